"""A row or dense parameter that is not finite ends the run with its name, and no checkpoint holds it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import dense_content
from rowcast.prefetcher.checkpoints.row_files import merged
from rowcast.prefetcher.run.commands import verify
from rowcast.prefetcher.stores.records import FiniteRows
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import Diverged
from rowcast.trainer.models.model_state import require_finite
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Past, Settings
from tests.support.processes import Session
from tests.support.ranked_run import RankedRun

MOODY = "tests.system.odd_models:moody_model"
ROW = 399  # of the first feature's table; no other look-up is of it


def poisoned(at: int, **sections: Any) -> tuple[Job, list[ScheduledBatch]]:
    """In train step `at` alone, row ROW is looked up, and its gradient is NaN."""
    diverging = {"model": {"kind": "tests.system.odd_models:diverging", "options": {"at": at + 1}}}
    own = small_job("adagrad", horizon=1, depth=1, **diverging | sections)
    batches = small_batches(own, "single", num_steps=16, eval_at=())
    for scheduled in batches:
        ids = scheduled.batch.ids.copy()
        ids[: 2 * scheduled.batch.size] %= ROW  # both features of the table
        if scheduled.train_step == at:
            ids[0] = ROW
        batches[scheduled.step] = replace(scheduled, batch=replace(scheduled.batch, ids=ids))
    return own, batches


def end_writing(run: InProcessRun) -> None:
    assert run.writer is not None
    run.writer.abandon()
    while run.writer.busy:
        run.writer.advance()


def whole(root: Path, job: Job) -> Manifest | None:
    """The newest checkpoint, whose rows and dense parameters are all finite."""
    checkpoints = Checkpoints(root, Disk())
    manifest = checkpoints.newest_valid()
    if manifest is not None:
        for group in group_specs(job):
            assert not any(FiniteRows(group).fault(*rows) for rows in merged(checkpoints.root, group, manifest.layers))
        dense = load(b"".join(dense_content(checkpoints.root, manifest)))
        assert all(tensor.isfinite().all() for name, tensor in dense.items() if name.startswith(("model", "optim")))
    return manifest


@pytest.mark.parametrize("tiered", [False, True], ids=["memory", "tiered"])
@pytest.mark.parametrize(("at", "home"), [(4, "leaves its slot"), (7, "comes home at the barrier")])
def test_a_row_that_is_not_finite_ends_the_run_where_it_comes_home(
    at: int, home: str, tiered: bool, tmp_path: Path
) -> None:
    own, batches = poisoned(at, job={"run_dir": str(tmp_path)}, checkpoint={"every": 4})
    slots = slots_for(group_specs(own), batches, "one batch")
    settings = Settings(slots=slots, tier_slots=tuple(n + 20 for n in slots) if tiered else None, tier_reserve=500)
    run = InProcessRun(own, batches, settings, Past(checkpoints=Checkpoints(tmp_path, Disk()), newest=None))
    with pytest.raises(Diverged, match=rf"row {ROW} of table narrow_a: weight\[0\] is nan since .* 4( to [4-7])?: "):
        run.run()
    end_writing(run)
    newest = whole(tmp_path, own)
    assert newest is not None
    assert newest.position.train_step == 4
    past = Past(checkpoints=Checkpoints(tmp_path, Disk()), newest=newest)
    again = InProcessRun(own, batches, settings, past)
    again.runner.model.at = 0  # as if the model were mended
    again.run()
    assert len(again.results.losses) == 16
    assert all(tensor.isfinite().all() for tensor in again.state().values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_owner_of_a_row_finds_it_on_any_rank(ranks: int) -> None:
    own, batches = poisoned(4, ranks={"parts": 2})
    slots = slots_for(group_specs(own), batches, "everything")
    run = RankedRun(own, batches, Settings(slots=slots), ranks=ranks, parts=2)
    for number, pair in enumerate(run.pairs):  # a model is called once for each of its parts, the row is in the first
        pair.runner.model.at = 0 if number else 4 * 2 // ranks + 1
    with pytest.raises(Diverged, match=rf"row {ROW} of table narrow_a: weight\[0\] is nan since .* 0 to 15: "):
        run.run()


@pytest.mark.parametrize("told", ["dense parameter never", "sum of dense parameter hidden.bias"])
def test_a_dense_parameter_that_is_not_finite_is_in_no_checkpoint(told: str, tmp_path: Path) -> None:
    """Neither changes the loss: a weight that is not used, and a sum of squares by whose root an update is divided."""
    dense = {"dense": {"kind": "adagrad", "lr": 0.1}}
    own, batches = poisoned(99, checkpoint={"every": 4}, optimizer=dense, model={"kind": MOODY})
    slots = slots_for(group_specs(own), batches, "more")
    past = Past(checkpoints=Checkpoints(tmp_path, Disk()), newest=None)
    run = InProcessRun(own, batches, Settings(slots=slots), past)
    run.advance_until(lambda: len(run.results.losses) == 6)
    moody, optimizer = run.runner.model, run.runner.dense_step.objects[0]
    tensor = moody.never.data if "never" in told else optimizer.state[moody.hidden.bias]["sum"]
    tensor[0] = torch.inf
    with pytest.raises(Diverged, match=f"^{told} holds inf after [0-9]+ train steps: "):
        run.run()
    end_writing(run)
    assert whole(tmp_path, own) is not None


def test_what_is_not_trained_may_be_infinite() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad = False
    model.bias.data[0] = -torch.inf
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    require_finite([model, torch.optim.Adam(model.parameters())], 0)


JOB: Mapping[str, Any] = {
    "model": {"kind": "tests.system.odd_models:diverging", "options": {"at": 30}, "bottom_mlp": None, "top_mlp": None},
    "checkpoint": {"every": 10},
    "data": {"synthetic": {"samples": 64 * 45}},
}


@pytest.mark.parametrize("store", ["memory", "tiered"])
def test_both_processes_end_with_the_rows_name_and_the_next_start_trains_on(store: str, session: Session) -> None:
    kind = {"kind": store, "memory": "4800 rows"} if store == "tiered" else {"kind": store}
    session.write_job(**JOB, store=kind)
    sentences = [process.ended().refused(1) for process in session.start_both()]
    assert len(set(sentences)) == 1
    assert re.match(r"row \d+ of table t: weight\[0\] is nan since one of train steps 20 to 29: ", sentences[0])
    assert verify(session.run_dir, None) == 0
    assert session.manifest().train_steps == 20
    for process in session.start_both():  # whose model has not called forward 30 times at its end
        assert process.ended().code == 0
    assert session.remains() == []
