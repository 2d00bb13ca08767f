"""`prefetcher timeline`: what both processes recorded under `--timeline`, on one clock."""
