"""Lists the settings to simulate: policies x capacities x memory tiers x horizons x batch sizes x orders. Each has the
values that a run of the job would have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from rowcast.job.file import parse_job
from rowcast.job.formats import FORMATS, Data
from rowcast.job.schema import EVICTION_POLICIES, Horizon, Job
from rowcast.job.stores import StoreWithTier
from rowcast.runtime.errors import ConfigError

BOUND = "belady"
SIMULATED = ("window", "ttl", BOUND)  # exist only in the simulator
POLICIES = (*EVICTION_POLICIES, *SIMULATED)
AUTO_BATCHES = 64
WITH_TIER = ("lookahead", BOUND)  # the others are simulated only for the device
# the others know no future, or all of it
LOOKING_AHEAD = (*(name for name, own in EVICTION_POLICIES.items() if own.looks_ahead), "window", "ttl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Values to vary; an empty list means the job's own value."""

    policies: Sequence[str] = ()
    capacities: Sequence[str | int] = ()  # as in cache.capacity
    memories: Sequence[str | int] = ()  # as in store.memory; a store without a memory tier is then simulated as tiered
    horizons: Sequence[Horizon] = ()
    batch_sizes: Sequence[int] = ()
    shuffles: Sequence[str] = ()  # as in data.shuffle

    def __post_init__(self) -> None:
        for policy in self.policies:
            if policy not in POLICIES:
                raise ConfigError(f"--policy {policy} is none of {', '.join(POLICIES)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run to simulate: a policy, and a job with its capacity, horizon and batches, and with the policy if a run can
    have it.

    horizon: batches known beyond the one planned, at least the depth; None if the policy looks at no future, or at all
    of it."""

    policy: str
    horizon: Horizon | None
    job: Job

    @property
    def horizon_batches(self) -> int:
        """The horizon of policies that exist only in the simulator; they do not have "auto"."""
        return AUTO_BATCHES if self.horizon == "auto" else self.horizon or 0


def with_values(job: Job, values: Mapping[str, Mapping[str, Any]]) -> Job:
    """Returns the job with other values in some sections, checked as a whole. Raises ConfigError."""
    content = msgspec.to_builtins(job)
    for section, changed in values.items():
        content[section] = {**content[section], **changed}
    return parse_job(content, "simulate")


def batches_jobs(job: Job, grid: Grid) -> list[Job]:
    """One job per batch size and order: each reads the data differently. Raises ConfigError before anything is read."""
    for shuffle in grid.shuffles:
        check_order(job.data, shuffle)
    sizes = dict.fromkeys(grid.batch_sizes or [job.data.batch_size])
    shuffles = dict.fromkeys(grid.shuffles or [job.data.shuffle])
    return [
        with_values(job, {"data": {"batch_size": size, "shuffle": shuffle}})
        for size, shuffle in product(sizes, shuffles)
    ]


def check_order(data: Data, shuffle: str) -> None:
    """Raises ConfigError for an order in which the job's data cannot be read."""
    if data.format not in FORMATS:
        raise ConfigError(f"--shuffle {shuffle}: batches of {data.format} have a fixed order; omit --shuffle")
    able = [name for name in FORMATS if can_have(name, shuffle)]
    if not able:
        raise ConfigError(f"--shuffle {shuffle} is not one of none, full, window:ROWS")
    if data.format not in able:
        raise ConfigError(
            f"--shuffle {shuffle}: {data.format} cannot be read in this order; {' and '.join(able)} can, or use "
            "window:65536"
        )


def can_have(format: str, shuffle: str) -> bool:
    try:
        Data(format=format, path="any", shuffle=shuffle)
    except ValueError:
        return False
    return True


def capacity_jobs(job: Job, grid: Grid) -> Iterator[Job]:
    """Yields a job for each capacity and memory tier."""
    for capacity in dict.fromkeys(grid.capacities or [job.cache.capacity]):
        own = with_values(job, {"cache": {"capacity": capacity}})
        yield from (with_memory(own, memory) for memory in dict.fromkeys(grid.memories)) if grid.memories else (own,)


def with_memory(job: Job, memory: str | int) -> Job:
    kind = job.store.kind if isinstance(job.store, StoreWithTier) else "tiered"
    return with_values(job, {"store": {"kind": kind, "memory": memory}})


def without_tier(job: Job) -> Job:
    content = msgspec.to_builtins(job)
    content["store"] = {}
    return parse_job(content, "simulate")


def settings(job: Job, grid: Grid) -> list[Setting]:
    """At the job's capacity and batches. Horizons below the depth are raised to it, as in a run; duplicates are
    removed."""
    found: dict[tuple[str, Horizon | None], Setting] = {}
    tierless = without_tier(job)
    for policy, horizon in product(grid.policies or [job.cache.policy], grid.horizons or [job.lookahead.horizon]):
        trained = {"policy": policy} if policy in EVICTION_POLICIES else {}
        base = job if policy in WITH_TIER else tierless
        own = with_values(base, {"lookahead": {"horizon": horizon}, "cache": trained})
        known = known_ahead(own, policy)
        found.setdefault((policy, known), Setting(policy=policy, horizon=known, job=own))
    return list(found.values())


def known_ahead(job: Job, policy: str) -> Horizon | None:
    """Batches known beyond the one planned, as in a run; None if the policy does not look at them."""
    return job.lookahead.known_ahead if policy in LOOKING_AHEAD else None
