"""Checks that a conversation is contiguous: pieces, bytes of a block, rows of a group, plans, steps, barriers.

One `Order` follows both directions from one end's view. Raising ProtocolError, with both numbers, leaves its state
unchanged. It holds at most `depth` + 1 open plans and the newest barrier.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rowcast.protocol.messages import (
    AnyMessage,
    DensePiece,
    EndOfData,
    Flush,
    PlanDone,
    PlanReady,
    Replica,
    Restore,
    RowsBack,
    Saved,
    Welcome,
)
from rowcast.protocol.plan_layout import ArraySpan, RowSpan, StepHeader
from rowcast.runtime.errors import ProtocolError


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ProtocolError(sentence)


class TravellingRows:
    """Counts the rows of each group, which arrive in order."""

    def __init__(self, totals: Sequence[int]) -> None:
        self._totals = tuple(totals)
        self._counts = [0] * len(self._totals)

    @property
    def complete(self) -> bool:
        return tuple(self._counts) == self._totals

    def after(self, spans: Sequence[RowSpan]) -> "TravellingRows":
        """Returns the counts after `spans`, without changing this object. Raises ProtocolError."""
        counts = list(self._counts)
        for span in spans:
            require(span.group < len(counts), f"rows of group {span.group} travel, but there are {len(counts)} groups")
            here, total = counts[span.group], self._totals[span.group]
            require(span.start == here, f"rows of group {span.group} continue at {span.start} instead of {here}")
            counts[span.group] += span.count
            require(
                counts[span.group] <= total,
                f"row {counts[span.group]} of group {span.group} travels, but there are {total}",
            )
        following = TravellingRows(self._totals)
        following._counts = counts
        return following

    def __str__(self) -> str:
        return f"{tuple(self._counts)} of {self._totals} rows in the groups"


class Pieces:
    """The pieces of a plan or of a barrier's slots: a block of arrays, then rows."""

    def __init__(self, num_pieces: int, arrays_bytes: int, num_rows: Sequence[int]) -> None:
        self._num_pieces = num_pieces
        self._next_piece = 0
        self._arrays_bytes = arrays_bytes
        self._next_byte = 0
        self._rows = TravellingRows(num_rows)

    @property
    def complete(self) -> bool:
        return self._next_piece == self._num_pieces

    def advance(self, piece: int, num_pieces: int, arrays: ArraySpan | None, rows: Sequence[RowSpan]) -> None:
        expected = (self._next_piece, self._num_pieces)
        require(
            (piece, num_pieces) == expected,
            f"piece {piece} of {num_pieces} came instead of piece {expected[0]} of {expected[1]}",
        )
        next_byte, total = self._next_byte, self._arrays_bytes
        if arrays is not None:
            require(arrays.offset == next_byte, f"arrays continue at byte {arrays.offset} instead of {next_byte}")
            next_byte += arrays.nbytes
        require(next_byte <= total, f"byte {next_byte} of a block of {total} travels")
        require(not rows or next_byte == total, f"rows came after {next_byte} of {total} array bytes")
        following = self._rows.after(rows)
        if piece == num_pieces - 1:
            require(next_byte == total, f"the pieces ended after {next_byte} of {total} array bytes")
            require(following.complete, f"the pieces ended after {following}")
        self._next_piece, self._next_byte, self._rows = piece + 1, next_byte, following


class ComingHome:
    """The dirty rows of a plan's victims or of a barrier, on their way home."""

    def __init__(self, num_dirty: Sequence[int], answered_when_empty: bool) -> None:
        self._rows = TravellingRows(num_dirty)
        self._next_piece = 0
        self.complete = self._rows.complete and not answered_when_empty

    def advance(self, message: RowsBack) -> None:
        require(
            message.piece == self._next_piece,
            f"piece {message.piece} of rows came home instead of piece {self._next_piece}",
        )
        following = self._rows.after(message.rows)
        require(not message.last or following.complete, f"the last rows came home after {following}")
        require(message.last or bool(message.rows), f"piece {message.piece} of rows came home without any")
        self._rows = following
        self._next_piece += 1
        self.complete = message.last


@dataclass(slots=True)
class OpenPlan:
    plan: int
    pieces: Pieces
    victims: ComingHome


class ModelStateOrder:
    """The pieces of the model state; each repeats its size and checksum."""

    def __init__(self, first: DensePiece) -> None:
        self._whole = (first.nbytes, first.checksum)
        self._pieces = Pieces(first.num_pieces, first.nbytes, ())

    @property
    def complete(self) -> bool:
        return self._pieces.complete

    def advance(self, message: DensePiece) -> None:
        whole = (message.nbytes, message.checksum)
        require(
            whole == self._whole,
            f"a piece of a model state of bytes and checksum {whole} came after one of {self._whole}",
        )
        self._pieces.advance(message.piece, message.num_pieces, message.span, ())


@dataclass(slots=True)
class OpenBarrier:
    barrier: int
    after_plan: int | None
    pieces: Pieces
    rows: ComingHome
    model_state: ModelStateOrder | None = None  # None before its first piece


@dataclass(slots=True)
class Order:
    """The plans, steps and barriers since the Welcome; the first of each may have any number."""

    depth: int = 1
    restore_bytes: int = 0  # announced by the Welcome
    restored: ModelStateOrder | None = None
    next_plan: int | None = None
    next_step: int | None = None
    next_barrier: int | None = None
    open_plans: deque[OpenPlan] = field(default_factory=deque)  # announced and not yet done, in order
    open_barrier: OpenBarrier | None = None  # the newest, even after it is done

    def follow(self, message: AnyMessage) -> None:
        """Applies the next message of either side. Raises ProtocolError if it is out of order."""
        match message:
            case Welcome():
                self.depth, self.restore_bytes = message.depth, message.restore_bytes
            case Restore():
                self._restore(message)
            case PlanReady():
                self._plan_ready(message)
            case RowsBack(barrier=None):
                self._rows_back(message)
            case RowsBack():
                self._barrier_rows(message)
            case PlanDone():
                self._plan_done(message)
            case Flush():
                self._flush(message)
            case Replica():
                self._replica(message)
            case Saved():
                self._saved(message)
            case EndOfData():
                self._end(message)
            case _:
                pass

    def _plan_ready(self, message: PlanReady) -> None:
        newest = self.open_plans[-1] if self.open_plans else None
        if message.steps:
            opened = self._opened_plan(message, message.steps)
            opened.pieces.advance(message.piece, message.num_pieces, message.arrays, message.rows)
            self.open_plans.append(opened)
            self.next_plan, self.next_step = message.plan + 1, message.steps[-1].step + 1
        elif newest is None or message.plan != newest.plan:
            raise ProtocolError(
                f"a piece of plan {message.plan} came while plan {newest and newest.plan} is the newest"
            )
        else:
            newest.pieces.advance(message.piece, message.num_pieces, message.arrays, message.rows)

    def _opened_plan(self, message: PlanReady, steps: Sequence[StepHeader]) -> OpenPlan:
        plan, first, last = message.plan, steps[0], steps[-1]
        self._check_all_sent(f"plan {plan}")
        require(self.next_plan in (None, plan), f"plan {plan} came instead of plan {self.next_plan}")
        require(self.next_step in (None, first.step), f"step {first.step} came instead of step {self.next_step}")
        if self.open_plans:
            oldest = self.open_plans[0].plan
            require(
                plan - oldest <= self.depth, f"plan {plan} came before plan {oldest} was done, at depth {self.depth}"
            )
        victims = ComingHome([group.num_dirty for group in first.groups], answered_when_empty=False)
        pieces = Pieces(message.num_pieces, last.arrays_bytes, [group.num_fetch for group in first.groups])
        return OpenPlan(plan, pieces, victims)

    def _restore(self, message: Restore) -> None:
        first = self.next_plan is None and self.next_barrier is None
        require(first, "a model state to start from came after the first step or barrier")
        require(
            message.nbytes == self.restore_bytes,
            f"a model state of {message.nbytes} bytes came, but {self.restore_bytes} were announced",
        )
        model_state = self.restored or ModelStateOrder(message)
        model_state.advance(message)
        self.restored = model_state

    def _check_all_sent(self, name: str) -> None:
        complete = not self.restore_bytes or (self.restored is not None and self.restored.complete)
        require(complete, f"{name} came before the model state of {self.restore_bytes} bytes that was announced")
        if self.open_plans:
            newest = self.open_plans[-1]
            require(newest.pieces.complete, f"{name} came before the last piece of plan {newest.plan}")

    def _rows_back(self, message: RowsBack) -> None:
        expected = next((plan for plan in self.open_plans if not plan.victims.complete), None)
        if expected is None:
            raise ProtocolError(f"rows of plan {message.plan} came home while no plan has dirty victims")
        require(
            message.plan == expected.plan, f"rows of plan {message.plan} came home before those of plan {expected.plan}"
        )
        expected.victims.advance(message)

    def _plan_done(self, message: PlanDone) -> None:
        oldest = self.open_plans[0] if self.open_plans else None
        if oldest is None or message.plan != oldest.plan:
            raise ProtocolError(f"plan {message.plan} is reported done while plan {oldest and oldest.plan} is next")
        require(oldest.pieces.complete, f"plan {message.plan} is reported done before its last piece came")
        require(oldest.victims.complete, f"plan {message.plan} is reported done before its victims came home")
        self.open_plans.popleft()

    def _flush(self, message: Flush) -> None:
        newest = self.open_barrier if message.piece else self._opened_barrier(message)
        if newest is None or message.barrier != newest.barrier:
            raise ProtocolError(
                f"a piece of barrier {message.barrier} came while barrier {newest and newest.barrier} is the newest"
            )
        newest.pieces.advance(message.piece, message.num_pieces, message.span, ())
        self.open_barrier, self.next_barrier = newest, message.barrier + 1

    def _opened_barrier(self, message: Flush) -> OpenBarrier:
        self._check_all_sent(f"barrier {message.barrier}")
        require(
            self.next_barrier in (None, message.barrier),
            f"barrier {message.barrier} came instead of {self.next_barrier}",
        )
        self._check_last_plan(message.after_plan, f"barrier {message.barrier}")
        pieces = Pieces(message.num_pieces, message.arrays_bytes, ())
        rows = ComingHome(message.num_dirty, answered_when_empty=True)
        return OpenBarrier(message.barrier, message.after_plan, pieces, rows)

    def _check_last_plan(self, plan: int | None, name: str) -> None:
        """Checks nothing before the first plan of this conversation: only the prefetcher knows the one before it."""
        if self.next_plan is not None:
            require(plan == self.next_plan - 1, f"{name} follows plan {plan} instead of plan {self.next_plan - 1}")

    def _barrier_rows(self, message: RowsBack) -> None:
        newest = self.open_barrier
        expected = (None, None) if newest is None else (newest.barrier, newest.after_plan)
        require(
            (message.barrier, message.plan) == expected,
            f"rows of barrier {message.barrier} after plan {message.plan} came home, not those of {expected[0]} after "
            f"{expected[1]}",
        )
        assert newest is not None, "checked above: a message has a barrier"
        if message.last:
            require(newest.pieces.complete, f"barrier {newest.barrier} ended before its slots had come")
            require(not self.open_plans, f"barrier {newest.barrier} ended before every plan was done")
        newest.rows.advance(message)

    def _saving(self, barrier: int) -> OpenBarrier:
        newest = self.open_barrier
        require(
            newest is not None and barrier == newest.barrier,
            f"the model state of barrier {barrier} came while barrier {newest and newest.barrier} is open",
        )
        assert newest is not None, "checked above"
        return newest

    def _replica(self, message: Replica) -> None:
        newest = self._saving(message.barrier)
        require(
            newest.model_state is None,
            f"only a checksum of the model state of barrier {message.barrier} came after pieces of it",
        )

    def _saved(self, message: Saved) -> None:
        newest = self._saving(message.barrier)
        model_state = newest.model_state or ModelStateOrder(message)
        model_state.advance(message)
        newest.model_state = model_state

    def _end(self, message: EndOfData) -> None:
        self._check_all_sent("the end of data")
        require(not self.open_plans, "the end of data came before every plan was done")
        self._check_last_plan(message.last_plan, "the end of data")
