"""Completes the batches of a rank: with the rows of its shard that other ranks look up.

A rank reads only its own samples. Steps ahead, it sends each owner the rows that they look up, and receives the same:

    add       own samples of step s        -> for each other rank a list of keys, several steps in a message
    advance   messages of other ranks      -> kept as they came
    take      step s, once every rank's list for it is here: the rows that need slots here

A list needs no plan, so no two ranks wait for each other. But a rank with a longer horizon needs lists of steps that
others would not read yet, so each message has its sender's horizon, and all read on to the longest.

All ranks must plan the same steps. So each also sends where its data ends, any fault that it finds, and how far it has
read the samples: no rank plans a step whose samples another rank may be unable to read.

A single rank sends nothing. Only the planning thread calls.

A list of keys has a part for each group:

    group 0 | count | gap gap gap ...         keys ascend: a gap is a key less the one before, less one
    group 1 | count | ...                     the first gap of a group is its first key

Every number is in LEB128: seven bits a byte, the lowest first, in as few bytes as hold it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import msgspec
import numpy as np

from rowcast.job.tables import KEY_SHIFT, GroupSpec
from rowcast.prefetcher.planner.directory import Records
from rowcast.prefetcher.planner.horizon import NeededRows
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.protocol.parts import LINE, Shards, owner
from rowcast.runtime.arrays import I64, Bytes
from rowcast.runtime.compiled import compiled_loop, compiled_part
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
    keys: bytes  # see `pack`


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
    checkpoint_step: Number = 0  # that rank 0 names, once


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KeyMessage)


class KeyLinks(Protocol):
    """Carries messages between the prefetchers of an attempt, those of each in order."""

    def send(self, rank: int, message: bytes) -> None:
        """Never blocks."""

    def receive(self) -> tuple[int, bytes] | None:
        """Returns a rank and its next message, None if none has arrived. Raises PeerLost."""

    def awaits(self, ranks: Sequence[int]) -> None:
        """Reports which ranks planning waits for now, or none."""


class NoLinks:
    """Implements `KeyLinks` for a single rank."""

    def send(self, rank: int, message: bytes) -> None:
        raise AssertionError("a single rank has nobody to send to")

    def receive(self) -> tuple[int, bytes] | None:
        return None

    def awaits(self, ranks: Sequence[int]) -> None: ...


@dataclass(slots=True)
class OtherRank:
    """What another rank has sent, and what was not sent to it yet."""

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
    def __init__(self, planner: RowPlanner, first_step: int) -> None:
        """`first_step`: of the attempt."""
        self.links: KeyLinks = NoLinks()  # to the other ranks
        self.fault: RowcastError | None = None  # the first that any rank has found
        self.fault_step = NOT_KNOWN  # it ends the run before this step
        self.awaited: tuple[int, ...] = ()  # the ranks that planning waits for
        self.checkpoint_steps = deque[int]()  # named checkpoints that are not made; see RowPlanner.reaches
        self._planner, self._arranger = planner, planner.arranger
        self._number, count = planner.rank.number, planner.rank.count
        self._others = [OtherRank(number, first_step, first_step) for number in range(count) if number != self._number]
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
    def checkpoint_step(self) -> int:
        """The next named checkpoint comes no earlier."""
        return self.checkpoint_steps[0] if self.checkpoint_steps else NOT_KNOWN

    @property
    def _num_unsent(self) -> int:
        """Returns the number of steps whose lists wait to be sent."""
        return len(self._others[0].unsent) if self._others else 0  # as many for each

    @property
    def samples_ahead(self) -> int:
        """Returns of how many steps to read available samples, so that messages with lists report them in time."""
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
        """Adds this rank's samples of the next batch, and their look-ups. `checksum`: as in `StepKeys`."""
        assert ids.step == self.next_step, f"step {ids.step} was added, but step {self.next_step} follows"
        wanted_rows = self._arranger.want(sources)
        self._added.append(Added(ids, wanted_rows, checksum))
        self.next_step += 1
        for other in self._others:
            keys = pack(self._arranger.wanted(wanted_rows, other.number))
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
        self._note(step, fault)
        self._end_at(self._fault_end())

    def _fault_end(self) -> End:
        assert self.fault is not None, "a fault has a step"
        code, sentence = told(self.fault)
        return End(self.fault_step, code, cleaned(sentence)[:TEXT_LIMIT])

    def read_samples(self, checksum: int) -> None:
        """This rank has read its samples of one more step. `checksum`: theirs, as in `StepKeys`."""
        self._next_samples += 1
        self._samples.append(checksum)
        self._untold.append(checksum)  # the next message will report it

    def all_have_samples(self, step: int, count: int) -> bool:
        """Returns whether every rank has read its samples of `count` steps from `step` on, as this one has. Raises as
        `take`."""
        if self._untold and len(self._untold) > len(self._samples) - self._planner.bundle:  # others may need these
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
        """Receives what has arrived. Raises PeerLost for an impossible message."""
        worked = False
        while (arrived := self.links.receive()) is not None:
            number, message = arrived
            try:
                self._accept(self._by_number[number], message)
            except (ValueError, RecursionError) as error:
                raise wrong_message(number, str(error)[:SENTENCE_LIMIT]) from None
            worked = True
        if self.next_step >= self.fault_step and self._end is None:  # no step will follow that fills the message
            self._end_at(self._fault_end())
        if self._told_horizon != self._planner.horizon and not self._planner.ready():
            self._tell_all()  # others may have read as far as they know to be needed
        return worked

    def flush(self) -> None:
        """Sends the lists that wait for more."""
        if self._num_unsent:
            self._tell_all()

    def take(self) -> tuple[Scheduled[Lookups], tuple[NeededRows, ...]] | None:
        """Returns the next batch, once it is complete. Raises Mismatch if ranks read different batches, PeerLost for an
        impossible list."""
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
        """Whether `take` has returned the last batch that all ranks have, and all have confirmed it: rank 0 names no
        checkpoint after that."""
        has_fault = self._next_taken >= self.fault_step
        ends = [self._end, *(other.end for other in self._others)]
        return all(end is not None and (has_fault or end.step == self._next_taken) for end in ends)

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
        self.links.awaits(self.awaited)
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
        self.checkpoint_steps.extend([message.checkpoint_step] if message.checkpoint_step else ())
        if end is not None and end.code:
            error = ERRORS_BY_EXIT_CODE.get(end.code, RowcastError)
            self._note(end.step, error(f"rank {other.number}: {end.sentence}"))

    def _note(self, step: int, fault: RowcastError) -> None:
        if step < self.fault_step:
            self.fault_step, self.fault = step, fault

    def _end_at(self, end: End) -> None:
        self._end = end
        self._tell_all()

    def name_checkpoint(self) -> None:
        """Makes all ranks save a checkpoint where the plans of all end, from the first step on that none can have
        planned without the next list. The horizons of ranks may differ, and are no shorter than `least_ahead`."""
        if self._end is None and self.fault is None:
            step = self.next_step - self._planner.least_ahead
            self.checkpoint_steps.append(step)
            self._tell_all(step)

    def _tell_all(self, checkpoint_step: int = 0) -> None:
        """Sends what waits to be sent."""
        for other in self._others:
            message = KeyMessage(
                self._planner.horizon,
                self.next_step - len(other.unsent),
                tuple(other.unsent),
                self._next_samples - len(self._untold),
                tuple(self._untold),
                self._end,
                checkpoint_step,
            )
            self.links.send(other.number, _encoder.encode(message))
            other.unsent.clear()
        self._untold.clear()
        self._unsent_bytes, self._told_horizon = 0, self._planner.horizon


def wrong_message(number: int, what: str) -> PeerLost:
    return PeerLost(f"rank {number} has sent a wrong list of keys: {what}; install the same rowcast on all hosts")


MOST_BYTES = 9  # of a number: keys have 63 bits
TABLE = np.dtype([("first_key", np.int64), ("end_key", np.int64), ("line", LINE)])


def pack(keys: Sequence[I64]) -> bytes:
    """`keys`: of each group, distinct and ascending."""
    content, end = np.empty(MOST_BYTES * (len(keys) + sum(map(len, keys))), np.uint8), 0
    for group_keys in keys:
        end = write_list(group_keys, content, end)
    return content[:end].tobytes()


class Unpacker:
    """Reads what other ranks want of this one."""

    def __init__(self, groups: Sequence[GroupSpec], shards: Sequence[Shards], number: int) -> None:
        """`shards`: of each group. `number`: of this rank."""
        of_groups = zip(groups, shards, strict=True)
        tables = [(table, shards.lines[table.index]) for group, shards in of_groups for table in group.tables]
        keys = [(table.index << KEY_SHIFT, table.num_embeddings, line) for table, line in tables]
        self._tables = np.array([(first, first + rows, line) for first, rows, line in keys], TABLE)
        self._first_tables = np.array([0, *accumulate(len(group.tables) for group in groups)])
        self._count, self._number = shards[0].count, number

    def unpack(self, content: memoryview) -> tuple[I64, ...]:
        """Returns the keys of each group, ascending. Takes at most 8 bytes for a byte of `content`.

        Raises RemoteProtocolError if `pack` gives no such bytes for rows of this shard."""
        received = np.frombuffer(content, np.uint8)
        received.flags.writeable = False  # some are, and loops are compiled for one kind
        keys, ends = np.empty(len(received), np.int64), np.zeros(len(self._first_tables), np.int64)
        read_lists(received, self._tables, self._first_tables, self._count, self._number, keys, ends)
        return tuple(keys[start:end] for start, end in pairwise(ends.tolist()))


@compiled_loop
def write_list(keys: I64, content: Bytes, end: int) -> int:
    end, before = write_number(len(keys), content, end), np.int64(-1)
    for key in keys:
        end, before = write_number(key - before - 1, content, end), key
    return end


@compiled_part
def write_number(number: int, content: Bytes, end: int) -> int:
    while number >= 128:
        content[end] = number | 128
        number >>= 7
        end += 1
    content[end] = number
    return end + 1


@compiled_loop
def read_lists(
    content: Bytes, tables: Records, first_tables: I64, count: int, number: int, keys: I64, ends: I64
) -> None:
    """Group g's tables begin at first_tables[g], its keys at ends[g]."""
    at = count_of_keys = 0
    for g in range(len(first_tables) - 1):
        num_keys, at = read_number(content, at)
        if num_keys > len(content) - at:
            raise RemoteProtocolError("a list of keys announces more of them than it has bytes")
        key, t, end_table = np.int64(-1), first_tables[g], first_tables[g + 1]
        end_key = tables[end_table - 1]["end_key"]
        for _ in range(num_keys):
            gap, at = read_number(content, at)
            key += 1 + min(gap, end_key - key)  # any gap: a key beyond the last table is none of its rows
            while t < end_table and key >= tables[t]["end_key"]:
                t += 1
            if t == end_table or key < tables[t]["first_key"] or owner(tables[t]["line"], key, count) != number:
                raise RemoteProtocolError("a list of keys has one that is no row of its group in this shard")
            keys[count_of_keys] = key
            count_of_keys += 1
        ends[g + 1] = count_of_keys
    if at < len(content):
        raise RemoteProtocolError("a list of keys goes on after its last group")


@compiled_part
def read_number(content: Bytes, at: int) -> tuple[np.int64, int]:
    """Returns a number and where it ends."""
    number = np.int64(0)
    for shift in range(0, 7 * MOST_BYTES, 7):
        if at == len(content):
            raise RemoteProtocolError("a list of keys ends before its last number")
        byte = np.int64(content[at])
        at += 1
        number |= (byte & 127) << shift
        if byte == 0 and shift > 0:
            break
        if byte < 128:
            return number, at
    raise RemoteProtocolError("a list of keys has a number in more bytes than it needs, or of more than 63 bits")
