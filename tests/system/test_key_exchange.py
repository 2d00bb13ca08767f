"""What prefetchers of several ranks tell each other: what follows from it, and what no rank says."""

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.tables import group_specs
from rowcast.prefetcher.pipeline.key_exchange import End, KeyExchange, KeyMessage, StepKeys
from rowcast.prefetcher.pipeline.planning import CheckpointClock
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.source import RankSource
from rowcast.protocol.batch import Samples, ScheduledBatch
from rowcast.protocol.parts import Rank, belonging
from rowcast.runtime.errors import DataError, Mismatch, PeerLost
from tests.support.batches import BATCH_SIZE, batches_of_sizes, slots_for, small_batches, small_job
from tests.support.driver import ListSource, MemoryCheckpointer, Settings
from tests.support.facts import facts
from tests.support.key_network import InProcessLinks, KeyNetwork
from tests.support.ranked_run import RankedRun
from tests.support.repeats import count

JOB = small_job("adagrad")
GROUPS = group_specs(JOB)
BATCHES = small_batches(JOB, "multi", num_steps=20, eval_at=())
SLOTS = slots_for(GROUPS, BATCHES, "two batches")
Where = Literal["ids", "dense"]


class OneRank:
    """The planning of one rank, without plans' other stages."""

    def __init__(self, links: InProcessLinks, rank: Rank, horizon: int = 2, bundle: int = 1) -> None:
        self.planner = RowPlanner(GROUPS, [SLOTS], 2, horizon, bundle=bundle, rank=rank)
        self.links, self.rank = links, rank
        self.source = RankSource(ListSource(BATCHES), rank, belonging(JOB))
        self.keys = KeyExchange(self.planner, 0)
        self.keys.links = links

    def add(self) -> None:
        ids = self.source.poll_ids()
        if ids is None:
            self.keys.end()
        else:
            self.keys.add(ids, self.planner.own_parts(ids.batch), self.source.checksum)
            self.keys._tell_all()  # without waiting for more

    def take(self) -> Any:
        self.keys.advance()
        return self.keys.take()

    def take_late(self) -> Any:
        """Once what it needs has arrived, which is on the way."""
        return next((taken for _ in range(1000) if (taken := self.take()) is not None), None)


def two(parts: int = 2, horizons: tuple[int, int] = (2, 2), bundle: int = 1) -> list[OneRank]:
    links = KeyNetwork(2, seed=0).links
    ranks = [Rank(number=number, count=2, parts=parts) for number in range(2)]
    return [OneRank(*own, bundle) for own in zip(links, ranks, horizons, strict=True)]


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (1, 3), (2, 2), (3, 6), (5, 5), (9, 9)])
def test_the_rows_of_a_batch_are_those_that_all_look_ups_give(count: int, parts: int) -> None:
    """The planner that knows all look-ups is the oracle."""
    links = KeyNetwork(count, seed=3).links
    ranks = [OneRank(links[n], Rank(number=n, count=count, parts=parts)) for n in range(count)]
    oracles = [RowPlanner(GROUPS, [SLOTS], 2, 2, rank=own.rank) for own in ranks]
    for own in ranks:
        for _ in BATCHES:
            own.add()
    for batch in BATCHES:
        for own, oracle in zip(ranks, oracles, strict=True):
            ids, rows = own.take_late()
            assert (ids.step, ids.batch.batch_size) == (batch.step, batch.batch.size)
            assert_same(rows, oracle.group(batch.batch))


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(found, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    elif isinstance(found, tuple):
        assert len(found) == len(expected)
        for own, other in zip(found, expected, strict=True):
            assert_same(own, other)
    elif hasattr(found, "__dataclass_fields__"):
        for name in found.__dataclass_fields__:
            assert_same(getattr(found, name), getattr(expected, name))
    else:
        assert found == expected


def test_a_rank_reads_on_for_one_with_a_longer_horizon() -> None:
    near, far = two(horizons=(1, 9))
    for own in (near, far):
        while own.keys.wants_batch:
            own.add()
    assert near.keys.next_step < far.keys.next_step
    for own in (near, far):
        own.keys.advance()
    while near.keys.wants_batch:
        near.add()
    assert near.keys.next_step == far.keys.next_step
    for _ in range(10):
        far.planner.add(*far.take_late())
    assert far.planner.ready()


def test_ranks_with_automatic_horizons_do_not_wait_for_each_other() -> None:
    """Each grows its own, as its shard fills."""
    job = small_job("adagrad", lookahead={"horizon": "auto", "depth": 2, "id_bytes": "1MiB"})
    batches = small_batches(job, "multi", num_steps=14, eval_at=(5,))
    slots = slots_for(group_specs(job), batches, "one batch")
    run = RankedRun(job, batches, Settings(slots=slots, seed=4), ranks=2, parts=2).run()
    first, second = (pair.prefetcher.planner.horizon for pair in run.pairs)
    assert first != second
    assert max(first, second) > job.lookahead.horizon_batches


def test_a_rank_that_has_made_its_last_plan_reads_on_for_the_others() -> None:
    """One whose horizon has grown meanwhile needs more lists for its own last plans."""
    batches = small_batches(JOB, "multi", num_steps=80, eval_at=())
    slots = slots_for(GROUPS, batches, "one batch")
    num_needed = 0
    for seed in range(12):
        run = RankedRun(JOB, batches, Settings(slots=slots, seed=seed), ranks=2, parts=2)
        near, far = (pair.prefetcher for pair in run.pairs)
        trainer, stop = run.pairs[0].trainer.loop, run.pairs[0].stop
        run.when(partial(lambda loop: (loop.step_begun or 0) > 2, trainer), partial(stop.ask, "enough"))

        def grow(far: Any = far, near: Any = near) -> None:
            nonlocal num_needed
            num_needed += far.planning.due.planned_through < near.planning.due.planned_through
            far.planner.known.num_batches += 40

        run.when(partial(lambda planning: planning.due.last_is_sent, near.planning), grow)
        run.run()
        assert len(run.losses()) < 80
    assert num_needed


def test_a_horizon_that_grows_is_told_to_ranks_that_have_read_enough() -> None:
    """One rank's stays, as if it had no bytes left for ids. The other's grows while it has lists for long."""
    job = small_job("adagrad", lookahead={"horizon": "auto", "depth": 2, "id_bytes": "1MiB"})
    batches = small_batches(job, "multi", num_steps=40, eval_at=())
    slots = slots_for(GROUPS, batches, "two batches")
    run = RankedRun(job, batches, Settings(slots=slots, seed=2), ranks=2, parts=2)
    run.pairs[0].prefetcher.planner._auto = None
    run.run()
    assert run.pairs[1].prefetcher.planner.horizon > run.pairs[0].prefetcher.planner.horizon


class Arriving(ListSource):
    """Has its next batch when the dice say so."""

    def poll_ids(self) -> Any:
        assert self._chance is not None, "a test gives dice"
        return super().poll_ids() if self._chance.random() < 0.1 else None


def saved_steps(run: RankedRun, rank: int) -> list[int]:
    """Returns the next step after each barrier of a rank."""
    checkpointer = run.pairs[rank].prefetcher.checkpointer
    assert isinstance(checkpointer, MemoryCheckpointer)
    return [barrier.position.step for barrier in checkpointer.begun]


@pytest.mark.parametrize("bundle", [1, 3])
def test_ranks_make_a_clocks_checkpoints_at_the_same_steps(bundle: int) -> None:
    """Plans end elsewhere on each rank, and one may be far behind the other."""
    job = small_job("adagrad", "multi", bundle=bundle, horizon=4)
    batches = batches_of_sizes(job, "multi", [BATCH_SIZE // 3] * 20, eval_at=(7, 8, 16), seed=3)
    for seed in range(count(2, 60)):
        slots = slots_for(GROUPS, batches, "nine batches" if seed % 3 else "two batches")
        run = RankedRun(job, batches, Settings(slots=slots, seed=seed), ranks=2, parts=2)
        for number, pair in enumerate(run.pairs):
            pair.prefetcher.planning._source._source = Arriving(batches, random.Random(2 * seed + number))
        run.pairs[0].prefetcher.planning.due.clock = CheckpointClock(0.0)
        assert len(run.run().losses()) == 17
        assert saved_steps(run, 0) == saved_steps(run, 1)
        assert len(saved_steps(run, 0)) > 2, "some before the end"


def test_a_checkpoint_may_be_named_before_another_rank_has_made_the_last() -> None:
    first, second = two()
    for _ in range(4):
        first.add()
    first.keys.name_checkpoint()
    first.add()
    first.keys.name_checkpoint()
    while len(second.keys.checkpoint_steps) < 2:
        second.keys.advance()
    assert second.keys.checkpoint_steps == first.keys.checkpoint_steps
    second.keys.end_at(0, DataError("row 7 is bad"))
    while first.keys.fault is None:
        first.keys.advance()
    first.keys.name_checkpoint()
    assert len(first.keys.checkpoint_steps) == 2, "the other rank may have planned all steps before its fault"


def test_a_clock_is_due_each_time_its_seconds_have_passed() -> None:
    time_s = 0.0
    clock, due_s = CheckpointClock(60.0, lambda: time_s), []
    for time_s in (59.9, 60.0, 60.5, 119.9, 185.0, 185.1, 244.9, 245.0):
        due_s += [time_s] if clock.is_due() else []
    assert due_s == [60.0, 185.0, 245.0]


def test_a_rank_that_waits_sends_nothing_twice() -> None:
    own, _ = two(bundle=4)
    own.add()
    own.keys.read_samples(0)
    for _ in range(3):
        assert not own.keys.all_have_samples(0, 1)
        assert len(own.links.sent) == 2, "the list and the samples"


class FaultyForOne(ListSource):
    """Finds a fault in one step, as the rank does that has its samples."""

    def __init__(self, step: int, where: Where) -> None:
        super().__init__(BATCHES[:12])
        self._step, self._where, self._next_dense = step, where, 0

    def poll_ids(self) -> Any:
        if self._where == "ids" and self._batches and self._batches[0].step == self._step:
            raise DataError("row 7 is bad")
        return super().poll_ids()

    def poll_dense(self) -> Samples | None:
        if self._where == "dense" and self._next_dense == self._step:
            raise DataError("row 7 is bad")
        self._next_dense += 1
        return super().poll_dense()


def run_to_the_fault(run: RankedRun) -> None:
    """Until the fault has ended every rank."""
    ended, chance = set(), random.Random(0)
    stages = [(pair, advance) for pair in run.pairs for advance in pair.advances]
    for _ in range(300_000):
        pair, advance = chance.choice(stages)
        try:
            run.network.advance()
            advance()
        except DataError as error:
            assert "row 7 is bad" in str(error)  # noqa: PT017
            ended.add(run.pairs.index(pair))
        if len(ended) == len(run.pairs):
            return
    raise AssertionError(f"only ranks {ended} ended")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("where", ["ids", "dense"])
@pytest.mark.parametrize("step", [0, 1, 7])
def test_a_fault_that_one_rank_finds_ends_all_at_its_step(step: int, where: Where, seed: int) -> None:
    run = RankedRun(JOB, BATCHES[:12], Settings(slots=SLOTS, seed=seed), ranks=2, parts=2)
    run.pairs[1].prefetcher.planning._source._source = FaultyForOne(step, where)
    run.pairs[0].prefetcher.planning.due.clock = CheckpointClock(0.0 if seed else math.inf)
    run_to_the_fault(run)
    for pair in run.pairs:
        assert pair.prefetcher.planning.due.planned_through == (step - 1 if step else None)
        assert len(pair.results.losses) == step
    assert set(saved_steps(run, 0)) == set(saved_steps(run, 1))


def test_of_two_faults_the_first_step_counts() -> None:
    run = RankedRun(JOB, BATCHES[:12], Settings(slots=SLOTS, seed=1), ranks=3, parts=3)
    run.pairs[0].prefetcher.planning._source._source = FaultyForOne(9, "ids")
    run.pairs[2].prefetcher.planning._source._source = FaultyForOne(6, "dense")
    run_to_the_fault(run)
    assert [len(pair.results.losses) for pair in run.pairs] == [6, 6, 6]


class ReadsWhole(RankSource):
    """Hands on what it has read whole as if it had read only its own samples."""

    checksum = property(lambda self: 0, lambda self, value: None)


def without_checksums(run: OneRank) -> OneRank:
    run.source = ReadsWhole(ListSource(BATCHES), run.rank, belonging(JOB))
    return run


def test_other_sizes_are_noticed_where_nobody_reads_all() -> None:
    first, second = map(without_checksums, two())
    shorter = ListSource([replace(BATCHES[0], batch=short(BATCHES[0]))])
    second.source = ReadsWhole(shorter, second.rank, belonging(JOB))
    for own in (first, second):
        own.add()
    for own in (first, second):
        with pytest.raises(Mismatch, match=facts("rank 1 reads other batches than rank 0", "step 0", "samples")):
            own.take_late()


def short(scheduled: ScheduledBatch) -> Any:
    source = RankSource(ListSource([scheduled]), Rank(number=0, count=2, parts=2), belonging(JOB))
    ids, dense = source.poll_ids(), source.poll_dense()
    assert ids is not None
    assert dense is not None
    return type(scheduled.batch).of(replace(ids.batch, others=0), dense)


def test_other_files_are_noticed_where_nobody_reads_all() -> None:
    first, second = two()
    for number, own in enumerate((first, second)):
        own.source._source.counters.files = 1 + number
        own.add()
    for own in (first, second):
        with pytest.raises(Mismatch, match=facts("rank 1 reads other batches than rank 0", "step 0", "files")):
            own.take_late()


def test_data_that_ends_for_one_rank_alone_is_noticed_by_both() -> None:
    first, second = two()
    first.add()
    second.keys.end()
    for own in (first, second):
        with pytest.raises(Mismatch, match=facts("rank 1 reads other batches than rank 0", "step 0", "ends")):
            own.take_late()


def test_an_end_needs_that_of_every_rank() -> None:
    first, second = two()
    first.keys.end()
    assert first.take() is None
    assert not first.keys.ended
    second.keys.end()
    assert first.take_late() is None
    assert first.keys.ended


# what no rank says

NEXT = KeyMessage(horizon=2, first_step=0, steps=(), first_samples=0, samples=(), end=None)
GOOD = StepKeys(batch_size=7, checksum=0, keys=b"\0" * len(GROUPS))
WRONG: dict[str, Any] = {
    "samples beyond the lists": msgspec.structs.replace(NEXT, samples=(0,)),
    "a fault beyond the lists": msgspec.structs.replace(NEXT, end=End(1, 4, "bad")),
    "an end before the lists' end": msgspec.structs.replace(NEXT, steps=(GOOD,), end=End(0, 0, "")),
    "another kind": "text",
    "a number below 0": [-1, 0, [], 0, [], None],
    "too many fields": [2, 0, [], 0, [], None, 0, 1],
    "a sentence for a terminal to obey": [2, 0, [], 0, [], [0, 4, "\x1b[2J"]],
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_message_is_refused_with_the_name_of_its_rank(what: str) -> None:
    first, second = two()
    second.links.send(0, msgspec.msgpack.encode(WRONG[what]))
    with pytest.raises(PeerLost, match=facts("rank 1", "wrong list of keys")):
        first.take_late()


@pytest.mark.parametrize("skipped", ["first_step", "first_samples"])
def test_a_message_that_is_missing_is_noticed(skipped: str) -> None:
    first, second = two()
    second.links.send(0, msgspec.msgpack.encode(msgspec.structs.replace(NEXT, **{skipped: 1})))
    with pytest.raises(PeerLost, match=facts("messages of rank 1", "missing", "network")):
        first.take_late()


def test_nothing_follows_an_end() -> None:
    first, second = two()
    second.keys.end()
    second.links.send(0, msgspec.msgpack.encode(msgspec.structs.replace(NEXT, steps=(GOOD,))))
    with pytest.raises(PeerLost, match=facts("rank 1", "goes on after its end")):
        first.take_late()


def test_a_flood_of_lists_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowcast.prefetcher.pipeline.key_exchange.MOST_WAITING_BYTES", 10_000)
    first, second = two()
    for step in range(12):
        steps = (StepKeys(7, 0, b"\0" * 1000),)
        second.links.send(0, msgspec.msgpack.encode(msgspec.structs.replace(NEXT, first_step=step, steps=steps)))
    with pytest.raises(PeerLost, match=facts("rank 1", "wait", "10000")):
        first.take_late()


def test_a_list_of_another_shards_rows_is_refused() -> None:
    first, second = two()
    first.add()
    second.add()
    [message] = second.links.sent
    sent = msgspec.msgpack.decode(message, type=KeyMessage)
    third = KeyNetwork(3, seed=0).links  # their shards are others
    other = OneRank(third[1], Rank(number=1, count=3, parts=3))
    other.add()
    foreign = msgspec.msgpack.decode(third[1].sent[1], type=KeyMessage).steps[0].keys
    steps = (msgspec.structs.replace(sent.steps[0], keys=foreign),)
    fresh, _ = two()
    fresh.add()
    fresh.links._arriving.clear()
    fresh.links._network.links[1].send(0, msgspec.msgpack.encode(msgspec.structs.replace(sent, steps=steps)))
    with pytest.raises(PeerLost, match=facts("rank 1", "no row of its group in this shard")):
        fresh.take_late()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_bytes_are_messages_or_refused(data: st.DataObject) -> None:
    first, second = two()
    first.add()
    second.add()
    [message] = second.links.sent
    first.links._arriving.clear()
    mutated = bytearray(message)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(mutated) - 1))
        mutated[place] = data.draw(st.integers(0, 255))
    content = bytes(mutated[: data.draw(st.integers(0, len(mutated)))]) if data.draw(st.booleans()) else bytes(mutated)
    second.links.send(0, content)
    try:
        first.take_late()
    except (PeerLost, Mismatch) as error:
        assert "rank 1" in str(error)  # noqa: PT017


def test_who_is_awaited_is_known() -> None:
    first, second = two()
    first.add()
    first.take()
    assert first.links.awaited == (1,)
    second.add()
    assert first.take_late() is not None
    assert not first.links.awaited
