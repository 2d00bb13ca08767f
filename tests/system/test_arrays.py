"""Arrays of samples, of look-ups and of the batch reach the model, and training has the bits of the plain loop."""

import functools
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import PlanReady
from rowcast.protocol.parts import UNDIVIDED, Rank, arrays_of_samples, batch_specs, belonging, samples_of
from rowcast.protocol.plan import step_block, step_header
from rowcast.protocol.plan_layout import StepHeader
from rowcast.protocol.session import decode
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.errors import ConfigError, DataError, RemoteProtocolError
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.step.plan_check import PlanCheck
from tests.support import sample_messages
from tests.support.array_models import NUM_NEGATIVES, array_job
from tests.support.batches import NUM_DENSE, slots_for, small_job
from tests.support.comparisons import Plain, assert_equal_bits
from tests.support.driver import InProcessRun, Settings, start_state
from tests.support.facts import facts
from tests.support.ranked_run import RankedRun

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = ("causal", "timed")
NO_ARRAYS: dict[str, Any] = {  # sections of a job whose model takes none
    "model": {"kind": "tests.support.batches:small_model"},
    "data": {"columns": {"label_values": "binary"}},
}


@functools.cache
def plain(model: str, parts: int) -> tuple[Job, list[ScheduledBatch], Plain]:
    job = array_job(model, parts)
    batches: list[ScheduledBatch] = list(schedule(job, open_reader(job)))
    return job, batches, run_plain_loop(job, start_state(job, 0), batches, parts)


def run_of(model: str, ranks: int, parts: int, **settings: Any) -> tuple[RankedRun, Plain]:
    job, batches, expected = plain(model, parts)
    slots = slots_for(group_specs(job), batches, "more")
    return RankedRun(job, batches, Settings(slots=slots, **settings), ranks=ranks, parts=parts).run(), expected


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("model", MODELS)
def test_arrays_of_every_kind_give_the_bits_of_the_plain_loop_in_as_many_parts(
    model: str, ranks: int, parts: int
) -> None:
    for seed, ring_bytes in enumerate((2**20, 2**14)):
        run, expected = run_of(
            model, ranks, parts, seed=seed, late_store=seed == 1, ring_bytes=ring_bytes, mirrored=seed == 1
        )
        assert_equal_bits(run, *expected)
        assert all(own.logloss is not None for own in run.pairs[0].results.evaluations)


@pytest.mark.parametrize("model", MODELS)
def test_look_ups_of_the_batch_are_whole_in_every_part_so_that_parts_have_one_loss(model: str) -> None:
    losses = [plain(model, parts)[2][0] for parts in (1, 2, 4)]
    assert losses[0] != losses[1], "other parts have other bits"
    for own in losses[1:]:
        assert own == pytest.approx(losses[0], rel=1e-6)


# a lying prefetcher


def plan_of(job: Job, batch: ScheduledBatch, rank: Rank) -> tuple[PlanCheck, StepHeader, Bytes]:
    groups = group_specs(job)
    slots = tuple(group.num_rows for group in groups)
    planner = job_planner(job, groups, [slots], [batch], rank=rank)
    planner.add(batch)
    planner.end()
    [plan] = planner.plan().steps
    whole = batch.batch.samples
    own = whole.within(arrays_of_samples(batch.batch, samples_of(batch.batch.size, rank), belonging(job)))
    block = step_block(own, plan, 0)
    content = np.zeros(block.nbytes, np.uint8)
    block.write(0, content)
    check = PlanCheck(groups, slots, batch_specs(own, belonging(job).arrays), 0, 2**20, is_tcp=True, rank=rank)
    return check, step_header(own, plan, block), content


def take(check: PlanCheck, header: StepHeader, content: Bytes) -> None:
    check.message(PlanReady(plan=0, piece=0, num_pieces=1, steps=(header,), payload=None, arrays=None, rows=()))
    check.arrays(0, content)


@pytest.mark.parametrize("rank", [UNDIVIDED, Rank(number=0, count=1, parts=3), Rank(number=1, count=2, parts=4)])
def test_a_plan_must_have_exactly_the_arrays_that_were_announced(rank: Rank) -> None:
    job, batches, _ = plain("causal", 1)
    take(*plan_of(job, batches[0], rank))
    lies: dict[str, dict[str, Any]] = {
        "inputs:time": {"shape": (1,)},
        "inputs:log_q": {"shape": (NUM_NEGATIVES - 1,)},
        "inputs:tokens": {"shape": (1, 2, 3)},
        "inputs:weight": {"dtype": "f4"},
        "inputs:seen": {"name": "inputs:sees"},
    }
    for name, changes in lies.items():
        check, header, content = plan_of(job, batches[0], rank)
        arrays = tuple(msgspec.structs.replace(own, **(changes if own.name == name else {})) for own in header.arrays)
        with pytest.raises(RemoteProtocolError, match=facts(f"array {name} should be")):
            take(check, msgspec.structs.replace(header, arrays=arrays), content)
    check, header, content = plan_of(job, batches[0], rank)
    seen = next(own for own in header.arrays if own.name == "inputs:seen")
    content[seen.offset] = 2
    with pytest.raises(RemoteProtocolError, match=facts("inputs:seen", 2)):
        take(check, header, content)


def test_a_frame_with_a_dtype_that_no_array_has_is_no_message() -> None:
    welcome = sample_messages.welcome()
    for changes in ({"dtype": "O8"}, {"shape": (-1,)}):
        spec = msgspec.structs.replace(welcome.inputs[0], **changes)
        lying = msgspec.structs.replace(welcome, inputs=(spec, *welcome.inputs[1:]))
        with pytest.raises(RemoteProtocolError):
            decode(msgspec.msgpack.encode([1, 0, lying]))


# what is refused


def test_a_model_that_takes_no_arrays_is_refused_where_the_data_has_some() -> None:
    with pytest.raises(ConfigError, match=facts("SmallModel.forward", "time", "inputs")):
        JobModel(array_job("causal", **NO_ARRAYS), 0)
    job = small_job("sgd")
    side, rows = JobModel(job, NUM_DENSE), [torch.zeros(2, table.width) for table in job.tables for _ in table.features]
    side.forward(torch.zeros(2, NUM_DENSE), rows, {}, training=False)
    with pytest.raises(ConfigError, match=facts("SmallModel.forward", "tokens", "inputs")):
        side.forward(torch.zeros(2, NUM_DENSE), rows, {"tokens": torch.zeros(2)}, training=False)


def test_a_model_that_needs_arrays_is_refused_at_the_first_batch_without_any() -> None:
    job, batches, _ = plain("causal", 1)
    bare = [replace(own, batch=replace(own.batch, inputs={})) for own in batches]
    slots = slots_for(group_specs(job), batches, "more")
    run = InProcessRun(array_job("causal", data={"of": {"negative": "batch"}}), bare, Settings(slots=slots))
    with pytest.raises(ConfigError, match=facts("Causal.forward", "inputs", "data.columns.inputs")):
        run.run()
    assert run.results.losses == []


def test_arrays_that_change_during_a_run_end_it_at_that_batch() -> None:
    job, batches, _ = plain("timed", 1)
    other = replace(batches[3].batch, inputs=batches[3].batch.inputs | {"weight": np.zeros(12, np.float32)})
    run = InProcessRun(
        job,
        [*batches[:3], replace(batches[3], batch=other), *batches[4:]],
        Settings(slots=slots_for(group_specs(job), batches, "more")),
    )
    with pytest.raises(DataError, match=facts("step 3", "weight", "float32", "float64")):
        run.run()
    assert len(run.results.losses) == 3
