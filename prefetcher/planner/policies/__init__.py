"""The eviction policies: `job/eviction_policies.py` lists them, `planner/eviction.py` says what they must do."""
