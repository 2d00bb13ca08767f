"""What do single parts cost: a barrier, writing a checkpoint, merging its deltas, sending a piece encrypted, opening a
text file?

Method: the run's own writer on a disk of this machine, rows of 128 bytes in blocks of 8 MiB, with a merge caused by a
third checkpoint that has as many changed rows; a barrier with as many changed rows in a memory store, from its begin
until training may go on, and then until all is durable, while another thread writes over rows at random; two ends of
the tcp link over loopback, payloads of 1 MiB, a few in flight; and a new file of text lines, opened as a run's first
start does, which counts its lines, and as its second start does. Medians of the rounds, in seconds and in processor
seconds, which vary less on a busy machine.

    make bench-parts
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.machine import machine
from rowcast.job.file import parse_job
from rowcast.job.schema import Job, Transport
from rowcast.job.tables import group_specs
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.snapshot import BLOCK_BYTES, BarrierCheckpointer
from rowcast.prefetcher.checkpoints.write_queue import RowBlock
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter
from rowcast.prefetcher.pipeline.plan_stream import PlannedBarrier
from rowcast.prefetcher.readers.text_files import TextIndex
from rowcast.prefetcher.run.make_keys import make_keys
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.codec import encode
from rowcast.protocol.messages import PROTOCOL_VERSION, ArraySpan, Envelope, Hello, RingRef, Saved
from rowcast.protocol.plan import BarrierPlan
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.disk import RealDisk
from rowcast.runtime.position import Position
from rowcast.runtime.stages import Doorbell, StageThread

RECORD_BYTES = 128
PIECE_BYTES = 2**20
ON_THE_WAY = 4  # pieces
WRITTEN_AT_ONCE = 2000  # rows
PAUSE_S = 0.01  # between writes
DEADLINE_S = 60.0  # for one piece

Measured = dict[str, list[tuple[float, float]]]  # part -> (seconds, processor seconds) of each round


def timed(work: Callable[[], None]) -> tuple[float, float]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


# checkpoints


def checkpoint_job(num_rows: int) -> Job:
    return parse_job(
        {
            "job": {"run_dir": "unused"},
            "data": {"format": "synthetic"},
            "tables": [
                {"name": "t", "num_embeddings": num_rows, "embedding_dim": RECORD_BYTES // 4, "features": ["f"]}
            ],
            "model": {"kind": "unused:unused"},
            "optimizer": {"sparse": {"kind": "sgd", "lr": 1.0}, "dense": {"kind": "sgd", "lr": 1.0}},
            "cache": {"capacity": "1MiB"},
        }
    )


def changed_rows(nbytes: int, chance: np.random.Generator) -> list[tuple[Keys, Records]]:
    block = BLOCK_BYTES // RECORD_BYTES
    records = chance.integers(0, 256, (block, RECORD_BYTES), np.uint8)
    return [
        (np.arange(start, start + block, dtype=np.int64), records) for start in range(0, nbytes // RECORD_BYTES, block)
    ]


def write_checkpoint(writer: CheckpointWriter, blocks: list[tuple[Keys, Records]], step: int) -> None:
    writer.begin(Position(step=step, train_step=step), finished=False, reason="benchmark")
    writer.finish(None, (RowBlock(group_index=0, keys=keys, records=records) for keys, records in blocks))
    while writer.busy:
        writer.advance()


def checkpoints(nbytes: int, folder: Path, measured: Measured) -> None:
    """The first checkpoint of `nbytes` is a base; the fourth finds more rows in the deltas before it than in the base,
    so these merge into a new base.
    """
    job = checkpoint_job(2 * nbytes // RECORD_BYTES)
    blocks = changed_rows(nbytes, np.random.default_rng(0))
    writer = CheckpointWriter(job, group_specs(job), "benchmark", None, Checkpoints(folder, RealDisk()), None, keep=1)
    folder.mkdir()
    for step, part in enumerate(
        ("a base written", "a delta as large", "another one", "a fourth, and three merged"), start=1
    ):
        measured.setdefault(part, []).append(timed(lambda at=step: write_checkpoint(writer, blocks, at)))  # type: ignore[misc]


def barrier(nbytes: int, folder: Path, measured: Measured) -> None:
    """Seconds at a barrier, which training waits for, and until its checkpoint is durable, with writes meanwhile."""
    job = checkpoint_job(2 * nbytes // RECORD_BYTES)
    [group] = groups = group_specs(job)
    store = TrackedStore(MemoryStore(group), group, seed=0)
    for keys, records in changed_rows(nbytes, np.random.default_rng(0)):
        store.write(keys, records)
    folder.mkdir()
    writer = CheckpointWriter(job, groups, "benchmark", None, Checkpoints(folder, RealDisk()), None, keep=1)
    checkpointer = BarrierCheckpointer(groups, (store,), writer, parse_bytes(job.checkpoint.memory))
    plan = BarrierPlan(barrier=0, after_step=0, dirty=(), reason="benchmark", finished=False)
    planned = PlannedBarrier(plan=plan, position=Position(step=1, train_step=1), last=False, ahead=(), fault=None)
    content = b"a small model state"
    piece = Saved(
        barrier=0,
        piece=0,
        num_pieces=1,
        payload=RingRef(position=0, nbytes=len(content), end=len(content)),
        span=ArraySpan(offset=0, nbytes=len(content)),
        nbytes=len(content),
        checksum=xxhash.xxh3_64_intdigest(content),
    )
    stage = StageThread("checkpoint", writer, Doorbell(), lambda error: os.abort())
    stage.start()

    def wait() -> None:
        checkpointer.begin(planned)
        checkpointer.take_dense(piece, content)

    def go_on() -> None:
        chance = np.random.default_rng(1)
        records = np.zeros((WRITTEN_AT_ONCE, RECORD_BYTES), np.uint8)
        while checkpointer.busy:
            rows = np.unique(chance.integers(0, nbytes // RECORD_BYTES, WRITTEN_AT_ONCE))
            if store.has_room(len(rows)):
                store.write(rows, records[: len(rows)])
            time.sleep(PAUSE_S)

    measured.setdefault("a barrier", []).append(timed(wait))
    measured.setdefault("then its checkpoint, beside writes", []).append(timed(go_on))
    stage.stop()


# tcp


def pieces_over_tcp(num_pieces: int, folder: Path, measured: Measured) -> None:
    transport = tcp_transport(folder)
    payload = memoryview(os.urandom(PIECE_BYTES))
    with (
        ZmqLink.prefetcher(folder, transport=transport) as prefetcher,
        ZmqLink.trainer(folder, transport=transport) as trainer,
    ):
        trainer.send(greeting())
        receive(prefetcher)

        def travel() -> None:
            for number in range(num_pieces + ON_THE_WAY):
                if number < num_pieces:
                    prefetcher.send(number.to_bytes(8, "little"), payload)
                if number >= ON_THE_WAY:
                    receive(trainer)

        measured.setdefault("pieces over tcp", []).append(timed(travel))


def tcp_transport(folder: Path) -> Transport:
    make_keys(folder / "keys", ["trainer"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Transport(endpoint=f"tcp://127.0.0.1:{port}", keys=str(folder / "keys"))


def greeting() -> bytes:
    """A trainer's first frame; without it no other frame is accepted."""
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        job_digest="",
        rank=0,
        world_size=1,
        pid=os.getpid(),
        threads=1,
        device="cpu",
        mode="train",
    )
    return encode(Envelope(incarnation=0, sequence=0, message=hello))


def receive(link: ZmqLink) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while link.receive() is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no piece came within {DEADLINE_S:g} s")
        time.sleep(0.0001)


# text


def opened_text(nbytes: int, folder: Path, measured: Measured) -> None:
    line = b"\t".join([b"1", *[b"12"] * 13, *[b"0123abcd"] * 26]) + b"\n"
    path = folder / "day_0"
    path.write_bytes(line * (nbytes // len(line)))
    for part in ("a text file opened first", "a text file opened again"):
        measured.setdefault(part, []).append(timed(lambda: open_text_file(path, folder / "lines")))


def open_text_file(path: Path, kept_in: Path) -> None:
    TextIndex([path], kept_in)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mb", type=int, default=300, help="bytes of changed rows, of pieces, and of text, in millions"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    nbytes = options.mb * 10**6
    measured: Measured = {}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as name:
            barrier(nbytes, Path(name) / "barrier", measured)
            checkpoints(nbytes, Path(name) / "run", measured)
            pieces_over_tcp(nbytes // PIECE_BYTES, Path(name), measured)
            opened_text(nbytes, Path(name), measured)
    print(f"| {options.mb} MB | seconds | processor seconds | MB/s |")
    print("|---|---|---|---|")
    for part, rounds in measured.items():
        wall_s, cpu_s = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {part} | {wall_s:.4f} | {cpu_s:.4f} | {options.mb / wall_s:,.0f} |")
    print(" ".join(f"{name}={value}" for name, value in machine().items()))


if __name__ == "__main__":
    main()
