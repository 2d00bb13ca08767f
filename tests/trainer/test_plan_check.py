"""Which values of a Welcome must fit the job, and blocks in pieces. `tests/hostile` has the plans of a lying peer."""

from typing import Any

import msgspec
import pytest

from rowcast.job.tables import group_specs
from rowcast.protocol.messages import PlanReady, RingSpec, RowSpan, Welcome
from rowcast.protocol.parts import InputSpec
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.trainer.step.engine import check_welcome_fits
from rowcast.trainer.step.plan_check import PlanCheck
from tests.support import sample_messages
from tests.support.batches import small_job
from tests.support.facts import facts

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
