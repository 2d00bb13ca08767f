"""`prefetcher profile`: which rows are looked up most, and what keeping them on the device would cover."""
