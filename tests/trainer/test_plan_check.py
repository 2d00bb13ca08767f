"""What the trainer refuses of a Welcome and of plans, whole or shared. `tests/hostile` has a lying peer's plans."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.protocol.batch import Batch
from rowcast.protocol.messages import PlanReady, RingSpec, Welcome
from rowcast.protocol.parts import UNDIVIDED, InputSpec, Rank, samples_of
from rowcast.protocol.plan import step_block, step_header
from rowcast.protocol.plan_layout import EXCHANGE_ARRAYS, GROUP_ARRAYS, RowSpan, ShareHeader, StepHeader
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.trainer.kernels import GroupLookup, cut_long_rows
from rowcast.trainer.models import runner
from rowcast.trainer.models.runner import StepInputs, step_lookups
from rowcast.trainer.step.engine import check_welcome_fits
from rowcast.trainer.step.plan_check import PlanCheck
from tests.support import sample_messages
from tests.support.batches import NUM_DENSE, Bags, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings
from tests.support.facts import facts
from tests.support.planner_runs import placed

JOB = small_job("adagrad", depth=2)
GROUPS = group_specs(JOB)
STAGING_BYTES = 2**16


def welcome(**changes: Any) -> Welcome:
    return msgspec.structs.replace(sample_messages.welcome(depth=2), **changes)


def with_array(**changes: Any) -> tuple[InputSpec, ...]:
    time = InputSpec(name="time", dtype="i8", shape=())
    return sample_messages.announced(13, msgspec.structs.replace(time, **changes))


def test_a_welcome_of_this_job_fits() -> None:
    check_welcome_fits(welcome(), JOB, GROUPS)
    check_welcome_fits(welcome(slots=tuple(group.num_rows for group in GROUPS)), JOB, GROUPS)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"slots": (100,)}, r"announces \(100,\) slots for groups of \(2400, 400\) rows"),
        ({"slots": (100, 401)}, r"announces \(100, 401\) slots"),
        ({"slots": (2**61, 1)}, "slots for groups of"),
        ({"depth": 2**61}, "announces depth 2305843009213693952; lookahead.depth is 2"),
        ({"back_ring": RingSpec(path="", nbytes=2**21)}, "rings of 1048576 and 2097152 bytes"),
        ({"inputs": sample_messages.announced(2**40)}, facts("announces dense", 2**40)),
        ({"inputs": sample_messages.announced(-1)}, facts("announces dense", -1)),
        ({"inputs": sample_messages.announced(4)[1:]}, facts("the arrays", "labels", "dense and labels come first")),
        ({"inputs": with_array(shape=(2**20, 2**20))}, facts("announces time as i8", 2**20)),
        ({"inputs": with_array(shape=(-(2**20), -2))}, facts("announces time as i8", -2)),
        ({"inputs": with_array(of="f0")}, facts("announces time as i8", "'f0'")),
        ({"inputs": with_array(name="labels")}, facts("no name twice")),
        (
            {"staging_bytes": 2**40},
            facts("1099511627776 bytes of staging", 64, 524160),
        ),
        ({"staging_bytes": 0}, "announces 0 bytes of staging"),
        ({"staging_bytes": 100}, "announces 100 bytes of staging"),
    ],
)
def test_a_welcome_that_asks_for_too_much_is_refused_before_memory_is_allocated(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        check_welcome_fits(welcome(**changes), JOB, GROUPS)


@pytest.mark.parametrize("changes", [{"num_dirty": (1, 1)}, {"arrays": ()}, {"checkpoint": True}])
def test_a_later_piece_of_a_barrier_cannot_announce_another_one(changes: dict[str, Any]) -> None:
    check = PlanCheck(GROUPS, (100, 50), sample_messages.announced(4), 0, STAGING_BYTES, is_tcp=False)
    first, second = sample_messages.flush_pieces(0, None)
    check.barrier(first, None)
    check.barrier(second, first)
    with pytest.raises(RemoteProtocolError, match=facts("piece 1 of barrier 0", "another barrier")):
        check.barrier(msgspec.structs.replace(second, **changes), first)


def test_a_piece_with_more_rows_than_staging_holds_is_refused() -> None:
    record_bytes = GROUPS[0].record_bytes
    rows = RowSpan(group=0, start=0, count=4, offset=256)
    ready = PlanReady(
        plan=0,
        piece=1,
        num_pieces=2,
        steps=(),
        payload=sample_messages.ref(256 + 4 * record_bytes),
        arrays=None,
        rows=(rows,),
    )
    PlanCheck(GROUPS, (100, 50), sample_messages.announced(4), 0, 4 * record_bytes, is_tcp=False).message(ready)
    with pytest.raises(RemoteProtocolError, match=facts("plan 0", f"{4 * record_bytes} bytes", 3 * record_bytes)):
        PlanCheck(GROUPS, (100, 50), sample_messages.announced(4), 0, 3 * record_bytes, is_tcp=False).message(ready)


@pytest.mark.parametrize("bags", ["single", "weighted", "apart"])
@pytest.mark.parametrize("ring_bytes", [2**15, 2**20])
def test_each_step_has_the_chunks_of_its_own_long_rows(
    bags: Bags, ring_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_job("adagrad", bags)
    batches = small_batches(job, bags)
    seen: list[int] = []

    def checked(step: StepInputs) -> list[GroupLookup]:
        lookups = step_lookups(step)
        for lookup in lookups:
            expected = cut_long_rows(lookup.segment_offsets.numpy())
            assert all(map(torch.equal, lookup.chunks, map(torch.from_numpy, expected)))
            seen.append(len(expected.chunk_rows))
        return lookups

    monkeypatch.setattr("rowcast.trainer.kernels.CHUNK_LOOKUPS", 2)
    monkeypatch.setattr(runner, "step_lookups", checked)
    slots = slots_for(group_specs(job), batches, "more")
    for seed in range(3):
        InProcessRun(job, batches, Settings(slots=slots, ring_bytes=ring_bytes, seed=seed)).run()
    assert np.count_nonzero(seen) > len(seen) // 2


RANK = Rank(number=1, count=3, parts=6)
SHARED_GROUPS = group_specs(small_job("adagrad", "weighted apart"))
SLOTS = tuple(group.num_rows for group in SHARED_GROUPS)
POSITIONS = [name for name, layout in (GROUP_ARRAYS | EXCHANGE_ARRAYS).items() if layout.below is not None]


def plan_of_rank(
    rank: Rank = RANK, groups: tuple[GroupSpec, ...] = SHARED_GROUPS, bags: Bags = "weighted apart"
) -> tuple[StepHeader, Bytes]:
    job = small_job("adagrad", bags)
    batches = small_batches(job, bags, num_steps=2, eval_at=())
    planner = job_planner(job, groups, [SLOTS], batches, rank=rank)
    planner.add(batches[0])
    planner.end()
    [plan] = planner.plan().steps
    batch = batches[0].batch
    own = samples_of(batch.size, rank)
    block = step_block(share := Batch(dense=batch.dense[own], labels=batch.labels[own], ids=batch.ids), plan, 0)
    content = np.zeros(block.nbytes, np.uint8)
    block.write(0, content)
    return step_header(share, plan, block), content


def take(header: StepHeader, content: Bytes, rank: Rank = RANK, groups: tuple[GroupSpec, ...] = SHARED_GROUPS) -> None:
    check = PlanCheck(groups, SLOTS, sample_messages.announced(NUM_DENSE), 0, 2**20, is_tcp=True, rank=rank)
    check.message(PlanReady(plan=0, piece=0, num_pieces=1, steps=(header,), payload=None, arrays=None, rows=()))
    check.arrays(0, content)


def test_what_the_planner_makes_passes() -> None:
    take(*plan_of_rank())


@pytest.mark.parametrize("bags", ["single", "multi", "weighted"])
@pytest.mark.parametrize("number", range(3))
def test_plans_of_placed_tables_pass_where_the_tables_are_placed_and_nowhere_else(bags: Bags, number: int) -> None:
    by_rows, rank = group_specs(small_job("adagrad", bags)), Rank(number=number, count=3, parts=6)
    pooled = [table.index for group in by_rows for table in group.tables if table.pooling != "none"]
    owners = [{own: own % 3 for own in pooled}, {own: (own + 1) % 3 for own in pooled}, {}]
    first, *others = [
        placed(by_rows, {own: (2 * owner + 1) * 2**31 // 3 for own, owner in of.items()}) for of in owners
    ]
    header, content = plan_of_rank(rank, first, bags)
    take(header, content, rank, first)
    for other in others:
        with pytest.raises(RemoteProtocolError, match=r"bags|array"):
            take(header, content, rank, other)


def with_share(header: StepHeader, change: Callable[[ShareHeader], dict[str, Any]]) -> StepHeader:
    assert header.share is not None
    first, *others = header.share.groups
    changed = msgspec.structs.replace(first, **change(first))
    return msgspec.structs.replace(header, share=msgspec.structs.replace(header.share, groups=(changed, *others)))


LIES: dict[str, tuple[Callable[[ShareHeader], dict[str, Any]], str]] = {
    "a rank too many": (lambda own: {"send_counts": (*own.send_counts, 0)}, "sends to 4 ranks instead of 3"),
    "a rank too few": (lambda own: {"receive_counts": own.receive_counts[1:]}, "receives from 2 ranks instead of 3"),
    "a row more to send": (
        lambda own: {"send_counts": (own.send_counts[0] + 1, *own.send_counts[1:])},
        "array 0.send_slots should be",
    ),
    "a row more to receive": (
        lambda own: {"receive_counts": (own.receive_counts[0] + 1, *own.receive_counts[1:])},
        "array 0.home_roots should be",
    ),
    "2^40 rows": (lambda own: {"send_counts": (2**40, 0, 0)}, "sends 1099511627776 rows"),
    "a row more to train": (lambda own: {"num_own": own.num_own + 1}, "array 0.roots should be"),
    "levels that fall": (lambda own: {"levels": (own.levels[0] + 1, own.levels[0])}, "has additions up to"),
    "more additions than gradients": (lambda own: {"home_levels": (10**6,)}, "has additions up to"),
    "sequences of one part": (lambda own: {"sequence_lookups": own.sequence_lookups[:1]}, "has sequences of"),
    "a look-up in another sequence": (
        lambda own: {"sequence_lookups": tuple(tuple(n + 1 for n in part) for part in own.sequence_lookups)},
        "has sequences of",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_numbers_that_do_not_fit_are_refused(lie: str) -> None:
    header, content = plan_of_rank()
    change, sentence = LIES[lie]
    with pytest.raises(RemoteProtocolError, match=sentence):
        take(with_share(header, change), content)


@pytest.mark.parametrize("name", POSITIONS)
def test_a_position_outside_its_range_is_refused(name: str) -> None:
    header, content = plan_of_rank()
    spec = next(spec for spec in header.arrays if spec.name.endswith(f".{name}") and spec.shape[0])
    content[spec.offset : spec.offset + 4].view(np.int32)[:] = 2**30
    with pytest.raises(RemoteProtocolError, match=facts(spec.name, 1073741824)):
        take(header, content)


def test_a_share_and_a_whole_batch_are_not_taken_for_each_other() -> None:
    with pytest.raises(RemoteProtocolError, match="brings a share instead of a whole batch"):
        take(*plan_of_rank(), rank=UNDIVIDED)
    with pytest.raises(RemoteProtocolError, match=facts("step 0", "whole batch", "rank")):
        take(*plan_of_rank(UNDIVIDED))


def test_the_share_of_another_rank_is_refused_where_its_samples_are_more_or_fewer() -> None:
    header, content = plan_of_rank()
    with pytest.raises(RemoteProtocolError, match=facts("21 samples", "22 of 64")):
        take(header, content, Rank(number=2, count=3, parts=6))
