"""Starts a run: connects to the prefetcher, trains, and reconnects after the peer was lost."""
