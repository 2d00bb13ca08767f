"""`prefetcher advise`: how much cache a job needs."""
