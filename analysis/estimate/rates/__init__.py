"""`trainer rates`: measures this device for `rowcast estimate`."""
