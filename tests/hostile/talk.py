"""Valid conversations, drawn message by message."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from rowcast.protocol.messages import (
    AnyMessage,
    Bye,
    DensePiece,
    Flush,
    PlanReady,
    Released,
    Replica,
    Restore,
    RowsBack,
    Saved,
    StopRequest,
)
from rowcast.protocol.plan_layout import ArraySpan, GroupHeader, RowSpan, StepHeader
from rowcast.protocol.session import PREFETCHER, TRAINER
from rowcast.runtime.run_directory import Role
from tests.support import sample_messages

Said = tuple[Role, AnyMessage]
GROUPS = 2
change = msgspec.structs.replace


@dataclass(slots=True)
class Open:
    """What the trainer still owes for one step."""

    step: int
    owed: list[AnyMessage]


@dataclass(slots=True)
class Talk:
    """Draws one conversation; every message is valid where it stands."""

    draw: st.DrawFn
    said: list[Said] = field(default_factory=list)
    depth: int = 1
    next_step: int = 0
    next_barrier: int = 0
    open: list[Open] = field(default_factory=list)

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def say(self, role: Role, *messages: AnyMessage | DensePiece) -> None:
        for message in messages:
            assert isinstance(message, AnyMessage), f"{message} is no message"
            self.said.append((role, message))
            if self.number(0, 9) == 0:
                self.said.append(self.draw(st.sampled_from(ASIDES)))

    def whole(self) -> list[Said]:
        self.depth, restore_bytes = self.number(1, 4), self.draw(st.sampled_from((0, 1, 1000)))
        self.next_step, self.next_barrier = self.number(0, 2**30), self.number(0, 2**30)
        self.said.append((TRAINER, sample_messages.hello()))
        self.said.append((PREFETCHER, sample_messages.welcome(3, self.depth, restore_bytes)))
        if restore_bytes:
            self.say(PREFETCHER, *self.dense_pieces(Restore, restore_bytes))
        for _ in range(self.number(1, 3)):
            for _ in range(self.number(0, 4)):
                self.one_step()
            while self.open:
                self.pay()
            self.one_barrier()
        self.say(PREFETCHER, sample_messages.end_of_data(self.last_plan))
        self.said += self.draw(st.permutations([(PREFETCHER, Bye()), (TRAINER, Bye())]))
        return self.said

    @property
    def last_plan(self) -> int | None:
        return self.next_step - 1 if self.next_step else None

    def one_step(self) -> None:
        while len(self.open) > self.depth or (self.open and self.number(0, 2) == 0):
            self.pay()
        fetch = [self.number(0, 6) for _ in range(GROUPS)]
        dirty = [self.number(0, rows) for rows in fetch]
        plan = self.plan(fetch, dirty)
        self.say(PREFETCHER, *self.plan_pieces(plan, fetch))
        owed: list[AnyMessage] = [*self.rows_home(dirty, self.next_step, None)]
        self.open.append(Open(self.next_step, [*owed, sample_messages.plan_done(self.next_step)]))
        self.next_step += 1

    def pay(self) -> None:
        """The trainer's next message on the oldest step."""
        oldest = self.open[0]
        self.say(TRAINER, oldest.owed.pop(0))
        if not oldest.owed:
            self.open.pop(0)

    def plan(self, fetch: list[int], dirty: list[int]) -> StepHeader:
        groups = tuple(
            GroupHeader(
                num_lookups=20,
                num_unique=10,
                num_fetch=rows,
                num_evict=out,
                num_dirty=out,
                fill_after=self.next_step - 1,
            )
            if self.next_step
            else GroupHeader(num_lookups=20, num_unique=10, num_fetch=rows, num_evict=0, num_dirty=0, fill_after=None)
            for rows, out in zip(fetch, dirty, strict=True)
        )
        dirty[:] = [group.num_dirty for group in groups]
        return change(sample_messages.plan(self.next_step), groups=groups)

    def plan_pieces(self, plan: StepHeader, fetch: list[int]) -> Iterator[PlanReady]:
        """The block in one or two pieces, then the rows behind it or in pieces of their own."""
        cut = self.draw(st.sampled_from((0, 64, 192)))
        spans = [ArraySpan(offset=0, nbytes=cut), ArraySpan(offset=cut, nbytes=256 - cut)][0 if cut else 1 :]
        rows = spans_of(fetch)
        parts: list[tuple[list[RowSpan], ArraySpan | None]] = [([], span) for span in spans]
        behind = bool(rows) and self.draw(st.booleans())
        parts = [*parts, (rows, None)] if behind else [*parts[:-1], (rows, spans[-1])]
        for piece, (part, span) in enumerate(parts):
            yield PlanReady(
                plan=self.next_step,
                piece=piece,
                num_pieces=len(parts),
                steps=(plan,) if piece == 0 else (),
                payload=sample_messages.ref(4096),
                arrays=span,
                rows=tuple(part),
            )

    def rows_home(self, counts: list[int], plan: int | None, barrier: int | None) -> Iterator[RowsBack]:
        spans = spans_of(counts)
        pieces = [[span] for span in spans] if self.draw(st.booleans()) else [spans]
        if not spans and barrier is not None:
            yield RowsBack(plan=plan, barrier=barrier, piece=0, last=True, payload=None, rows=())
        elif spans:
            for piece, own in enumerate(pieces):
                last = piece == len(pieces) - 1
                yield RowsBack(
                    plan=plan,
                    barrier=barrier,
                    piece=piece,
                    last=last,
                    payload=sample_messages.ref(4096),
                    rows=tuple(own),
                )

    def one_barrier(self) -> None:
        after, dirty = self.last_plan, [self.number(0, 3) for _ in range(GROUPS)]
        checkpoint = self.draw(st.booleans())
        first = change(
            sample_messages.flush(self.next_barrier, after, checkpoint, (2, 1)),
            num_dirty=tuple(dirty),
        )
        self.say(
            PREFETCHER,
            *self.flush_pieces(
                first if any(dirty) else sample_messages.flush(self.next_barrier, after, checkpoint, (0, 0))
            ),
        )
        rows = list(self.rows_home(dirty, after, self.next_barrier))
        self.say(
            TRAINER,
            *rows[:-1],
            rows[-1],
        )
        if checkpoint and self.draw(st.booleans()):
            self.say(TRAINER, Replica(barrier=self.next_barrier, checksum=self.number(0, 9)))
        elif checkpoint:
            barrier = self.next_barrier
            self.say(TRAINER, *self.dense_pieces(lambda **fields: Saved(barrier=barrier, **fields), 1000))
        self.next_barrier += 1

    def flush_pieces(self, flush: Flush) -> list[Flush]:
        if flush.payload is None or self.draw(st.booleans()):
            return [flush]
        return [
            change(
                flush, piece=i, num_pieces=2, payload=sample_messages.ref(64), span=ArraySpan(offset=64 * i, nbytes=64)
            )
            for i in range(2)
        ]

    def dense_pieces(self, make: Callable[..., DensePiece], nbytes: int) -> list[DensePiece]:
        cut = self.number(0, nbytes - 1)
        bounds = [(0, nbytes)] if cut == 0 else [(0, cut), (cut, nbytes)]
        return [
            make(
                piece=piece,
                num_pieces=len(bounds),
                nbytes=nbytes,
                checksum=7,
                payload=sample_messages.ref(end - start),
                span=ArraySpan(offset=start, nbytes=end - start),
            )
            for piece, (start, end) in enumerate(bounds)
        ]


def spans_of(counts: list[int]) -> list[RowSpan]:
    return [sample_messages.rows(group, 0, rows, 1024 * (group + 1)) for group, rows in enumerate(counts) if rows]


ASIDES: tuple[Said, ...] = (
    (PREFETCHER, sample_messages.heartbeat()),
    (TRAINER, sample_messages.heartbeat()),
    (TRAINER, StopRequest(reason="SIGTERM to the trainer")),
    (PREFETCHER, StopRequest(reason="SIGTERM to the prefetcher")),
    (PREFETCHER, Released(position=64)),
    (TRAINER, Released(position=128)),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Said]:
    return Talk(draw).whole()
