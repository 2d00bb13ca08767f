"""One decoding process: order, errors, and every way in which either side may leave. Several: `test_workers.py`."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.workers import WorkerSource
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from tests.readers.polling import LONG_S, decoders_of, is_alive, next_batch, parent_process, rest_of, wait_until
from tests.support.data_files import make_job, same_batch, with_workers, write_day
from tests.support.facts import facts
from tests.support.inline_source import InlineSource


def factory(name: str, **options: Any) -> Job:
    return make_job(f"tests.readers.factories:{name}", options=options)


def synthetic_job(samples: int = 100) -> Job:
    return make_job("synthetic", synthetic={"samples": samples}, shuffle="full", epochs=2)


def test_what_is_known_beforehand_comes_first(opened: Callable[..., WorkerSource]) -> None:
    job = synthetic_job()
    for source in (opened(job, max_steps=15), InlineSource(job, 15)):
        info = source.info()
        assert (len(info.dense_names), info.expected_train_steps, info.num_train, info.num_eval) == (13, 15, 80, 20)


def test_a_run_goes_on_where_another_stopped(opened: Callable[..., WorkerSource]) -> None:
    job = synthetic_job()
    whole = rest_of(opened(job))
    rest = rest_of(opened(job, start=whole[6].following))
    assert [placed.step for placed in rest] == list(range(7, len(whole)))
    assert all(same_batch(a.batch, b.batch) for a, b in zip(rest, whole[7:], strict=True))


def test_arrivals_are_announced(opened: Callable[..., WorkerSource]) -> None:
    announced: list[None] = []
    source = opened(factory("function"), on_arrival=lambda: announced.append(None))
    wait_until(lambda: len(announced) == 5)  # three batches to train, one to evaluate, the end
    assert len(rest_of(source)) == 4


def test_a_config_error_arrives_as_itself(tmp_path: Path, opened: Callable[..., WorkerSource]) -> None:
    job = make_job("criteo-tsv", path=str(tmp_path / "nowhere"))
    source = opened(job)
    for ask in (source.info, lambda: next_batch(source), source.poll, source.info):
        with pytest.raises(ConfigError, match=r"data\.path = .*/nowhere': no such file"):
            ask()
    inline = InlineSource(job)
    inline.start()
    with pytest.raises(ConfigError, match=r"data\.path = .*/nowhere': no such file"):
        inline.poll()


def test_a_data_error_arrives_after_the_batches_before_it(opened: Callable[..., WorkerSource]) -> None:
    source = opened(factory("changed", case="a negative id"))
    first = next_batch(source)
    assert first is not None
    assert first.step == 0
    with pytest.raises(
        DataError, match=facts("train batch 1 of epoch 0", "look-up 2", "column cat_0", "id -1", "table late")
    ):
        next_batch(source)
    assert not source.ended


def test_what_a_data_set_s_code_raises_is_told_and_its_traceback_shown(
    capfd: pytest.CaptureFixture[str], opened: Callable[..., WorkerSource]
) -> None:
    source = opened(factory("raising"))
    assert next_batch(source) is not None
    with pytest.raises(DataError, match=facts("train batch 1 of epoch 0", "KeyError: 'user_id'")):
        next_batch(source)
    assert "KeyError: 'user_id'" in capfd.readouterr().err


def test_a_data_file_that_becomes_shorter_while_it_is_read_is_named(
    tmp_path: Path, opened: Callable[..., WorkerSource]
) -> None:
    write_day(tmp_path, "day_0", 20_000)
    source = opened(make_job("criteo-npy", path=str(tmp_path), eval_fraction=0.0, batch_size=100))
    assert next_batch(source) is not None
    cut = tmp_path / "day_0_sparse.npy"
    os.truncate(cut, 4096)
    with pytest.raises(DataError) as caught:
        rest_of(source)
    assert "was killed by SIGBUS: a data file became shorter" in str(caught.value)
    assert f"({cut})" in str(caught.value), "the other files are as they were"


def test_a_decoder_killed_while_it_opens_the_data_is_an_error(opened: Callable[..., WorkerSource]) -> None:
    source = opened(factory("slow_to_open"))
    os.kill(source.pids[0], signal.SIGKILL)
    with pytest.raises(RowcastError, match="SIGKILL"):
        source.info()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_whole_group_leave_the_decoder_at_work(number: int, opened: Callable[..., WorkerSource]) -> None:
    source = opened(factory("signalled", number=int(number)))
    os.kill(source.pids[0], number)  # while it still starts
    assert len(rest_of(source)) == 2


def test_this_process_keeps_its_signals(opened: Callable[..., WorkerSource]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    opened(factory("function"))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


THREE = with_workers(make_job("synthetic", synthetic={"samples": 10**6}), 3)
JOBS = {name: factory(name) for name in ("slow_to_open", "stuck", "endless", "function")} | {"three": THREE}


@pytest.mark.parametrize("name", JOBS)
def test_closing_ends_the_decoders_whatever_they_do(name: str) -> None:
    source = WorkerSource(JOBS[name])
    source.start()
    if name != "slow_to_open":
        assert next_batch(source) is not None
    source.close()
    assert not any(map(is_alive, source.pids))
    assert source.poll() is None
    source.close()


def test_closing_a_source_that_was_never_started_does_nothing() -> None:
    for source in (WorkerSource(synthetic_job()), InlineSource(synthetic_job())):
        source.close()
        assert source.poll() is None


@pytest.mark.parametrize("name", ["stuck", "three"])
def test_the_decoders_end_when_their_parent_is_killed(name: str) -> None:
    with parent_process(JOBS[name], "time.sleep(600)") as parent:
        pids = decoders_of(parent)
    assert len(pids) == (3 if name == "three" else 1)
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(("ending", "exit_code"), [("", 0), ("raise SystemExit(3)", 3), ("raise KeyError", 1)])
def test_a_parent_that_forgets_to_close_still_ends(ending: str, exit_code: int) -> None:
    with parent_process(factory("stuck"), ending) as parent:
        pids = decoders_of(parent)
        assert parent.wait(LONG_S) == exit_code
    assert not any(map(is_alive, pids))
