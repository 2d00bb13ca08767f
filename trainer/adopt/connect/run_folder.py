"""Names a script's run directory, and reads its run."""

import sys
from pathlib import Path

import torch

from rowcast.job.schema import Job
from rowcast.runtime.checkpoint_manifest import (
    Manifest,
    beside,
    checked_file,
    checkpoint_folders,
    newest_checkpoint,
    readable,
    write_durably,
)
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import RunDirectory
from rowcast.trainer.models.model_state import Tensors, pack, unpack

# in the run directory: the model state after the script's loop over the epochs, as safetensors
FINAL_FILE = "script.over"
FINAL_RUN = "over.run"  # u8: the last checkpoint's run and train steps
CANNOT_RESUME = (
    "{} holds a run of {} train steps, but the model and its optimizer begin from scratch: connect(..., dense=(model, "
    "optimizer)) continues that run, and fresh=True begins a new one, whose first checkpoint replaces it"
)
ANOTHER_JOB = (
    "{} holds a run of {} train steps with other settings than this script gives: {}; restore them to continue it, or "
    "give another run_dir, or fresh=True, which begins a new run whose first checkpoint replaces that one"
)
HAS_TABLES = (
    "{} holds a run of {} train steps, which continues with its own tables, but load_state_dict() has given others: "
    "omit that call to continue the run (ebc.has_run says whether there is one), or give fresh=True to begin a new run "
    "with them, whose first checkpoint replaces it"
)


def default_run_dir() -> Path:
    """runs/<the script's name>, in a notebook or an interactive session runs/notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    script = Path("notebook" if file is None else file).resolve()
    return Path("runs") / (script.parent.name if script.stem == "__main__" else script.stem)


def refuse_to_resume(run_dir: Path, train_steps: int, *, has_dense: bool, has_tables: bool) -> None:
    """Raises ConfigError if a script without `dense`, or with loaded tables, cannot continue the run."""
    if not has_dense:
        raise ConfigError(CANNOT_RESUME.format(run_dir, train_steps))
    if has_tables:
        raise ConfigError(HAS_TABLES.format(run_dir, train_steps))


def newest_run(run_dir: Path) -> Manifest | None:
    """Returns the manifest of the newest readable checkpoint; None without train steps before it."""
    newest = next(
        (found for folder in checkpoint_folders(run_dir / "checkpoints") if (found := readable(folder)) is not None),
        None,
    )
    return newest if newest is not None and newest.train_steps else None


def may_hold_training(run_dir: Path) -> bool:
    """Returns whether the directory may hold a trained run, even a damaged or a replacing one."""
    root = (run_dir / "checkpoints").resolve()
    manifests = (readable(folder) for place in (root, *beside(root)) for folder in checkpoint_folders(place))
    return any(manifest is None or manifest.train_steps for manifest in manifests)


def is_complete(job: Job, newest: Manifest, max_steps: int | None) -> bool:
    """Returns whether the run is over and the job adds no train steps. Raises ConfigError if that cannot be read."""
    completion = RunDirectory(job.run_dir, "trainer").completion()
    return completion is not None and not completion.leaves_more(job.data.epochs, job.eval.patience, max_steps)


def dense_tensors(run_dir: Path, manifest: Manifest) -> Tensors:
    """Returns the model state of a checkpoint. Raises DataError."""
    if manifest.dense is None:
        return {}
    return unpack(checked_file(run_dir / "checkpoints", manifest.dense).read_bytes())


def checkpoint_of(run_dir: Path, run_id: str | None, train_steps: int) -> str | None:
    """Returns the name of the newest checkpoint if it is of this run and train step; otherwise None.

    An earlier run that a fresh one has not replaced yet may have a checkpoint of the same train step."""
    folder = newest_checkpoint(run_dir)
    newest = None if folder is None else readable(folder)  # a fresh run may be replacing it at this moment
    if newest is None or newest.train_steps != train_steps or newest.run_id != run_id:
        return None
    return newest.name


def keep_final(run_dir: Path, tensors: Tensors) -> None:
    newest = newest_run(run_dir)
    if newest is not None:
        run = torch.frombuffer(bytearray(described_run(newest)), dtype=torch.uint8)
        write_durably(run_dir / FINAL_FILE, pack({**tensors, FINAL_RUN: run}))


def final_tensors(run_dir: Path, newest: Manifest) -> Tensors | None:
    """Returns what `keep_final` saved for this run; None if it did not. Raises DataError."""
    try:
        tensors = unpack((run_dir / FINAL_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return tensors if FINAL_RUN in tensors and tensors[FINAL_RUN].numpy().tobytes() == described_run(newest) else None


def described_run(newest: Manifest) -> bytes:
    return f"{newest.run_id} {newest.train_steps}".encode()
