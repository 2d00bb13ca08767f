"""`trainer rates`: measures this device for `prefetcher estimate`."""
