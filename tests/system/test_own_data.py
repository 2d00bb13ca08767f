"""Own CSV and Parquet files with two real processes."""

import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from examples.sequence_data import NUM_CATEGORIES, make_sequences
from rowcast.trainer.report.report_json import read_report
from tests.support.comparisons import assert_trained_as_the_plain_loop
from tests.support.jobs import table
from tests.support.one_frame import TABLES, written
from tests.support.processes import Session


def test_a_csv_file_with_text_lists_and_missing_ids_gives_the_bits_of_the_plain_loop(
    session: Session, tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    users = np.array(["ann", '"bob, b."', "", "ünï"])[rng.integers(0, 4, 1000)]
    items = ["|".join(map(str, rng.integers(0, 50, count))) for count in rng.integers(0, 4, 1000)]
    items[::20] = ["7|57"] * 50  # the second one is outside the table
    rows = (f"{i % 2},{i / 7},{user},{item}\n" for i, (user, item) in enumerate(zip(users, items, strict=True)))
    (tmp_path / "clicks.csv").write_text("label,int_0,user,item\n" + "".join(rows))
    session.write_job(
        data={
            **{"format": "csv", "path": str(tmp_path), "columns": {"hash": ["user"], "lists": {"item": "|"}}},
            **{"eval_fraction": 0.1, "shuffle": "window:300", "on_invalid_id": "modulo", "synthetic": None},
        },
        tables=[table("user", 300, 4), table("item", 50, 4)],
        prefetcher={"workers": 2},
    )
    prefetcher, trainer = session.start_both()
    trainer.ended().quiet()
    assert "invalid_ids=50" in prefetcher.ended().quiet().stderr
    assert_trained_as_the_plain_loop(session)


def test_a_restarted_run_over_histories_has_the_bits_of_the_plain_loop(
    session: Session, tmp_path: Path, one_thread: None
) -> None:
    pq.write_table(make_sequences(1000, seed=3), tmp_path / "sequences.parquet")
    tables = {"item": (100_000, "past_items"), "category": (NUM_CATEGORIES, "past_categories")}
    session.write_job(
        data={
            **{"format": "parquet", "path": str(tmp_path / "sequences.parquet"), "eval_fraction": 0.1},
            **{"columns": {"dense": ["int_0", "log_frequency"]}, "synthetic": None},
        },
        tables=[
            *(table(name, rows, 4, name, past, pooling="none") for name, (rows, past) in tables.items()),
            table("user", 20_000, 4),
        ],
        model={
            **{"kind": "din", "targets": {"past_items": "item", "past_categories": "category"}, "bottom_mlp": None},
            **{"attention_mlp": [5], "top_mlp": [8, 1], "history": 6},
        },
        cache={"capacity": "1300 rows"},
        checkpoint={"every": 5},
        lookahead={"depth": 2},
    )
    for options in (["--max-steps=7"], []):
        for process in session.start_both(*options):
            process.ended().quiet()
    auc = read_report(session.run_dir / "report.json").auc
    assert auc is not None
    assert 0.0 <= auc <= 1.0
    losses, plain = assert_trained_as_the_plain_loop(session)
    assert len(losses) == 15
    assert plain["top_activations.0.running_var"].ne(1).all(), "running means are trained"


@pytest.mark.parametrize("way", ["csv", "no header", "jsonl", "arrow", "parquet"])
def test_prepared_columns_of_every_format_survive_a_kill_with_the_bits_of_the_plain_loop(
    way: str, session: Session, tmp_path: Path, one_thread: None
) -> None:
    session.write_job(
        data={
            **written(way, tmp_path),
            **{"shuffle": "window:150", "batch_size": 16, "eval_fraction": 0.1, "synthetic": None},
        },
        tables=[own | {"embedding_dim": 4} for own in TABLES],
        cache={"capacity": "400 rows"},
        checkpoint={"every": 5},
        prefetcher={"workers": 2},
    )
    prefetcher, trainer = session.start_training()
    prefetcher.signal(signal.SIGKILL)
    trainer.ended()
    for process in session.start_both():
        process.ended().quiet()
    assert_trained_as_the_plain_loop(session)
