"""A script's run keeps the number of torch's threads with which it began."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rowcast
from rowcast.runtime.errors import ConfigError
from tests.adopt.scripts import Launches, make, train_all, train_until
from tests.support.facts import facts

DATASET = "tests.adopt.clicks:train"


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def begin(folder: Path) -> None:
    """Stops after step 2, with two threads."""
    torch.set_num_threads(2)
    model, optimizer = make(folder)
    loader = rowcast.connect(model.ebc, DATASET, dense=(model, optimizer))
    train_until(model, optimizer, loader, 2, loader.stop)


def test_a_script_with_another_number_gets_the_recorded_one_and_is_told(
    tmp_path: Path, launches: Launches, capfd: Any
) -> None:
    begin(tmp_path)
    assert "threads" not in capfd.readouterr().err
    torch.set_num_threads(1)
    model, optimizer = make(tmp_path)
    assert len(train_all(model, optimizer, rowcast.connect(model.ebc, DATASET, dense=(model, optimizer)))) == 5
    assert torch.get_num_threads() == 2
    assert "keeps its 2 threads; a new run would have 1 here" in capfd.readouterr().err


def test_a_script_that_states_another_number_is_refused(tmp_path: Path, launches: Launches) -> None:
    begin(tmp_path)
    job: dict[str, Any] = {"trainer.threads": 3}
    model, optimizer = make(tmp_path, **job)
    with pytest.raises(ConfigError, match=facts("trainer.threads", 3, 2)):
        train_all(model, optimizer, rowcast.connect(model.ebc, DATASET, dense=(model, optimizer)))
    assert launches.remains() == []
