"""The run directory of a script that names none: `runs/<the script's name>`, which remembers the script, so that no other one takes it."""

import os
import sys
from pathlib import Path

from protocol.errors import ConfigError
from protocol.manifest import newest_checkpoint

NOTEBOOK = "notebook"  # a session without a file
SCRIPT_FILE = "script"  # in the run directory: the path of the script from there


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
            raise ConfigError(f"{run_dir} holds a run that was given this directory by name; set run_dir=... for the run of {described()}")
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
