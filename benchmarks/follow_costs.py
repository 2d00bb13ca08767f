"""What does following a folder cost, and how late are rows served?

    python -m benchmarks.follow_costs [waits] [serving] [price] [flat] [auc]

waits      whole batches that lie in the folder untrained, beyond `lookahead.horizon`, once nothing arrives
serving    from a file's rename until `Model.refresh` sees a step after its last batch, with checkpoint.every = "1s" and
           `rowcast publish --every 1s`: seconds, and checkpoints made since that step
price      processor seconds of a followed run over files that are all there, over those of the ordinary job with the
           same horizon and bundle, and with its own
flat       bytes of the last manifest, its files, and the prefetcher's memory, for 20 times as many files that leave
auc        of the last tenth of the retail log (ROWCAST_RETAIL), with `forget --untrained-for N` after every N of 1,128
           train steps, and the rows that the last checkpoint holds
flights    the same of the log of flights that the package has: 977 train steps of 32 samples, one epoch in time order
rows       rows of the last checkpoint after each of 6 such calls where ids are born for ever, over those that the last
           2 N train steps look up
"""

import gzip
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.follow import (
    BATCH_SIZE,
    FIRST_FILES,
    ROWS,
    FilesThatArrive,
    FollowingRun,
    Way,
    await_end,
    checkpoints,
    job_content,
    read_data,
    write_config,
)
from benchmarks.machine import machine, write_result
from rowcast.prefetcher.checkpoints.forget import forget_rows
from rowcast.runtime.checkpoint_manifest import read_manifest
from rowcast.serving.model import Model

DEPTH, QUIET_S, LIMIT_S = 2, 8.0, 300.0
RETAIL, RETAIL_STEPS, FORGETS = Path(__file__).parents[1] / "examples" / "retail.toml", 1128, (100, 200, 400)
FLIGHT_STEPS, BORN_CALLS, BORN_FOR = 977, 6, 40
SERVED, PRICED_FILES, PRICED_ROWS, ROUNDS = 6, 30, 20_000, 2


def write_job(folder: Path, way: Way, name: str = "follow", *, follow: bool = True) -> Path:
    write_config(folder / f"{name}.json", job_content(way, folder, name, "", follow=follow))
    return folder / f"{name}.json"


def steps_of(run_dir: Path) -> list[int]:
    return [read_manifest(checkpoint).train_steps for checkpoint in checkpoints(run_dir)]


def settled_steps(run_dir: Path) -> int:
    """Returns the train steps of the newest checkpoint once none has been made for long."""
    steps, until_s = 0, time.monotonic() + LIMIT_S
    quiet_s = time.monotonic()
    while (not steps or time.monotonic() - quiet_s < QUIET_S) and time.monotonic() < until_s:
        newest = max(steps_of(run_dir), default=0)
        if newest != steps:
            steps, quiet_s = newest, time.monotonic()
        time.sleep(0.5)
    return steps


def waits() -> dict[str, int]:
    beyond = {}
    for way in (Way(), Way(workers=3), Way(ranks=2), Way(ranks=2, workers=3)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            files = FilesThatArrive(folder)
            for _ in range(FIRST_FILES + 3):
                files.arrive()
            with FollowingRun(write_job(folder, way), folder / "log"):
                whole = files.number * ROWS // BATCH_SIZE
                beyond[f"{way.ranks} ranks, {way.workers} decoders"] = (
                    whole - settled_steps(folder / "follow") - 2 * DEPTH - 2
                )
    return beyond


def serving() -> dict[str, Any]:
    seconds, made = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = FilesThatArrive(folder)
        for _ in range(FIRST_FILES):
            files.arrive()
        run_dir, served = folder / "follow", folder / "served"
        with FollowingRun(write_job(folder, Way()), folder / "log"):
            settled_steps(run_dir)
            command = [sys.executable, "-m", "rowcast", "publish", "--run", str(run_dir), "--to", str(served)]
            with subprocess.Popen([*command, "--every", "1s", "--metrics", "127.0.0.1:0"]) as publisher:
                while not (served / "CURRENT").exists():
                    time.sleep(0.1)
                model = Model(served)
                for _ in range(SERVED):
                    files.arrive()
                    began_s, last = time.monotonic(), -(-files.number * ROWS // BATCH_SIZE)
                    for _ in range(2):  # files of the horizon
                        files.arrive()
                    since = set[int]()
                    while model.version.position.train_step < last:
                        since |= {step for step in steps_of(run_dir) if step >= last}
                        model.refresh()
                        time.sleep(0.05)
                    seconds.append(round(time.monotonic() - began_s, 2))
                    made.append(len(since))
                publisher.terminate()
    return {"seconds": seconds, "median_s": statistics.median(seconds), "checkpoints": made}


def price() -> dict[str, Any]:
    used: dict[str, list[float]] = {"follow": [], "finished": [], "finished, its own horizon and bundle": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = FilesThatArrive(folder, PRICED_ROWS)
        for _ in range(PRICED_FILES):
            files.arrive()
        (files.arriving / "END").touch()
        for number in range(ROUNDS):
            for kind in used:
                content = job_content(Way(), folder, f"{kind}{number}", "", follow=kind == "follow")
                if kind != "finished, its own horizon and bundle":
                    content["lookahead"] |= {"horizon": 2 * DEPTH + 2, "bundle": 1}  # the defaults of data.follow
                write_config(folder / "price.json", content)
                before = children_s()
                await_end(folder / "price.json", folder / "log")
                used[kind].append(children_s() - before)
    return {**used, "ratio": min(used["follow"]) / min(used["finished"])}


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def flat() -> dict[str, Any]:
    found = {}
    for number in (20, 400):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            files, run_dir = FilesThatArrive(folder), folder / "follow"
            for _ in range(20):
                files.arrive()
            with FollowingRun(write_job(folder, Way()), folder / "log") as run:
                while files.number < number:
                    for oldest in checkpoints(run_dir)[:1]:
                        files.remove(read_data(oldest).last_before)
                    untrained = files.number - max(steps_of(run_dir), default=0) * BATCH_SIZE // ROWS
                    for _ in range(min(20 - untrained, number - files.number)):
                        files.arrive()
                    time.sleep(0.1)
                (files.arriving / "END").touch()
                run.process.wait(LIMIT_S)
            report = msgspec.json.decode((run_dir / "report.json").read_bytes())
            last = checkpoints(run_dir)[-1]
            found[f"{number} files"] = {
                "steps": report["train_steps"],
                "left": files.removed,
                "manifest_bytes": (last / "manifest.json").stat().st_size,
                "listed": len(read_data(last).files),
                "prefetcher_mb": report["host_bytes"] / 1e6,
            }
    return found


def auc() -> dict[str, Any]:
    sizes = {"data.batch_size": "256", "model.bottom_mlp": "[64, 16]", "model.top_mlp": "[64, 1]"}
    return forgetting(RETAIL, RETAIL_STEPS, {"data.path": f"{os.environ['ROWCAST_RETAIL']}/train.tsv", **sizes})


def flights() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        log, job = Path(name) / "flights.csv", Path(name) / "job.toml"
        log.write_bytes(gzip.decompress((files("rowcast") / "flights.csv.gz").read_bytes()))
        command = [sys.executable, "-m", "rowcast", "new", "--data", str(log), "--label", "late", "--dense", "miles"]
        job.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
        once = {"data.epochs": "1", "data.shuffle": "none", "data.batch_size": "32", "eval.patience": "0"}
        return forgetting(job, FLIGHT_STEPS, once)


def forgetting(job: Path, num_steps: int, changes: dict[str, str]) -> dict[str, Any]:
    """AUC and rows of a job without and with `forget`, by its `--untrained-for`."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for untrained_for in (0, *FORGETS):
            run_dir, every = Path(name) / str(untrained_for), untrained_for or num_steps
            options = [f"--set={key}={value}" for key, value in {"job.run_dir": str(run_dir), **changes}.items()]
            for steps in range(every, num_steps, every):
                await_end(job, Path(name) / "log", *options, "--max-steps", str(steps))
                forget_rows(run_dir, untrained_for)
            await_end(job, Path(name) / "log", *options)
            report = msgspec.json.decode((run_dir / "report.json").read_bytes())
            rows = read_manifest(checkpoints(run_dir)[-1]).num_rows
            found[f"N = {untrained_for}"] = {"auc": report["auc"], "steps": report["train_steps"], "rows": rows}
    return found


def rows() -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arriving = FilesThatArrive(folder)
        for _ in range(-(-BORN_CALLS * BORN_FOR * BATCH_SIZE // ROWS)):
            arriving.arrive()
        job = write_job(folder, Way(), "born", follow=False)
        ids = pa.concat_tables(pq.read_table(path) for path in sorted((folder / "finished").iterdir()))
        for steps in range(BORN_FOR, BORN_CALLS * BORN_FOR + 1, BORN_FOR):
            await_end(job, folder / "log", "--max-steps", str(steps))
            kept = forget_rows(folder / "born", BORN_FOR)[0].num_rows
            last = ids.slice(max(steps - 2 * BORN_FOR, 0) * BATCH_SIZE, 2 * BORN_FOR * BATCH_SIZE)
            of_last = sum(len(pc.unique(last[column])) for column in ("user", "item"))
            found[f"after {steps} steps"] = {"rows": kept, "of the last 2 N": of_last, "share": kept / of_last}
    return found


MEASURES = {"waits": waits, "serving": serving, "price": price, "flat": flat, "flights": flights, "rows": rows}
if "ROWCAST_RETAIL" in os.environ:
    MEASURES["auc"] = auc


def main() -> int:
    results: dict[str, Any] = {}
    print(machine())
    for name in sys.argv[1:] or MEASURES:
        results[name] = MEASURES[name]()
        print(name, results[name], flush=True)
    write_result("follow_costs", **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
