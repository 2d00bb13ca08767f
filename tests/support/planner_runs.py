"""Small groups of tables and random traces over them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from rowcast.job.optimizers import SparseOptimizer
from rowcast.job.schema import Policy
from rowcast.job.tables import GroupSpec, RecordPart, TableSpec
from rowcast.prefetcher.planner.planner import AutoHorizon, RowPlanner
from rowcast.protocol.batch import Batch, Kind, ScheduledBatch
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.protocol.plan import BarrierPlan, PlannedSteps
from rowcast.trainer.kernels.choose import arranged
from tests.support.planner_integrity import check_planner

Entry = PlannedSteps | BarrierPlan


def table(
    index: int, num_embeddings: int, dim: int, *features: str, pooling: Literal["sum", "none"] = "sum"
) -> TableSpec:
    return TableSpec(
        index=index,
        name=f"t{index}",
        num_embeddings=num_embeddings,
        embedding_dim=dim,
        features=features,
        pooling=pooling,
        init="uniform",
    )


def group(index: int, tables: tuple[TableSpec, ...], positions: tuple[int, ...]) -> GroupSpec:
    dim = tables[0].embedding_dim
    return GroupSpec(
        index=index,
        name=f"fp32_d{dim}_sgd",
        tables=tables,
        embedding_dim=dim,
        optimizer=SparseOptimizer(kind="sgd", lr=0.1),
        parts=(RecordPart(name="weight", dtype="fp32", offset=0, width=dim, initial=None),),
        record_bytes=4 * dim,
        feature_positions=positions,
    )


def one_group(*num_embeddings: int) -> tuple[GroupSpec, ...]:
    """One table a feature, all of one width."""
    tables = tuple(table(index, rows, 4, f"f{index}") for index, rows in enumerate(num_embeddings))
    return (group(0, tables, tuple(range(len(tables)))),)


def two_groups() -> tuple[GroupSpec, ...]:
    """Features a, b | c | d | e of tables 0 to 3; the groups' features alternate in a batch, one table has two."""
    first = (table(0, 7, 4, "a", "b"), table(2, 11, 4, "d"))
    second = (table(1, 5, 8, "c"), table(3, 4, 8, "e"))
    return (group(0, first, (0, 1, 3)), group(1, second, (2, 4)))


def without_pooling(groups: tuple[GroupSpec, ...], *indices: int) -> tuple[GroupSpec, ...]:
    """The groups with pooling = "none" in the tables of these indices."""
    return tuple(
        replace(g, tables=tuple(replace(t, pooling="none") if t.index in indices else t for t in g.tables))
        for g in groups
    )


def placed(groups: tuple[GroupSpec, ...], points: Mapping[int, int]) -> tuple[GroupSpec, ...]:
    """The groups with whole tables owned by the ranks around these `points`, by index."""
    return tuple(
        replace(g, tables=tuple(replace(t, point=points.get(t.index), pooling=pooled(t, points)) for t in g.tables))
        for g in groups
    )


def pooled(own: TableSpec, points: Mapping[int, int]) -> Literal["sum", "mean", "none"]:
    return "sum" if own.index in points and own.pooling == "none" else own.pooling


def num_rows_by_feature(groups: tuple[GroupSpec, ...]) -> list[int]:
    rows = {p: t.num_embeddings for g in groups for p, t in zip(g.feature_positions, g.feature_tables(), strict=True)}
    return [rows[position] for position in sorted(rows)]


def random_batch(
    rng: np.random.Generator, groups: tuple[GroupSpec, ...], size: int, jagged: bool, weighted: bool
) -> Batch:
    """Skewed ids; jagged bags hold 0 to 3 look-ups."""
    num_rows = num_rows_by_feature(groups)
    per_bag = rng.integers(0, 4, len(num_rows) * size) if jagged else np.ones(len(num_rows) * size, np.int64)
    rows = np.repeat(np.repeat(num_rows, size), per_bag)
    return Batch(
        dense=np.zeros((size, 1), np.float32),
        labels=np.zeros(size, np.float32),
        ids=(rng.random(len(rows)) ** 2 * rows).astype(np.int64),
        offsets=np.concatenate([[0], np.cumsum(per_bag)]).astype(np.int64) if jagged else None,
        weights=rng.random(len(rows), np.float32) if weighted else None,
    )


def schedule(batches: list[Batch], kinds: list[Kind], first_step: int = 0) -> list[ScheduledBatch]:
    return [
        ScheduledBatch.at(step=first_step + i, kind=kind, train_step=kinds[:i].count("train"), epoch=0, batch=batch)
        for i, (batch, kind) in enumerate(zip(batches, kinds, strict=True))
    ]


def single_hot_trace(ids: list[list[int]]) -> list[ScheduledBatch]:
    """Training batches of one feature."""
    batches = [
        Batch(
            dense=np.zeros((len(row), 1), np.float32),
            labels=np.zeros(len(row), np.float32),
            ids=np.array(row, np.int64),
        )
        for row in ids
    ]
    return schedule(batches, ["train"] * len(ids))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides a run's plans."""

    groups: tuple[GroupSpec, ...]
    slots: tuple[int, ...]
    depth: int
    horizon: int
    trace: list[ScheduledBatch]
    barriers: frozenset[int]  # steps after which a barrier comes
    policy: Policy = "lookahead"
    num_first: int = 0  # first batches, by which "static" judges
    num_threads: int = 1
    tiers: tuple[tuple[int, ...], ...] = ()  # slots of each level below the device
    rank: Rank = UNDIVIDED

    def planner(self, horizon: AutoHorizon | None = None) -> RowPlanner:
        return RowPlanner(
            self.groups,
            [self.slots, *self.tiers],
            self.depth,
            horizon or self.horizon,
            policy=self.policy,
            first_batches=self.trace[: self.num_first],
            num_threads=self.num_threads,
            rank=self.rank,
        )


def random_run(
    seed: int,
    groups: tuple[GroupSpec, ...],
    num_steps: int,
    batch_size: int,
    depth: int,
    horizon: int,
    policy: Policy = "lookahead",
) -> Run:
    """Random batches, kinds and barriers; slots from just enough for the largest batch upwards."""
    rng = np.random.default_rng(seed)
    jagged, weighted, evals = rng.random(3) < 0.5
    sizes = rng.integers(1, batch_size + 1, num_steps).tolist()
    batches = [random_batch(rng, groups, size, bool(jagged), bool(weighted)) for size in sizes]
    kinds: list[Kind] = ["eval" if evals and rng.random() < 0.4 else "train" for _ in range(num_steps)]
    trace = schedule(batches, kinds, first_step=int(rng.integers(0, 3)))
    barriers = frozenset(scheduled.step for scheduled in trace if rng.random() < 0.15)
    least = [max((len(distinct_keys(g, scheduled.batch)) for scheduled in trace), default=0) for g in groups]
    return Run(
        groups=groups,
        slots=tuple(int(n + rng.integers(0, 4)) for n in least),
        depth=depth,
        horizon=horizon,
        trace=trace,
        barriers=barriers,
        policy=policy,
        num_first=int(rng.integers(0, 4)),
    )


def lookups_of(group: GroupSpec, batch: Batch) -> list[tuple[int, int, int]]:
    """(key, bag, place in the batch's ids) of each of the group's look-ups, feature by feature and sample by sample."""
    found = []
    for f, (position, owner) in enumerate(zip(group.feature_positions, group.feature_tables(), strict=True)):
        for sample in range(batch.size):
            bag = position * batch.size + sample
            start, end = (bag, bag + 1) if batch.offsets is None else batch.offsets[bag : bag + 2].tolist()
            found += [(owner.index * 2**48 + int(batch.ids[i]), f * batch.size + sample, i) for i in range(start, end)]
    return found


def plan_bags(group: GroupSpec, batch: Batch) -> tuple[list[int], list[list[int]]]:
    """The look-ups in each of the group's bags as a plan numbers them, and for each feature without pooling where each
    sample's look-ups start."""
    per_bag = Counter(bag for _, bag, _ in lookups_of(group, batch))
    bags, starts = list[int](), list[list[int]]()
    for f, owner in enumerate(group.feature_tables()):
        counts = [per_bag[f * batch.size + sample] for sample in range(batch.size)]
        if owner.pooling == "none":
            starts.append([sum(counts[:sample]) for sample in range(batch.size + 1)])
            counts = [1] * sum(counts)
        bags += counts
    return bags, starts


def distinct_keys(group: GroupSpec, batch: Batch) -> list[int]:
    return sorted({key for key, _, _ in lookups_of(group, batch)})


def feed(planner: RowPlanner, left: list[ScheduledBatch], eager: bool) -> None:
    """Adds what the planner takes; tells the end of the data as soon as it is known, or once no batch is left."""
    while planner.wants_batch and left:
        planner.add(left.pop(0))
    if not left and (eager or planner.wants_batch):
        planner.end()


def entries_of(run: Run, eager: bool = True, check: bool = False, horizon: AutoHorizon | None = None) -> list[Entry]:
    """The plan stream, as the kernels get it. `eager`: tells the next batch and the end of the data before a barrier,
    not after it. `horizon`: instead of the run's."""
    planner, left, entries = run.planner(horizon), list(run.trace), list[Entry]()
    feed(planner, left, eager)
    while planner.ready():
        plan = planner.plan()
        steps = [replace(step, groups=tuple(map(arranged, step.groups, run.groups))) for step in plan.steps]
        entries.append(replace(plan, steps=tuple(steps)))
        if eager:
            feed(planner, left, eager)
        if plan.steps[-1].step in run.barriers:
            entries.append(planner.barrier("checkpoint", finished=False))
        if check:
            check_planner(planner)
        feed(planner, left, eager)
    return entries


def assert_same(ours: object, theirs: object, where: str = "") -> None:
    """Equal field by field, arrays by dtype and every element."""
    if isinstance(ours, np.ndarray):
        assert isinstance(theirs, np.ndarray), where
        assert ours.dtype == theirs.dtype, where
        np.testing.assert_array_equal(ours, theirs, err_msg=where)
    elif isinstance(ours, tuple | list):
        assert isinstance(theirs, tuple | list), where
        assert len(ours) == len(theirs), where
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(our, their, f"{where}[{i}]")
    elif hasattr(ours, "__dataclass_fields__"):
        assert type(ours) is type(theirs), where
        for name in ours.__dataclass_fields__:
            assert_same(getattr(ours, name), getattr(theirs, name), f"{where}.{name}")
    else:
        assert ours == theirs, where


def i32(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def i64(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)
