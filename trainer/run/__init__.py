"""How a run of the trainer is started, repeated after the loss of a prefetcher, and observed."""
