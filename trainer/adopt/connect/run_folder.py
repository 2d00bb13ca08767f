"""Names a script's run directory, checks its owner script, and reads its run.

runs/<the script's name>     by default; it records the script, so that no other script uses it
"""

import os
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
from rowcast.runtime.disk import not_a_link
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import RunDirectory
from rowcast.trainer.models.model_state import Tensors, pack, unpack

NOTEBOOK = "notebook"  # a session without a file
SCRIPT_FILE = "script"  # in the run directory: the path of the script from there
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
    script = own_script()
    if script is None:
        return Path("runs") / NOTEBOOK
    return Path("runs") / (script.parent.name if script.stem == "__main__" else script.stem)


def own_script() -> Path | None:
    """The script's path; None in a notebook or an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else Path(file).resolve()


def check_owner(run_dir: Path) -> None:
    """Raises ConfigError if the directory, which is this script's by default, belongs to another script."""
    record = run_dir / SCRIPT_FILE
    if not record.exists():
        if newest_checkpoint(run_dir) is not None:
            raise ConfigError(
                f"{run_dir} holds a run that was given this directory by name; set run_dir=... for the run of "
                f"{described()}"
            )
        return
    made_by = record.read_text().strip()
    if made_by != described_from(run_dir):
        named = made_by if made_by == NOTEBOOK else os.path.normpath(run_dir.resolve() / made_by)
        raise ConfigError(
            f"{run_dir} is the run directory of {named}, and by default also of {described()}; set another one by "
            "EmbeddingBagCollection(..., run_dir=...)"
        )


def claim(run_dir: Path) -> None:
    """Records this script as the owner. Raises ConfigError if there is a different one, OSError if it cannot be
    written."""
    check_owner(run_dir)
    with open(run_dir / SCRIPT_FILE, "w", opener=not_a_link) as record:
        record.write(f"{described_from(run_dir)}\n")


def described() -> str:
    return str(own_script() or "a notebook or an interactive session")


def described_from(run_dir: Path) -> str:
    """Returns a relative path, so that script and run directory may move together."""
    script = own_script()
    return NOTEBOOK if script is None else os.path.relpath(script, run_dir.resolve())


# the run in the directory


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
