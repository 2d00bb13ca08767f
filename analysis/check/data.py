"""Checks a job against its data: whether it opens, what a sample contains, how ranks divide it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice

import numpy as np

from rowcast.analysis.scan import (
    Amount,
    draw_batches,
    measured_keys,
    owners_touched,
    read_drawn,
    reader_for_another_pass,
)
from rowcast.analysis.show import Finding, about, error, ok, warning
from rowcast.job.models import NextItemSettings
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, TableSpec, group_specs, make_keys
from rowcast.prefetcher.planner.first_batches import (
    MEASURED_BATCHES,
    Bytes,
    TableBytes,
    Touched,
    Traffic,
    counted,
    everywhere,
    short_of_memory,
    slots_of,
)
from rowcast.prefetcher.planner.grouping import Grouper
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.prefetcher.readers.columns import bag_offsets
from rowcast.prefetcher.readers.data_files import in_recorded_order, with_recorded_rule
from rowcast.prefetcher.readers.follow import folder_of
from rowcast.prefetcher.readers.id_check import check_id_types
from rowcast.prefetcher.readers.reader import Reader, id_types, open_reader, schedule
from rowcast.prefetcher.run.sizing import Decisions, check_continues, decide, placed, training_data
from rowcast.protocol.batch import Batch, Kind, ScheduledBatch
from rowcast.protocol.parts import (
    BLOCK_BITS,
    Rank,
    Shards,
    belonging,
    described,
    input_specs,
    owner_of,
    part_bounds,
    rank_of,
)
from rowcast.runtime.arrays import F32, F64, I64
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent_number, plural

BLOCK_ROWS = 1 << BLOCK_BITS
MOST_BLOCKS = 2**20  # a table with more blocks is not counted: it is divided evenly enough
UNEVEN = 1.2  # the rows of the largest shard over the mean
SAMPLE = Amount(share=0.05, least_batches=64)
ALL = Amount(share=1.0)
SPLITS: tuple[Kind, ...] = ("train", "eval")
TIGHT = 0.9  # share of the slots taken by the largest batch of the sample; an unread one may be larger


@dataclass(kw_only=True, slots=True)
class SeenArrays:
    of_batch: dict[str, tuple[int, str]] = field(default_factory=dict)  # most bytes, and what an array holds
    spread: set[int] = field(default_factory=set)  # positions of features that several samples of a batch look up
    used: set[int] = field(default_factory=set)  # positions of features that a batch of several samples looks up

    def add(self, batch: Batch, job: Job) -> None:
        for spec in input_specs(batch.inputs, belonging(job).arrays):
            nbytes = max(batch.inputs[spec.name].nbytes, self.of_batch.get(spec.name, (0, ""))[0])
            self.of_batch[spec.name] = (
                nbytes,
                f"{described(spec)} per {f'look-up of {spec.of}' if spec.of else 'sample'}",
            )
        if batch.offsets is None or batch.size == 1:
            self.spread |= set(range(len(job.features))) if batch.size > 1 else set()
            return
        num_samples = np.count_nonzero(np.diff(batch.offsets).reshape(-1, batch.size), axis=1)
        self.spread |= set(np.flatnonzero(num_samples > 1).tolist())
        self.used |= set(np.flatnonzero(num_samples).tolist())


def check_arrays(job: Job, seen: SeenArrays) -> Iterator[Finding]:
    for name, (nbytes, what) in seen.of_batch.items():
        yield ok(f"{name}: {what}, up to {human_bytes(nbytes)} a step")
    whole = belonging(job).batch_positions
    if job.ranks.num_parts == 1:
        return
    for position in sorted(seen.used - seen.spread - whole):
        name = job.features[position]
        yield warning(
            f"feature {name}: one sample has all look-ups of a batch, and {job.ranks.num_parts} parts divide it, so "
            f'others train without them; if they belong to the batch, set data.of.{name} = "batch"'
        )


@dataclass(kw_only=True, slots=True)
class SeenHistories:
    num_samples: int = 0
    num_cut: int = 0
    num_falling: int = 0  # samples with a time before the one that precedes it
    first_fall: tuple[int, int] = (0, 0)  # both times

    def add(self, batch: Batch, job: Job) -> None:
        if not isinstance(job.model, NextItemSettings):
            return
        first = job.features.index(job.model.history_feature) * batch.size
        bounds = bag_offsets(batch.ids, batch.offsets)[first : first + batch.size + 1]
        self.num_samples += batch.size
        self.num_cut += int(np.count_nonzero(np.diff(bounds) > job.model.history))
        name = job.model.time
        if job.data.lookup_arrays.get(name) != job.model.history_feature:
            return
        times, starts = batch.inputs[name], bounds - bounds[0]
        falls = np.setdiff1d(np.flatnonzero(times[1:] < times[:-1]) + 1, starts)
        if len(falls) and not self.num_falling:
            self.first_fall = int(times[falls[0] - 1]), int(times[falls[0]])
        self.num_falling += len(np.unique(np.searchsorted(starts, falls, side="right")))


def check_histories(job: Job, seen: SeenHistories) -> Iterator[Finding]:
    if not isinstance(job.model, NextItemSettings):
        return
    read = f"of {seen.num_samples:,} histories read"
    if seen.num_cut:
        yield ok(
            f"{seen.num_cut:,} {read} are longer than model.history = {job.model.history}; their oldest items are cut"
        )
    if seen.num_falling:
        before, after = seen.first_fall
        yield warning(
            f"the array {job.model.time} falls within {seen.num_falling:,} {read}, first from {before} to {after}; "
            "sort each history by time, the oldest item first"
        )


def check_ranks(job: Job, groups: Sequence[GroupSpec]) -> Iterator[Finding]:
    ranks = job.ranks
    if ranks.num_parts == 1:
        return
    yield parts_finding(job)
    if ranks.count == 1:
        return
    yield shards_finding(groups, ranks.count)
    hosts = ranks.count // ranks.on_host
    if hosts > 1:
        yield warning(
            f"{ranks.on_host} of {ranks.count} ranks run on each of {hosts} hosts: job.run_dir = {str(job.run_dir)!r} "
            "must be the same folder on all of them, and this command sees only one"
        )


def parts_finding(job: Job) -> Finding:
    """Checks that each part of a batch has a sample. In the last batch of an epoch, a part may have none."""
    ranks, size = job.ranks, job.data.batch_size
    shared = f"{plural(ranks.count, 'rank')} of {plural(ranks.num_parts // ranks.count, 'part')}"
    sizes = np.diff(part_bounds(size, ranks.num_parts))
    if not sizes.min():
        return warning(
            f"{shared}: data.batch_size = {size} leaves {int((sizes == 0).sum())} of {ranks.num_parts} parts without a "
            f"sample; set {ranks.num_parts} or more, or fewer ranks.parts"
        )
    samples = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    return ok(f"{shared}, each of {samples} of the {size} samples of a batch")


def shards_finding(groups: Sequence[GroupSpec], count: int) -> Finding:
    rows = np.array([np.sum([shard_rows(table, count) for table in group.tables], axis=0) for group in groups])
    total, nbytes = rows.sum(axis=0), np.array([group.record_bytes for group in groups]) @ rows
    owned = f"a rank owns {round(total.min()):,} to {round(total.max()):,} of {round(total.sum()):,} rows"
    num_whole = sum(table.point is not None for group in groups for table in group.tables)
    if total.max() > UNEVEN * total.mean() and not num_whole:
        return warning(
            f"{owned}: rows are divided in blocks of {BLOCK_ROWS}, and these tables have few; use fewer ranks, which "
            "will have as much to do"
        )
    whole = f"; {plural(num_whole, 'table')} with one owner each" if num_whole else ""
    return ok(f"{owned}, up to {human_bytes(float(nbytes.max()))}{whole}")


def shard_rows(table: TableSpec, count: int) -> F64:
    """Returns the rows of each shard, [count]; their mean for a table that is too large to count."""
    if (owner := owner_of(table, count)) is not None:
        whole: F64 = np.eye(count)[owner] * table.num_embeddings
        return whole
    num_blocks = -(-table.num_embeddings // BLOCK_ROWS)
    if num_blocks > MOST_BLOCKS:
        return np.full(count, table.num_embeddings / count)
    firsts: I64 = np.arange(num_blocks) * BLOCK_ROWS
    sizes = np.minimum(table.num_embeddings - firsts, BLOCK_ROWS)
    owners = Shards([table], count).owners(make_keys(table.index, firsts))
    sums: F64 = np.bincount(owners, weights=sizes, minlength=count).astype(np.float64)
    return sums


@dataclass(kw_only=True, slots=True)
class SeenLabel:
    """One label of the samples; a label that is NaN is unknown."""

    num_known: int = 0
    num_positive: int = 0
    low: float = math.inf
    high: float = -math.inf
    outside: float | None = None  # the first that is not from 0 to 1

    def add(self, labels: F32) -> None:
        known = labels[~np.isnan(labels)]
        self.num_known += len(known)
        self.num_positive += int(np.count_nonzero(known > 0.5))
        self.low, self.high = min(self.low, known.min(initial=self.low)), max(self.high, known.max(initial=self.high))
        outside = (known < 0) | (known > 1)
        if outside.any() and self.outside is None:
            self.outside = float(known[np.argmax(outside)])


@dataclass(kw_only=True, slots=True)
class Seen:
    groups: tuple[GroupSpec, ...]
    count: int = 1  # ranks: rows are counted of the shard that has most of them
    measured: list[ScheduledBatch] = field(default_factory=list)  # the run's first batches
    reader: Reader | None = None  # None: the data does not open
    num_samples: int = 0
    labels: list[SeenLabel] = field(default_factory=list)  # one or several
    lookups: list[int] = field(default_factory=list)  # by table in the job's order, then of other pieces
    largest_batch_rows: list[int] = field(default_factory=list)  # by group, of the sample, on one rank
    largest_batch_bytes: int = 0  # of the batch's arrays
    arrays: SeenArrays = field(default_factory=SeenArrays)
    histories: SeenHistories = field(default_factory=SeenHistories)
    start: Decisions | None = None  # what the first rank decides; None if the run is refused or its data does not open
    _of_ranks: list[Touched] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place(self.groups)

    def place(self, groups: tuple[GroupSpec, ...]) -> None:
        """Counts the rows of these groups from now on."""
        self.groups, self._of_ranks = groups, []
        self.lookups = [0] * sum(len(group.tables) for group in groups)
        self.largest_batch_rows = [0] * len(groups)

    def add(self, batch: Batch, groupers: list[Grouper]) -> None:
        for g, (group, grouper) in enumerate(zip(self.groups, groupers, strict=True)):
            lookups = grouper.lookups(batch)
            keys = grouper.group(lookups).keys
            owned = len(keys)  # by the rank with most of them
            if self.count > 1:
                owned = int(np.bincount(Shards(group.tables, self.count).owners(keys), minlength=1).max())
            self.largest_batch_rows[g] = max(self.largest_batch_rows[g], owned)
            for table, num_lookups in zip(group.tables, np.diff(lookups.table_starts).tolist(), strict=True):
                self.lookups[table.index] += num_lookups
        self.num_samples += batch.size
        columns = batch.labels.reshape(batch.size, -1).T
        self.labels = self.labels or [SeenLabel() for _ in columns]
        for seen, column in zip(self.labels, columns, strict=True):
            seen.add(column)
        arrays = [batch.dense, batch.labels, batch.ids, batch.offsets, batch.weights, *batch.inputs.values()]
        nbytes = sum(array.nbytes for array in arrays if array is not None)
        self.largest_batch_bytes = max(self.largest_batch_bytes, nbytes)

    @property
    def largest_rows(self) -> list[int]:
        return list(map(max, self.touched.largest_batch_rows, self.largest_batch_rows))

    @property
    def of_ranks(self) -> list[Touched]:
        """Returns the rows that the first batches touch on each rank. Read it after those batches."""
        if not self._of_ranks:
            keys = measured_keys(groupers_of(self.groups), self.measured)
            self._of_ranks = owners_touched(self.groups, keys, self.measured, self.count)
        return self._of_ranks

    @property
    def touched(self) -> Touched:
        """Returns the rows that the first batches touch, on the rank that owns most of them."""
        return Touched(
            num_batches=self.of_ranks[0].num_batches,
            largest_batch_rows=tuple(
                map(max, zip(*(of_rank.largest_batch_rows for of_rank in self.of_ranks), strict=True))
            ),
            distinct_rows=tuple(map(max, zip(*(of_rank.distinct_rows for of_rank in self.of_ranks), strict=True))),
        )


def check_opens(job: Job, seen: Seen) -> Iterator[Finding]:
    if job.data.follow and not any(folder_of(job).glob("[!._]*")):
        raise ConfigError(
            f"data.path = {job.data.path!r} holds no file yet, for which `rowcast train` waits; add the first one"
        )
    seen.reader = reader = open_reader(job)
    counts = [samples_of(reader, "train", "for training"), samples_of(reader, "eval", "for evaluation")]
    files = (
        f"{human_bytes(sum(path.stat().st_size for path in reader.paths))} in {plural(len(reader.paths), 'file')}: "
        if reader.paths
        else ""
    )
    features = f"{len(reader.dense_names)} dense and {len(job.features)} id features"
    if reader.num_samples("train") == 0:
        yield error(
            f"data.eval_fraction = {job.data.eval_fraction} leaves no sample for training; lower it or give more data"
        )
        return
    yield ok(f"{files}{', '.join(counts)}, {features}")
    seen.measured = list(islice(schedule(job, reader), MEASURED_BATCHES))


def samples_of(reader: Reader, split: Kind, purpose: str) -> str:
    count = reader.num_samples(split)
    return f"{'an unknown number of' if count is None else f'{count:,}'} samples {purpose}"


def check_samples(job: Job, seen: Seen, amount: Amount) -> Iterator[Finding]:
    """Reads the sample. The reader checks ids and dense values, and raises DataError for the first bad one."""
    assert seen.reader is not None, "the data was opened"
    groupers, num_replaced = [Grouper(group, len(job.features)) for group in seen.groups], 0
    for split in SPLITS:
        reader = reader_for_another_pass(job, seen.reader)
        replaced_before = reader.invalid_ids
        for batch in read_drawn(job, reader, draw_batches(job, reader, amount, split), split):
            seen.add(batch, groupers)
            seen.arrays.add(batch, job)
            seen.histories.add(batch, job)
        num_replaced += reader.invalid_ids - replaced_before
    read = f"{'all ' if amount == ALL else ''}{seen.num_samples:,} samples"
    yield from about("ids", [ids_finding(job, seen, read, num_replaced)])
    yield from about("arrays", check_arrays(job, seen.arrays))
    yield from about("histories", check_histories(job, seen.histories))
    yield from about("labels", label_findings(job, seen))


def ids_finding(job: Job, seen: Seen, read: str, num_replaced: int) -> Finding:
    if not num_replaced:
        return ok(f"the {sum(seen.lookups[: len(job.tables)]):,} look-ups of {read} are inside their tables")
    return warning(
        f"data.on_invalid_id = {job.data.on_invalid_id!r} replaced {num_replaced:,} ids of {read}, which are missing "
        "or outside their tables; give missing ids a value of their own, and enlarge the tables if the others are real "
        "rows"
    )


def label_findings(job: Job, seen: Seen) -> Iterator[Finding]:
    columns = job.data.columns
    if columns.label_values != "none":
        for name, label in zip(columns.label_names, seen.labels, strict=False):
            yield label_finding(
                label, f"{name}: " if columns.labels else "", is_binary=columns.label_values == "binary"
            )


def label_finding(seen: SeenLabel, name: str, *, is_binary: bool) -> Finding:
    if is_binary and seen.outside is not None:
        return error(f"{name}a label is {seen.outside:g}; binary cross entropy needs labels from 0 to 1")
    if not seen.num_known:
        return warning(f"{name}no label is known, so there is nothing to learn; look at the label column")
    if (seen.num_positive in (0, seen.num_known)) if is_binary else seen.low == seen.high:
        value = int(seen.num_positive > 0) if is_binary else seen.low
        return warning(
            f"{name}every label of {seen.num_known:,} samples is {value:g}, so there is nothing to learn; look at the "
            "label column"
        )
    if not is_binary:
        return ok(f"{name}{seen.num_known:,} labels go from {seen.low:g} to {seen.high:g}")
    return ok(f"{name}{percent_number(seen.num_positive / seen.num_known)} % of {seen.num_known:,} are positive")


def check_start(job: Job, seen: Seen, newest_valid: Callable[[], Manifest | None]) -> Iterator[Finding]:
    """Lets the prefetcher make the decisions of its start, from its checkpoint and the run's first batches. Raises what
    a run's start raises."""
    assert seen.reader is not None, "the data was opened"
    newest, measured = None, seen.measured
    with suppress(DataError):  # `check_run_directory` reports that every checkpoint is damaged
        newest = newest_valid()
    if newest is not None:
        ordered = in_recorded_order(with_recorded_rule(job, newest), newest)
        reader = open_reader(ordered) if ordered != job else reader_for_another_pass(job, seen.reader)
        measured = list(islice(schedule(ordered, reader, None, newest.position), MEASURED_BATCHES))
        every_part = Rank(number=0, count=1, parts=job.ranks.num_parts)
        check_continues(newest, job, training_data(reader.dense_names, reader.paths), measured, every_part)
        check_id_types(newest, id_types(reader), reader.paths)
    count = cache(partial(counted, job, measured))
    own_places = placed(job, newest, count)
    seen.place(group_specs(own_places))
    for of_rank in seen.of_ranks:
        slots_of(job, seen.groups, of_rank)
    seen.start = decide(own_places, seen.groups, measured, rank_of(job.ranks, 0))
    yield from about("placement", check_placement(job, own_places, count))


def check_capacity(job: Job, seen: Seen) -> Iterator[Finding]:
    slots = slots_of(job, seen.groups, seen.touched)
    of_one = "" if seen.count == 1 else f" of the shard of one of {seen.count} ranks"
    for group, n, largest in zip(seen.groups, slots, seen.largest_rows, strict=True):
        batch = f"the largest batch read touches {largest:,} rows{of_one}, and group {group.name} has {n:,} slots"
        enough = capacity_for(job, group, len(seen.groups), largest)
        if largest > n:
            yield error(f"{batch}; set {enough}, or make data.batch_size smaller")
        elif largest > TIGHT * n and n < group.num_rows:
            yield warning(f"{batch}: an unread one may not fit; set {enough}, or make data.batch_size smaller")
        else:
            yield ok(f"{batch} ({human_bytes(n * group.record_bytes)})")


def capacity_for(job: Job, group: GroupSpec, num_groups: int, largest_batch_rows: int) -> str:
    if group.name not in {known.name for known in group_specs(job)}:
        return "a larger cache.capacity"  # "auto" has made its pieces, and the job file cannot name it
    # a tenth more than the largest batch seen, because another may be larger
    rows = min(group.num_rows, largest_batch_rows - (-largest_batch_rows // 10))
    key = "cache.capacity" if num_groups == 1 and not job.cache.groups else f"cache.groups.{group.name}"
    return f'{key} = "{rows} rows" or more'


def check_placement(asked: Job, placed: Job, count: Callable[[], Traffic]) -> Iterator[Finding]:
    """`asked`: the job as its file has it. `placed`: with every table placed as a run would. `count`: counts what the
    run's first batches send."""
    if short := short_of_memory(asked, placed, count):
        yield warning(short)
    if placed.ranks.count == 1 or all(table.placement == "rows" for table in asked.tables):
        return
    traffic, placements = count(), [table.placement for table in placed.tables]
    for table, nbytes in zip(asked.tables, traffic.of_each(placements), strict=True):
        if table.placement != "rows":
            yield ok(sentence_of(nbytes, " or hold more than ranks.memory" if asked.ranks.memory else ""))
    rows, chosen = traffic.of(everywhere(placed, "rows")), traffic.of(placements)
    yield ok(f"all tables: {sum_of(chosen)} a step, both ways; with all tables by rows {sum_of(rows)}")


def sentence_of(of_table: TableBytes, or_else: str) -> str:
    rows, vectors = human_bytes(of_table.rows), human_bytes(of_table.vectors)
    if of_table.owners:
        ranks = ", ".join(map(str, of_table.owners))
        who = (
            f"rank {ranks} pools it" if len(of_table.owners) == 1 else f"ranks {ranks} pool a piece of its columns each"
        )
        return f"table {of_table.table}: {who} for all, {vectors} a rank and step; by rows {rows}"
    why = f"; its owner would make the busiest rank busier{or_else}" if of_table.vectors < of_table.rows else ""
    return f"table {of_table.table}: rows travel, {rows} a rank and step; as pooled vectors {vectors}{why}"


def sum_of(nbytes: Bytes) -> str:
    return f"{human_bytes(nbytes.mean)} a rank, {human_bytes(nbytes.most)} the busiest"
