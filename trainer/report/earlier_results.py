"""Keeps the results of an earlier run until the run that replaces it has a checkpoint."""

import os
from contextlib import suppress
from pathlib import Path

from rowcast.protocol.messages import Welcome
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.report.results import PAGE, REPORT, RESULTS


class EarlierResults:
    """Results of an earlier run, kept in `<run_dir>/earlier` until the run that replaces it has a checkpoint on disk.

    `<run_dir>/earlier/run_id` names that run. It is called `run_id.partial` while that run's results are being moved. A
    folder with neither file is not ours, nor is any other file in it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "earlier"
        self._owner, self._moving = (self._folder / name for name in ("run_id", "run_id.partial"))

    def check(self, welcome: Welcome, *, fresh: bool) -> None:
        """Raises ConfigError if the run would lose results of an earlier one, or cannot keep them. `fresh`: this
        command also replaces them."""
        if welcome.fresh:
            self.check_place()
        resumes = welcome.checkpoint != "" and not welcome.fresh
        if (self._run_dir / REPORT).exists() and not fresh and not resumes:
            raise ConfigError(
                f"a new run begins, but {self._run_dir} holds the report of an earlier one; add --fresh to this "
                "command too, or set another job.run_dir in both"
            )

    def begin(self, welcome: Welcome) -> None:
        """Begins a run, which replaces the earlier one or continues it. Raises ConfigError."""
        if welcome.fresh:
            self.set_aside(welcome.replaces)
            return
        self.give_up()
        for name in (REPORT, PAGE):
            (self._run_dir / name).unlink(missing_ok=True)  # written by this run before it was stopped

    def end(self, welcome: Welcome, *, has_checkpoint: bool) -> None:
        """Ends that run, also after a loss. Without a checkpoint it has replaced nothing."""
        if welcome.fresh and has_checkpoint:
            self.give_up()
        elif welcome.fresh:
            self.bring_back()

    def check_place(self) -> None:
        """Raises ConfigError if foreign files are where results will be set aside."""
        is_free = not os.path.lexists(self._folder) or is_own_folder(self._folder, empty=True)
        if self._results() and not is_free and self._held() is None:
            raise ConfigError(
                f"{self._folder} is where a fresh run keeps the results of the one before until its first checkpoint, "
                "but it holds files that rowcast did not put there; move them elsewhere and start again"
            )

    def set_aside(self, run_id: str) -> None:
        """Sets results aside for a new run, which replaces run `run_id` ("" if that has no checkpoint). Raises
        ConfigError.

        If a killed run has already set aside the results of run `run_id`, deletes the killed run's results."""
        held = self._held()
        if held == run_id and self._owner.exists():
            for path in self._results():
                path.unlink()
            return
        if held is not None and held != run_id:
            self.give_up()  # they belong to a run that was replaced meanwhile
        self.check_place()
        try:
            self._move(self._results(), run_id)
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: the results of the earlier run cannot be kept there ({error.strerror}); let this "
                "user write there and start again"
            ) from None

    def bring_back_of(self, run_id: str) -> None:
        """Restores the results of run `run_id` that a killed run set aside but did not replace."""
        if self._held() == run_id:
            self.bring_back()

    def bring_back(self) -> None:
        """Restores the earlier results: the new run ended without a checkpoint."""
        if self._held() is not None:
            for name in RESULTS:
                with suppress(FileNotFoundError):
                    (self._folder / name).replace(self._run_dir / name)
            self.give_up()

    def give_up(self) -> None:
        """Deletes the earlier results: their run is replaced. Other files in the folder stay."""
        if self._held() is not None:
            with suppress(OSError):
                for name in (*RESULTS, self._moving.name, self._owner.name):
                    (self._folder / name).unlink(missing_ok=True)
                self._folder.rmdir()

    def _results(self) -> list[Path]:
        return [path for name in RESULTS if (path := self._run_dir / name).exists()]

    def _move(self, results: list[Path], run_id: str) -> None:
        if results or self._moving.exists():
            self._folder.mkdir(exist_ok=True)
            self._moving.write_text(run_id)
            for path in results:
                path.replace(self._folder / path.name)
            self._moving.replace(self._owner)

    def _held(self) -> str | None:
        """Returns the run of the results in the folder; None if the folder is not ours."""
        notes = (note for note in (self._owner, self._moving) if note.is_file() and not note.is_symlink())
        note = next(notes, None) if is_own_folder(self._folder) else None
        return None if note is None else note.read_text(errors="replace")


def is_own_folder(path: Path, *, empty: bool = False) -> bool:
    return path.is_dir() and not path.is_symlink() and not (empty and any(path.iterdir()))
