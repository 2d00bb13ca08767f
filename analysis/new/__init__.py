"""`prefetcher new`: a job file for data that has none."""
