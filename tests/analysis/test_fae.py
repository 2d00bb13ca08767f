"""The FAE example over a small file: its knob, its schedule as a copy of the data, and its three ways."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.fae.__main__ import main
from examples.fae.blocks import block_order, write_blocks
from examples.fae.hot import popularity, row_keys
from examples.fae.ways import Trainer, run
from rowcast.analysis.simulate.simulate import Grid, simulate
from rowcast.job.file import load_job, with_values
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.jobs import job_content, table, write_job

SAMPLES, BATCH, BUDGET = 64 * 30, 64, 400


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    ids = {f"cat_{f}": (rng.random(SAMPLES) ** 4 * 1000).astype(np.int64) for f in range(2)}
    dense = {"int_0": np.arange(SAMPLES, dtype=np.float32)}  # tells samples apart
    columns = {"label": rng.integers(0, 2, SAMPLES), **dense, **ids}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    data = {"format": "parquet", "path": str(tmp_path / "log.parquet"), "eval_fraction": 0.1, "synthetic": None}
    content = job_content(
        tmp_path / "run",
        data={**data, "shuffle": "window:65536"},
        tables=[table("a", 1000, 4, "cat_0"), table("b", 1000, 4, "cat_1")],
        cache={"capacity": f"{BUDGET} rows"},
        trainer={"kernels": "torch"},
    )
    return write_job(tmp_path / "job.toml", content)


def blocks_of(job: Job, folder: Path) -> Job:
    return write_blocks(job, block_order(popularity(job), BUDGET, BATCH, 2), folder)


def test_the_copy_has_hot_and_cold_blocks_of_the_same_samples(config: Path, tmp_path: Path) -> None:
    job, rows = load_job(config), popularity(load_job(config))
    hot_keys = rows.keys[rows.ranks < BUDGET]
    blocks = blocks_of(job, tmp_path / "blocks")
    reader = open_reader(blocks)
    batches = list(reader.batches("train", 0))
    are_hot = [np.isin(row_keys(blocks, batch)[0], hot_keys) for batch in batches]
    full = [kind.all() for kind in are_hot][: sum(rows.coldest < BUDGET) // BATCH * 2]
    assert full[:8] == [True, True, False, False] * 2
    assert rows.shares(BUDGET)[0] == pytest.approx(np.concatenate(are_hot).mean())
    assert not np.concatenate([kind.reshape(2, -1).all(0) for kind in are_hot[2:4]]).any()
    for split in ("train", "eval"):
        samples = [
            np.concatenate([batch.dense[:, 0] for batch in own.batches(split, 0)]) for own in (reader, open_reader(job))
        ]
        assert sorted(samples[0]) == sorted(samples[1])
    steps = list(schedule(blocks, reader))
    again = list(schedule(blocks, open_reader(blocks), start=steps[7].position))
    assert len(again) == len(steps) - 7
    assert all((a.batch.dense == b.batch.dense).all() for a, b in zip(again, steps[7:], strict=True))


def test_three_ways_have_the_same_losses_and_move_other_bytes(config: Path, tmp_path: Path) -> None:
    job, rows = load_job(config), popularity(load_job(config))
    blocks = blocks_of(job, tmp_path / "blocks")
    batches = list(schedule(blocks, open_reader(blocks)))
    hot = rows.keys[rows.ranks < BUDGET]
    cpu, hybrid, look_ahead = (run(blocks, batches, hot, way) for way in ("cpu", "hybrid", "look-ahead"))
    assert cpu.losses == hybrid.losses == look_ahead.losses
    assert cpu.auc == hybrid.auc == look_ahead.auc
    assert all_rows(cpu) == all_rows(hybrid) == all_rows(look_ahead)
    pooled = 2 * 4 * 4  # bytes of a sample's rows
    assert (cpu.bytes_near, cpu.bytes_far) == (SAMPLES * pooled, SAMPLES * 9 // 10 * pooled)
    cold = sum(len(own.batch.labels) for own in batches) - BATCH * hybrid.hot_batches
    switches = hybrid.bytes_near - cold * pooled
    assert hybrid.hot_batches >= 4
    assert switches > 0
    assert switches % (BUDGET * hybrid.groups[0].record_bytes) == 0
    (counted,) = simulate(blocks, Grid(), lambda _: batches)
    assert look_ahead.bytes_near == counted.bytes_fetched
    assert look_ahead.bytes_far == counted.bytes_written_back


def all_rows(trainer: Trainer) -> list[bytes]:
    return [records.numpy().tobytes() for records in trainer.far]


def test_the_command_prints_the_knob_and_a_line_for_each_way(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["fae", str(config), "--out", str(out), "--budget", "0.5", "--max-steps", "4"])
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    main()
    lines = [f"{line} ".split(" | ") for line in capsys.readouterr().out.splitlines()]
    ways = [(cells[0].strip("| "), cells[1]) for cells in lines if cells[1:2] in (["log"], ["blocks"])]
    assert ways == [
        ("cpu", "log"),
        ("look-ahead", "log"),
        *((way, "blocks") for way in ("cpu", "hybrid", "look-ahead")),
    ]
    assert [cells[3:] for cells in lines if cells[1:2] == ["100.0%"]] == [["100.0%", "100.0%", " "]]
    assert (out / "hot.png").read_bytes().startswith(b"\x89PNG")


def test_a_format_that_is_not_written_is_one_sentence(tmp_path: Path) -> None:
    job = with_values(load_job(write_job(tmp_path / "job.toml", job_content(tmp_path))), {})
    with pytest.raises(ConfigError, match=facts("data.format", "synthetic", "parquet", "criteo-npy")):
        write_blocks(job, np.arange(4), tmp_path)
