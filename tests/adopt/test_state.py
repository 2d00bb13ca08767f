"""State dicts of whole tables: before training, at checkpoints, after the end, in another run, and after a stop."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rowcast
from rowcast.job.file import load_job
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from rowcast.trainer.adopt.connect.script_state import ScriptObjects
from rowcast.trainer.adopt.connect.table_files import run_prefetcher_command
from tests.adopt.scripts import CONFIGS, Launches, Model, copied, make, same, train_all, train_on, train_until
from tests.support.facts import facts

DATASET = "tests.adopt.clicks:train"
WIDE = "ebc.embedding_bags.wide.weight"


def test_tables_are_whole_before_a_run_at_its_checkpoints_and_behind_it(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    start = copied(model.state_dict())
    assert [name for name in start if "embedding" in name] == [WIDE, "ebc.embedding_bags.small.weight"]
    assert start[WIDE].shape == (500, 4)
    loader = rowcast.connect(model.ebc, DATASET, save_every=3)
    states, losses = [], []
    for step, batch in enumerate(loader):
        if step == 0:
            assert same(start, dict(model.state_dict()))
        losses.append(train_on(model, optimizer, batch))
        if step % 3 == 2:
            states.append(copied(model.state_dict()))
    assert len(losses) == 8
    assert not torch.equal(states[0][WIDE], start[WIDE])
    assert not torch.equal(states[1][WIDE], states[0][WIDE])
    end = copied(model.state_dict())
    export_run(tmp_path, tmp_path / "exported")
    exported = load_file(tmp_path / "exported")
    assert torch.equal(end[WIDE], exported["embedding_bags.wide.weight"])

    shorter, its_optimizer = make(tmp_path / "shorter")
    assert train_all(shorter, its_optimizer, rowcast.connect(shorter.ebc, DATASET, max_steps=6)) == losses[:6]
    assert same(dict(shorter.state_dict()), states[1])


def test_tables_that_are_loaded_are_those_that_a_run_begins_with(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path / "first")
    losses = train_all(model, optimizer, rowcast.connect(model.ebc, DATASET, max_steps=4))
    end = copied(model.state_dict())
    other, its_optimizer = make(tmp_path / "other")
    with pytest.raises(RuntimeError, match=facts("embedding_bags.wide.weight", "[3, 4]", "[500, 4]")):
        other.load_state_dict({**end, WIDE: torch.zeros(3, 4)})
    with pytest.raises(RuntimeError, match=facts("Missing key(s)", "ebc.embedding_bags.wide.weight")):
        other.load_state_dict({name: tensor for name, tensor in end.items() if name != WIDE})
    other.load_state_dict(end)
    assert same(dict(other.state_dict()), end)
    loader = rowcast.connect(other.ebc, DATASET)
    for step, batch in enumerate(loader):
        if step == 0:
            assert same(dict(other.state_dict()), end)
        loss = train_on(other, its_optimizer, batch)
        assert step > 0 or loss != losses[0]
        with pytest.raises(RuntimeError, match=facts("tables", "loaded only before", "first batch")):
            other.load_state_dict(end)


def a_run(run_dir: Path, steps: int = 3) -> None:
    """One that was left without a word, and has a checkpoint behind its second step."""
    model, optimizer = make(run_dir)
    with rowcast.connect(model.ebc, DATASET, save_every=2, dense=(model, optimizer)) as loader:
        for step, batch in enumerate(loader):
            train_on(model, optimizer, batch)
            if step == steps - 1:
                break


def kept(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted((run_dir / "checkpoints").rglob("*")) if path.is_file()}


def test_a_script_that_is_started_again_says_what_it_does(
    tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path)
    assert (
        f"rowcast: begins a new run in {tmp_path}; checkpoints are made every 2 train steps\n" in capfd.readouterr().err
    )
    for fresh, said in (
        (
            False,
            f"continues the run in {tmp_path} after 2 train steps, in epoch 0; "
            "checkpoints are made every 10m (fresh=True begins",
        ),
        (
            True,
            f"begins a new run in {tmp_path}, whose first checkpoint replaces the run of 2 train steps there; "
            "checkpoints",
        ),
    ):
        model, optimizer = make(tmp_path)
        rowcast.connect(model.ebc, DATASET, dense=(model, optimizer), fresh=fresh)
        out, err = capfd.readouterr()
        assert err.startswith(f"rowcast: {said}")
        assert out == ""
    model, _ = make(tmp_path / "other")
    rowcast.connect(model.ebc, DATASET)
    assert "checkpoints are made at the end only" in capfd.readouterr().err


def test_a_run_does_not_go_on_with_a_model_that_begins_anew(tmp_path: Path, launches: Launches) -> None:
    a_run(tmp_path)
    before = kept(tmp_path)
    model, _ = make(tmp_path)
    with pytest.raises(
        ConfigError,
        match=facts("2 train steps", "from scratch", "dense="),
    ):
        rowcast.connect(model.ebc, DATASET)
    model, optimizer = make(tmp_path / "first")
    model.load_state_dict(model.state_dict())
    model.ebc.load_state_dict(model.ebc.state_dict())
    a_run(tmp_path / "first")
    model, optimizer = make(tmp_path / "first")
    assert model.ebc.has_run
    model.ebc.load_state_dict(model.ebc.state_dict())
    with pytest.raises(ConfigError, match=facts("own tables", "load_state_dict()")):
        rowcast.connect(model.ebc, DATASET, dense=(model, optimizer))
    assert kept(tmp_path) == before != {}
    assert launches.remains() == []


@pytest.mark.parametrize("loads", [False, True])
def test_a_script_that_dies_in_its_first_steps_costs_no_earlier_run(
    loads: bool, tmp_path: Path, launches: Launches
) -> None:
    a_run(tmp_path)
    before = kept(tmp_path)
    model, optimizer = make(tmp_path)
    if loads:
        model.load_state_dict(model.state_dict())
    with (
        rowcast.connect(model.ebc, DATASET, dense=(model, optimizer), fresh=True) as loader,
        pytest.raises(ZeroDivisionError),
    ):
        train_until(model, optimizer, loader, 3, lambda: 1 / 0)
    assert kept(tmp_path) == before != {}
    model, optimizer = make(tmp_path)
    losses = train_all(model, optimizer, rowcast.connect(model.ebc, DATASET, dense=(model, optimizer)))
    assert len(losses) == 6, "it goes on where the earlier run stood"


def test_a_checkpoint_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path: Path, launches: Launches) -> None:
    """A fresh run comes to step 2, where the earlier one has a checkpoint and this one has none."""
    a_run(tmp_path)
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET, save_every=4, dense=(model, optimizer), fresh=True) as loader:
        for step, batch in enumerate(loader):
            train_on(model, optimizer, batch)
            if step == 1:
                with pytest.raises(RuntimeError, match=facts("2 train steps", "newest rows", "save_every=N")):
                    model.state_dict()
                break


def test_a_state_that_no_checkpoint_can_hold_is_named(tmp_path: Path, launches: Launches) -> None:
    class Odd:
        def state_dict(self) -> object:
            return {"random": np.random.default_rng(0)}

        def load_state_dict(self, state_dict: object) -> None:
            """Nothing to load."""

    model, optimizer = make(tmp_path)
    with pytest.raises(ConfigError, match=facts("state of an object", "Generator", "checkpoint")):
        train_all(model, optimizer, rowcast.connect(model.ebc, DATASET, save_every=2, dense=(Odd(),)))
    model, optimizer = make(tmp_path / "early")
    with rowcast.connect(model.ebc, DATASET, save_every=1, dense=(model, optimizer)) as loader:
        dense, sparse, _ = next(iter(loader))
        torch.autograd.backward(model(dense, sparse).sum())
        with pytest.raises(RuntimeError, match=facts("dense=...", "optimizer.step()", "state_dict()")):
            model.state_dict()
        optimizer.step()
        assert len(model.state_dict()) == 4
    with pytest.raises(ConfigError, match=facts("dense", "int", "load_state_dict")):
        rowcast.connect(make(tmp_path / "other")[0].ebc, DATASET, dense=(3,))  # type: ignore[arg-type]


def test_an_export_is_of_a_run_or_of_a_job_file(tmp_path: Path) -> None:
    model, _ = make(tmp_path)
    job_file = model.ebc.shared.write_job_file()
    for options in ((), ("--run", str(tmp_path), "--config", str(job_file))):
        with pytest.raises(ConfigError, match=facts("--run DIR", "--config job.toml")):
            run_prefetcher_command("export", "--out", str(tmp_path / "out"), *options)
    assert load_job(job_file) == model.ebc.job
    job_file.write_text("{")
    with pytest.raises(ConfigError, match=r"job\.json: not a JSON file"):
        load_job(job_file)


def test_rows_of_two_bytes_go_through_state_dicts_as_they_are(tmp_path: Path, launches: Launches) -> None:
    configs = [replace(own, data_type="bf16") for own in CONFIGS]
    ends: list[dict[str, torch.Tensor]] = []
    for name in ("first", "second"):
        ebc = EmbeddingBagCollection(
            configs, optimizer={"kind": "sgd", "lr": 0.1}, capacity="60 rows", device="cpu", run_dir=tmp_path / name
        )
        model = Model(ebc)
        if ends:
            model.load_state_dict(ends[0])
            assert same(dict(model.state_dict()), ends[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_all(model, optimizer, rowcast.connect(ebc, DATASET, max_steps=2))
        ends.append(copied(model.state_dict()))
    assert ends[0][WIDE].dtype == torch.bfloat16
    assert not torch.equal(ends[0][WIDE], ends[1][WIDE])


def test_a_schedule_of_milestones_is_restored_as_it_was() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5, 5])
    objects = ScriptObjects([schedule], torch.device("cpu"), nullcontext)
    tensors = objects.state()
    schedule.milestones = Counter()
    objects.restore(tensors)
    assert sorted(schedule.milestones.elements()) == [2, 5, 5]
