"""A notebook's cells that are run again, after they ended, or failed with an error that is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rowcast
from rowcast.runtime.errors import ConfigError
from tests.adopt.scripts import Launches, copied, make, same, train_on
from tests.support.facts import facts

MAKE = "model, optimizer = make(run_dir)"
CONNECT = "loader = rowcast.connect(model.ebc, 'tests.adopt.clicks:listed', epochs=2, dense=(model, optimizer))"
LOOP = "train(loader, model, optimizer)"
WHOLE = "\n".join([MAKE, CONNECT, LOOP])


class Notebook:
    """Runs cells in one namespace, and keeps the last error with its frames, as IPython does."""

    def __init__(self, run_dir: Path) -> None:
        self.steps: list[int] = []
        self.act: Callable[[int], object] = lambda step: None
        self.last_error: BaseException | None = None
        self.names: dict[str, Any] = {"make": make, "rowcast": rowcast, "run_dir": run_dir, "train": self._train}

    def run(self, cell: str) -> None:
        try:
            exec(cell, self.names)
        except BaseException as error:
            self.last_error = error
            raise

    def _train(self, loader: Any, model: Any, optimizer: Any) -> None:
        for _ in loader.epochs:
            for batch in loader:
                train_on(model, optimizer, batch)
                self.steps.append(batch.train_step)
                self.act(batch.train_step)

    def state(self) -> dict[str, torch.Tensor]:
        return copied(self.names["model"].state_dict())


def test_a_cell_that_failed_is_run_again_while_its_error_is_kept(
    tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(tmp_path / "run")
    notebook.act = lambda step: 1 // (4 - step)
    with pytest.raises(ZeroDivisionError):
        notebook.run(WHOLE)
    notebook.act = lambda step: None
    notebook.run(WHOLE)
    assert notebook.steps == [*range(5), *range(8)], "there was no checkpoint yet"
    assert "ends the run that an earlier loader of this process has open" in capfd.readouterr().err
    undisturbed = Notebook(tmp_path / "undisturbed")
    undisturbed.run(WHOLE)
    assert same(notebook.state(), undisturbed.state())


def test_a_cell_that_ended_trains_nothing_when_it_is_run_again(
    tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(tmp_path)
    notebook.run(WHOLE)
    ended = notebook.state()
    notebook.run(LOOP)
    notebook.run(WHOLE)
    assert notebook.steps == list(range(8))
    assert "is complete after 8 train steps, and nothing is trained" in capfd.readouterr().err
    assert same(notebook.state(), ended)


def test_a_connection_that_is_made_again_needs_a_module_of_its_own(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    notebook.run(MAKE)
    notebook.run(CONNECT)
    with pytest.raises(ConfigError, match=facts("EmbeddingBagCollection", "a loader already")):
        notebook.run(CONNECT)
