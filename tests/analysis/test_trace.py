"""Saved traces: what is saved comes back, plans made again are identical, and what is no whole trace is refused."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from rowcast.analysis.simulate.grid import Grid, Setting, settings
from rowcast.analysis.simulate.moves import new_planner
from rowcast.analysis.simulate.replay import Comparing, Replay, Saving, counts, planned_beside
from rowcast.analysis.simulate.simulate import simulate
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.capacity import job_slots
from rowcast.prefetcher.traces.header import check_tables, same_settings, trace_header
from rowcast.prefetcher.traces.reader import TraceReader
from rowcast.prefetcher.traces.writer import (
    HEADER_KEY,
    VERSION_KEY,
    TraceWriter,
    batch_checksum,
    plan_checksum,
    plan_facts,
)
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import GroupPlan, StepPlan
from rowcast.runtime.errors import ConfigError, DataError, Mismatch, RowcastError
from tests.support.batches import BAGS, Bags, small_batches, small_job
from tests.support.facts import facts
from tests.support.planner_runs import assert_same


def workload(bags: Bags = "multi", **sections: dict[str, Any]) -> tuple[Job, list[ScheduledBatch]]:
    job = small_job("adagrad", bags, depth=2, horizon=4, **({"cache": {"capacity": "40KB"}} | sections))
    return job, small_batches(job, bags, num_steps=10, eval_at=(4, 7))


class Noting(Saving):
    """Saves, and keeps what it saves."""

    def __init__(self, writer: TraceWriter) -> None:
        super().__init__(writer)
        self.plans: list[StepPlan] = []

    def plan(self, scheduled: ScheduledBatch, plan: StepPlan) -> None:
        super().plan(scheduled, plan)
        self.plans.append(plan)


def the_setting(job: Job) -> Setting:
    (setting,) = settings(job, Grid())
    return setting


def slots_of(job: Job, batches: Sequence[ScheduledBatch]) -> tuple[int, ...]:
    return job_slots(job, group_specs(job), batches[:32])


def save(path: Path, job: Job, batches: Sequence[ScheduledBatch]) -> list[StepPlan]:
    groups, slots = group_specs(job), slots_of(job, batches)
    with TraceWriter(path, trace_header(job, groups, [slots])) as writer:
        noting = Noting(writer)
        for _ in planned_beside(batches, new_planner(the_setting(job), groups, [slots], batches[:32]), noting):
            pass
    return noting.plans


def save_stopped(path: Path, job: Job, batches: Sequence[ScheduledBatch], num_plans: int) -> None:
    """As a run that is stopped after that many plans: it knew more batches than it planned."""
    groups, slots = group_specs(job), slots_of(job, batches)
    planner = new_planner(the_setting(job), groups, [slots], batches[:32])
    left = list(batches)
    with TraceWriter(path, trace_header(job, groups, [slots])) as writer:
        for _ in range(num_plans):
            while planner.wants_batch:
                planner.add(left.pop(0))
            plan = planner.plan()
            writer.add(batches[plan.step], plan)
        writer.finish(counts(planner.barrier("stop", finished=False)), finished=False)


def compare(path: Path, job: Job, max_steps: int | None = None) -> int:
    """Plans the trace again under the job's settings; returns how many plans could be compared."""
    with TraceReader(path) as reader:
        batches = list(reader.steps())
        groups, slots = group_specs(job), slots_of(job, batches)
        assert same_settings(reader.header, trace_header(job, groups, [slots]))
        replay = Replay(reader, max_steps)
        comparing = Comparing(replay)
        for _ in planned_beside(
            replay.batches(), new_planner(the_setting(job), groups, [slots], batches[:32]), comparing
        ):
            pass
        return comparing.num_compared


@pytest.mark.parametrize("bags", BAGS)
def test_what_is_saved_comes_back(bags: Bags, tmp_path: Path) -> None:
    job, batches = workload(bags)
    plans = save(tmp_path / "a.trace", job, batches)
    with TraceReader(tmp_path / "a.trace") as reader:
        traced = list(reader.steps())
        assert reader.finished
    assert len(traced) == len(batches) == 12
    for ours, theirs, plan in zip(traced, batches, plans, strict=True):
        assert (ours.step, ours.kind, ours.train_step, ours.epoch) == (
            theirs.step,
            theirs.kind,
            theirs.train_step,
            theirs.epoch,
        )
        assert ours.batch.size == theirs.batch.size
        assert_same((ours.batch.ids, ours.batch.offsets), (theirs.batch.ids, theirs.batch.offsets))
        assert (ours.batch.weights is None) == (theirs.batch.weights is None)
        assert ours.facts == plan_facts(plan)
    assert sum(sum(plan.facts.rows_evicted) for plan in traced) > 0
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("bags", BAGS)
def test_plans_made_again_are_identical(bags: Bags, tmp_path: Path) -> None:
    job, batches = workload(bags)
    save(tmp_path / "a.trace", job, batches)
    assert compare(tmp_path / "a.trace", job) == 12


def test_a_simulation_over_a_trace_is_one_over_its_data(tmp_path: Path) -> None:
    job, batches = workload("weighted")
    save(tmp_path / "a.trace", job, batches)
    grid = Grid(policies=("lookahead", "lru", "ttl", "window"), capacities=("40KB", "60KB"))
    with TraceReader(tmp_path / "a.trace") as reader:
        over_trace = simulate(job, grid, lambda _: reader.steps(), per_step=True)
    assert over_trace == simulate(job, grid, lambda _: batches, per_step=True)


def test_of_a_stopped_run_the_plans_are_compared_whose_future_is_in_the_trace(tmp_path: Path) -> None:
    job, _ = workload()
    batches = small_batches(job, "multi", num_steps=40, eval_at=(4, 7))
    save_stopped(tmp_path / "a.trace", job, batches, num_plans=36)  # the first 32 decide how the capacity is divided
    assert compare(tmp_path / "a.trace", job) == 36 - 4, "the horizon is 4"


def test_the_beginning_of_a_trace_compares_what_does_not_depend_on_the_rest(tmp_path: Path) -> None:
    job, batches = workload()
    save(tmp_path / "a.trace", job, batches)
    assert compare(tmp_path / "a.trace", job, max_steps=7) == 5, "7 train steps and 2 evaluations, less a horizon of 4"
    assert compare(tmp_path / "a.trace", job, max_steps=10) == 12


def test_ids_are_kept_in_the_narrowest_type_that_holds_every_table(tmp_path: Path) -> None:
    types = []
    for rows in (2**8, 2**8 + 1, 2**32, 2**32 + 1):
        job, batches = workload("single")
        tables = [msgspec.structs.replace(table, num_embeddings=min(rows, 200)) for table in job.tables[1:]]
        job = msgspec.structs.replace(
            job, tables=[msgspec.structs.replace(job.tables[0], num_embeddings=rows), *tables]
        )
        ids = np.minimum(batches[0].batch.ids, 99)
        ids[0] = rows - 1
        batch = ScheduledBatch(
            step=0, kind="train", train_step=0, epoch=0, batch=dataclasses.replace(batches[0].batch, ids=ids)
        )
        save(tmp_path / "a.trace", job, [batch])
        with TraceReader(tmp_path / "a.trace") as reader:
            assert [traced.batch.ids[0] for traced in reader.steps()] == [rows - 1]
        with pa.ipc.open_file(str(tmp_path / "a.trace")) as file:
            types.append(str(file.schema.field("ids").type.value_type))
    assert types == ["uint8", "uint16", "uint32", "uint64"]


def rewritten(
    path: Path, metadata: dict[bytes, bytes | None], rows: Callable[[list[Any]], list[Any]] = lambda rows: rows
) -> Path:
    """The trace with other metadata, or other record batches."""
    with pa.ipc.open_file(str(path)) as file:
        kept = rows([file.get_batch(index) for index in range(file.num_record_batches)])
        changed = {key: value for key, value in (file.schema.metadata | metadata).items() if value is not None}
    schema = kept[0].schema.with_metadata(changed)
    with pa.ipc.new_file(str(path), schema) as file:
        for batch in kept:
            file.write_batch(batch.replace_schema_metadata(changed))
    return path


def read_all(path: Path) -> list[Any]:
    with TraceReader(path) as reader:
        return [(step.step, step.facts, batch_checksum(step.batch)) for step in reader.steps()]


def changed(name: str, value: Any) -> Callable[[list[Any]], list[Any]]:
    """Puts another value into a column of step 3."""

    def change(rows: list[Any]) -> list[Any]:
        place = rows[3].schema.get_field_index(name)
        array = pa.array([value], rows[3].schema.field(place).type)
        return [*rows[:3], rows[3].set_column(place, rows[3].schema.field(place), array), *rows[4:]]

    return change


VERSION_1: dict[bytes, bytes | None] = {VERSION_KEY: b"1"}
NOTHING: dict[bytes, bytes | None] = {}


@pytest.mark.parametrize(
    ("metadata", "rows", "error", "sentence"),
    [
        (VERSION_1, None, Mismatch, "trace version 1, but this version reads 3"),
        ({VERSION_KEY: None}, None, DataError, "an Arrow file, but not a trace"),
        ({HEADER_KEY: b"{}"}, None, DataError, "its header is damaged"),
        (NOTHING, lambda rows: rows[:-1], DataError, "the last row is not an end row"),
        (NOTHING, lambda rows: [*rows[:2], *rows[3:]], DataError, "row 2 is step 3 of kind train"),
        (
            NOTHING,
            lambda rows: [row.drop_columns(["epoch"]) for row in rows],
            DataError,
            "its columns are not those of a trace",
        ),
        (
            NOTHING,
            lambda rows: [*rows[:5], rows[5].slice(0, 0), *rows[6:]],
            DataError,
            "record batch 5 has 0 rows instead of 1",
        ),
        (NOTHING, changed("kind", "serve"), DataError, "row 3 is step 3 of kind serve"),
        (NOTHING, changed("batch_size", None), DataError, "step 3 has no batch_size"),
        (NOTHING, changed("batch_size", 0), DataError, "bags for 0 samples"),
        (NOTHING, changed("batch_size", 63), DataError, "320 bags for 63 samples of 5 features"),
        (NOTHING, changed("offsets", [0, 1]), DataError, "1 bags for 64 samples"),
        (NOTHING, changed("ids", [2000] * 10), DataError, "step 3 has 10 ids and"),
        (NOTHING, changed("weighted", True), DataError, "the ids of step 3 do not have the checksum"),
    ],
)
def test_what_is_no_whole_trace_is_refused_with_one_sentence(
    metadata: dict[bytes, bytes | None],
    rows: Callable[[list[Any]], list[Any]] | None,
    error: type[RowcastError],
    sentence: str,
    tmp_path: Path,
) -> None:
    save(tmp_path / "a.trace", *workload())
    rewritten(tmp_path / "a.trace", metadata, rows or (lambda rows: rows))
    with pytest.raises(error) as caught:
        read_all(tmp_path / "a.trace")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_id_outside_its_table_is_refused_before_anything_is_indexed_with_it(tmp_path: Path) -> None:
    job, batches = workload("single")
    save(tmp_path / "a.trace", job, batches)
    ids = batches[3].batch.ids.copy()
    ids[2 * 64 + 5] = 300  # f2 of a table of 300 rows; another table has 2000
    rewritten(tmp_path / "a.trace", {}, changed("ids", ids))
    with pytest.raises(DataError, match=facts("step 3", "feature f2", 300, "--save-trace")):
        read_all(tmp_path / "a.trace")


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.trace", *workload())
    whole = (tmp_path / "a.trace").read_bytes()
    for size in [0, 1, 7, *range(8, len(whole), len(whole) // 40), len(whole) - 1]:
        (tmp_path / "cut.trace").write_bytes(whole[:size])
        with pytest.raises(DataError, match="not a whole trace file"):
            read_all(tmp_path / "cut.trace")


def test_a_damaged_file_gives_its_own_steps_or_a_sentence(tmp_path: Path) -> None:
    save(tmp_path / "a.trace", *workload())
    whole, path = (tmp_path / "a.trace").read_bytes(), tmp_path / "damaged.trace"
    right, num_refused = read_all(tmp_path / "a.trace"), 0
    for place in range(0, len(whole), 211):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            assert [step[2] for step in read_all(path)] == [step[2] for step in right]
        except RowcastError:
            num_refused += 1
    assert num_refused > 20


@pytest.mark.parametrize("name", ["text", "folder", "missing"])
def test_what_is_no_arrow_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("[job]\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises((ConfigError, DataError), match=r"--trace .*(not a whole trace file|cannot be read)"):
        TraceReader(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tables: tables[1:], "the trace has 4 tables and the job 3"),
        (
            lambda tables: [tables[1], tables[0], *tables[2:]],
            facts("table narrow_a of 400 rows", "f0, f1", "wide_a of 300"),
        ),
        (
            lambda tables: [msgspec.structs.replace(tables[0], num_embeddings=401), *tables[1:]],
            "has narrow_a of 401 rows",
        ),
    ],
)
def test_tables_that_do_not_fit_the_job_are_refused(
    change: Callable[[Any], Any], sentence: str, tmp_path: Path
) -> None:
    job, batches = workload()
    save(tmp_path / "a.trace", job, batches)
    other = msgspec.structs.replace(job, tables=change(job.tables))
    with TraceReader(tmp_path / "a.trace") as reader, pytest.raises(Mismatch, match=sentence):
        check_tables(reader.header, other, "--trace a.trace")


def test_other_widths_and_optimizers_may_be_tried_but_are_not_the_traces_settings(tmp_path: Path) -> None:
    job, batches = workload()
    save(tmp_path / "a.trace", job, batches)
    other = msgspec.structs.replace(
        job, tables=[msgspec.structs.replace(table, embedding_dim=16) for table in job.tables]
    )
    with TraceReader(tmp_path / "a.trace") as reader:
        check_tables(reader.header, other, "--trace a.trace")
        assert not same_settings(reader.header, trace_header(other, group_specs(other), [(300,)]))


def test_a_plan_that_differs_is_named(tmp_path: Path) -> None:
    """Planned again by another policy, as a version that chooses other victims would."""
    job, batches = workload()
    plans = save(tmp_path / "a.trace", job, batches)
    (lru,) = settings(job, Grid(policies=("lru",)))
    first = next(plan.step for plan in plans if any(len(group.evict_keys) for group in plan.groups))
    with TraceReader(tmp_path / "a.trace") as reader:
        replay = Replay(reader, None)
        watched = planned_beside(
            replay.batches(), new_planner(lru, group_specs(job), [slots_of(job, batches)], batches), Comparing(replay)
        )
        with pytest.raises(DataError, match=facts(f"step {first}", "planned differently")):
            list(watched)


def test_the_checksum_sees_every_part_of_a_plan(tmp_path: Path) -> None:
    plans = save(tmp_path / "a.trace", *workload("weighted"))
    plan = next(
        plan for plan in plans if all(group.fill_after is not None and group.num_dirty for group in plan.groups)
    )
    seen = {plan_checksum(plan)}
    names = [
        field.name
        for field in dataclasses.fields(plan.groups[1])
        if field.name not in ("weights", "order", "sequence_offsets", "share")  # a trace is of a trainer that is alone
    ]
    for name in names:
        seen.add(plan_checksum(dataclasses.replace(plan, groups=(plan.groups[0], other_value(plan.groups[1], name)))))
    seen.add(plan_checksum(dataclasses.replace(plan, after_step=plan.step)))
    seen.add(plan_checksum(dataclasses.replace(plan, groups=plan.groups[::-1])))
    assert len(seen) == len(names) + 3


@pytest.mark.parametrize(("bags", "name"), [("apart", "sequence_offsets"), ("single", "order")])
def test_the_checksum_sees_the_arrays_of_other_bags(bags: Bags, name: str, tmp_path: Path) -> None:
    plan = save(tmp_path / "a.trace", *workload(bags))[0]
    changed = dataclasses.replace(plan, groups=(other_value(plan.groups[0], name), *plan.groups[1:]))
    assert plan_checksum(changed) != plan_checksum(plan)


def other_value(group: GroupPlan, name: str) -> GroupPlan:
    value: Any = getattr(group, name)
    if isinstance(value, np.ndarray):
        value = np.concatenate([value[:-1], value[-1:] + 1]) if len(value) else np.ones(1, value.dtype)
    else:
        value += 1
    return dataclasses.replace(group, **{name: value})


def test_a_run_that_did_not_end_in_order_leaves_nothing(tmp_path: Path) -> None:
    job, batches = workload()
    header = trace_header(job, group_specs(job), [slots_of(job, batches)])
    with TraceWriter(tmp_path / "a.trace", header):
        assert list(tmp_path.iterdir()), "it is being written"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["missing/a.trace", "/dev/full", "."])
def test_where_no_trace_can_be_saved_is_said_at_once(path: str, tmp_path: Path) -> None:
    job, batches = workload()
    header = trace_header(job, group_specs(job), [slots_of(job, batches)])
    with pytest.raises(ConfigError, match=r"--save-trace .*(cannot be written|is not a file)"):
        TraceWriter(tmp_path / path, header)
    assert not list(tmp_path.rglob("*"))
