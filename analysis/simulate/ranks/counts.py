"""Counts what all ranks of a simulated run exchange and move, step by step.

Rows and bytes are those that travel between ranks. What a rank keeps for itself is copied, but it takes no link. `sent`
and `received` are seen from the rank; each is divided into what stays in its host and what leaves it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rowcast.analysis.simulate.ranks.owners import OwnerMoves
from rowcast.analysis.simulate.ranks.shares import GroupShares
from rowcast.job.tables import ITEM_BYTES, GroupSpec
from rowcast.protocol.batch import Kind, ScheduledBatch
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError

GRADIENT_BYTES = 4  # of a column: gradients and pooled rows travel as fp32
SENT, RECEIVED = 0, 1
IN_HOST, ACROSS = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExchange:
    """One step of N ranks, M parts and, over all groups, T tables."""

    step: int
    kind: Kind
    batch_size: int
    num_lookups: int
    part_rows: I64  # [M] distinct rows of each part
    owner_rows: I64  # [N] distinct rows of the whole batch in each shard
    rows: I64  # [2, 2, N] (sent, received) x (in its host, across hosts)
    late: I64  # [N] of the received rows: used by some rank in the step before, so they cannot travel early
    row_bytes: I64  # [2, 2, N]
    gradient_bytes: I64  # [2, 2, N]; 0 in an evaluation
    travelling: I64  # [T] rows of each table that travel
    vectors: I64  # [T] pooled rows of each table, or look-ups where they are not pooled


@dataclass(kw_only=True, slots=True)
class RunCounts:
    """The steps of one setting; `fetched` and `written_back` are [N, G] rows of each."""

    count: int
    steps: list[StepExchange]
    fetched: list[I64]
    written_back: list[I64]

    def moved(self, moves: OwnerMoves) -> None:
        assert moves.step - self.steps[0].step == len(self.fetched), f"step {moves.step} is not the next one"
        self.fetched.append(moves.fetched)
        self.written_back.append(moves.written_back)


def step_exchange(
    groups: Sequence[GroupSpec], scheduled: ScheduledBatch, shares: Sequence[GroupShares], on_host: int
) -> StepExchange:
    """`on_host`: ranks of a host."""
    trains = scheduled.kind == "train"
    by_group = [divided(own.exchanged, on_host) for own in shares]
    row_bytes = [group.embedding_dim * ITEM_BYTES[group.parts[0].dtype] for group in groups]
    gradient_bytes = [group.embedding_dim * GRADIENT_BYTES * trains for group in groups]
    return StepExchange(
        step=scheduled.step,
        kind=scheduled.kind,
        batch_size=scheduled.batch.size,
        num_lookups=len(scheduled.batch.ids),
        part_rows=total(own.part_rows for own in shares),
        owner_rows=total(own.owner_rows for own in shares),
        rows=total(by_group),
        late=total(own.late for own in shares),
        row_bytes=total(rows * nbytes for rows, nbytes in zip(by_group, row_bytes, strict=True)),
        # they go back where the rows came from
        gradient_bytes=total(rows[::-1] * nbytes for rows, nbytes in zip(by_group, gradient_bytes, strict=True)),
        travelling=np.concatenate([own.travelling for own in shares]),
        vectors=np.concatenate([own.vectors for own in shares]),
    )


def total(arrays: Iterable[I64]) -> I64:
    found: I64 = np.sum(list(arrays), axis=0)
    return found


def divided(exchanged: I64, on_host: int) -> I64:
    """`GroupShares.exchanged` -> [2, 2, N] as in StepExchange."""
    hosts = np.arange(len(exchanged)) // on_host
    in_host = np.where(hosts[:, None] == hosts[None, :], exchanged, 0)
    across = exchanged - in_host
    np.fill_diagonal(in_host, 0)
    return np.stack([np.stack([own.sum(axis=axis) for own in (in_host, across)]) for axis in (0, 1)])


def ranks_on_host(count: int, wanted: int | None) -> int:
    """Ranks of a host where each has room for `wanted` of `count` (None: for all). Raises ConfigError."""
    if wanted is None or wanted >= count:
        return count
    if count % wanted:
        raise ConfigError(f"--ranks {count}: hosts of {wanted} ranks cannot be full; give a multiple of {wanted}")
    return wanted
