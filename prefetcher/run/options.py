"""Defines the options of `prefetcher run`."""

from dataclasses import dataclass
from pathlib import Path

from rowcast.protocol.messages import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    max_steps: int | None = None
    fresh: bool = False
    source: Path | None = None  # a run directory or an exported file to start from
    timeline: bool = False  # record one
    mode: Mode = "train"
    checkpoint: str | None = None  # eval: the name of the checkpoint to evaluate; None: the newest
    host: int = 0  # which of the hosts that have ranks
    rank: int | None = None  # serve only this rank; None: all ranks of the host
