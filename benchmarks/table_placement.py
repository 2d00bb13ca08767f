"""How many bytes does a rank send for tables by rows, for whole tables, for pieces of 16 columns, and as
`placement = "auto"` chooses?

Method: the first 32 batches of each log and number of ranks are counted as a run counts them (`counted`), tables
have 128 fp32 columns. Nothing is timed, and every call gives the same. MB a rank and train step, both ways: mean and
busiest rank.

    criteo:1       Criteo 1 TB's cardinalities, one look-up (Zipf 1.05), 4,096 samples a rank: one batch
    criteo:214     the same with MLPerf's 214 look-ups: an id has a fixed bag, itself and ids hashed from it
    NAME=FOLDER    a log in the npy layout, 2,048 samples a rank
    meta=FILE      the uses of a row in one batch of 65,536 samples and 856 tables (dlrm_datasets' locality statistics),
                   thinned to a rank's samples. The file tells no tables apart, so all are equal: only ratios count

    python -m benchmarks.table_placement criteo:1 criteo:214 retail=FOLDER flights=FOLDER meta=FILE
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.planner import job_over
from benchmarks.traffic import log_cardinalities
from rowcast.job.schema import Job, Ranks
from rowcast.job.tables import with_placements
from rowcast.prefetcher.planner.first_batches import (
    MEASURED_BATCHES,
    RECEIVED,
    SENT,
    Traffic,
    chosen,
    counted,
    everywhere,
)
from rowcast.prefetcher.readers.formats.synthetic import Zipf
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.runtime.arrays import GOLDEN, I64, mix

COLUMNS = 128
# rows of Criteo 1 TB's tables, with MLPerf's cap and look-ups (mlcommons/training, recommendation_v2)
CARDINALITIES = """40000000 39060 17295 7424 20265 3 7122 1543 63 40000000 3067956 405282 10 2209 11938 155 4 976 14
    40000000 40000000 40000000 590152 12973 108 36"""
BAGS = "3 2 1 2 6 1 1 1 1 7 3 8 1 6 9 5 1 1 1 12 100 27 10 3 1 1"
META_TABLES, META_SAMPLES = 856, 65_536


def auto_job(data: dict[str, object], cardinalities: Sequence[int], count: int) -> Job:
    job = job_over(data, cardinalities, COLUMNS)
    job = with_placements(job, ["auto"] * len(job.tables))
    return type(job)(**{name: getattr(job, name) for name in job.__struct_fields__} | {"ranks": Ranks(count=count)})


def criteo(is_multi: bool, count: int, samples: int) -> Traffic:
    cardinalities = [int(rows) for rows in CARDINALITIES.split()]
    job = auto_job({"format": "synthetic"}, cardinalities, count)
    rng, size, ids = np.random.default_rng(3), samples * count, list[I64]()
    lengths = [int(length) if is_multi else 1 for length in BAGS.split()]
    for rows, length in zip(cardinalities, lengths, strict=True):
        first = Zipf(rows, 1.05).ranks(rng.random(size))
        bags = np.empty((size, length), np.int64)
        for place in range(length):
            hashed = mix(mix(first.astype(np.uint64)) + np.array([place], np.uint64) * GOLDEN)
            bags[:, place] = hashed % np.uint64(rows) if place else first
        ids.append(bags.ravel())
    offsets = np.concatenate([[0], np.cumsum(np.repeat(lengths, size))])
    batch = Lookups(size=size, ids=np.concatenate(ids), offsets=offsets if is_multi else None)
    return counted(job, [Scheduled.at(step=0, kind="train", train_step=0, epoch=0, batch=batch)])


def log(folder: Path, count: int, samples: int) -> Traffic:
    data = {"format": "criteo-npy", "path": str(folder), "batch_size": samples * count}
    job = auto_job(data, log_cardinalities(folder), count)
    batches = list(islice(schedule(job, open_reader(job)), MEASURED_BATCHES))
    return counted(job, batches)


def meta(file: Path, count: int) -> Traffic:
    """Rows of a use for each bin of a histogram, spread over the ranks' samples: each is looked up by some of them."""
    text = file.read_text()
    lookups, distinct = (float(found) for found in re.findall(r"Avg # of .*: (\d+)", text)[:2])
    shares = [float(found) for found in re.findall(r"^\(.*: ([\d.]+)$", text, re.MULTILINE)]
    of_rows, of_lookups = np.array(shares[:17]) * distinct, np.array(shares[17:34]) * lookups
    of_rows = np.maximum(of_rows, of_lookups / (1.5 * 2.0 ** np.arange(17)))  # a share of 0.000 is rounded
    uses = of_lookups / of_rows
    wanted = float((of_rows * (1 - (1 - 1 / count) ** uses)).sum()) / META_TABLES  # of a table, by a rank
    job = auto_job({"format": "synthetic"}, [round(distinct / META_TABLES)] * META_TABLES, count)
    traffic = Traffic(job)
    traffic.add(META_SAMPLES, [])
    traffic.distinct += round(wanted * count)
    traffic.rows[:, [SENT, RECEIVED]] += round(wanted * (count - 1) / count)
    return traffic


def line(name: str, count: int, traffic: Traffic, job: Job) -> str:
    auto = chosen(job, traffic)
    ways = [*(everywhere(job, way) for way in ("rows", "table", "columns")), auto]
    cells = [f"{own.mean / 1e6:,.3g} / {own.most / 1e6:,.3g}" for own in map(traffic.of, ways)]
    found = Counter(auto)
    return f"| {name} | {count} | {' | '.join(cells)} | {', '.join(f'{found[way]} {way}' for way in sorted(found))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", help="as above")
    parser.add_argument("--ranks", default="2,8,64")
    arguments = parser.parse_args()
    print("| log | ranks | rows | whole tables | columns | auto | its tables |\n|---|---|---|---|---|---|---|")
    for workload in arguments.workloads:
        name, _, path = workload.partition("=")
        for count in map(int, arguments.ranks.split(",")):
            if name.startswith("criteo"):
                traffic = criteo(name == "criteo:214", count, 4096)
            else:
                traffic = meta(Path(path), count) if name == "meta" else log(Path(path), count, 2048)
            print(line(name, count, traffic, traffic.job), flush=True)


if __name__ == "__main__":
    main()
