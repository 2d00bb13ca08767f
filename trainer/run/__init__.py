"""Starts a run: meets the prefetcher, trains, and connects again after the peer was lost."""
