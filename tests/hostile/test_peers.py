"""A peer that is honest and then lies once: the other side ends with one sentence, never another exception."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load, save

from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.protocol.messages import (
    AnyMessage,
    Envelope,
    Flush,
    PlanReady,
    Released,
    Restore,
    RingRef,
    RowsBack,
    Saved,
)
from rowcast.protocol.plan_layout import GROUP_ARRAYS, ArraySpec, StepHeader
from rowcast.protocol.session import PREFETCHER, ROLES, TRAINER, encode
from rowcast.runtime.arrays import I32, Bytes
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import RemoteProtocolError, RowcastError
from rowcast.runtime.run_directory import Role
from tests.hostile.mutate import Mutator
from tests.hostile.peers import HostileRun, Lie, array_of
from tests.support.batches import Bags, slots_for, small_batches, small_job
from tests.support.conversations import EVERY_MESSAGE
from tests.support.driver import Past, StuckError
from tests.support.facts import facts
from tests.support.repeats import count

NUM_MUTATED_RUNS = count(30, 600)
change = msgspec.structs.replace


def in_array(
    name: str, write: Callable[["np.ndarray[tuple[int], np.dtype[np.int32]]"], None], kind: type = PlanReady
) -> Lie:
    def lie(message: AnyMessage, content: Bytes) -> AnyMessage | None:
        own = array_of(message, content, name) if isinstance(message, kind) else None
        if own is None or len(own) < 2:
            return None
        write(own)
        return message

    return lie


def at(place: int, value: int) -> Callable[["np.ndarray[tuple[int], np.dtype[np.int32]]"], None]:
    return lambda array: array.__setitem__(place, value)


def same(array: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
    array[1] = array[0]


def field_of(kind: type[AnyMessage], changed: Callable[[AnyMessage], AnyMessage | None]) -> Lie:
    return lambda message, content: changed(message) if isinstance(message, kind) else None


def in_plan(changed: Callable[[StepHeader], StepHeader]) -> Lie:
    return field_of(
        PlanReady, lambda m: change(m, steps=(changed(m.steps[0]),)) if isinstance(m, PlanReady) and m.steps else None
    )


def in_group(**changes: Callable[[Any], Any]) -> Lie:
    def changed(plan: StepHeader) -> StepHeader:
        first = plan.groups[0]
        return change(
            plan,
            groups=(
                change(first, **{name: of(getattr(first, name)) for name, of in changes.items()}),
                *plan.groups[1:],
            ),
        )

    return in_plan(changed)


def in_spec(array: str, **changes: object) -> Lie:
    def changed(plan: StepHeader) -> StepHeader:
        return change(
            plan, arrays=tuple(change(spec, **changes) if spec.name == array else spec for spec in plan.arrays)
        )

    return in_plan(changed)


def in_ref(kind: type[AnyMessage], changed: Callable[[RingRef], RingRef]) -> Lie:
    def lie(message: AnyMessage) -> AnyMessage | None:
        ref = getattr(message, "payload", None)
        return change(message, payload=changed(ref)) if isinstance(ref, RingRef) else None

    return field_of(kind, lie)


def moved(by: int) -> Callable[[RingRef], RingRef]:
    return lambda ref: change(ref, position=ref.position + by, end=ref.end + by)


EXTRA = ArraySpec(name="extra", dtype="u1", shape=(), offset=0)
PREFETCHER_LIES: dict[str, tuple[Lie, str]] = {
    "a look-up twice": (in_array("0.order", same), "0.order is no permutation of the look-ups 0 to"),
    "a look-up of another table": (in_array("1.order", at(-1, 2**16 - 1)), "1.order is no permutation of the look-ups"),
    "an update twice": (in_array("1.unique_slots", same), "1.unique_slots names a slot twice"),
    "segments that fall": (in_array("0.segment_offsets", at(1, 10**6)), "0.segment_offsets falls"),
    "segments that begin inside": (in_array("1.segment_offsets", at(0, 1)), "1.segment_offsets goes from 1"),
    "a fill outside": (in_array("0.fetch_slots", at(0, -5)), "0.fetch_slots holds -5"),
    "a fill twice": (in_array("0.fetch_slots", same), "0.fetch_slots names a slot twice"),
    "arrays of another type": (in_spec("0.unique_slots", dtype="f4"), "array 0.unique_slots should be i4"),
    "arrays of another shape": (in_spec("labels", shape=(1,)), "array labels should be f4 .64,. at byte"),
    "arrays over each other": (in_spec("labels", offset=0), "array labels should be"),
    "arrays of another name": (in_spec("0.order", name="0.bag"), "array 0.slots should be"),
    "arrays too many": (
        in_plan(lambda plan: change(plan, arrays=(*plan.arrays, EXTRA))),
        "extra, u1 .. at byte 0, came",
    ),
    "arrays too few": (in_plan(lambda plan: change(plan, arrays=plan.arrays[:-1])), "and nothing came"),
    "weights of look-ups that are ordered": (
        in_plan(lambda plan: change(plan, arrays=(*plan.arrays, change(EXTRA, name="0.weights")))),
        "the order of group 0 alone",
    ),
    "more look-ups": (in_group(num_lookups=lambda n: n + 1), "look-ups in .* bags of one"),
    "look-ups without end": (in_group(num_lookups=lambda n: 2**40), "has 1099511627776 look-ups"),
    "more rows than slots": (
        in_group(num_lookups=lambda n: 10**6, num_unique=lambda n: 10**6),
        "touches 1000000 rows of group 0, which has",
    ),
    "fewer rows": (in_group(num_unique=lambda n: n - 1), "unique_slots should be i4"),
    "another batch size": (in_plan(lambda plan: change(plan, batch_size=63)), "look-ups in .* bags of one"),
    "no batch": (in_plan(lambda plan: change(plan, batch_size=0)), "has an empty batch"),
    "a batch without end": (in_plan(lambda plan: change(plan, batch_size=2**61)), "look-ups in|bags"),
    "fewer groups": (
        in_plan(lambda plan: change(plan, groups=plan.groups[:1])),
        "has 1 groups instead of 2|rows of group 1 travel",
    ),
    "more groups": (
        in_plan(
            lambda plan: change(
                plan, groups=(*plan.groups, change(plan.groups[0], num_fetch=0, num_evict=0, num_dirty=0))
            )
        ),
        "3 groups",
    ),
    "another train step": (
        in_plan(lambda plan: change(plan, kind="train", train_step=plan.train_step + 5)),
        "is train step .* instead of",
    ),
    "a piece far outside the ring": (in_ref(PlanReady, moved(2**40)), "does not follow the one that ended at"),
    "rows on top of each other": (lambda m, c: rows_on_top(m), "overlap those that end at"),
    "slots of a barrier outside": (in_array("0.slots", at(0, 10**7), Flush), "barrier 0: 0.slots holds 10000000"),
    "slots of a barrier twice": (in_array("0.slots", same, Flush), "barrier 0: 0.slots names a slot twice"),
    "a barrier of more rows": (
        field_of(Flush, lambda m: change(m, num_dirty=(10**9, 0))),
        "brings .1000000000, 0. rows home from",
    ),
    "a barrier of fewer groups": (field_of(Flush, lambda m: change(m, num_dirty=(1,))), "brings .1,. rows home from"),
    "a barrier of other arrays": (field_of(Flush, lambda m: change(m, arrays=(EXTRA,))), "array 0.slots should be"),
}

WEIGHTED_LIES: dict[str, tuple[Lie, str]] = {
    "a negative look-up": (in_array("0.slots", at(-1, -1)), "0.slots holds -1"),
    "a negative bag": (in_array("0.bag_order", at(5, -(2**31))), "0.bag_order holds -2147483648"),
    "weights without their order": (in_spec("0.lookup_order", name="0.other"), "array 0.lookup_order should be"),
    "bags that fall": (in_array("1.offsets", at(1, 10**6)), "1.offsets falls"),
    "bags that end outside": (in_array("1.offsets", at(-1, -1)), "1.offsets goes from 0 to -1 instead of"),
}

# the look-ups that some arrays come with
BAGS_OF: dict[str, Bags] = {
    "slots": "weighted",
    "bag_order": "weighted",
    "lookup_order": "weighted",
    "offsets": "weighted",
    "sequence_offsets": "apart",
}

# group 0 has sequences of features 0 and 1 of 3, group 1 of feature 1 of 2
SEQUENCE_LIES: dict[str, tuple[Lie, str]] = {
    "sequences that fall": (in_array("0.sequence_offsets", at(1, 10**6)), r"0.sequence_offsets\[0\] falls"),
    "sequences that begin inside": (in_array("1.sequence_offsets", at(0, 1)), r"1.sequence_offsets\[0\] goes from 1"),
    "sequences that end outside": (
        in_array("0.sequence_offsets", at(-1, 10**6)),
        r"0.sequence_offsets\[1\] goes from 0 to 1000000",
    ),
    "sequences too few": (
        in_group(sequence_lookups=lambda own: own[:1]),
        "has 1 features of sequences in group 0 instead of 2",
    ),
    "no sequences": (in_group(sequence_lookups=lambda own: ()), "has 0 features of sequences in group 0 instead of 2"),
    "a longer sequence": (in_group(sequence_lookups=lambda own: (own[0] + 1, own[1])), "array 0.offsets should be"),
    "a longer sequence and a shorter one": (
        in_group(sequence_lookups=lambda own: (own[0] + 1, own[1] - 1)),
        "s.0. goes from 0 to",
    ),
    "sequences without end": (
        in_group(sequence_lookups=lambda own: (2**40, 0)),
        "look-ups of sequences are among|look-ups in",
    ),
}

TRAINER_LIES: dict[str, tuple[Lie, str]] = {
    "rows that reach behind their payload": (
        lambda m, c: rows_at_the_end(m),
        "came back out of order|beyond their payload",
    ),
    "rows of another plan": (
        field_of(RowsBack, lambda m: change(m, plan=m.plan + 9) if isinstance(m, RowsBack) and m.plan else None),
        "rows of plan",
    ),
    "rows far outside the ring": (in_ref(RowsBack, moved(2**40)), "does not follow the one that ended at"),
    "space given back that is not held": (
        field_of(Released, lambda m: Released(position=2**40)),
        "Released names position",
    ),
}


def rows_on_top(message: AnyMessage) -> AnyMessage | None:
    if not isinstance(message, PlanReady) or len(message.rows) < 2 or message.rows[0].count < 3:
        return None
    first, second = message.rows[:2]
    return change(message, rows=(first, change(second, offset=first.offset + -(-first.count // 64) * 64)))


def rows_at_the_end(message: AnyMessage) -> AnyMessage | None:
    """The last rows begin where only one of them still fits."""
    if not isinstance(message, RowsBack) or not message.rows or message.payload is None or message.rows[-1].count < 8:
        return None
    offset = (message.payload.nbytes - message.rows[-1].count) // 64 * 64
    return change(message, rows=(*message.rows[:-1], change(message.rows[-1], offset=offset)))


def check_refused(role: Role, lie: Lie, sentence: str, *, bags: Bags = "single", good: int = 2) -> None:
    told = 0
    for seed in range(2):  # streams that run at once, and streams that a seed runs in any order
        hostile = HostileRun(role, lie, good if seed else 0)
        with pytest.raises(RowcastError, match=sentence) as refused:
            hostile.run(seed=seed, bags=bags)
        told += hostile.told
        assert type(refused.value) is not RowcastError
        assert "\n" not in str(refused.value)
    assert told


@pytest.mark.parametrize("name", PREFETCHER_LIES)
def test_a_trainer_ends_with_a_sentence_when_its_prefetcher_sends(name: str) -> None:
    check_refused(PREFETCHER, *PREFETCHER_LIES[name], good=0 if "barrier" in name else 2)


def test_a_bad_plan_is_refused_where_it_arrives_and_not_by_the_thread_that_issues_work() -> None:
    hostile = HostileRun(PREFETCHER, in_array("0.unique_slots", at(3, 10**8)))
    with pytest.raises(RemoteProtocolError, match=r"0\.unique_slots holds 100000000") as refused:
        hostile.run()
    callers = {frame.name for frame in refused.traceback}
    assert "_received" in callers
    assert "copy_in_next" not in callers


def with_a_dirty_victim(message: AnyMessage) -> AnyMessage | None:
    """One more than the plan has, in the slot of a row that none makes room for."""
    if not isinstance(message, PlanReady) or not message.steps:
        return None
    first, *others = message.steps[0].groups
    if not 0 < first.num_dirty == first.num_evict < first.num_fetch:
        return None
    first = change(first, num_evict=first.num_evict + 1, num_dirty=first.num_dirty + 1)
    return change(message, steps=(change(message.steps[0], groups=(first, *others)),))


def test_a_victim_that_the_planner_did_not_choose_is_refused_when_it_comes_home() -> None:
    check_refused(PREFETCHER, field_of(PlanReady, with_a_dirty_victim), "travels, but there are", good=0)


@pytest.mark.parametrize("name", [name for name, layout in GROUP_ARRAYS.items() if layout.dtype == "i4"])
def test_a_value_outside_the_range_that_the_table_gives_is_refused_of_every_array(name: str) -> None:
    lie = in_array(f"0.{name}", at(-1, 2**31 - 1))
    check_refused(PREFETCHER, lie, rf"0\.{name}.* (holds|from 0 to) 2147483647", bags=BAGS_OF.get(name, "single"))


@pytest.mark.parametrize("name", [name for name, layout in GROUP_ARRAYS.items() if layout.below is not None])
def test_a_value_one_beyond_its_range_is_refused(name: str) -> None:
    bags = BAGS_OF.get(name, "single")
    job = small_job("adagrad", bags)
    batches, groups = small_batches(job, bags), group_specs(job)
    num_slots = slots_for(groups, batches, "more")[0]
    num_bags = batches[0].batch.size * sum(len(own.features) for own in groups[0].tables)

    def lie(array: I32) -> None:
        array[-1] = num_slots if name.endswith("slots") else num_bags if name == "bag_order" else len(array)

    check_refused(PREFETCHER, in_array(f"0.{name}", lie), rf"0\.{name} holds \d+", bags=bags)


@pytest.mark.parametrize("name", WEIGHTED_LIES)
def test_a_trainer_with_weighted_bags_ends_with_a_sentence_when_its_prefetcher_sends(name: str) -> None:
    check_refused(PREFETCHER, *WEIGHTED_LIES[name], bags="weighted")


@pytest.mark.parametrize("name", SEQUENCE_LIES)
def test_a_trainer_with_sequences_ends_with_a_sentence_when_its_prefetcher_sends(name: str) -> None:
    check_refused(PREFETCHER, *SEQUENCE_LIES[name], bags="apart")


@pytest.mark.parametrize("name", TRAINER_LIES)
def test_a_prefetcher_ends_with_a_sentence_when_its_trainer_sends(name: str) -> None:
    check_refused(TRAINER, *TRAINER_LIES[name], good=0)


def header(**tensors: dict[str, object]) -> bytes:
    """A safetensors content with this header and no data."""
    content = json.dumps(tensors).encode()
    return len(content).to_bytes(8, "little") + content


def packed(**changes: torch.Tensor | None) -> Callable[[bytes], bytes]:
    """The dense side with some tensors changed or gone."""

    def changed(content: bytes) -> bytes:
        tensors = load(content)
        by_name = {name.replace("__", "."): tensor for name, tensor in changes.items()}
        return save({name: tensor for name, tensor in {**tensors, **by_name}.items() if tensor is not None})

    return changed


DENSE_SIDES: dict[str, Callable[[bytes], bytes]] = {
    "noise": lambda content: Random(1).randbytes(len(content)),
    "zeros": lambda content: bytes(len(content)),
    "a header without end": lambda content: (2**63).to_bytes(8, "little") + content[8:],
    "a header that is longer than the content": lambda content: len(content).to_bytes(8, "little") + content[8:],
    "a tensor outside": lambda content: header(x={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}),
    "a shape that overflows": lambda content: header(
        x={"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]}
    ),
    "a type that is not known": lambda content: header(x={"dtype": "F4", "shape": [0], "data_offsets": [0, 0]}),
    "another type": lambda content: header(x={"dtype": "object", "shape": [0], "data_offsets": [0, 0]}),
    "weights of another shape": packed(model__out__weight=torch.zeros(3, 3)),
    "weights of another name": packed(model__other=torch.zeros(3)),
    "random state of another length": packed(random__cpu=torch.zeros(7, dtype=torch.uint8)),
    "random state of another type": packed(random__cpu=torch.zeros(7)),
    "state of another optimizer": packed(optimizer__out__weight__exp_avg=torch.zeros(3)),
    "an evaluation that is no JSON": packed(evaluations=torch.full((5,), 255, dtype=torch.uint8)),
    "an evaluation without its fields": packed(evaluations=torch.tensor(list(b"{}"), dtype=torch.uint8)),
    "metrics of another shape": packed(metrics__histogram=torch.zeros(7, dtype=torch.int64)),
}


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """A run that has ended with a checkpoint."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run"), Disk())
    HostileRun(PREFETCHER, lambda message, content: None).run(past=Past(checkpoints=checkpoints, newest=None))
    newest = checkpoints.newest_valid()
    assert newest is not None
    return Past(checkpoints=checkpoints, newest=newest)


@pytest.mark.parametrize("name", DENSE_SIDES)
def test_a_trainer_ends_with_a_sentence_when_the_dense_side_is(name: str, past: Past) -> None:
    def lie(message: AnyMessage, content: Bytes) -> AnyMessage | None:
        """A content of the same length, as the Welcome announced it."""
        if not isinstance(message, Restore):
            return None
        assert message.num_pieces == 1
        other = DENSE_SIDES[name](content.tobytes())[: len(content)]
        content[:] = np.frombuffer(other.ljust(len(content), b"\0"), np.uint8)
        return change(message, checksum=xxhash.xxh3_64_intdigest(content.data))

    hostile = HostileRun(PREFETCHER, lie)
    with pytest.raises(RowcastError) as refused:
        hostile.run(past=past)
    assert hostile.told
    assert refused.value.exit_code in (4, 5), refused.value
    assert "\n" not in str(refused.value)


def test_a_dense_side_whose_checksum_is_of_other_bytes_is_refused(past: Past) -> None:
    def lie(message: AnyMessage, content: Bytes) -> AnyMessage | None:
        return change(message, checksum=message.checksum ^ 1) if isinstance(message, Restore) else None

    with pytest.raises(RemoteProtocolError, match=r"model state .*checksum \w{16}.* announced"):
        HostileRun(PREFETCHER, lie).run(past=past)


def test_a_saved_dense_side_whose_checksum_is_of_other_bytes_makes_no_checkpoint(tmp_path: Path) -> None:
    def lie(message: AnyMessage, content: Bytes) -> AnyMessage | None:
        return change(message, checksum=message.checksum ^ 1) if isinstance(message, Saved) else None

    checkpoints = Checkpoints(tmp_path, Disk())
    with pytest.raises(RowcastError, match=facts("model state arrived", "checksum")):
        HostileRun(TRAINER, lie).run(past=Past(checkpoints=checkpoints, newest=None))
    assert not checkpoints.candidates()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.timeout(count(300, 1800))
def test_mutated_frames_at_any_moment_end_a_run_with_a_sentence_or_do_it_no_harm(role: Role) -> None:
    frames = [encode(Envelope(incarnation=1, sequence=5, message=message)) for message in EVERY_MESSAGE]
    endings = {"sentence": 0, "none": 0}
    for seed in range(NUM_MUTATED_RUNS):
        chance = Random(seed)
        hostile = HostileRun(
            role, lambda message, content: message, good=chance.randrange(60), mutate=Mutator(chance, frames).mutated
        )
        try:
            hostile.run(seed=seed)
        except RowcastError:
            endings["sentence"] += 1
        except (
            StuckError
        ):  # a message that was never said: in a real process the peer is given up after `stall_timeout`
            endings["none"] += 1
        else:
            endings["none"] += 1
    assert endings["sentence"] > NUM_MUTATED_RUNS // 2
