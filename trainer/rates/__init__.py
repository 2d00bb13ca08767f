"""`trainer rates`: measures what this device does, so that a job's step can be foretold without running it."""
