"""`prefetcher check`: a job file against its data and this machine."""
