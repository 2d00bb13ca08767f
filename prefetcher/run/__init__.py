"""How a run of the prefetcher is started, sized, observed, and repeated after the loss of a trainer."""
