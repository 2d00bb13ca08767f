"""Implements the eviction policies listed in `job/schema.py`, with the interface in
`planner/eviction.py`."""
