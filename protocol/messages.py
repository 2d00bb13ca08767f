"""Defines every message between the two processes as a typed header. Arrays travel in a ring, never in a header.

`session.py` defines who may send which, and when. CONTRIBUTING.md lists the places of a new message.
"""

from typing import Literal

import msgspec

from rowcast.protocol.parts import InputSpec
from rowcast.protocol.plan_layout import (
    ALIGNMENT,
    ArraySpan,
    ArraySpec,
    RowSpan,
    StepHeader,
    check_specs,
    check_steps,
    require,
)
from rowcast.runtime.checkpoint_manifest import Position, SavedScript
from rowcast.runtime.first_values import FirstValues
from rowcast.runtime.machine import UNRECORDED, Machine
from rowcast.runtime.ranges import Checksum, Number, Seconds, Text

PROTOCOL_VERSION = 21
STEP_LIMIT = 2**40  # a piece's stamp in the ring is one int64: the number of its plan or barrier,
PIECE_LIMIT = 2**20  # and its piece's
MODEL_STATE_LIMIT = 2**36  # bytes of the model state
Mode = Literal["train", "eval"]  # eval: one pass over the evaluation batches, without training or saving


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""

    @property
    def kind(self) -> str:
        """The message's name in `session.py`: its type's, divided further if that decides what may follow."""
        return type(self).__name__

    def check(self) -> None:
        """Raises ValueError if the fields cannot belong together. The types check the range of each alone."""


def check_piece(piece: int, num_pieces: int) -> None:
    require(piece < num_pieces, f"piece {piece} of {num_pieces} does not exist")
    require(num_pieces <= PIECE_LIMIT, f"{num_pieces} pieces come; there may be up to {PIECE_LIMIT}")


class RingRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes in the sender's ring. Positions count all bytes ever allocated, so they never repeat; see `ring.py`."""

    position: Number  # of the payload; its first byte in the ring is position % ring bytes
    nbytes: Number
    end: Number  # of the piece's end, with padding and guards; `Released` names it
    checksum: Checksum | None = None  # xxh3_64 of the payload, in some pieces

    def check(self) -> None:
        size = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        require(self.position % ALIGNMENT == 0, f"a payload at position {self.position} is not aligned to {ALIGNMENT}")
        ends = self.end >= self.position + size
        require(ends, f"a payload of {self.nbytes} bytes at {self.position} does not end by {self.end}")


def check_payload(payload: RingRef | None, arrays: ArraySpan | None, rows: tuple[RowSpan, ...]) -> None:
    """Checks that array bytes come first, then spans of rows at rising offsets, all inside the payload."""
    if payload is None:
        if arrays is not None or rows:
            raise ValueError("arrays or rows are announced without a payload")
        return
    payload.check()
    end = 0 if arrays is None else arrays.nbytes
    for span in rows:
        if span.count <= 0:
            raise ValueError(f"a span of group {span.group} has no rows")
        if span.offset % ALIGNMENT != 0:
            raise ValueError(f"rows at offset {span.offset} are not aligned to {ALIGNMENT}")
        if span.offset < end:
            raise ValueError(f"rows at offset {span.offset} overlap what ends at {end}")
        end = span.offset + span.count  # at least one byte per row; only the receiver knows a row's size
    if end > payload.nbytes:
        raise ValueError(f"arrays and rows end at {end}, beyond their payload of {payload.nbytes} bytes")


class PlanReady(Message, frozen=True, kw_only=True):
    """One piece of a plan. The first carries the headers; array spans come before row spans."""

    plan: Number
    piece: Number
    num_pieces: Number
    steps: tuple[StepHeader, ...]  # only in piece 0; the first has the numbers of the plan's move
    payload: RingRef | None  # None if the piece has neither arrays nor rows
    arrays: ArraySpan | None
    rows: tuple[RowSpan, ...]
    returned: Number = 0  # the `Returned` that were in the store before its rows were read

    def check(self) -> None:
        check_piece(self.piece, self.num_pieces)
        require(self.plan < STEP_LIMIT, f"plan {self.plan} is beyond 2^40")
        require(
            self.payload is not None or self.num_pieces == 1,
            f"piece {self.piece} of {self.num_pieces} brings nothing",
        )
        require(
            bool(self.steps) == (self.piece == 0),
            f"piece {self.piece} must carry steps if, and only if, it is piece 0",
        )
        if self.steps:
            check_steps(self.plan, self.steps)
        check_payload(self.payload, self.arrays, self.rows)


class RowsBack(Message, frozen=True, kw_only=True):
    """Dirty rows on their way home, in the order of the plan's dirty victims or of the barrier's dirty rows."""

    plan: Number | None  # that evicts them; at a barrier the plan that it follows, None before the first
    barrier: Number | None  # the barrier's number, or None for victims
    piece: Number
    last: bool
    payload: RingRef | None  # None only in reply to an empty flush
    rows: tuple[RowSpan, ...]

    @property
    def kind(self) -> str:
        return "RowsBack" if self.barrier is None else f"RowsBack (barrier{', last' if self.last else ''})"

    def check(self) -> None:
        require(self.plan is not None or self.barrier is not None, "rows come home for neither a plan nor a barrier")
        require(self.piece < PIECE_LIMIT, f"piece {self.piece} of rows is beyond 2^20")
        check_payload(self.payload, None, self.rows)


class PlanDone(Message, frozen=True, kw_only=True):
    """All steps of the plan are complete on the device, and every RowsBack of it was sent before."""

    plan: Number
    rank: Number


class Released(Message, frozen=True, kw_only=True):
    """Every byte of the receiver's ring before `position` is free again."""

    position: Number


class Hello(Message, frozen=True, kw_only=True):
    protocol_version: Number
    job_digest: Text
    rank: Number  # 0 to world_size - 1
    world_size: Number  # trainers that divide every batch, this one included
    pid: Number
    machine: Machine  # that will compute the run, if no checkpoint records another number of threads
    device: Text
    mode: Mode


class RingSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Text  # a file in shared memory, or "" for the in-process link
    nbytes: Number


class Welcome(Message, frozen=True, kw_only=True):
    protocol_version: Number
    run_id: Text
    incarnation: Number
    pid: Number
    slots: tuple[Number, ...]  # one number per group
    inputs: tuple[InputSpec, ...]  # every batch's arrays: dense features, labels, and the others
    depth: Number
    fetch_ring: RingSpec  # prefetcher writes, trainer reads
    back_ring: RingSpec  # trainer writes, prefetcher reads
    staging_bytes: Number  # device bytes in each direction: a piece carries at most that many bytes of rows
    train_steps: Number | None  # expected over the run; None if the reader does not know
    first_train_step: Number  # train steps before this incarnation, from its checkpoint
    # size of the model state that follows in `Restore`; 0 if the model starts from the job's initial values
    restore_bytes: Number
    start: Position = Position()  # where this incarnation begins, from its checkpoint
    fresh: bool = False  # this run has no checkpoint on disk: all in the run directory are from an earlier run
    replaces: Text = ""  # if `fresh`, the run_id of the earlier run, if that has a checkpoint
    # train and evaluation batches of an epoch; None if the reader does not know
    epoch_batches: tuple[Number | None, Number | None] = (None, None)
    pairing: Text = ""  # the column of each feature, if the data has ids by position
    data: Text = ""  # which files are read, or the format of data without files
    rank: Number = 0  # the rank that owns this prefetcher's shard
    placements: tuple[Text, ...] = ()  # of each table; () as the job file has them
    checkpoint: Text = ""  # the checksum of the manifest that this incarnation begins at; "" for the start of the run
    machine: Machine = UNRECORDED  # that computed this checkpoint
    data_checksums: tuple[tuple[Text, Text], ...] = ()  # names and checksums: of data files, of an epoch's length
    # of the first batches: of each feature, of dense features and labels; evaluation's separately
    first_batches: tuple[tuple[Text, Text], ...] = ()

    def check(self) -> None:
        require(self.incarnation > 0, "incarnation 0 belongs to a trainer before its Welcome")
        require(self.depth > 0, "depth must be at least 1")
        require(
            self.restore_bytes <= MODEL_STATE_LIMIT,
            f"a model state has up to {MODEL_STATE_LIMIT} bytes, not {self.restore_bytes}",
        )
        require(bool(self.slots) and all(self.slots), f"slots {self.slots} must be at least one for each group")

    @property
    def num_dense(self) -> int:
        """Dense features per sample."""
        return self.inputs[0].shape[0]


class Flush(Message, frozen=True, kw_only=True):
    """A barrier. Its slots travel in the ring like a plan's arrays, one "<group>.slots" array per group."""

    barrier: Number
    after_plan: Number | None
    num_dirty: tuple[Number, ...]  # dirty rows of each group
    piece: Number
    num_pieces: Number
    arrays: tuple[ArraySpec, ...]
    arrays_bytes: Number
    payload: RingRef | None  # None if no row is dirty
    span: ArraySpan | None
    checkpoint: bool  # the model state follows the rows, in `Saved`
    reason: Text
    evaluated: bool = False  # the evaluation before it, if there is one, is over

    @property
    def kind(self) -> str:
        return "Flush (later piece)" if self.piece else "Flush (checkpoint)" if self.checkpoint else "Flush"

    def check(self) -> None:
        check_piece(self.piece, self.num_pieces)
        require(self.barrier < STEP_LIMIT, f"barrier {self.barrier} is beyond 2^40")
        require(
            self.payload is not None or self.num_pieces == 1,
            f"piece {self.piece} of {self.num_pieces} brings nothing",
        )
        check_specs(self.arrays, self.arrays_bytes)
        check_payload(self.payload, self.span, ())


class DensePiece(Message, frozen=True, kw_only=True):
    """Consecutive bytes of the model state as safetensors: weights, optimizer state, random state, metrics, losses."""

    piece: Number
    num_pieces: Number
    nbytes: Number  # the whole model state's, above 0
    checksum: Checksum  # xxh3_64 of the whole model state
    payload: RingRef
    span: ArraySpan  # its bytes in the model state

    def check(self) -> None:
        check_piece(self.piece, self.num_pieces)
        require(
            0 < self.nbytes <= MODEL_STATE_LIMIT,
            f"a model state has 1 to {MODEL_STATE_LIMIT} bytes, not {self.nbytes}",
        )
        require(self.span.nbytes > 0, f"piece {self.piece} of {self.num_pieces} brings nothing")
        end = self.span.offset + self.span.nbytes
        require(end <= self.nbytes, f"bytes up to {end} travel, but the model state has {self.nbytes}")
        require(
            self.span.nbytes == self.payload.nbytes,
            f"{self.span.nbytes} bytes travel in a payload of {self.payload.nbytes}",
        )
        check_payload(self.payload, self.span, ())


class Saved(DensePiece, frozen=True, kw_only=True):
    """The model state at a barrier, sent after the last of its rows."""

    barrier: Number
    is_best: bool = False  # of all evaluations, the one of this model has the lowest loss

    @property
    def kind(self) -> str:
        return "Saved (last)" if self.piece == self.num_pieces - 1 else "Saved"


class Replica(Message, frozen=True, kw_only=True):
    """Replaces `Saved` from a trainer of a rank above 0: all hold the same model state, and only rank 0's is saved."""

    barrier: Number
    checksum: Checksum  # xxh3_64 of the whole model state


class Restore(DensePiece, frozen=True, kw_only=True):
    """The model state that an incarnation starts from, sent before its first plan."""


class TierTotals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The summed counters of all groups' stores, if they have a memory tier and a cold tier."""

    rows_from_cold: Number  # entered memory from the cold tier
    rows_never_trained: Number  # entered memory with their first value
    rows_to_cold: Number  # left memory and were written
    rows_read_past_memory: Number  # late rows, and rows that a checkpoint collects
    late_rows: Number  # planned to be in memory when requested, and were not
    bytes_read: Number  # from the cold tier, whole pages
    bytes_written: Number  # to it, rows moved to collect garbage included
    read_s: Seconds  # spent reading the cold tier, summed over threads
    index_bytes: Number  # of memory for the index of where each row is, at the end
    disk_bytes: Number  # of the cold tier, at the end
    garbage_bytes: Number  # of these: old copies of rows


class DataDelay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far training is behind the files that arrive (data.follow)."""

    waiting_files: Number  # in the folder, and not trained to their end
    last_s: Seconds | None  # from the end of writing the last trained file to its last step; None: there is none
    longest_s: Seconds  # of the files since this start, seen once a second


class RowCopies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The passes of fetches and write-backs over rows, and the memory that holds the rows of the stores."""

    bytes_read: Number = 0  # rows from the stores to the ring, first values included
    read_s: Seconds = 0.0  # of every thread that shares them; waits for a cold tier only if they hold a thread up
    bytes_written: Number = 0  # rows from the ring to the stores, bytes of rows
    write_s: Seconds = 0.0  # the look for rows that are not finite included
    memory_bytes: Number = 0  # resident, of the maps with rows, at the end
    huge_page_bytes: Number = 0  # of these: in huge pages


class Wait(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Text
    seconds: Seconds


class Ids(Message, frozen=True, kw_only=True):
    """The rows that a training script will look up in a coming step; of many rows, the next ones.

    Row numbers are i64, ascending and distinct within a table, table after table."""

    step: Number
    trains: bool
    counts: tuple[Number, ...]  # rows of each table, in all messages of the step together
    rows: bytes

    def check(self) -> None:
        require(self.step < STEP_LIMIT, f"step {self.step} is beyond 2^40")
        check_rows(self.rows)


class Ask(Message, frozen=True, kw_only=True):
    """A training script looks up rows that are neither planned nor on the device, or asks which rows were trained.
    Travels behind the victims that have left before, so they are home when the rows are read."""

    number: Number  # 0, 1, ...
    table: Number
    rows: bytes  # i64, ascending; of "trained rows": none for the first parcel, the last row of the one before
    wants: Literal["records", "trained rows"] = "records"

    def check(self) -> None:
        check_rows(self.rows)


class Answer(Message, frozen=True, kw_only=True):
    number: Number  # of the Ask
    # of its rows; or the numbers of trained rows, i64, ascending, none after the last; or why a Save failed
    records: bytes


class Returned(Message, frozen=True, kw_only=True):
    """Rows that a training script has trained beside the plan. Travels behind the victims that have left before, and
    before those that leave later."""

    number: Number  # 1, 2, ...
    table: Number
    rows: bytes  # i64, ascending
    records: bytes

    def check(self) -> None:
        check_rows(self.rows)


class Save(Message, frozen=True, kw_only=True):
    """A training script saves itself. Travels between `Returned` as an `Ask` does, and has two halves: rows that are
    returned after the first are the ones that have changed; the second asks for the checkpoint, and an `Answer` of its
    number says that it is durable."""

    number: Number  # in the order of `Ask`
    request: bytes  # `SaveRequest` as JSON; b"" in the first half


ROW_NUMBER_BYTES = 8


def check_rows(rows: bytes) -> None:
    require(len(rows) % ROW_NUMBER_BYTES == 0, f"{len(rows)} bytes are no whole numbers of rows")


class EndOfData(Message, frozen=True, kw_only=True):
    """No plan follows. Sent after the last barrier is done. Counts cover the prefetcher's process."""

    last_plan: Number | None
    finished: bool  # True if the data has ended, False if a stop was requested
    host_bytes: Number  # peak resident bytes of the prefetcher
    waits: tuple[Wait, ...]
    tier: TierTotals | None  # None: all rows of the stores are in memory, or in files that the kernel caches
    row_copies: RowCopies
    data_delay: DataDelay | None = None  # with data.follow


class StopRequest(Message, frozen=True, kw_only=True):
    """Requests an orderly stop. From a prefetcher: it got the request, and the trainers must agree on the last step."""

    reason: Text
    next_step: Number | None = None  # the first planned step that will not be trained; None if all will
    # plans continue to this step, which no prefetcher has planned, so that all ranks stop there; None: plans end at
    # once
    after_step: Number | None = None
    finished: bool = False  # the run is complete: its evaluations have ended it


class Heartbeat(Message, frozen=True, kw_only=True):
    step_begun: Number | None
    step_done: Number | None
    work: Number  # grows with all other progress: batches read, rows written back, files written
    waiting_for: Text


class Failure(Message, frozen=True, kw_only=True):
    """The sender gives up; both processes end with exit code `code`."""

    code: Number
    sentence: str

    def check(self) -> None:
        require(1 <= self.code <= 255, f"code {self.code} is not the exit code of a failure")


class Bye(Message, frozen=True, kw_only=True):
    """Nothing follows on this link."""


AnyMessage = (
    PlanReady
    | RowsBack
    | PlanDone
    | Released
    | Hello
    | Welcome
    | Flush
    | Saved
    | Replica
    | Restore
    | Ids
    | Ask
    | Answer
    | Returned
    | Save
    | EndOfData
    | StopRequest
    | Heartbeat
    | Failure
    | Bye
)


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Wraps every message, so that the receiver refuses frames of an earlier incarnation, gaps and repeats."""

    incarnation: Number
    sequence: Number  # 0, 1, ... per sender and link
    message: AnyMessage


SETUP = "script.json"  # in the run directory


class ScriptTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    columns: tuple[FirstValues, ...]  # of its records, from the left
    # counted over the first `num_steps` steps; they divide the capacity
    largest_rows: int  # distinct rows of the largest step
    distinct_rows: int  # of all of them together


class ScriptSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a training script's process passes to the prefetcher that it starts, in the file `SETUP`."""

    num_steps: int  # that are known at the start
    tables: tuple[ScriptTable, ...]  # in the order of the job


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint of the script: the rows of all tables, and a model state."""

    folder: str  # of the run
    run_id: str
    step: int  # of the script, above those of earlier saves
    keep: int  # checkpoints
    # checksum of the manifest since which the rows have changed; "": they are all rows
    after: str
    script: SavedScript
    objects: str  # a file with the model state, as safetensors
