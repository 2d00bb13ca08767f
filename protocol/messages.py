"""Every message that crosses between the two processes, as typed headers. Arrays never stand in a header: they are in a ring.

    prefetcher -> trainer   Welcome  Restore  StepReady  Flush  EndOfData
    trainer -> prefetcher   Hello  RowsBack  RowChecksums  StepDone  Saved  StopRequest
    both                    Released  Heartbeat  Failure  Bye

`session.py` holds which of them may follow which.
"""

from typing import Literal

import msgspec

from rowcast.protocol.plan_layout import Dtype
from rowcast.runtime.position import Position

PROTOCOL_VERSION = 5
Mode = Literal["train", "eval"]  # eval: the evaluation batches alone, once; nothing is trained and nothing saved


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


class RingRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes in the sender's ring. Positions count all bytes ever allocated, so that they never repeat; see `ring.py`."""

    position: int  # where the payload starts; the byte in the ring is position % ring bytes
    nbytes: int
    end: int  # where the piece ends, padding and guards included: what `Released` names when it is the newest one done
    checksum: int | None = None  # xxh3_64 of the payload, for a sampled share of pieces


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one array lies in a plan's block of arrays."""

    name: str  # "dense", "labels", "<group>.slots", ...
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int  # bytes into the block, a multiple of 64


class GroupHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a `GroupPlan`; its arrays are in the block, laid out as `plan_layout.py` says."""

    num_lookups: int
    num_unique: int
    num_fetch: int
    num_evict: int
    num_dirty: int
    fill_after: int | None
    # of each feature whose look-ups stay apart: the last of its `sequence_offsets`
    sequence_lookups: tuple[int, ...] = ()


class PlanHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `StepPlan` without its arrays."""

    kind: Literal["train", "eval"]
    train_step: int
    epoch: int
    batch_size: int
    groups: tuple[GroupHeader, ...]
    arrays: tuple[ArraySpec, ...]
    arrays_bytes: int  # length of the whole block
    num_checksums: int = 0  # of rows in their slots that the plan asks for; see `row_checksum.py`


class RowSpan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive rows of one group, in the order of the plan's move."""

    group: int
    start: int  # first row of the span in the move
    count: int
    offset: int  # bytes into the piece's payload, a multiple of 64


class ArraySpan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive bytes of the plan's block of arrays; they stand at the start of the piece's payload."""

    offset: int  # bytes into the block
    nbytes: int


class StepReady(Message, frozen=True, kw_only=True):
    """One piece of a plan. The first carries the header; array spans come before row spans."""

    step: int
    piece: int
    num_pieces: int
    plan: PlanHeader | None  # in piece 0 only
    payload: RingRef | None  # None where the piece has neither arrays nor rows
    arrays: ArraySpan | None
    rows: tuple[RowSpan, ...]


class RowsBack(Message, frozen=True, kw_only=True):
    """Dirty rows on their way home, in the order of the plan's dirty victims, or of the barrier's dirty rows."""

    step: int | None  # the plan whose victims these are; at a barrier the step it follows, None before the first
    barrier: int | None  # the barrier's number, or None for victims
    piece: int
    last: bool
    payload: RingRef | None  # None in the one answer to an empty flush
    rows: tuple[RowSpan, ...]


class RowChecksums(Message, frozen=True, kw_only=True):
    """Checksums of rows as they stood in their slots, which a plan or barrier asked for: before its `StepDone`, or its last `RowsBack`."""

    step: int | None  # the plan's; at a barrier the step it follows, None before the first
    barrier: int | None
    start: int  # how many of the plan's or barrier's came before
    checksums: bytes  # int64, little-endian, in the order of the arrays that ask for them


class StepDone(Message, frozen=True, kw_only=True):
    """The step is complete on the device, and every RowsBack of its plan was sent before this message."""

    step: int
    rank: int
    waited_s: float  # the device side waited for rows
    step_s: float


class Released(Message, frozen=True, kw_only=True):
    """Every byte of the receiver's ring before `position` is free again."""

    position: int


class Hello(Message, frozen=True, kw_only=True):
    protocol_version: int
    job_digest: str
    rank: int
    world_size: int
    pid: int
    threads: int
    device: str
    mode: Mode


class RingSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str  # a file in shared memory, or "" for the in-process link
    nbytes: int


class Welcome(Message, frozen=True, kw_only=True):
    protocol_version: int
    run_id: str
    incarnation: int
    pid: int
    slots: tuple[int, ...]  # per group
    num_dense: int  # dense features of a sample
    depth: int
    fetch_ring: RingSpec  # prefetcher writes, trainer reads
    back_ring: RingSpec  # trainer writes, prefetcher reads
    staging_bytes: int  # on the device, each way: a piece carries no more bytes of rows
    train_steps: int | None  # expected over the run, where the reader knows
    first_train_step: int  # train steps before this incarnation: those of the checkpoint that it goes on from
    # of the dense side that follows in `Restore`; 0: there is none, the model begins as the job says
    restore_bytes: int
    verify: float = 0.0  # share of the rows whose checksums the plans ask for
    start: Position = Position()  # where this incarnation begins: that of the checkpoint
    fresh: bool = False  # no checkpoint of this run is on disk: whatever the run directory holds is of an earlier one
    replaces: str = ""  # where it is fresh, the run_id of the earlier one, if that has a checkpoint
    # train and evaluation batches of an epoch, where the reader knows
    epoch_batches: tuple[int | None, int | None] = (None, None)
    pairing: str = ""  # which column was taken for which feature, where a data set gives ids by position


class Flush(Message, frozen=True, kw_only=True):
    """A barrier. Slots travel in the ring like a plan's arrays, one "<group>.slots" array a group."""

    barrier: int
    after_step: int | None
    num_dirty: tuple[int, ...]  # per group
    piece: int
    num_pieces: int
    arrays: tuple[ArraySpec, ...]
    arrays_bytes: int
    payload: RingRef | None  # None where nothing is dirty
    span: ArraySpan | None
    checkpoint: bool  # the rows are followed by the dense side, in `Saved`
    reason: str
    num_checksums: int = 0  # of dirty rows in their slots


class DensePiece(Message, frozen=True, kw_only=True):
    """Consecutive bytes of the dense side, as safetensors: weights, optimizer state, random state, metrics and losses."""

    piece: int
    num_pieces: int
    nbytes: int  # of the whole, above 0
    checksum: int  # xxh3_64 of the whole
    payload: RingRef
    span: ArraySpan  # its place in the whole


class Saved(DensePiece, frozen=True, kw_only=True):
    """The dense side at a barrier, behind the last of its rows."""

    barrier: int


class Restore(DensePiece, frozen=True, kw_only=True):
    """The dense side that an incarnation begins with, before its first plan."""


class EndOfData(Message, frozen=True, kw_only=True):
    """No plan follows. Sent after the last barrier is done."""

    last_step: int | None
    finished: bool  # the data has ended; otherwise a stop was asked for
    host_bytes: int  # peak resident bytes of the prefetcher


class StopRequest(Message, frozen=True, kw_only=True):
    reason: str
    next_step: int | None = None  # the first step that is passed over untrained; None: all that are planned are trained


class Heartbeat(Message, frozen=True, kw_only=True):
    step_begun: int | None
    step_done: int | None
    work: int  # grows with whatever else is progress: batches read, rows home, files written
    waiting_for: str


class Failure(Message, frozen=True, kw_only=True):
    """The sender gives up; `code` is the exit code that both processes end with."""

    code: int
    sentence: str


class Bye(Message, frozen=True, kw_only=True):
    """Nothing follows on this link."""


AnyMessage = (
    StepReady
    | RowsBack
    | RowChecksums
    | StepDone
    | Released
    | Hello
    | Welcome
    | Flush
    | Saved
    | Restore
    | EndOfData
    | StopRequest
    | Heartbeat
    | Failure
    | Bye
)


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What stands around every message: frames of an earlier incarnation, gaps and repeats are refused."""

    incarnation: int
    sequence: int  # 0, 1, ... per sender and link
    message: AnyMessage
