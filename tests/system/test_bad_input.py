"""What a user's mistake gets: an exit code and one sentence, on both sides where both see it, and never a traceback."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from rowcast.command_line.trainer import app as trainer_app
from rowcast.prefetcher.run.all_ranks import check_options
from rowcast.prefetcher.run.starting_point import RunOptions
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.jobs import job
from tests.support.processes import Session


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


# the job file


def test_both_commands_say_the_same_of_a_bad_job_file(session: Session) -> None:
    session.config.write_text("[job]\nseeed = 1\n")
    sentence = f"{session.config}: job: unknown key seeed; the nearest is seed\n"
    for process, name in zip(session.start_both(), ("prefetcher", "trainer"), strict=True):
        ended = process.ended()
        assert (ended.code, ended.stdout, ended.stderr) == (2, "", f"rowcast {name}: {sentence}")
    assert not session.run_dir.exists()


# the data


def write_day(folder: Path, ids: Any, values: Any) -> dict[str, Any]:
    """ids [n, 2], dense values [n]; labels alternate."""
    np.save(folder / "day_0_sparse.npy", np.asarray(ids, np.int64))
    np.save(folder / "day_0_dense.npy", np.asarray(values, np.float32)[:, None])
    np.save(folder / "day_0_labels.npy", np.arange(len(values)) % 2)
    return {"format": "criteo-npy", "path": str(folder)}


def test_missing_data_ends_the_prefetcher_before_it_waits_for_a_trainer(session: Session) -> None:
    session.write_job(data={"format": "parquet", "path": "nosuch/*.parquet"})
    sentence = session.start("prefetcher").ended().refused(2)
    assert sentence == "data.path = 'nosuch/*.parquet': no such file, folder or glob"
    assert session.remains() == []


def test_bad_data_in_the_middle_of_a_run_ends_both_with_its_place_after_every_step_before_it(
    session: Session, tmp_path: Path
) -> None:
    values = np.zeros(64 * 60)
    values[64 * 50 + 5] = np.nan
    session.write_job(data=write_day(tmp_path, np.zeros((len(values), 2)), values))
    place = re.escape(str(tmp_path / "day_0_dense.npy"))
    for _ in range(2):  # a restart has nothing more to train
        for process in session.start_both():
            sentence = process.ended().refused(4)
            assert re.match(rf"{place}, row 3205, column int_0: value nan is not finite", sentence)
        assert session.remains() == []
        assert [path.name for path in (session.run_dir / "checkpoints").glob("step-*")] == ["step-000000000050"]


# the cache


def growing_data(folder: Path, largest_batch: int) -> dict[str, Any]:
    """60 batches of one row each, but for batch `largest_batch`, which touches 100."""
    ids = np.zeros((60, 64, 2), np.int64)
    ids[largest_batch, :50] = np.arange(100).reshape(50, 2)
    return write_day(folder, ids.reshape(-1, 2), np.zeros(60 * 64))


def test_a_later_batch_too_large_for_the_cache_ends_both_with_the_capacity_needed(session: Session) -> None:
    session.write_job(data=growing_data(session.folder, largest_batch=50), cache={"capacity": 99 * 32})
    refusals = {process.ended().refused(2) for process in session.start_both()}
    assert len(refusals) == 1
    sentence = refusals.pop()
    assert "step 50 touches 100 distinct rows of group fp32_d4_adagrad, more than its 99 slots" in sentence
    assert session.remains() == []
    enough = re.findall(r"raise cache\.capacity to at least \d+ rows \((\d+) bytes\)", sentence)[0]
    session.write_job(data=growing_data(session.folder, largest_batch=50), cache={"capacity": int(enough)})
    for process in session.start_both():
        process.ended().quiet()


# this machine


def refused_trainer(session: Session, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The trainer's command in this process, for what it refuses before it meets anyone: its one sentence."""
    code = trainer_app(["run", f"--config={session.config}", *options], standalone_mode=False)
    stderr = capsys.readouterr().err
    assert code == 2
    assert re.fullmatch(r"rowcast trainer: .*\n", stderr), stderr
    return stderr.removeprefix("rowcast trainer: ").removesuffix("\n")


def test_an_environment_that_is_not_torchruns_is_refused(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "two", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert refused_trainer(session, capsys) == (
        "the environment variable RANK = 'two' is no number; several trainers are started by torchrun, which sets it"
    )


def test_a_trainer_alone_is_refused_where_the_job_file_has_two(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused_trainer(session, capsys, "--set=ranks.count=2") == (
        "WORLD_SIZE = 1, but ranks.count = 2; start as many trainers as it says (torchrun's --nnodes times "
        "--nproc-per-node), or change it; a script needs none"
    )


def test_a_host_that_ranks_do_not_have_is_refused(tmp_path: Path) -> None:
    hosts = job(job={"run_dir": str(tmp_path)}, ranks={"count": 4, "per_host": 2})
    with pytest.raises(ConfigError, match=facts("--host 2", "4 ranks", "2 hosts")):
        check_options(hosts, RunOptions(host=2))
    check_options(hosts, RunOptions(host=1))


def test_a_device_that_is_not_there_is_refused(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, sentence in {
        "cuda:3": "'cuda:3', but torch sees no CUDA device here; use cpu",
        "tpu9": "'tpu9' is not a device that torch knows; use auto, cpu or cuda",
        "mps": "'mps' is not supported; use auto, cpu or cuda",
    }.items():
        assert refused_trainer(session, capsys, f"--set=trainer.device={name}") == f"trainer.device = {sentence}"


def test_a_device_beyond_those_that_are_there_is_refused(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    sentence = refused_trainer(session, capsys, "--set=trainer.device=cuda:2")
    assert sentence == "trainer.device = 'cuda:2', but this machine has cuda:0 to cuda:1; use one of these"


def test_a_run_directory_that_cannot_be_made_is_refused_by_all(session: Session) -> None:
    session.run_dir.write_text("a file")
    processes = [session.start(name) for name in ("prefetcher", "trainer", "local")]
    sentences = [process.ended().refused(2) for process in processes]
    assert all(sentence.startswith(f"job.run_dir = '{session.run_dir}' cannot be ") for sentence in sentences)


# the model


def test_a_loss_that_is_not_finite_ends_both_naming_the_train_step(session: Session) -> None:
    session.write_job(optimizer={"dense": {"kind": "sgd", "lr": 1e38}})
    sentences = [process.ended().refused(1) for process in session.start_both()]
    assert len(set(sentences)) == 1
    assert re.match(r"the loss of train step \d+ is (nan|inf): training diverged", sentences[0])
    assert session.remains() == []
