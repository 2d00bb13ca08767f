"""`prefetcher simulate`: what other policies, capacities and horizons would move."""
