"""A script with a job file and no data set waits for the prefetcher that somebody starts with that file."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import rowcast
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import failure_path, failure_since
from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from rowcast.trainer.run import connection
from tests.adopt.clicks import ROWS
from tests.adopt.scripts import CONFIGS, Model, train_all
from tests.support import jobs
from tests.support.facts import facts
from tests.support.processes import Session
from tests.support.starter import Starter

FAILING = "--checkpoint=step-000000000001"  # which is for --eval only
SENTENCE = "--checkpoint chooses what --eval evaluates"
TABLES = [jobs.table("wide", ROWS[0], 4, "a", "b"), jobs.table("small", ROWS[1], 4, "c")]


@pytest.fixture
def session(tmp_path: Path, starter: Starter) -> Iterator[Session]:
    with Session(tmp_path, starter.launch) as session:
        data = {"format": "tests.adopt.clicks:train", "batch_size": None, "synthetic": None}
        session.write_job(tables=TABLES, data=data)
        yield session


def train(session: Session) -> list[float]:
    """The script."""
    model = Model(EmbeddingBagCollection(job=session.config))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return train_all(model, optimizer, rowcast.connect(model.ebc))


def test_a_job_file_with_linear_weights_or_beside_settings_of_its_own_is_refused(tmp_path: Path) -> None:
    content = jobs.job_content(
        tmp_path / "run",
        tables=[jobs.table("wide", 50, 4, "a", linear=True)],
        model={"kind": "wide-deep", "bottom_mlp": None},
    )
    path = jobs.write_job(tmp_path / "job.toml", content)
    with pytest.raises(ConfigError, match=facts("table wide", "linear = true", "EmbeddingBagCollection")):
        EmbeddingBagCollection(job=path)
    for given in ({"tables": CONFIGS}, {"capacity": "1MiB"}):
        with pytest.raises(ConfigError, match="sets tables, optimizer, capacity and device"):
            EmbeddingBagCollection(job=path, **given)


@contextmanager
def prefetcher_starts_once_awaited(session: Session, monkeypatch: pytest.MonkeyPatch, *options: str) -> Iterator[None]:
    """`prefetcher run` starts after the script has looked for the note of a failure."""
    looked = threading.Event()

    def look(*args: Any) -> Any:
        failure = failure_since(*args)
        looked.set()
        return failure

    def start() -> None:
        if looked.wait(60):
            session.start("prefetcher", *options)

    monkeypatch.setattr(connection, "failure_since", look)
    thread = threading.Thread(target=start)
    thread.start()
    yield
    thread.join()


def test_a_prefetcher_that_fails_ends_the_script_that_waits_for_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        prefetcher_starts_once_awaited(session, monkeypatch, FAILING),
        pytest.raises(ConfigError, match=f"^{SENTENCE}"),
    ):
        train(session)
    assert session.remains() == []


def test_a_failure_from_before_the_script_began_does_not_end_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run_dir.mkdir()
    assert session.start("prefetcher", FAILING).ended().refused(2).startswith(SENTENCE)
    assert failure_path(session.run_dir, "prefetcher").exists()
    with prefetcher_starts_once_awaited(session, monkeypatch):
        assert len(train(session)) == 8
    assert not failure_path(session.run_dir, "prefetcher").exists()
