"""However a script or its prefetcher ends, the other ends too, says why in one sentence, and leaves nothing behind."""

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rowcast
from rowcast.runtime.errors import DataError, RowcastError
from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from tests.adopt.scripts import CONFIGS, Launches, Model, make, train_all, train_on, train_until
from tests.support.facts import facts
from tests.support.processes import ROOT, proc_text

DATASET = "tests.adopt.clicks:train"
ENDLESS = {"batches": 10**6}


def test_an_error_in_the_scripts_loop_ends_both(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET, options=ENDLESS) as loader, pytest.raises(ZeroDivisionError):
        train_until(model, optimizer, loader, 3, lambda: 1 / 0)
    assert launches.children[0].code == 1
    assert "the training script left its loop after 3 train steps" in launches.children[0].describe_exit()
    assert launches.remains() == []


def test_a_loader_that_nobody_holds_ends(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    for batch in rowcast.connect(model.ebc, DATASET, options=ENDLESS):
        train_on(model, optimizer, batch)
        break
    del batch
    gc.collect()
    assert launches.remains() == []
    with pytest.raises(RuntimeError, match="the loader was closed"):
        model.state_dict()


def test_a_prefetcher_that_is_killed_is_named_and_not_waited_for(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    loader = rowcast.connect(model.ebc, DATASET, options=ENDLESS)
    with pytest.raises(RowcastError, match=facts("prefetcher", "SIGKILL")):
        train_until(model, optimizer, loader, 3, lambda: os.kill(launches.children[0].process.pid, signal.SIGKILL))
    with pytest.raises(RuntimeError, match="the loader was closed"):
        next(iter(loader))
    assert launches.remains() == [] or all("/dev/shm" not in left for left in launches.remains())


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ("tests.adopt.clicks:missing", "cannot import it .*has no attribute 'missing'"),
        (
            "tests.adopt.clicks:broken",
            facts("clicks:broken", "train batch 1 of epoch 0", "KeyError: 'user_id'"),
        ),
        ("tests.adopt.clicks:gone", "the decoding process"),
    ],
)
def test_a_data_set_that_fails_is_named(dataset: str, sentence: str, tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    with pytest.raises(RowcastError, match=sentence):
        train_all(model, optimizer, rowcast.connect(model.ebc, dataset))
    assert launches.children[0].code != 0
    assert launches.remains() == []


def test_an_id_outside_its_table_is_named(tmp_path: Path, launches: Launches) -> None:
    configs = [replace(CONFIGS[0], num_embeddings=5), CONFIGS[1]]
    ebc = EmbeddingBagCollection(
        configs, optimizer={"kind": "sgd", "lr": 0.1}, capacity="11 rows", device="cpu", run_dir=tmp_path
    )
    model = Model(ebc)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DataError, match=facts("column a", "wide", "num_embeddings = 5")):
        train_all(model, optimizer, rowcast.connect(model.ebc, DATASET))


def test_a_prefetcher_that_is_stopped_says_so(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    loader = rowcast.connect(model.ebc, DATASET, options=ENDLESS)
    with pytest.raises(
        RowcastError,
        match=facts("prefetcher was stopped", "checkpoint", "connect(..."),
    ):
        train_until(model, optimizer, loader, 3, lambda: launches.children[0].signal(signal.SIGTERM))
    assert launches.children[0].code == 0
    assert launches.remains() == []


def test_evaluation_batches_come_where_the_plans_have_them_if_they_are_asked_for(
    tmp_path: Path, launches: Launches
) -> None:
    evaluating = "tests.adopt.clicks:with_evaluation"
    losses: list[list[float]] = []
    kinds: list[str] = []
    for evaluate in (False, True):
        model, optimizer = make(tmp_path / str(evaluate))
        loader = rowcast.connect(model.ebc, evaluating, epochs=2, evaluate=evaluate)
        losses.append([])
        for _ in range(2):
            for batch in loader:
                kinds.append(batch.kind)
                if batch.kind == "eval":
                    with pytest.raises(RuntimeError, match=facts("evaluation batch", "model.eval()")):
                        model(batch.dense_features, batch.sparse_features)
                    assert len(model.eval()(batch.dense_features, batch.sparse_features)) == 8
                    model.train()
                else:
                    losses[-1].append(train_on(model, optimizer, batch))
    assert losses[0] == losses[1]
    assert kinds == ["train"] * 8 + (["train"] * 4 + ["eval"] * 2) * 2


SCRIPT = """
import sys
from pathlib import Path
import rowcast
from tests.adopt.scripts import make, train_until
model, optimizer = make(Path(sys.argv[1]))
loader = rowcast.connect(model.ebc, "tests.adopt.clicks:train", options={"batches": 10**6})
train_until(model, optimizer, loader, 3, lambda: %s)
"""


@pytest.mark.parametrize(
    ("ends", "code", "last"),
    [
        ("1 / 0", 1, "the training script left its loop after 3 train steps"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", -9, "the trainer "),
    ],
)
def test_a_script_that_ends_takes_its_prefetcher_with_it(ends: str, code: int, last: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % ends, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    lock = (tmp_path / "prefetcher.lock").read_text()
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{lock}").exists() and "zombie" not in proc_text(int(lock), "status"):
        assert time.monotonic() < deadline_s, f"prefetcher {lock} still runs"
        time.sleep(0.05)
    assert f"\nrowcast prefetcher: {last}" in (tmp_path / "prefetcher.log").read_text()
    assert not list(Path("/dev/shm").glob(f"rowcast-*-{lock}-*"))
