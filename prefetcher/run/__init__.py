"""How a run of the prefetcher is started, repeated after the loss of a trainer, sized and observed."""
