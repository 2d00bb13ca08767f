"""What do the ids of a step cost the prefetcher of one rank among N?

Method: a log in the npy layout, the same samples a rank for every N, as many parts as ranks or a multiple. Each turn
takes one batch for every N, one after the other in one thread, and times rank 0 by the processor time of the thread:

    whole      cut the batch of all ranks, group all parts, checksum, exchange (tests/support/exchange_oracle.py)
    own        cut the rank's samples, group them, checksum, `want`, `pack` for others, `unpack` theirs, `complete`

Both must give the same plans. Figures are medians of the turns; reading is not counted. Ratios are to `whole` of the
first N. The last column counts the bytes of the lists that the rank sends.

    python -m benchmarks.rank_ids FOLDER --samples 2048 --ranks 1,2,4,8,16,64       the folder holds day_0_*.npy
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import TypeVar

from benchmarks.machine import write_result
from benchmarks.traffic import log_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.pipeline.key_exchange import Unpacker, pack
from rowcast.prefetcher.planner.exchange import ExchangedRows, OwnRows, ShareOfBatch, own_rows
from rowcast.prefetcher.planner.grouping import JointGrouper
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import Lookups, ids_checksum
from rowcast.protocol.parts import Rank, Shards, ids_of_samples, parts_of, samples_of
from tests.support.exchange_oracle import assert_same, shared_rows_of

MOST_BATCHES = 8
STEPS = ("cut", "group", "want", "pack", "unpack", "complete")
Result = TypeVar("Result")


class FirstRank:
    """Rank 0 of `count`, and what it spends on each batch."""

    def __init__(self, job: Job, count: int, parts_per_rank: int) -> None:
        groups = group_specs(job)
        self.rank = Rank(number=0, count=count, parts=count * parts_per_rank)
        self.batches = [own.batch.lookups for own in islice(schedule(job, open_reader(job)), MOST_BATCHES)]
        self.ms = defaultdict[str, list[float]](list)
        self.sent_bytes = self.sent_keys = 0
        self._grouper = JointGrouper(groups)
        self._shards = [Shards(group.tables, count) for group in groups]
        self._share = ShareOfBatch(groups, self._grouper, self.rank)
        self._unpacker = Unpacker(groups, self._shards, 0)

    def turn(self, batch: Lookups) -> None:
        k = self.rank.parts_per_rank
        parts = parts_of(batch, self.rank.parts, ())
        others = [self._share.want(parts[first : first + k]) for first in range(k, len(parts), k)]
        lists = [pack([rows.wanted[0] for rows in of_rank]) for of_rank in others]
        expected = self._timed("whole", lambda: self._whole(batch))
        samples = ids_of_samples(batch, samples_of(batch.size, self.rank), ())
        cut = self._timed("cut", lambda: (parts_of(samples, k, ()), ids_checksum(samples))[0])
        grouped = self._timed("group", lambda: list(map(self._grouper.group, cut)))
        own = self._timed(
            "want", lambda: tuple(map(own_rows, zip(*grouped, strict=True), repeat(()), self._shards, repeat(0)))
        )
        sent = self._timed("pack", lambda: self._packed(own))
        received = self._timed("unpack", lambda: [self._unpacker.unpack(memoryview(content)) for content in lists])
        asked = [tuple(rows.wanted[0] for rows in own), *received]
        found = self._timed("complete", lambda: self._share.complete(own, asked))
        assert_same(found, expected, "rank 0")
        self.sent_bytes += sum(map(len, sent))
        self.sent_keys += sum(len(keys) for rows in own for keys in rows.wanted[1:])

    def _whole(self, batch: Lookups) -> tuple[ExchangedRows, ...]:
        ids_checksum(batch)
        by_part = [self._grouper.group(part) for part in parts_of(batch, self.rank.parts, ())]
        by_group = zip(zip(*by_part, strict=True), self._shards, strict=True)
        return tuple(shared_rows_of(parts, shards, self.rank) for parts, shards in by_group)

    def _packed(self, own: Sequence[OwnRows]) -> list[bytes]:
        return [pack([rows.wanted[owner] for rows in own]) for owner in range(1, self.rank.count)]

    def _timed(self, name: str, call: Callable[[], Result]) -> Result:
        began_s = time.thread_time()
        result = call()
        self.ms[name].append(1e3 * (time.thread_time() - began_s))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=2048, help="of a rank")
    parser.add_argument("--parts", type=int, default=1, help="of a rank")
    parser.add_argument("--ranks", default="1,2,4,8,16,64")
    parser.add_argument("--turns", type=int, default=16)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.ranks.split(",")]
    ranks = [FirstRank(log_job(arguments.folder, n * arguments.samples), n, arguments.parts) for n in counts]
    for turn in range(arguments.turns):
        for rank in ranks:
            rank.turn(rank.batches[turn % len(rank.batches)])
    medians = [{name: statistics.median(own) for name, own in rank.ms.items()} for rank in ranks]
    print(f"| ranks | whole, ms | own, ms | {' / '.join(STEPS)} | ratio | ratio | bytes a key |\n|{'---|' * 7}")
    for rank, ms in zip(ranks, medians, strict=True):
        own, base = sum(ms[name] for name in STEPS), medians[0]["whole"]
        steps = " / ".join(f"{ms[name]:.2f}" for name in STEPS)
        ratios = f"{ms['whole'] / base:.2f} | {own / base:.2f} | {rank.sent_bytes / max(1, rank.sent_keys):.2f}"
        print(f"| {rank.rank.count} | {ms['whole']:.2f} | {own:.2f} | {steps} | {ratios} |")
    write_result("rank_ids", ranks=dict(zip(counts, medians, strict=True)))


if __name__ == "__main__":
    main()
