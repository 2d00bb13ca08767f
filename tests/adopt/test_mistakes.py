"""What a script does by mistake, or in a mode of its own, and the sentence or the same bits that it gets."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rowcast
import rowcast.trainer.kernels.choose
from rowcast.runtime.errors import ConfigError, Mismatch
from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from rowcast.trainer.adopt.connect.table_files import SCRIPT, run_prefetcher_command
from tests.adopt.scripts import CONFIGS, Launches, Model, copied, make, same, train_all, train_on
from tests.support.facts import facts

DATASET = "tests.adopt.clicks:train"


def test_a_script_that_its_own_prefetcher_imports_is_told_to_guard_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = make(tmp_path)
    monkeypatch.setenv(SCRIPT, "77")
    with pytest.raises(ConfigError, match=facts("prefetcher", 77, "__main__")):
        rowcast.connect(model.ebc, DATASET)


def test_a_warning_leaves_the_scripts_standard_output_alone(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rowcast.trainer.kernels.choose, "differing", lambda *others: "made up")
    model, optimizer = make(tmp_path)
    train_all(model, optimizer, rowcast.connect(model.ebc, DATASET, max_steps=2))
    out, err = capfd.readouterr()
    assert out == ""
    assert "compiled kernels have other bits than torch here" in err


@pytest.mark.parametrize(("steps", "warned"), [(3, False), (4, True)])
def test_a_loader_that_is_left_between_two_epochs_says_so(
    steps: int, warned: bool, tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, "tests.adopt.clicks:listed", epochs=2) as loader:
        for done, batch in enumerate(loader, start=1):
            train_on(model, optimizer, batch)
            if done == steps and not warned:
                break
    assert done == steps
    assert ("one `for` loop over it is one epoch" in capfd.readouterr().err) == warned


def test_a_forgotten_train_mode_is_named(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET) as loader:
        batches = iter(loader)
        train_on(model, optimizer, next(batches))
        model.eval()
        train_on(model, optimizer, next(batches))
        with pytest.raises(RuntimeError, match=facts("train step 1", "eval", "model.train()")):
            next(batches)


def test_rows_may_stay_as_they_are_where_they_are_looked_up_without_gradients(
    tmp_path: Path, launches: Launches
) -> None:
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET, options={"batches": 2}) as loader:
        for dense, sparse, _ in loader:
            with torch.no_grad():
                values = model.ebc(sparse).values()
            torch.autograd.backward(model.layer(torch.cat([dense, values], dim=1)).sum())
            optimizer.step()
    assert launches.children[0].code == 0


def test_rows_are_not_frozen_by_requires_grad(tmp_path: Path) -> None:
    model, _ = make(tmp_path)
    with pytest.raises(RuntimeError, match=facts("requires_grad_(False)", "lr = 0")):
        model.ebc.requires_grad_(False)
    assert model.ebc.requires_grad_() is model.ebc


def test_a_run_may_begin_in_inference_mode(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path / "first")
    losses = train_all(model, optimizer, rowcast.connect(model.ebc, DATASET))
    model, optimizer = make(tmp_path / "second")
    with rowcast.connect(model.ebc, DATASET) as loader:
        batches = iter(loader)
        with torch.inference_mode():
            first = next(batches)
            model(first.dense_features, first.sparse_features)
        found = [train_on(model, optimizer, first), *(train_on(model, optimizer, batch) for batch in batches)]
    assert found == losses


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET, save_every=2, dense=(model, optimizer)) as loader:
        for batch in loader:
            train_on(model, optimizer, batch)
            if batch.train_step == 2:
                break
    model, optimizer = make(tmp_path)
    model.layer = nn.Linear(14, 3)
    with pytest.raises(Mismatch, match=facts("Model", "size mismatch")):
        train_all(
            model, optimizer, rowcast.connect(model.ebc, DATASET, save_every=2, dense=(model, optimizer), fresh=False)
        )


def test_a_connect_that_was_refused_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path)
    before = model.ebc.job
    wrong: list[Any] = [{"dense": (3,)}, {"epochs": 0}]
    with pytest.raises(ConfigError, match=facts("train_on", "package.module:factory")):
        rowcast.connect(model.ebc, train_on)  # type: ignore[arg-type]
    for options in wrong:
        with pytest.raises(ConfigError):
            rowcast.connect(model.ebc, DATASET, **options)
        assert model.ebc.job == before
    rowcast.connect(model.ebc, DATASET, dense=(model, optimizer))
    assert model.ebc.job.data.epochs == before.data.epochs


def test_a_module_is_copied_before_its_run_and_not_in_it(tmp_path: Path, launches: Launches) -> None:
    model, _ = make(tmp_path)
    assert copy.deepcopy(model).ebc.job == model.ebc.job
    with rowcast.connect(model.ebc, DATASET) as loader:
        next(iter(loader))
        with pytest.raises(RuntimeError, match=facts("loader has begun", "copied")):
            copy.deepcopy(model)


@pytest.mark.parametrize("rows", ["keep", "follow"])
@pytest.mark.parametrize("schedule", [True, False])
def test_a_schedule_that_the_rows_do_not_follow_is_told_once(
    schedule: bool, rows: str, tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    own: dict[str, Any] = (
        {"optimizer.sparse.schedule": {"kind": "linear", "decay_steps": 8}} if rows == "follow" else {}
    )
    model, optimizer = make(tmp_path, **own)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)] if schedule else []
    with rowcast.connect(model.ebc, "tests.adopt.clicks:listed") as loader:
        for batch in loader:
            train_on(model, optimizer, batch)
            for each in schedules:
                each.step()
    told = capfd.readouterr().err.count("'schedule': {'kind': 'cosine', 'decay_steps': N}")
    assert told == (schedule and rows == "keep")


def test_weights_that_the_tables_cannot_hold_are_refused(tmp_path: Path, launches: Launches) -> None:
    configs = [replace(own, data_type="fp16") for own in CONFIGS]
    ebc = EmbeddingBagCollection(
        configs, optimizer={"kind": "sgd", "lr": 0.1}, capacity="60 rows", device="cpu", run_dir=tmp_path
    )
    model = Model(ebc)
    ebc.load_state_dict(
        {name: torch.full_like(weight, 7e4, dtype=torch.float32) for name, weight in ebc.state_dict().items()}
    )
    with pytest.raises(ConfigError, match="65504"):
        next(iter(rowcast.connect(model.ebc, DATASET)))


def test_a_master_copy_begins_with_all_bits_of_what_was_loaded(tmp_path: Path) -> None:
    configs = [replace(own, data_type="bf16") for own in CONFIGS]
    optimizer = {"kind": "sgd", "lr": 0.1, "master": True}
    ebc = EmbeddingBagCollection(
        configs, optimizer=optimizer, capacity="60 rows", device="cpu", run_dir=tmp_path / "run"
    )
    ebc.load_state_dict(
        {name: torch.full_like(weight, 1.2345678, dtype=torch.float64) for name, weight in ebc.state_dict().items()}
    )
    loaded_file = ebc.shared.loaded
    assert loaded_file is not None
    loaded = loaded_file.rename(tmp_path / "loaded")
    run_prefetcher_command("import", "--config", str(ebc.shared.write_job_file()), "--from", str(loaded))
    run_prefetcher_command("export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported")
    assert torch.equal(exported["optimizer.wide.master"], torch.full((500, 4), 1.2345678))
    assert exported["embedding_bags.wide.weight"].dtype == torch.bfloat16


def test_a_gradient_scaler_is_refused_before_it_trains_a_row(tmp_path: Path, launches: Launches) -> None:
    class Own(torch.amp.GradScaler):
        """As torch.cuda.amp.GradScaler is one, and those of trainers built on torch."""

    model, optimizer = make(tmp_path)
    scaler, own = torch.amp.GradScaler("cpu"), Own("cpu")
    with rowcast.connect(model.ebc, DATASET, options={"batches": 2}) as loader:
        for batch in loader:
            loss = model(batch.dense_features, batch.sparse_features).sum()
            for scales, outputs in ((scaler, loss), (scaler, [loss, loss]), (own, loss)):
                with pytest.raises(RuntimeError, match=facts("GradScaler", "dtype=torch.bfloat16")):
                    scales.scale(outputs)
            assert torch.amp.GradScaler("cpu", enabled=False).scale(loss) is loss
            torch.autograd.backward(loss)
            optimizer.step()
            assert scaler.scale(torch.ones(())) == 65536.0, "another model's scaler is none of ours"
    assert torch.amp.GradScaler.scale.__module__ == "torch.amp.grad_scaler"
    assert scaler.scale(torch.ones(())) == 65536.0


def test_validation_data_that_is_not_the_loaders_is_told_where_it_comes_from(tmp_path: Path) -> None:
    model, _ = make(tmp_path)
    with pytest.raises(
        RuntimeError,
        match=facts("no batch to look up", "validation", '"eval"', "evaluate=True"),
    ):
        model(torch.zeros(8, 2), None)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_look_up_is_exact_or_named(reentrant: bool, tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path / "plain")
    with rowcast.connect(model.ebc, DATASET) as loader:
        train_all(model, optimizer, loader)
    end = copied(model.state_dict())

    model, optimizer = make(tmp_path / "recomputed")
    with rowcast.connect(model.ebc, DATASET) as loader:
        for batch in loader:
            dense = batch.dense_features.requires_grad_()
            logits = checkpoint(model, dense, batch.sparse_features, use_reentrant=reentrant)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            optimizer.zero_grad()
            if not reentrant:
                with pytest.raises(RuntimeError, match=facts("checkpoint", "use_reentrant=True", "train step 0")):
                    torch.autograd.backward(loss)
                return
            torch.autograd.backward(loss)
            optimizer.step()
    assert same(dict(model.state_dict()), end)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double], ids=["bf16", "fp16", "fp64"])
def test_a_model_of_another_dtype_is_told_where_to_cast(cast: Any, tmp_path: Path) -> None:
    model, _ = make(tmp_path)
    with pytest.raises(RuntimeError, match=facts("fp32", "torch.autocast")):
        cast(model)
    assert model.float().to("cpu").ebc is model.ebc


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.full((500, 4), 1e39, dtype=torch.float64), facts("wide", "row 0", "finite", "torch.float32")),
        (torch.cat([torch.zeros(499, 4), torch.full((1, 4), math.nan)]), facts("wide", "row 499", "finite")),
        (torch.zeros(500, 4, dtype=torch.float16) - math.inf, facts("wide", "row 0", "torch.float16")),
        (torch.zeros(500, 4, dtype=torch.int8), facts("wide", "torch.int8", "floats")),
        (torch.zeros(500, 4, dtype=torch.complex64), facts("wide", "torch.complex64", "floats")),
    ],
)
def test_tables_that_would_not_be_kept_are_refused(value: Tensor, named: str, tmp_path: Path) -> None:
    model, _ = make(tmp_path)
    tables = {"embedding_bags.wide.weight": value, "embedding_bags.small.weight": torch.zeros(6, 4)}
    with pytest.raises(ConfigError, match=named):
        model.ebc.load_state_dict(tables)
    assert model.ebc.shared.loaded is None
