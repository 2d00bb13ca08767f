"""A script leaves out a batch: `loader.skip()` before the backward pass trains nothing, and after it is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rowcast
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.report.report_json import read_report
from tests.adopt.scripts import Launches, Model, copied, make, same, train_on
from tests.support.facts import facts

DATASET = "tests.adopt.clicks:train"
NAMES_GUARD = facts("clip_grad_norm_", "backward()", "loader.skip()", "end the run")


def loss_of(model: Model, batch: Any) -> Tensor:
    logits = model(batch.dense_features, batch.sparse_features)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


def guarded(
    model: Model, optimizer: Any, loader: rowcast.Loader, left_out: set[int], act: Any = lambda step: None
) -> None:
    """As a script that leaves out batches whose loss is not finite."""
    for batch in loader:
        loss = loss_of(model, batch) * (math.nan if batch.train_step in left_out else 1)
        loader.record(loss=loss)
        if not loss.isfinite():
            loader.skip()
            continue
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        act(batch.train_step)


def without(model: Model, optimizer: Any, loader: rowcast.Loader, left_out: set[int]) -> None:
    for batch in loader:
        if batch.train_step not in left_out:
            train_on(model, optimizer, batch)


@pytest.mark.parametrize("left_out", [{0}, {3}, {7}, {3, 4}, set(range(8))], ids=str)
def test_a_batch_that_is_left_out_trains_nothing(left_out: set[int], tmp_path: Path, launches: Launches) -> None:
    ends = []
    for name, run in (("skips", guarded), ("passes", without)):
        model, optimizer = make(tmp_path / name, optimizer="adam")
        with rowcast.connect(model.ebc, DATASET) as loader:
            run(model, optimizer, loader, left_out)
            ends.append(copied(model.state_dict()))
    assert same(*ends)
    losses = np.fromfile(tmp_path / "skips" / "losses.f32", np.float32) if len(left_out) < 8 else np.full(8, np.nan)
    assert set(np.flatnonzero(np.isnan(losses)).tolist()) == left_out
    assert len(losses) == 8
    report = read_report(tmp_path / "skips" / "report.json")
    assert (report.train_steps, report.skipped_steps) == (8, len(left_out))
    assert report.loss == (pytest.approx(np.nanmean(losses)) if len(left_out) < 8 else None)
    assert launches.remains() == []


def test_a_run_that_is_killed_around_a_batch_that_is_left_out_ends_with_the_same_bits(
    tmp_path: Path, launches: Launches
) -> None:
    class Killed(Exception):
        """Stands in for the end of the process: nothing is saved."""

    def run(folder: Path, left_out: set[int], die_at: int | None = None) -> dict[str, Tensor]:
        def die(step: int) -> None:
            if step == die_at:
                raise Killed

        model, optimizer = make(folder, optimizer="adam")
        with rowcast.connect(model.ebc, DATASET, dense=(model, optimizer), save_every=2) as loader:
            guarded(model, optimizer, loader, left_out, die)
            return copied(model.state_dict())

    left_out = {1, 3, 4, 7}
    whole = run(tmp_path / "whole", left_out)
    for die_at in (2, 5, 6):
        with pytest.raises(Killed):
            run(tmp_path / "killed", left_out, die_at)
    assert same(run(tmp_path / "killed", left_out), whole)
    losses = [(tmp_path / name / "losses.f32").read_bytes() for name in ("whole", "killed")]
    assert losses[0] == losses[1]
    assert [read_report(tmp_path / name / "report.json").skipped_steps for name in ("whole", "killed")] == [4, 4]


def test_a_run_may_stop_at_a_batch_that_is_left_out(tmp_path: Path, launches: Launches) -> None:
    ends = []
    for stops in (False, True):
        model, optimizer = make(tmp_path / str(stops))
        with rowcast.connect(model.ebc, DATASET, dense=(model, optimizer)) as loader:
            for batch in loader:
                if batch.train_step == 3:
                    loader.skip()
                    if stops:
                        loader.stop()
                        break
                    continue
                train_on(model, optimizer, batch)
        if stops:
            model, optimizer = make(tmp_path / str(stops))
            with rowcast.connect(model.ebc, DATASET, dense=(model, optimizer)) as loader:
                without(model, optimizer, loader, set())
                ends.append(copied(model.state_dict()))
        else:
            ends.append(copied(model.state_dict()))
    assert same(*ends)


def test_a_batch_is_left_out_before_its_backward_pass_or_not_at_all(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path / "undisturbed")
    with rowcast.connect(model.ebc, DATASET) as loader:
        without(model, optimizer, loader, {2})
    end = copied(model.state_dict())

    model, optimizer = make(tmp_path / "disturbed")
    with rowcast.connect(model.ebc, DATASET) as loader:
        with pytest.raises(RuntimeError, match=facts("loader.skip()", "train batch")):
            loader.skip()
        for batch in loader:
            loss = loss_of(model, batch)
            if batch.train_step == 2:
                loader.skip()
                loader.skip()
                with pytest.raises(RuntimeError, match=facts("train step 2", "left out")):
                    torch.autograd.backward(loss)
                with pytest.raises(RuntimeError, match=facts("train step 2", "left out", "loader.skip()")):
                    loss_of(model, batch)
                with torch.no_grad(), pytest.raises(RuntimeError, match=facts("left out")):
                    loss_of(model, batch)
                continue
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            with pytest.raises(RuntimeError, match=NAMES_GUARD):
                loader.skip()
            optimizer.step()
        with pytest.raises(RuntimeError, match=facts("loader.skip()", "train batch")):
            loader.skip()
    assert same(dict(model.state_dict()), end)


def test_a_guard_on_a_gradient_norm_is_named(tmp_path: Path, launches: Launches) -> None:
    model, _ = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET) as loader:
        batches = iter(loader)
        torch.autograd.backward(loss_of(model, next(batches)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # and no step
        second = next(batches)
        with pytest.raises(RuntimeError, match=NAMES_GUARD):
            loss_of(model, second)


def test_an_evaluation_batch_cannot_be_left_out(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    loader = rowcast.connect(model.ebc, "tests.adopt.clicks:with_evaluation", evaluate=True)
    with loader:
        for batch in loader:
            if batch.kind == "train":
                train_on(model, optimizer, batch)
                continue
            with pytest.raises(RuntimeError, match=facts("loader.skip()", "train batch")):
                loader.skip()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_look_up_is_exact_or_named(reentrant: bool, tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path / "plain")
    with rowcast.connect(model.ebc, DATASET) as loader:
        without(model, optimizer, loader, set())
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
