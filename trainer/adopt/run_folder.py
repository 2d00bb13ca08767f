"""The run directory of a script: what it is called where the script names none, whose it is, and which run it holds.

runs/<the script's name>     by default; it remembers the script, so that no other one takes it
"""

import os
import sys
from pathlib import Path

import torch

from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.runtime.checkpoint_manifest import (
    Manifest,
    beside,
    checked_file,
    checkpoint_folders,
    newest_checkpoint,
    read_manifest,
    write_durably,
)
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.run_directory import RunDirectory
from rowcast.trainer.models.model_state import Tensors, pack, unpack

NOTEBOOK = "notebook"  # a session without a file
SCRIPT_FILE = "script"  # in the run directory: the path of the script from there
# in the run directory: the dense side when the script had left its loop over the epochs, as safetensors
OVER_FILE = "script.over"
OVER_RUN = "over.run"  # u8: the last checkpoint's run and train steps
CANNOT_GO_ON = (
    "{} holds a run of {} train steps, but the model and its optimizer begin anew: connect(..., dense=(model, optimizer)) goes on where "
    "that run stands, and fresh=True begins a new one, whose first checkpoint replaces it"
)
ANOTHER_JOB = (
    "{} holds a run of {} train steps with other tables, row optimizer, data or seed than this script gives: make them what they were to "
    "go on, or give another run_dir, or fresh=True, which begins a new run whose first checkpoint replaces that one"
)
HAS_TABLES = (
    "{} holds a run of {} train steps, which goes on with its own tables, but load_state_dict() has given others: leave that away to go "
    "on (ebc.has_run says whether there is a run), or give fresh=True to begin a new run with them, whose first checkpoint replaces it"
)


def default_run_dir() -> Path:
    script = own_script()
    if script is None:
        return Path("runs") / NOTEBOOK
    return Path("runs") / (script.parent.name if script.stem == "__main__" else script.stem)


def own_script() -> Path | None:
    """None in a notebook or an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else Path(file).resolve()


def check_owner(run_dir: Path) -> None:
    """Raises ConfigError where the directory, which this script has by default, is another one's."""
    record = run_dir / SCRIPT_FILE
    if not record.exists():
        if newest_checkpoint(run_dir) is not None:
            raise ConfigError(
                f"{run_dir} holds a run that was given this directory by name; set run_dir=... for the run of {described()}"
            )
        return
    made_by = record.read_text().strip()
    if made_by != described_from(run_dir):
        named = made_by if made_by == NOTEBOOK else os.path.normpath(run_dir.resolve() / made_by)
        raise ConfigError(
            f"{run_dir} is the run directory of {named}, and that of {described()} by default too; set another one by "
            "EmbeddingBagCollection(..., run_dir=...)"
        )


def claim(run_dir: Path) -> None:
    """The directory is this script's from now on. Raises ConfigError where it is another one's, OSError where it cannot be written."""
    check_owner(run_dir)
    (run_dir / SCRIPT_FILE).write_text(f"{described_from(run_dir)}\n")


def described() -> str:
    return str(own_script() or "a notebook or an interactive session")


def described_from(run_dir: Path) -> str:
    """A relative path, so that script and run directory may move together."""
    script = own_script()
    return NOTEBOOK if script is None else os.path.relpath(script, run_dir.resolve())


# the run that is there


def refuse_to_go_on(run_dir: Path, train_steps: int, *, has_dense: bool, has_tables: bool) -> None:
    """Raises ConfigError where a run of `train_steps` cannot go on with a script that `has_tables` of its own."""
    if not has_dense:
        raise ConfigError(CANNOT_GO_ON.format(run_dir, train_steps))
    if has_tables:
        raise ConfigError(HAS_TABLES.format(run_dir, train_steps))


def newest_run(run_dir: Path) -> Manifest | None:
    """The newest checkpoint whose manifest can be read, where train steps were done before it."""
    newest = next(
        (found for folder in checkpoint_folders(run_dir / "checkpoints") if (found := readable(folder)) is not None),
        None,
    )
    return newest if newest is not None and newest.train_steps else None


def may_hold_training(run_dir: Path) -> bool:
    """Whether a trained run may be here, also one that only the prefetcher can judge: damaged, or not yet in its place."""
    root = (run_dir / "checkpoints").resolve()
    found = (readable(folder) for own in (root, *beside(root)) for folder in checkpoint_folders(own))
    return any(manifest is None or manifest.train_steps for manifest in found)


def readable(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where there is none any more, or it is damaged."""
    try:
        return read_manifest(folder)
    except DataError:
        return None


def is_complete(job: Job, newest: Manifest, max_steps: int | None) -> bool:
    """Whether the run is over, and the job gives it nothing more to train. Raises ConfigError where that cannot be read."""
    completion = RunDirectory(job.run_dir, "trainer").completion()
    return completion is not None and not completion.leaves_more(job.data.epochs, max_steps)


def is_of_another_job(job: Job, newest: Manifest) -> bool:
    """Whether the run was trained by other settings. Whether its data set is as large as it was only the prefetcher knows."""
    return parse_job(newest.job, str(job.run_dir)).training_digest([]) != job.training_digest([])


def dense_tensors(run_dir: Path, manifest: Manifest) -> Tensors:
    """The dense side of a checkpoint. Raises DataError."""
    if manifest.dense is None:
        return {}
    return unpack(checked_file(run_dir / "checkpoints", manifest.dense).read_bytes())


def checkpoint_of(run_dir: Path, run_id: str | None, train_steps: int) -> str | None:
    """The name of the newest checkpoint, where it is of this run and of that train step: an earlier run, whose place a
    fresh one has not taken yet, may have one of that step too."""
    folder = newest_checkpoint(run_dir)
    newest = None if folder is None else readable(folder)  # a fresh run may be taking the place just now
    if newest is None or newest.train_steps != train_steps or newest.run_id != run_id:
        return None
    return newest.name


def keep_over(run_dir: Path, tensors: Tensors) -> None:
    """The script has done what it does after its last epoch, and this is its dense side now."""
    newest = newest_run(run_dir)
    if newest is not None:
        write_durably(
            run_dir / OVER_FILE,
            pack({**tensors, OVER_RUN: torch.frombuffer(bytearray(described_run(newest)), dtype=torch.uint8)}),
        )


def over_tensors(run_dir: Path, newest: Manifest) -> Tensors | None:
    """What `keep_over` has kept of this run; None where the script did not come so far. Raises DataError."""
    try:
        tensors = unpack((run_dir / OVER_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return tensors if OVER_RUN in tensors and tensors[OVER_RUN].numpy().tobytes() == described_run(newest) else None


def described_run(newest: Manifest) -> bytes:
    return f"{newest.run_id} {newest.train_steps}".encode()
