"""Implements `rowcast score`: runs both processes as for an evaluation, on new samples, and keeps the predictions."""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace
from typer import Option

from rowcast.deploy.local import run_both
from rowcast.job.file import apply_override, parse_job, read_content, refuse_script
from rowcast.job.formats import FORMATS, format_of
from rowcast.job.named_code import code_in, from_file, trusted
from rowcast.job.schema import Job
from rowcast.job.section import without_removed
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.command_options import CheckpointName, GivenConfig, Overrides, Probability, RunFolder, Trust
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.process import Signals
from rowcast.runtime.telemetry.format_numbers import plural
from rowcast.trainer.report.score_place import check_place

GLOB = re.compile(r"[*?[]")


def score(
    run: RunFolder,
    data: Annotated[Path, Option(help="The samples: a file, a folder or a glob, in the format of the training data.")],
    out: Annotated[Path, Option(help="A new file for the scores.", metavar="FILE.csv|FILE.parquet")],
    checkpoint: CheckpointName = None,
    probability: Probability = False,
    overrides: Overrides = None,
    config: GivenConfig = None,
    trust: Trust = None,
) -> Callable[[Signals], None]:
    def main(signals: Signals) -> None:
        check_place(out, "--out")
        chosen = Checkpoints(run, Disk()).choose(checkpoint)
        job = scoring_job(chosen, run, data, overrides or ())
        job = trusted(job, [*(trust or ()), *named_by(config, overrides or ())], line_to_trust)
        with beside(out) as folder:
            job_file, scores = Path(folder) / "job.json", Path(folder) / out.name
            once = replace(job, data=replace(job.data, copies=folder))  # columns of text go with the folder
            job_file.write_bytes(msgspec.json.encode(once.content()))
            given = ["--config", str(job_file)]
            kind = ["--probability"] if probability else []
            named = f"--checkpoint={chosen.name}@{chosen.checksum}"
            run_both(job, [*given, "--eval", named], "eval", [*given, f"--scores={scores}", *kind], signals)
            if not scores.exists():
                raise RowcastError(f"stopped by {signals.stop_reason} before the last sample; {out} was not written")
            check_place(out, "--out")  # another scoring may have ended meanwhile
            scores.rename(out)
        scored = plural(num_rows(out), "row")
        steps = plural(chosen.train_steps, "train step")
        typer.echo(f"scored {scored} of {data} to {out}, by the model after {steps}")

    return main


def named_by(config: Path | None, overrides: Sequence[str]) -> list[str]:
    """Returns the code that the caller has named, in a job file and by --set. Raises ConfigError."""
    content = {} if config is None else read_content(config)
    named = [*code_in(content).values()]
    for override in overrides:
        apply_override(content, override)
    return [*named, *code_in(content).values()]


def line_to_trust(names: Sequence[str]) -> str:
    return shlex.join(["rowcast", *sys.argv[1:], *(f"--trust={name}" for name in names)])


def beside(out: Path) -> TemporaryDirectory[str]:
    """Makes a folder beside `out`. Raises ConfigError."""
    try:
        return TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: nothing can be written in its folder ({error.strerror}); free space there, or give another"
        ) from None


def scoring_job(checkpoint: Manifest, run: Path, data: Path, overrides: Sequence[str]) -> Job:
    """Returns the job of the checkpoint, on other data. Raises ConfigError."""
    content = scoring_content(checkpoint, run, str(data))
    form, known = content["data"]["format"], format_of(content["data"]["format"])
    if not known.has_files and form in FORMATS:
        raise ConfigError(f'--run {run} was trained on data.format = "{form}", which has no files to score')
    if known.has_files and not data.exists() and not GLOB.search(str(data)):  # opening the files tells the rest
        raise ConfigError(f"--data {data}: no such file or folder; correct the name")
    for override in overrides:
        apply_override(content, override)
    return from_file(parse_job(content, f"the job of {run}"))


def scoring_content(checkpoint: Manifest, run: Path, data: str) -> dict[str, Any]:
    refuse_script(checkpoint.job, str(run))
    content = without_removed(msgspec.to_builtins(checkpoint.job))
    own, ranks = content["data"], content["ranks"]
    content["job"]["run_dir"], content["eval"] = str(run), {}
    own |= {"path": data, "eval_path": data, "eval_fraction": 0.0, "follow": False}
    if format_of(own["format"]).named_columns:
        own["columns"]["label_values"] = "none"
    ranks |= {"parts": ranks["parts"] or ranks["count"], "count": 1, "per_host": None}
    content["transport"]["endpoint"] = "ipc"
    content["metrics"] |= {"prefetcher": "127.0.0.1:0", "trainer": "127.0.0.1:0"}  # another run may have the job's
    return content


def num_rows(scores: Path) -> int:
    if scores.suffix == ".csv":
        with scores.open("rb") as lines:
            return sum(1 for _ in lines) - 1
    from pyarrow import parquet as pq  # it takes memory, so not while the two processes run

    return int(pq.read_metadata(scores).num_rows)
