"""`prefetcher simulate --ranks`: what each of N ranks would plan, exchange and move."""
