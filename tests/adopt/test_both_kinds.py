"""Bags and sequences in one script: one job, one look-up and one update, in whatever order they are called."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import rowcast
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.runtime.errors import ConfigError
from tests.adopt import both_kinds
from tests.adopt.both_kinds import BAGS, EPOCHS, ITEMS, Losses, build, train, train_twin
from tests.adopt.scripts import Launches, copied
from tests.support.facts import facts
from tests.support.processes import ROOT
from tests.support.repeats import count

State = dict[str, torch.Tensor]


def differing(found: State, expected: State) -> int:
    assert found.keys() == expected.keys()
    return sum(int((found[name] != tensor).sum()) for name, tensor in expected.items())


def twin(rule: str, start: State, batches: int) -> tuple[Losses, State]:
    model = build(rule, None, bags_first=True)
    model.load_state_dict(start)
    return train_twin(model, rule, batches), dict(model.state_dict())


@pytest.mark.parametrize(("rule", "bags_first"), [("sgd", True), ("adagrad", False), ("adam", True)])
def test_bags_and_sequences_have_the_bits_of_their_twin_over_nn(
    rule: str, bags_first: bool, tmp_path: Path, launches: Launches
) -> None:
    model = build(rule, tmp_path / "run", bags_first=bags_first)
    start = copied(build(rule, None, bags_first=bags_first).state_dict())
    model.load_state_dict(start)
    losses = train(model, 8, lambda loader, step: None)
    expected_losses, expected = twin(rule, start, 8)
    assert losses == expected_losses
    assert len(losses["eval"]) == 2 * EPOCHS
    export_run(tmp_path / "run", tmp_path / "tables")
    tables = load_file(tmp_path / "tables")
    with model.bags.shared.without_tables():  # type: ignore[operator, union-attr]
        found = dict(model.state_dict())
    for name in expected.keys() - found.keys():  # <module>.<kind>.<table>.weight
        found[name] = tables[f"embedding_bags.{name.split('.')[2]}.weight"]
    assert differing(found, expected) == 0


@pytest.mark.timeout(count(300, 1800))
def test_kills_of_either_process_change_no_bit(tmp_path: Path) -> None:
    number = count(test=1, soak=20)
    batches = 6 * (number + 1) // EPOCHS
    model = build("adagrad", None, bags_first=True)
    save_file(model.state_dict(), tmp_path / "start")
    rng = random.Random(number)
    kills = [f"{('script', 'prefetcher')[i % 2]}:{6 * i + rng.randrange(3, 9)}" for i in range(number)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for i, kill in enumerate([*kills, None]):
        command = [sys.executable, "-m", "tests.adopt.both_kinds", str(tmp_path), "--batches", str(batches)]
        command += ([] if kill is None else ["--kill", kill]) + ([] if i else ["--start"])
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
        assert (ended.returncode == 0) == (kill is None), ended.stderr
    losses, expected = twin("adagrad", load_file(tmp_path / "start"), batches)
    assert np.fromfile(tmp_path / "run" / "losses.f32", np.float32).tolist() == losses["train"]
    assert differing(load_file(tmp_path / "end"), expected) == 0


def test_a_collection_that_a_step_leaves_out_is_named(tmp_path: Path, launches: Launches) -> None:
    model = build("adagrad", tmp_path, bags_first=True)
    model.load_state_dict(model.state_dict())
    with rowcast.connect(
        both(model), "tests.adopt.both_kinds:visits", options={"batches": 2}, dense_optimizer=False
    ) as loader:
        batches = iter(loader)
        sparse = next(batches)["sparse"]
        with torch.no_grad():
            model.sequences(sparse)
        torch.autograd.backward(model.bags(sparse)["user"].sum())
        with pytest.raises(RuntimeError, match=facts("train step 0", "table item", "before backward()")):
            next(batches)


def both(model: both_kinds.Model) -> Any:
    return [model.bags, model.sequences]


def test_collections_that_are_no_one_job_are_refused(tmp_path: Path) -> None:
    def bags(config: Any = BAGS, lr: float = 0.1) -> rowcast.EmbeddingBagCollection:
        return rowcast.EmbeddingBagCollection(
            [config], optimizer={"kind": "sgd", "lr": lr}, capacity="1MiB", run_dir=tmp_path
        )

    def refused(*collections: rowcast.EmbeddingBagCollection, **options: Any) -> Any:
        rowcast.connect(collections, "tests.adopt.both_kinds:visits", **options)

    items = rowcast.EmbeddingCollection(
        [ITEMS], optimizer={"kind": "sgd", "lr": 0.1}, capacity="1MiB", run_dir=tmp_path
    )
    with pytest.raises(ConfigError, match=facts("table user", "two collections")):
        refused(bags(), bags())
    with pytest.raises(ConfigError, match=facts("optimizer differs", 0.1, 0.2)):
        refused(items, bags(lr=0.2))
    with pytest.raises(ConfigError, match=facts("accumulate = 2", "does not pool")):
        refused(bags(), items, accumulate=2)
    with pytest.raises(ConfigError, match=facts("no collection")):
        refused()
    own = bags()
    own.load_state_dict({"embedding_bags.user.weight": torch.zeros(80, both_kinds.DIM)})
    loader = rowcast.connect([own, items], "tests.adopt.both_kinds:visits", options={"batches": 1})
    with pytest.raises(ConfigError, match=facts("without item", "all collections")):
        next(iter(loader))
    with pytest.raises(ConfigError, match=facts("loader already")):
        refused(own)
