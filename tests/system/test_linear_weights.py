"""Tables with linear weights through planner, cache and write-back: the plain loop's bits."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.import_checkpoint import import_run
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError
from tests.support.batches import NUM_DENSE, Bags, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits, assert_tested_what_it_claims
from tests.support.driver import InProcessRun, Past, Settings, start_state
from tests.support.facts import facts
from tests.support.full_capacity import bits
from tests.support.jobs import table


@pytest.mark.parametrize(
    ("kind", "optimizer", "dtype"),
    [("wide-deep", "adagrad", "bf16"), ("deepfm", "adam", "fp32"), ("deepfm", "sgd", "bf16")],
)
def test_its_bits_are_the_plain_loops(kind: str, optimizer: str, dtype: str) -> None:
    tables = [
        table("a", 60, 4, linear=True, dtype=dtype),
        table("b", 40, 4, "b0", "b1", linear=True, dtype=dtype),
        table("c", 50, 4, dtype=dtype),
    ]
    job = small_job(optimizer, tables=tables, model={"kind": kind, "top_mlp": [6, 1]})
    batches = small_batches(job, "multi", num_steps=6, eval_at=(2,))
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    assert_equal_bits(run, losses, end)


def mixed_job(optimizer: str, **sections: Any) -> Job:
    """Two widths and three dtypes; of each width, some tables have linear weights and some have none."""
    tables = [
        table("a", 60, 4, "a0", "a1", linear=True, pooling="mean"),
        table("b", 400, 4, linear=True, dtype="fp16"),
        table("c", 50, 5),  # as wide as a, with its linear weights
        table("d", 90, 7, linear=True, dtype="bf16", init="normal:0.1"),
    ]
    return small_job(optimizer, master=True, tables=tables, model={"kind": "wide-deep", "top_mlp": [6, 1]}, **sections)


@pytest.mark.parametrize(("optimizer", "bags"), [("sgd", "weighted"), ("adagrad", "multi"), ("adam", "empty")])
def test_tables_with_and_without_them_in_every_dtype_have_the_plain_loops_bits(optimizer: str, bags: Bags) -> None:
    job = mixed_job(optimizer)
    if bags == "weighted":  # a weighted mean is refused
        job = msgspec.structs.replace(job, tables=[msgspec.structs.replace(t, pooling="sum") for t in job.tables])
    batches = small_batches(job, bags)
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    for seed, capacity in enumerate(("one batch", "more")):
        settings = Settings(slots=slots_for(group_specs(job), batches, capacity), seed=seed, late_store=bool(seed))
        run = InProcessRun(job, batches, settings).run()
        assert_equal_bits(run, losses, end)
        assert_tested_what_it_claims(run, job)


def test_a_run_goes_on_from_its_checkpoint_and_an_import_of_its_export_is_exported_the_same(tmp_path: Path) -> None:
    runs = [tmp_path / "first", tmp_path / "second"]
    job, second = (mixed_job("adam", job={"run_dir": str(run)}, data={"format": "synthetic"}) for run in runs)
    runs[0].mkdir()
    batches = small_batches(job, "multi")
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    checkpoints = Checkpoints(job.run_dir, Disk())
    settings = Settings(slots=slots_for(group_specs(job), batches, "one batch"))
    InProcessRun(job, batches[:6], settings, Past(checkpoints=checkpoints, newest=None)).run()
    past = Past(checkpoints=checkpoints, newest=checkpoints.choose(None))
    assert_equal_bits(InProcessRun(job, batches, settings, past).run(), losses, end)
    export_run(job.run_dir, tmp_path / "whole")
    export_run(job.run_dir, tmp_path / "trained", trained_only=True)
    import_run(second, tmp_path / "whole", fresh=False)
    export_run(second.run_dir, tmp_path / "again")
    whole, trained, again = (load_file(tmp_path / name) for name in ("whole", "trained", "again"))
    assert whole.keys() == again.keys() == end.keys()
    for name, tensor in end.items():
        assert torch.equal(bits(whole[name]), bits(tensor)), name
        assert torch.equal(bits(again[name]), bits(tensor)), name
        if name.startswith(("embedding_bags.", "optimizer.")):
            tensor = tensor[trained[f"embedding_bags.{name.split('.')[1]}.rows"]]
        assert torch.equal(bits(trained[name]), bits(tensor)), name
    assert 0 < len(trained["embedding_bags.b.rows"]) < 400


def test_an_export_of_a_table_without_them_is_refused(tmp_path: Path) -> None:
    plain = small_job("sgd", tables=[table("a", 60, 4)], job={"run_dir": str(tmp_path)})
    batches = small_batches(plain, "single", num_steps=1, eval_at=())
    past = Past(checkpoints=Checkpoints(tmp_path, Disk()), newest=None)
    InProcessRun(plain, batches, Settings(slots=slots_for(group_specs(plain), batches, "more")), past).run()
    export_run(tmp_path, tmp_path / "file")
    job = small_job(
        "sgd",
        tables=[table("a", 60, 4, linear=True)],
        model={"kind": "wide-deep", "top_mlp": [1]},
        job={"run_dir": str(tmp_path / "other")},
    )
    with pytest.raises(ConfigError, match=facts("a.weight", "F32 [60, 4]", "F32 [60, 5]")):
        import_run(job, tmp_path / "file", fresh=False)
    with pytest.raises(ConfigError, match=facts("table a [60, 4]", "[60, 5, linear]")):
        import_run(job, tmp_path, fresh=False)
