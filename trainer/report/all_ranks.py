"""Combines the reports of all ranks into one."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import msgspec

from rowcast.protocol.messages import TierTotals
from rowcast.trainer.report.report_json import Report

# quantities that ranks divide; the other fields are the same on all, or rank 0's
ADDED = (
    "samples",
    "lookups",
    "unique_rows",
    "rows_fetched",
    "rows_evicted",
    "rows_written_back",
    "rows_flushed",
    "bytes_to_device",
    "bytes_from_device",
    "cache_bytes",
    "staging_bytes",
    "plans_bytes",
    "device_bytes",
    "host_bytes",
    "lines_lost",
)


def report_of_all(ranks: Sequence[Report]) -> Report:
    """`ranks`: each rank's report, by rank. Reports may have different names."""
    added = msgspec.structs.replace(ranks[0], **sums(ranks, ADDED))
    unique_rows, wall_s = added.unique_rows, added.wall_s
    waited_s = max(own.trainer_wait_s for own in ranks)
    return msgspec.structs.replace(
        added,
        samples_per_s=added.samples / wall_s if wall_s else 0.0,
        hit_ratio=(unique_rows - added.rows_fetched) / unique_rows if unique_rows else None,
        trainer_wait_s=waited_s,
        stall_share=waited_s / wall_s if wall_s else 0.0,
        waits_s={
            process: by_name(max, [own.waits_s.get(process, {}) for own in ranks]) for process in ranks[0].waits_s
        },
        phase_ms=by_name(fmean, [own.phase_ms for own in ranks]),
        tier=tier_of_all([own.tier for own in ranks if own.tier is not None]),
        ranks=tuple(figures for own in ranks for figures in own.ranks),
    )


def sums(parts: Sequence[object], names: Iterable[str]) -> dict[str, Any]:
    return {name: sum(getattr(part, name) for part in parts) for name in names}


def by_name(put_together: Callable[[list[float]], float], parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: put_together([part.get(name, 0.0) for part in parts]) for name in parts[0]}


def tier_of_all(tiers: Sequence[TierTotals]) -> TierTotals | None:
    return TierTotals(**sums(tiers, TierTotals.__struct_fields__)) if tiers else None
