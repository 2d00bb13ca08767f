"""One look at a log: what its steps look up, row by row, for every command that asks before training."""
