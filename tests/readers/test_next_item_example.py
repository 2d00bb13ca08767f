"""examples/next_item.py: windows of histories and next items against a plain loop over owners."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

HISTORY, LEAST = 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next-item")
    rng = np.random.default_rng(5)
    size = 400
    owner = rng.integers(0, 30, size).astype(object)
    owner[rng.random(size) < 0.1] = None
    item = [f"i{n}" for n in rng.integers(0, 25, size) ** 2 // 25]
    time = rng.integers(0, 60, size)  # several lines of a time
    pq.write_table(
        pa.table({"who": pa.array(owner, pa.int64()), "what": item, "when": pa.array(time, pa.timestamp("s"))}),
        folder / "log.parquet",
    )
    columns = ("--owner", "who", "--item", "what", "--time", "when", "--missing", "7")
    command = [sys.executable, "-m", "examples.next_item", str(folder / "log.parquet"), *columns]
    sizes = ("--least", str(LEAST), "--history", str(HISTORY), "--out", str(folder))
    done = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True, timeout=120)
    assert "left out" in done.stdout
    return folder


def test_windows_are_those_of_a_loop_over_owners(folder: Path) -> None:
    lines = pq.read_table(folder / "log.parquet").to_pylist()
    by_owner: dict[int, list[tuple[int, str]]] = {}
    for line in lines:
        if line["who"] not in (None, 7):
            by_owner.setdefault(line["who"], []).append((int(line["when"].timestamp()), line["what"]))
    names = pq.read_table(folder / "items.parquet")["item"].to_pylist()
    train, held_out = (
        sorted(
            (tuple(names[n] for n in row["history"]), tuple(names[n] for n in row["positive"]), tuple(row["time"]))
            for row in pq.read_table(folder / f"{name}.parquet").to_pylist()
        )
        for name in ("train", "eval")
    )
    expected_train, expected_eval, counts = [], [], Counter[str]()
    for own in by_owner.values():
        if len(own) < LEAST:
            continue
        own = sorted(own, key=lambda line: line[0])
        *trained, last = own
        newest = trained[-HISTORY:]
        expected_eval.append((tuple(i for _, i in newest), (last[1],), tuple(t for t, _ in newest)))
        stop = len(trained)
        while stop > 1:
            window = trained[max(0, stop - HISTORY - 1) : stop]
            positives = tuple(i for _, i in window[1:])
            expected_train.append((tuple(i for _, i in window[:-1]), positives, tuple(t for t, _ in window[:-1])))
            counts.update(positives)
            stop -= HISTORY
    assert train == sorted(expected_train)
    assert held_out == sorted(expected_eval)
    assert dict(zip(names, np.load(folder / "counts.npy").tolist(), strict=True)) == {n: counts[n] for n in names}
