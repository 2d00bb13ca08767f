"""`prefetcher timeline`: what both processes recorded under `--trace`, on one clock."""
