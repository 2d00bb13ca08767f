"""Finds hot samples, whose ids are all in data.hot, and keeps one bit per training row.

    data.hot, ids of every training row (one pass, without dense features where the format allows) -> bits
    <run_dir>/order/hot-samples     what they were made from (32 hex digits), their checksum (16), the bits

The bits depend on the data, the job and data.hot, so a file for other inputs is recomputed. The process that makes the
file holds a lock; others wait for it and map the same bits.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from rowcast.job.formats import Data
from rowcast.job.schema import Job, digest
from rowcast.prefetcher.readers.columns import Ids, bag_offsets
from rowcast.prefetcher.readers.data_files import file_state, files_of, path_text
from rowcast.prefetcher.readers.folder_lock import folder_lock
from rowcast.prefetcher.readers.pin_files import check_tables, checksum, read_pins
from rowcast.prefetcher.readers.reader import open_reader, stream_columns
from rowcast.prefetcher.readers.schedule import RowOrder
from rowcast.protocol.batch import Lookups
from rowcast.runtime.arrays import I64, Bools, Bytes
from rowcast.runtime.checkpoint_manifest import write_durably

KEY = "data.hot"
PASS_SAMPLES = 65536  # in a batch of the pass; a multiple of 8
KEY_BYTES, CHECKSUM_BYTES = 32, 16


@dataclass(frozen=True, kw_only=True)
class HotSamples:
    num_rows: int
    bits: Bytes  # [ceil(num_rows / 8)], the first row in the highest bit
    _counts: dict[int, I64] = field(default_factory=dict)  # by rows in a block

    def are_hot(self, start: int, stop: int) -> Bools:
        """Returns bool [stop - start]."""
        own = np.unpackbits(self.bits[start // 8 : -(-stop // 8)])
        return own[start % 8 :][: stop - start].astype(np.bool_)

    def counts(self, block_rows: int) -> I64:
        """Counts the hot rows of each block of training rows, i64 [blocks]."""
        if block_rows not in self._counts:
            starts = range(0, self.num_rows, block_rows)
            found = [self.are_hot(start, min(start + block_rows, self.num_rows)).sum() for start in starts]
            self._counts[block_rows] = np.array(found, np.int64)
        return self._counts[block_rows]

    @property
    def num_hot(self) -> int:
        return int(self.counts(PASS_SAMPLES).sum())


def hot_rows_checksum(job: Job) -> str:
    """Returns the checksum of the rows of data.hot, 16 hex digits; "" if the job has none. Raises as `read_pins`."""
    return "" if job.data.hot is None else checksum(read_pins(Path(job.data.hot), KEY))


def hot_samples(job: Job, num_rows: int) -> HotSamples:
    """Returns those of the job's `num_rows` training rows, kept or made. Raises ConfigError and DataError."""
    assert job.data.hot is not None, "the job file refuses an order of hot blocks without data.hot"
    hot = read_pins(Path(job.data.hot), KEY)
    check_tables(hot, {table.name: table.num_embeddings for table in job.tables}, f"{KEY} = {job.data.hot!r}")
    folder = job.run_dir / "order"
    made_from = origin(job, checksum(hot), num_rows)
    bits = load_bits(folder / "hot-samples", made_from, num_rows)
    if bits is not None:
        return HotSamples(num_rows=num_rows, bits=bits)
    if job.run_dir.is_dir():
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
    with folder_lock(folder / "lock", "hot-samples*"):
        bits = load_bits(folder / "hot-samples", made_from, num_rows)  # another process may have written them meanwhile
        if bits is None:
            bits = np.concatenate([np.zeros(0, np.uint8), *(np.packbits(own) for own in passes(job, hot))])
            if folder.is_dir():
                with suppress(OSError):
                    write_durably(folder / "hot-samples", made_from + bits_checksum(bits) + bits.tobytes())
    return HotSamples(num_rows=num_rows, bits=bits)


def passes(job: Job, hot: Mapping[str, I64]) -> Iterator[Bools]:
    """Yields which samples are hot, in the files' order."""
    plain_job = msgspec.structs.replace(job, data=in_file_order(job.data))
    nothing = np.zeros(0, np.int64)
    features = [hot.get(table.name, nothing) for table in job.tables for _ in table.features]
    for decode in open_reader(plain_job, stream_columns(job)[0]).pending("train", 0):
        batch = decode()
        assert isinstance(batch, Lookups), "a stream of ids gives ids"
        offsets = bag_offsets(batch.ids, batch.offsets)
        are_hot = np.ones(batch.size, np.bool_)
        for f, rows in enumerate(features):
            ends = offsets[f * batch.size : (f + 1) * batch.size + 1]
            cold = np.cumsum(~contained(batch.ids[ends[0] : ends[-1]], rows))
            are_hot &= np.diff(np.append(0, cold)[ends - ends[0]]) == 0
        yield are_hot


def in_file_order(data: Data) -> Data:
    plain = {"order": None, "hot": None, "shuffle": "none", "batch_size": PASS_SAMPLES, "epochs": 1}
    return msgspec.structs.replace(data, **plain)


def contained(ids: I64, rows: I64) -> Bools:
    """Returns whether each id is among the ascending `rows`."""
    if not len(rows):
        return np.zeros(len(ids), np.bool_)
    found: Bools = rows[np.minimum(np.searchsorted(rows, ids), len(rows) - 1)] == ids
    return found


def origin(job: Job, hot_rows: str, num_rows: int) -> bytes:
    files = [(path_text(own), *file_state(own)[:2]) for own in files_of(job, "path")]
    read = msgspec.to_builtins([job.tables, in_file_order(job.data), job.job.seed])
    return digest([read, hot_rows, files, num_rows]).encode()


def load_bits(path: Path, made_from: bytes, num_rows: int) -> Bytes | None:
    try:
        with path.open("rb") as file:
            head = file.read(KEY_BYTES + CHECKSUM_BYTES)
            nbytes = os.fstat(file.fileno()).st_size
        if head[:KEY_BYTES] != made_from or nbytes != len(head) + -(-num_rows // 8):
            return None
        bits = np.memmap(path, np.uint8, "r", offset=len(head))
    except (OSError, ValueError):
        return None
    return bits if head[KEY_BYTES:] == bits_checksum(bits) else None


def bits_checksum(bits: Bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(bits.data).encode()


class HotBlocks:
    """The order of one epoch's rows with alternating runs of hot and cold samples.

        order    h c c h c h c c c h c c     2 blocks:  h h | c c c c | h h | c c c c

    Both kinds keep their order in `order`. The order is a function of the row's number: the counts of each kind before
    each block of `order` give the position of a run.
    """

    def __init__(self, order: RowOrder, hot: HotSamples, num_blocks: int) -> None:
        self._order, self._hot = order, hot
        block_rows, num_rows = order.block_rows, hot.num_rows
        sizes = np.diff(np.minimum(np.arange(-(-num_rows // block_rows) + 1) * block_rows, num_rows))
        counts = hot.counts(block_rows)
        # samples of each kind, hot and cold, before each block, and in total
        self._before = [np.concatenate([[0], np.cumsum(own)]) for own in (counts, sizes - counts)]
        bounds = [own[-1] * np.arange(num_blocks + 1) // num_blocks for own in self._before]
        self._firsts = np.stack([own[:-1] for own in bounds], axis=1).ravel()  # of each run, among samples of its kind
        self._starts = np.concatenate([[0], np.cumsum(np.stack([np.diff(own) for own in bounds], axis=1).ravel())])
        self._last: tuple[int, tuple[Ids, Ids]] | None = None

    def rows(self, start: int, stop: int) -> Ids:
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        parts = []
        for run in range(int(first), int(last) + 1):
            begin, end = max(start, int(self._starts[run])), min(stop, int(self._starts[run + 1]))
            if begin < end:
                moved = int(self._firsts[run] - self._starts[run])
                parts += self._of_kind(run % 2, begin + moved, end + moved)
        return np.concatenate(parts)

    def within(self, start: int, stop: int) -> range:
        """Returns the span of all rows: a block's samples are anywhere, and only formats that can read any row have
        blocks."""
        return range(self._hot.num_rows)

    def _of_kind(self, kind: int, start: int, stop: int) -> list[Ids]:
        """Returns the samples `start` to `stop` of a kind, counted over the epoch; kind 0 is hot, 1 is cold."""
        before = self._before[kind]
        first, last = np.searchsorted(before, [start, stop - 1], side="right") - 1
        blocks = range(int(first), int(last) + 1)
        return [self._split(block)[kind][max(start - before[block], 0) : stop - before[block]] for block in blocks]

    def _split(self, block: int) -> tuple[Ids, Ids]:
        # the last block is kept, because consecutive batches share it
        if self._last is None or self._last[0] != block:
            rows = self._order.block(block)
            first = block * self._order.block_rows
            are_hot = self._hot.are_hot(first, first + len(rows))[rows - first]
            self._last = block, (rows[are_hot], rows[~are_hot])
        return self._last[1]
