"""Decoding processes: order, errors, how either side leaves, where arrays arrive. Their bits: `test_conformance.py`."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.prefetcher.readers.shared_arrays import ArrayReceiver, ArraySender
from rowcast.prefetcher.readers.workers import DecoderShare, WorkerSource, decode_share
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from tests.readers.polling import (
    LONG_S,
    decoders_of,
    is_alive,
    next_batch,
    parent_process,
    polled_ahead,
    rest_of,
    wait_until,
)
from tests.support.data_files import make_job, same_batch, with_workers, write_day
from tests.support.facts import facts
from tests.support.inline_source import InlineSource


def synthetic_job(samples: int = 100, num_workers: int = 3) -> Job:
    return with_workers(make_job("synthetic", synthetic={"samples": samples}, shuffle="full", epochs=2), num_workers)


def npy_job(folder: Path, num_workers: int = 3, **data: Any) -> Job:
    """Batches of 8 rows; ids 7 in rows 30 and 55 are outside the table of cat_25, as is -1 in row 61."""
    write_day(folder, "day_0", 100)
    ids = np.load(folder / "day_0_sparse.npy")
    ids[[30, 55], 25], ids[61, 25] = 7, -1
    np.save(folder / "day_0_sparse.npy", ids)
    return with_workers(make_job("criteo-npy", path=str(folder), **data), num_workers)


@pytest.mark.parametrize("max_steps", [None, 5, 0])
def test_the_run_ends_where_it_would_with_one(max_steps: int | None, opened: Callable[..., WorkerSource]) -> None:
    job = synthetic_job()
    source = opened(job, max_steps=max_steps)
    expected = list(schedule(job, open_reader(job), max_steps))
    found = rest_of(source)
    assert [(batch.step, batch.kind, batch.position) for batch in found] == [
        (batch.step, batch.kind, batch.position) for batch in expected
    ]
    assert all(same_batch(a.batch, b.batch) for a, b in zip(found, expected, strict=True))
    assert source.ended
    assert source.poll() is None


def test_a_run_shorter_than_the_workers_are_many_ends(opened: Callable[..., WorkerSource]) -> None:
    assert [batch.step for batch in rest_of(opened(synthetic_job(num_workers=4), max_steps=1))] == [0, 1, 2, 3]


def test_replaced_ids_are_counted_batch_by_batch_as_with_one(
    tmp_path: Path, opened: Callable[..., WorkerSource]
) -> None:
    job = npy_job(tmp_path, on_invalid_id="zero", epochs=2)
    counts = []
    for source in (opened(job), InlineSource(job)):
        own = []
        while next_batch(source) is not None:
            own.append(source.counters.invalid_ids)
        counts.append(own)
    assert counts[0] == counts[1]
    assert counts[0][2:8] == [0, 1, 1, 1, 2, 3]
    assert counts[0][-1] == 6


def break_value(folder: Path, row: int) -> None:
    dense = np.load(folder / "day_0_dense.npy")
    dense[row, 2] = np.nan
    np.save(folder / "day_0_dense.npy", dense)


@pytest.mark.parametrize(
    ("row", "horizon", "sentence"),
    [
        (29, 100, "day_0_dense.npy, row 29, column int_2: value nan"),
        (31, 0, "day_0_dense.npy, row 31, column int_2: value nan"),
        (32, 100, facts("day_0_sparse.npy", "row 30", "column cat_25", "id 7", "table last")),
    ],
)
def test_the_first_error_of_the_data_is_told_although_others_are_met_earlier(
    row: int, horizon: int, sentence: str, tmp_path: Path, opened: Callable[..., WorkerSource]
) -> None:
    job = npy_job(tmp_path)
    break_value(tmp_path, row)
    source = opened(job)
    if horizon == 0:
        assert [next_batch(source) is not None for _ in range(3)] == [True] * 3
    with pytest.raises(DataError, match=sentence):
        polled_ahead(source, horizon)


def test_batches_of_others_are_not_even_checked(tmp_path: Path) -> None:
    write_day(tmp_path, "day_0", 100)
    labels = np.load(tmp_path / "day_0_labels.npy", mmap_mode="r+")
    labels[30] = 2
    labels.flush()
    job = make_job("criteo-npy", path=str(tmp_path))
    for index in range(11):
        share = DecoderShare(job=job, columns="all", max_steps=None, start=None, index=index, num_decoders=11)
        if index == 30 // 8:
            with pytest.raises(DataError, match="row 30, column label"):
                list(decode_share(share, open_reader(job)))
        else:
            assert [own.step for own in decode_share(share, open_reader(job))] == list(range(index, 13, 11))


@pytest.mark.parametrize(("num_workers", "num_ahead", "bound"), [(3, 6, 9), (2, 1, 2)])
def test_all_together_stay_a_bounded_number_of_batches_ahead(
    num_workers: int, num_ahead: int, bound: int, opened: Callable[..., WorkerSource]
) -> None:
    """A message of as many batches as may wait arrives once there is room for one."""
    source = opened(synthetic_job(10**6, num_workers), num_ahead=num_ahead)
    depths = []
    for _ in range(40):
        time.sleep(0.005)
        assert next_batch(source) is not None
        depths.append(source.counters.queue_depth)
    assert max(depths) <= bound


def test_small_batches_arrive_together(opened: Callable[..., WorkerSource]) -> None:
    arrived: list[None] = []
    source = opened(synthetic_job(10**6, 1), num_ahead=8, on_arrival=lambda: arrived.append(None))
    for _ in range(81):  # the first travels by itself: its size is not known
        assert next_batch(source) is not None
    assert len(arrived) <= 12


@pytest.mark.parametrize(("num_workers", "victim"), [(3, 0), (1, 1)], ids=["of ids", "of dense values"])
def test_the_death_of_any_is_an_error_with_its_pid(
    num_workers: int, victim: int, tmp_path: Path, opened: Callable[..., WorkerSource]
) -> None:
    write_day(tmp_path, "day_0", 100_000)
    source = opened(with_workers(make_job("criteo-npy", path=str(tmp_path)), num_workers))
    assert next_batch(source) is not None
    assert len(source.pids) == num_workers + 1
    os.kill(source.pids[victim], signal.SIGKILL)
    with pytest.raises(RowcastError, match=facts("decoding process", source.pids[victim], "SIGKILL")):
        rest_of(source)


def test_a_data_set_of_ones_own_has_one_worker_and_one_warning(opened: Callable[..., WorkerSource]) -> None:
    job = with_workers(make_job("tests.support.data_files:listed"), 3)
    with structlog.testing.capture_logs() as logs:
        source = opened(job)
    assert [(line["log_level"], line["workers"]) for line in logs] == [("warning", 3)]
    assert "one worker decodes" in logs[0]["event"]
    assert len(source.pids) == 1
    assert len(rest_of(source)) == len(list(schedule(job, open_reader(job))))


def test_one_worker_of_a_data_set_of_ones_own_is_no_reason_for_a_warning(opened: Callable[..., WorkerSource]) -> None:
    with structlog.testing.capture_logs() as logs:
        opened(make_job("tests.support.data_files:listed"))
    assert logs == []


def test_what_a_child_logs_is_logged_by_its_parent(opened: Callable[..., WorkerSource]) -> None:
    with structlog.testing.capture_logs() as lines:
        opened(make_job("tests.readers.factories:logging", eval_fraction=0.0, batch_size=2)).info()
    assert {"event": "of the child", "value": 7, "log_level": "warning"} in lines


def factory(name: str, **options: Any) -> Job:
    return make_job(f"tests.readers.factories:{name}", options=options)


def two_epochs(samples: int = 100) -> Job:
    return make_job("synthetic", synthetic={"samples": samples}, shuffle="full", epochs=2)


def test_what_is_known_beforehand_comes_first(opened: Callable[..., WorkerSource]) -> None:
    job = two_epochs()
    for source in (opened(job, max_steps=15), InlineSource(job, 15)):
        info = source.info()
        assert (len(info.dense_names), info.expected_train_steps, info.num_train, info.num_eval) == (13, 15, 80, 20)


def test_a_run_goes_on_where_another_stopped(opened: Callable[..., WorkerSource]) -> None:
    job = two_epochs()
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
    for source in (WorkerSource(two_epochs()), InlineSource(two_epochs())):
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


class Ends:
    """Both ends in one process; the child's is a thread, which waits until its object is received."""

    def __init__(self) -> None:
        self.parents, self.childs = Pipe()
        self.sender, self.receiver = ArraySender(self.childs), ArrayReceiver(self.parents)

    def passed(self, content: object) -> Any:
        thread = threading.Thread(target=self.sender.send, args=(content,))
        thread.start()
        received = self.receiver.receive()
        thread.join()
        return received


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.parents.close()
    ends.childs.close()


def arrays(seed: int, size: int = 1000) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "step": seed,
        "ids": random.integers(0, 2**62, size),
        "dense": random.random((size, 3), np.float32),
        "odd": random.integers(0, 255, 7, np.uint8),
        "none": np.zeros(0, np.int64),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value)
        assert getattr(found[name], "dtype", None) == getattr(value, "dtype", None)


def test_objects_arrive_with_the_bits_that_were_sent(ends: Ends) -> None:
    for seed, size in enumerate([0, 1, 10, 100_000, 10]):
        assert_same(ends.passed(arrays(seed, size)), arrays(seed, size))
    assert ends.passed("no arrays") == "no arrays"


def test_arrays_may_be_written_and_begin_a_cache_line(ends: Ends) -> None:
    found = ends.passed(arrays(0))
    found["ids"] += 1
    assert np.array_equal(found["ids"], arrays(0)["ids"] + 1)
    assert found["dense"].ctypes.data % 64 == 0


def test_what_is_kept_is_never_overwritten(ends: Ends) -> None:
    kept = [ends.passed(arrays(seed)) for seed in range(20)]
    part = ends.passed(arrays(20))["ids"][500:510]
    for seed in range(30):
        ends.passed(arrays(100 + seed))
    for seed, found in enumerate(kept):
        assert_same(found, arrays(seed))
    assert np.array_equal(part, arrays(20)["ids"][500:510])


def test_memory_is_that_of_what_the_parent_keeps(ends: Ends) -> None:
    for seed in range(50):
        ends.passed(arrays(seed))
    assert len(ends.sender._segments) <= 2
    kept = [ends.passed(arrays(seed)) for seed in range(10)]
    assert 10 <= len(ends.sender._segments) <= 12
    del kept
    gc.collect()
    for seed in range(50):
        ends.passed(arrays(seed, 20_000))
    assert ends.sender._segments.keys() == ends.receiver._segments.keys()
    assert len(ends.sender._segments) <= 2


def test_the_child_waits_until_its_object_is_received(ends: Ends) -> None:
    sent = threading.Event()

    def send() -> None:
        ends.sender.send(arrays(0))
        sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert not sent.wait(0.2)
    ends.receiver.receive()
    assert sent.wait(30)
    thread.join()


def test_a_sender_notices_that_the_other_end_is_closed(ends: Ends) -> None:
    ends.parents.close()
    with pytest.raises(BrokenPipeError):
        ends.sender.send(arrays(0))


def received_to_the_end(receiver: ArrayReceiver) -> None:
    while True:
        receiver.receive()


def test_what_was_received_outlives_a_killed_child_and_nothing_is_left() -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    parents, childs = Pipe()
    child = os.fork()
    if child == 0:
        sender = ArraySender(childs)
        for seed in range(1000):
            sender.send(arrays(seed))
        os._exit(1)
    childs.close()
    receiver = ArrayReceiver(parents)
    kept = [receiver.receive() for _ in range(5)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises((EOFError, OSError)):
        received_to_the_end(receiver)
    for seed, found in enumerate(kept):
        assert_same(found, arrays(seed))
    assert {path.name for path in Path("/dev/shm").iterdir()} <= before
    parents.close()
