"""Starts, sizes and observes a run of the prefetcher, and repeats it after the loss of a trainer."""
