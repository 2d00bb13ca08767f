"""Valid messages of every type."""

from msgspec.structs import replace

from rowcast.protocol.messages import (
    PROTOCOL_VERSION,
    Answer,
    Ask,
    DataDelay,
    EndOfData,
    Flush,
    Heartbeat,
    Hello,
    Ids,
    PlanDone,
    PlanReady,
    Replica,
    Restore,
    Returned,
    RingRef,
    RingSpec,
    RowCopies,
    RowsBack,
    Save,
    Saved,
    TierTotals,
    Wait,
    Welcome,
)
from rowcast.protocol.parts import InputSpec
from rowcast.protocol.plan_layout import ArraySpan, ArraySpec, GroupHeader, RowSpan, StepHeader
from rowcast.runtime.machine import Machine

DIGEST = "d" * 32


def hello(**changes: object) -> Hello:
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "job_digest": DIGEST,
        "rank": 0,
        "world_size": 1,
        "pid": 2,
        "machine": Machine(threads=1, facts=(("torch", "2.13.0"),)),
    }
    return Hello(**{**fields, "device": "cpu", "mode": "train", **changes})  # type: ignore[arg-type]


def announced(num_dense: int, *others: InputSpec) -> tuple[InputSpec, ...]:
    dense = InputSpec(name="dense", dtype="f4", shape=(num_dense,))
    return dense, InputSpec(name="labels", dtype="f4", shape=()), *others


def welcome(incarnation: int = 1, depth: int = 1, restore_bytes: int = 0) -> Welcome:
    return Welcome(
        protocol_version=PROTOCOL_VERSION,
        run_id="run",
        incarnation=incarnation,
        pid=1,
        slots=(100, 50),
        inputs=announced(13),
        depth=depth,
        fetch_ring=RingSpec(path="/dev/shm/rowcast-fetch", nbytes=2**20),
        back_ring=RingSpec(path="", nbytes=2**20),
        staging_bytes=2**16,
        train_steps=None,
        first_train_step=0,
        restore_bytes=restore_bytes,
    )


def ref(nbytes: int = 1024, checksum: int | None = None) -> RingRef:
    size = -(-nbytes // 64) * 64
    return RingRef(position=64, nbytes=nbytes, end=64 + size + 64, checksum=checksum)


def group(num_fetch: int, num_dirty: int, step: int) -> GroupHeader:
    return GroupHeader(
        num_lookups=20,
        num_unique=10,
        num_fetch=num_fetch,
        num_evict=num_dirty,
        num_dirty=num_dirty,
        fill_after=max(0, step - 1),
    )


def plan(step: int, num_dirty: tuple[int, int] = (4, 0), arrays_bytes: int = 256) -> StepHeader:
    """Fetches 5 rows of group 0 and 3 of group 1."""
    return StepHeader(
        step=step,
        kind="train",
        train_step=step,
        epoch=0,
        batch_size=2,
        groups=(group(5, num_dirty[0], step), group(3, num_dirty[1], step)),
        arrays=(
            ArraySpec(name="dense", dtype="f4", shape=(2, 13), offset=0),
            ArraySpec(name="labels", dtype="f4", shape=(2,), offset=128),
            ArraySpec(name="0.slots", dtype="i4", shape=(4,), offset=192),
        ),
        arrays_bytes=arrays_bytes,
    )


def rows(group: int, start: int, count: int, offset: int) -> RowSpan:
    return RowSpan(group=group, start=start, count=count, offset=offset)


def plan_ready(number: int, num_dirty: tuple[int, int] = (4, 0)) -> PlanReady:
    """A plan of one step, in one piece."""
    return PlanReady(
        plan=number,
        piece=0,
        num_pieces=1,
        steps=(plan(number, num_dirty),),
        payload=ref(),
        arrays=ArraySpan(offset=0, nbytes=256),
        rows=(rows(0, 0, 5, 256), rows(1, 0, 3, 576)),
    )


def plan_pieces(number: int) -> tuple[PlanReady, PlanReady, PlanReady]:
    """The same plan in three pieces: arrays, arrays and rows, rows."""
    first = replace(plan_ready(number), num_pieces=3, payload=ref(128), arrays=ArraySpan(offset=0, nbytes=128), rows=())
    rest = replace(first, steps=())
    return (
        first,
        replace(rest, piece=1, payload=ref(384), arrays=ArraySpan(offset=128, nbytes=128), rows=(rows(0, 0, 3, 128),)),
        replace(rest, piece=2, payload=ref(), arrays=None, rows=(rows(0, 3, 2, 0), rows(1, 0, 3, 128))),
    )


def rows_back(plan: int, piece: int = 0, last: bool = True, start: int = 0, count: int = 4) -> RowsBack:
    return RowsBack(plan=plan, barrier=None, piece=piece, last=last, payload=ref(), rows=(rows(0, start, count, 0),))


def numbers_of(*rows: int) -> bytes:
    return b"".join(row.to_bytes(8, "little") for row in rows)


def ids(step: int) -> Ids:
    """The rows of a step over three tables."""
    return Ids(step=step, trains=True, counts=(2, 0, 1), rows=numbers_of(3, 5, 4))


def ask(number: int) -> Ask:
    return Ask(number=number, table=2, rows=numbers_of(1, 7))


def answer(number: int) -> Answer:
    return Answer(number=number, records=bytes(32))


def returned(number: int) -> Returned:
    return Returned(number=number, table=0, rows=numbers_of(6), records=bytes(16))


def save(number: int) -> Save:
    return Save(number=number, request=b"{}")


def plan_done(number: int) -> PlanDone:
    return PlanDone(plan=number, rank=0)


def flush(barrier: int, after_plan: int | None, checkpoint: bool = False, num_dirty: tuple[int, int] = (2, 1)) -> Flush:
    """A barrier whose slots come in one piece."""
    empty = not any(num_dirty)
    arrays = tuple(ArraySpec(name=f"{i}.slots", dtype="i4", shape=(n,), offset=64 * i) for i, n in enumerate(num_dirty))
    return Flush(
        barrier=barrier,
        after_plan=after_plan,
        num_dirty=num_dirty,
        piece=0,
        num_pieces=1,
        arrays=() if empty else arrays,
        arrays_bytes=0 if empty else 128,
        payload=None if empty else ref(128),
        span=None if empty else ArraySpan(offset=0, nbytes=128),
        checkpoint=checkpoint,
        reason="end of data",
    )


def flush_pieces(barrier: int, after_plan: int | None) -> tuple[Flush, Flush]:
    """The same barrier with its slots in two pieces."""
    whole = replace(flush(barrier, after_plan), num_pieces=2, payload=ref(64), reason="stop")
    first, second = (replace(whole, piece=n, span=ArraySpan(offset=64 * n, nbytes=64)) for n in range(2))
    return first, second


def barrier_rows(barrier: int, plan: int | None, last: bool = True, piece: int = 0, whole: bool = True) -> RowsBack:
    """All rows that `flush` asks for; with `whole` False the first half of them."""
    spans = (rows(0, 0, 2, 0), rows(1, 0, 1, 128)) if whole else (rows(0, 0, 2, 0),)
    return RowsBack(plan=plan, barrier=barrier, piece=piece, last=last, payload=ref(), rows=spans)


def saved(barrier: int) -> Saved:
    """A dense side in one piece."""
    return Saved(
        barrier=barrier,
        piece=0,
        num_pieces=1,
        nbytes=1000,
        checksum=7,
        payload=ref(1000),
        span=ArraySpan(offset=0, nbytes=1000),
    )


def replica(barrier: int) -> Replica:
    return Replica(barrier=barrier, checksum=7)


def saved_pieces(barrier: int) -> tuple[Saved, Saved]:
    """The same in two."""
    whole = replace(saved(barrier), num_pieces=2)
    return (
        replace(whole, payload=ref(960), span=ArraySpan(offset=0, nbytes=960)),
        replace(whole, piece=1, payload=ref(40), span=ArraySpan(offset=960, nbytes=40)),
    )


def restore_pieces() -> tuple[Restore, Restore]:
    """The dense side that a Welcome of 100 bytes announces."""
    return (
        Restore(piece=0, num_pieces=2, nbytes=100, checksum=8, payload=ref(64), span=ArraySpan(offset=0, nbytes=64)),
        Restore(piece=1, num_pieces=2, nbytes=100, checksum=8, payload=ref(36), span=ArraySpan(offset=64, nbytes=36)),
    )


def end_of_data(last_plan: int | None) -> EndOfData:
    return EndOfData(
        last_plan=last_plan,
        finished=True,
        host_bytes=10**9,
        waits=(Wait(reason="credit", seconds=1.5), Wait(reason="store", seconds=0.0)),
        tier=tier_totals(),
        row_copies=row_copies(),
        data_delay=DataDelay(waiting_files=1, last_s=0.5, longest_s=2.0),
    )


def row_copies() -> RowCopies:
    return RowCopies(
        bytes_read=6 * 10**9,
        read_s=1.5,
        bytes_written=3 * 10**9,
        write_s=1.0,
        memory_bytes=2**30,
        huge_page_bytes=2**29,
    )


def tier_totals() -> TierTotals:
    return TierTotals(
        rows_from_cold=1234567,
        rows_never_trained=89,
        rows_to_cold=45678,
        rows_read_past_memory=21,
        late_rows=7,
        bytes_read=3 * 2**30,
        bytes_written=2**29,
        read_s=1.5,
        index_bytes=2**20,
        disk_bytes=2**31,
        garbage_bytes=2**24,
    )


def heartbeat() -> Heartbeat:
    return Heartbeat(work=0, step_begun=3, step_done=None, waiting_for="rows")
