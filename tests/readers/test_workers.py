"""Several decoding processes: what they share, and which of their errors is told. Their bits: `test_conformance.py`."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.prefetcher.readers.workers import DecoderShare, WorkerSource, decode_share
from rowcast.runtime.errors import DataError, RowcastError
from tests.readers.polling import (
    next_batch,
    polled_ahead,
    rest_of,
)
from tests.support.data_files import (
    make_job,
    same_batch,
    with_workers,
    write_day,
)
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
