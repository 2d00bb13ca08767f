"""Implements the eviction policies listed in `job/eviction_policies.py`, with the interface in
`planner/eviction.py`."""
