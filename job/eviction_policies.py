"""Lists the policies of `cache.policy` without importing them. A new one is a line here and the policy's file."""

from dataclasses import dataclass

POLICIES = "rowcast.prefetcher.planner.policies"


@dataclass(frozen=True, slots=True)
class PolicyKind:
    module: str  # has new_policy(first_batches), see planner/eviction.py; imported only when the policy is used
    note: str = ""  # for docs/job-file.md
    looks_ahead: bool = False  # sees the batches of lookahead.horizon; otherwise only the past, as if it were 0


EVICTION_POLICIES = {
    "lookahead": PolicyKind(f"{POLICIES}.farthest_next_use", note="farthest next use first", looks_ahead=True),
    "lru": PolicyKind(f"{POLICIES}.farthest_next_use", note="oldest last use first"),
    "lfu": PolicyKind(f"{POLICIES}.use_counts", note="fewest batches since the fill first"),
    "static": PolicyKind(f"{POLICIES}.static_counts", note="fewest of the run's first batches first"),
}
