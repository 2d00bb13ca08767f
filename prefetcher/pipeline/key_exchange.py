"""Completes the batches of a rank: with the rows of its shard that other ranks look up.

A rank reads its own samples alone. It tells each owner, steps ahead, which rows they look up, and is told the same:

    add       own samples of step s        -> for each other rank a list of keys, several steps in a message
    advance   messages of other ranks      -> kept as they came
    take      step s, once every rank's list for it is here: the rows that need slots here

A list needs no plan, so no two ranks wait for each other. But a rank with a longer horizon needs lists of steps that
others would not read yet, so each message has its sender's horizon, and all read on to the longest.

All ranks must plan the same steps. So each also tells where its data ends, the fault that it finds, and how far it has
read the samples: no rank plans a step whose samples another one may be unable to read.

A single rank sends nothing. Only the planning thread calls.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rowcast.prefetcher.planner.horizon import NeededRows
from rowcast.prefetcher.planner.key_lists import Unpacker, pack
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import (
    ERRORS_BY_EXIT_CODE,
    Mismatch,
    PeerLost,
    RemoteProtocolError,
    RowcastError,
    cleaned,
    told,
)
from rowcast.runtime.ranges import TEXT_LIMIT, Checksum, Number, Text

# each message wakes three threads of its receiver, so lists wait until there are so many steps of them, or until those
# to all ranks together have so many bytes
MOST_TOGETHER, ENOUGH_BYTES = 16, 2**17
MOST_WAITING_BYTES = 2**30  # one rank's lists may wait with so many; horizons keep them far below
SENTENCE_LIMIT = 1000  # characters of an error about a message, because it may quote the message
NOT_KNOWN = 2**62  # a step beyond all


class StepKeys(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step's list of keys for one owner."""

    batch_size: Number  # samples over all ranks
    checksum: Checksum  # of the whole batch's ids; 0 if this rank reads only its own
    keys: bytes  # see `key_lists.py`


class End(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender cannot give the batch of this step."""

    step: Number
    code: Number  # the exit code of the fault there; 0: the data has ended
    sentence: Text


class KeyMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From one rank to another. Steps and samples follow those of the message before."""

    horizon: Number
    first_step: Number
    steps: tuple[StepKeys, ...]
    first_samples: Number  # a step
    samples: tuple[Checksum, ...]  # of each step whose samples the sender has read since: as in `StepKeys`
    end: End | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KeyMessage)


class KeyLinks(Protocol):
    """Carries messages between the prefetchers of an attempt, those of each in order."""

    def send(self, rank: int, message: bytes) -> None:
        """Never blocks."""

    def receive(self) -> tuple[int, bytes] | None:
        """Returns a rank and its next message, None if none has arrived. Raises PeerLost."""

    def awaits(self, ranks: Sequence[int]) -> None:
        """Says which ranks planning waits for now; none: it goes on."""


class NoLinks:
    """Implements `KeyLinks` for a single rank."""

    def send(self, rank: int, message: bytes) -> None:
        raise AssertionError("a single rank has nobody to send to")

    def receive(self) -> tuple[int, bytes] | None:
        return None

    def awaits(self, ranks: Sequence[int]) -> None: ...


@dataclass(slots=True)
class OtherRank:
    """What another rank has told, and what it was not told yet."""

    number: int
    next_step: int  # of its next list
    next_samples: int  # the step of the next samples that it will have read
    horizon: int = 0
    end: End | None = None
    lists: deque[StepKeys] = field(default_factory=deque)  # not taken; the last is of `next_step` - 1
    waiting_bytes: int = 0  # of these
    samples: deque[int] = field(default_factory=deque)  # checksums, not compared; the last is of `next_samples` - 1
    unsent: list[StepKeys] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Added:
    """A batch whose rows are not complete."""

    ids: Scheduled[Lookups]
    own: tuple[Any, ...]  # as in `Arranger`
    checksum: int


def differ(first: int, second: int) -> bool:
    """Returns whether two ranks have read another batch. `first`, `second`: as in `StepKeys`."""
    return first != second and 0 not in (first, second)


class KeyExchange:
    def __init__(self, planner: RowPlanner, links: KeyLinks, first_step: int) -> None:
        """`first_step`: of the attempt."""
        self.fault: RowcastError | None = None  # the first that any rank has found
        self.fault_step = NOT_KNOWN  # it ends the run before this step
        self.awaited: tuple[int, ...] = ()  # the ranks that planning waits for
        self._planner, self._arranger, self._links = planner, planner.arranger, links
        self._number, count = planner.rank.number, planner.rank.count
        self._others = [OtherRank(own, first_step, first_step) for own in range(count) if own != self._number]
        self._by_number = {other.number: other for other in self._others}
        self._unpack = Unpacker(planner.groups, planner.shards, self._number).unpack
        self._together = 1  # steps in the last message
        self._added: deque[Added] = deque()
        self.next_step = self._next_taken = first_step  # of the batch to be added next, and to be taken next
        self._next_samples = first_step  # to be read
        self._samples: deque[int] = deque()  # checksums of those that are not compared
        self._untold: list[int] = []  # the last of these
        self._unsent_bytes = 0  # of lists, to all others
        self._told_horizon = planner.horizon
        self._end: End | None = None

    @property
    def _num_unsent(self) -> int:
        """Steps whose lists wait to be sent."""
        return len(self._others[0].unsent) if self._others else 0  # as many for each

    @property
    def samples_ahead(self) -> int:
        """Of how many steps to read the samples, if they are there, so that messages with lists tell them in time."""
        return 1 + self._planner.bundle + self._together

    @property
    def has_others(self) -> bool:
        """Whether other ranks need the lists of this one."""
        return bool(self._others)

    @property
    def wants_batch(self) -> bool:
        """Whether this rank or another needs one more batch for its next plan."""
        if self._end is not None or self.next_step >= self.fault_step:
            return False
        horizon = max([self._planner.horizon, *(other.horizon for other in self._others)])
        spare = self._together if self._others else 0  # so that lists travel while plans are made
        known = self._planner.num_known + len(self._added)
        return known <= horizon + spare or self._num_unsent > 0

    def add(self, ids: Scheduled[Lookups], sources: Sequence[Lookups], checksum: int) -> None:
        """Adds the own samples of the next batch, and what this rank looks up. `checksum`: as in `StepKeys`."""
        assert ids.step == self.next_step, f"step {ids.step} was added, but step {self.next_step} follows"
        own = self._arranger.want(sources)
        self._added.append(Added(ids, own, checksum))
        self.next_step += 1
        for other in self._others:
            keys = pack(self._arranger.wanted(own, other.number))
            other.unsent.append(StepKeys(ids.batch.batch_size, checksum, keys))
            self._unsent_bytes += len(keys)
        if self._num_unsent >= MOST_TOGETHER or self._unsent_bytes >= ENOUGH_BYTES:
            self._together = self._num_unsent
            self._tell_all()

    def end(self) -> None:
        """The data has ended before the next batch."""
        self._end_at(End(self.next_step, 0, ""))

    def end_at(self, step: int, fault: RowcastError) -> None:
        """This rank has found a fault in the batch of `step`."""
        code, sentence = told(fault)
        self._note(step, fault)
        self._end_at(End(step, code, cleaned(sentence)[:TEXT_LIMIT]))

    def read_samples(self, checksum: int) -> None:
        """The own samples of one more step have been read. `checksum`: as in `StepKeys`, of these."""
        self._next_samples += 1
        self._samples.append(checksum)
        self._untold.append(checksum)  # the next message will tell it

    def all_have_samples(self, step: int, count: int) -> bool:
        """Returns whether every rank has read its samples of `count` steps from `step` on, as this one has. Raises as
        `take`."""
        if len(self._untold) > len(self._samples) - self._planner.bundle:  # others may need more steps of them
            self._tell_all()
        late = self._await(other for other in self._others if len(other.samples) < count)
        for other in self._others if not late else ():
            for number in range(count):
                if differ(other.samples[number], self._samples[number]):
                    raise self._differs(other, step + number, "other dense features or labels")
        return not late

    def stop_waiting(self) -> None:
        """No plan will follow."""
        self._await(())

    def planned(self) -> None:
        """The first step whose samples all have was planned."""
        for samples in (self._samples, *(other.samples for other in self._others)):
            samples.popleft()

    def advance(self) -> bool:
        """Receives what has arrived. Raises PeerLost for a message that no rank sends."""
        worked = False
        while (arrived := self._links.receive()) is not None:
            number, message = arrived
            try:
                self._accept(self._by_number[number], message)
            except (ValueError, RecursionError) as error:
                raise wrong_message(number, str(error)[:SENTENCE_LIMIT]) from None
            worked = True
        if self.next_step >= self.fault_step:
            self.flush()  # no step will follow that fills the message
        if self._told_horizon != self._planner.horizon and not self._planner.ready():
            self._tell_all()  # others may have read as far as they know to be needed
        return worked

    def flush(self) -> None:
        """Sends the lists that wait for more."""
        if self._num_unsent:
            self._tell_all()

    def take(self) -> tuple[Scheduled[Lookups], tuple[NeededRows, ...]] | None:
        """Returns the next batch, once it is complete. Raises Mismatch if ranks read different batches, PeerLost for a
        list that no rank sends."""
        self._check_ends()
        if not self._added or self._next_taken >= self.fault_step:
            self._await(())
            return None
        if self._await(other for other in self._others if not other.lists):
            return None
        added = self._added.popleft()
        asked = {other.number: self._taken(other, added) for other in self._others}
        asked[self._number] = self._arranger.wanted(added.own, self._number)
        self._next_taken += 1
        return added.ids, self._arranger.complete(added.own, [asked[number] for number in sorted(asked)])

    @property
    def ended(self) -> bool:
        """Whether `take` has returned the last batch that all ranks have."""
        if self._next_taken >= self.fault_step:
            return True
        ends = [self._end, *(other.end for other in self._others)]
        return all(end is not None and end.step == self._next_taken for end in ends)

    def _check_ends(self) -> None:
        """Raises Mismatch if one rank's data ends before that of another."""
        step = self._next_taken
        has_own, ends_here = bool(self._added), self._end is not None and not self._added
        for other in self._others if step < self.fault_step else ():
            its_end = other.end is not None and not other.lists
            if (has_own and its_end) or (ends_here and other.lists):
                raise self._differs(other, step, "its data ends there, or goes on")

    def _await(self, late: Iterable[OtherRank]) -> tuple[int, ...]:
        self.awaited = tuple(other.number for other in late)
        self._links.awaits(self.awaited)
        return self.awaited

    def _taken(self, other: OtherRank, added: Added) -> Sequence[I64]:
        """Returns the keys that another rank asks of this shard in the batch, by group."""
        told, step = other.lists.popleft(), added.ids.step
        other.waiting_bytes -= len(told.keys)
        if told.batch_size != added.ids.batch.batch_size:
            raise self._differs(other, step, f"{told.batch_size} samples and {added.ids.batch.batch_size}")
        if differ(told.checksum, added.checksum):
            raise self._differs(other, step, "other ids, dense features or labels")
        try:
            return self._unpack(memoryview(told.keys))
        except RemoteProtocolError as error:
            raise wrong_message(other.number, str(error)) from None

    def _differs(self, other: OtherRank, step: int, how: str) -> Mismatch:
        first, second = sorted((other.number, self._number))
        return Mismatch(
            f"rank {second} reads other batches than rank {first}: at step {step} {how}; give every host the same "
            "files, and a data set of your own the same order on every rank"
        )

    def _accept(self, other: OtherRank, content: bytes) -> None:
        """Raises ValueError for a message that cannot follow the ones before."""
        message = _decoder.decode(content)
        if (message.first_step, message.first_samples) != (other.next_step, other.next_samples):
            raise PeerLost(
                f"messages of rank {other.number} are missing: keys of step {message.first_step} come before those of "
                f"{other.next_step}; look for a fault of the network between its host and this one"
            )
        last, end = other.next_step + len(message.steps), message.end
        if other.end is not None and (message.steps or end is None or end.step > other.end.step):
            raise ValueError(f"it goes on after its end at step {other.end.step}")
        if other.next_samples + len(message.samples) > last:
            raise ValueError(f"it has read samples of {len(message.samples)} steps, more than its lists have")
        if end is not None and not (end.step <= last if end.code else end.step == last):
            raise ValueError(f"it ends at step {end.step}, and its lists at {last}")
        other.waiting_bytes += sum(len(step.keys) for step in message.steps)
        if other.waiting_bytes > MOST_WAITING_BYTES:
            raise ValueError(f"{other.waiting_bytes} bytes of lists wait, more than {MOST_WAITING_BYTES}")
        other.lists.extend(message.steps)
        other.samples.extend(message.samples)
        other.next_step, other.next_samples = last, other.next_samples + len(message.samples)
        other.horizon, other.end = message.horizon, end
        if end is not None and end.code:
            error = ERRORS_BY_EXIT_CODE.get(end.code, RowcastError)
            self._note(end.step, error(f"rank {other.number}: {end.sentence}"))

    def _note(self, step: int, fault: RowcastError) -> None:
        if step < self.fault_step:
            self.fault_step, self.fault = step, fault

    def _end_at(self, end: End) -> None:
        self._end = end
        self._tell_all()

    def _tell_all(self) -> None:
        """Sends what waits to be sent."""
        for other in self._others:
            message = KeyMessage(
                self._planner.horizon,
                self.next_step - len(other.unsent),
                tuple(other.unsent),
                self._next_samples - len(self._untold),
                tuple(self._untold),
                self._end,
            )
            self._links.send(other.number, _encoder.encode(message))
            other.unsent.clear()
        self._untold.clear()
        self._unsent_bytes, self._told_horizon = 0, self._planner.horizon


def wrong_message(number: int, what: str) -> PeerLost:
    return PeerLost(f"rank {number} has sent a wrong list of keys: {what}; install the same rowcast on all hosts")
