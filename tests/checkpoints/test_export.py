"""An export is one safetensors file with the dense weights and every row, trained or not; stock PyTorch loads it."""

import io
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load as torch_load
from safetensors.torch import load_file
from safetensors.torch import save as torch_save
from torch import Tensor, nn

from rowcast.job.embedding_tables import Table
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.checkpoints import export, row_files
from rowcast.prefetcher.checkpoints.export import CheckpointRows, SavedModelState, export_run
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.stores import records as stores
from rowcast.prefetcher.stores.records import first_records, of_seed
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.checkpoint_manifest import DenseFile, Manifest, file_checksum, newest_checkpoint, read_manifest
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.trainer.models.dlrm import DLRM
from rowcast.trainer.models.job_model import mean_loss
from tests.checkpoints.fake_run import FakeRun
from tests.checkpoints.fake_run import small_job as job_of_three_tables
from tests.support import jobs
from tests.support.batches import make_batch, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Past, Settings, start_state
from tests.support.facts import facts

DIM = 6


def dlrm_job(run_dir: Path, tables: list[tuple[str, int, list[str]]], optimizer: str = "adagrad") -> Job:
    sparse = {"kind": optimizer, "lr": 0.1, "initial_accumulator": 0.5 if optimizer == "adagrad" else 0.0}
    return jobs.job(
        job={"run_dir": str(run_dir), "seed": 4},
        data={"format": "tests.support.batches:unused", "batch_size": 32},
        tables=[jobs.table(name, rows, DIM, *features, init="normal:0.3") for name, rows, features in tables],
        model={"kind": "dlrm", "bottom_mlp": [5, DIM], "top_mlp": [7, 1]},
        optimizer={"sparse": sparse},
        cache={"capacity": "1GiB"},
    )


def with_checkpoint(job: Job, batches: list[ScheduledBatch], slots: tuple[int, ...]) -> InProcessRun:
    """A run to its end, which writes a checkpoint."""
    job.run_dir.mkdir(parents=True)
    past = Past(checkpoints=Checkpoints(job.run_dir, Disk()), newest=None)
    return InProcessRun(job, batches, Settings(slots=slots), past).run()


def trained_run(run_dir: Path, num_steps: int = 6) -> InProcessRun:
    job = small_job("adagrad", "multi", job={"run_dir": str(run_dir)})
    batches = small_batches(job, "multi", num_steps=num_steps, eval_at=(2,)) if num_steps else []
    return with_checkpoint(job, batches, slots_for(group_specs(job), batches, "one batch") if batches else (1, 1))


def newest_folder(run_dir: Path) -> Path:
    folder = newest_checkpoint(run_dir)
    assert folder is not None
    return folder


def newest_manifest(run_dir: Path) -> Manifest:
    return read_manifest(newest_folder(run_dir))


def exported(run: InProcessRun, out: Path) -> dict[str, Tensor]:
    export_run(run.job.run_dir, out)
    return load_file(out)


def assert_equal_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), f"{name} differs"


@pytest.mark.parametrize(("shard_bytes", "block_rows"), [(1_000, 65_536), (4_000, 64), (10_000_000, 7), (2_000, 1)])
def test_shards_and_blocks_of_any_size_give_the_same_export(
    shard_bytes: int, block_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "ROW_FILE_BYTES", shard_bytes)
    run = trained_run(tmp_path / "run", num_steps=3)
    monkeypatch.setattr(export, "BLOCK_ROWS", block_rows)
    assert_equal_tensors(exported(run, tmp_path / "out.safetensors"), run.state())


@pytest.mark.parametrize("shard_bytes", [1_000, 10_000_000])
def test_an_export_of_the_trained_rows_has_their_ids_and_what_the_whole_export_has_there(
    shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "ROW_FILE_BYTES", shard_bytes)
    job = small_job("adagrad", "multi", job={"run_dir": str(tmp_path / "run")})
    batches = small_batches(job, "multi", num_steps=3, eval_at=(2,))
    run = with_checkpoint(job, batches, slots_for(group_specs(job), batches, "one batch"))
    whole = exported(run, tmp_path / "whole")
    export_run(job.run_dir, tmp_path / "trained", trained_only=True)
    expected = dict(whole)
    for table in job.tables:
        rows = trained_rows(job, batches, table)
        assert 0 < len(rows) < table.num_embeddings
        expected[f"embedding_bags.{table.name}.rows"] = rows
        for name in whole:
            if name.startswith((f"embedding_bags.{table.name}.", f"optimizer.{table.name}.")):
                expected[name] = whole[name][rows]
    assert_equal_tensors(load_file(tmp_path / "trained"), expected)


def trained_rows(job: Job, batches: list[ScheduledBatch], table: Table) -> Tensor:
    """Ids of the rows that train steps look up, ascending."""
    found = []
    for batch in (scheduled.batch for scheduled in batches if scheduled.kind == "train"):
        assert batch.offsets is not None
        ends = batch.offsets[:: batch.size]
        found += [batch.ids[ends[own] : ends[own + 1]] for own in map(job.features.index, table.features)]
    return torch.from_numpy(np.unique(np.concatenate(found)))


def test_an_export_larger_than_the_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    job = dlrm_job(tmp_path / "run", [("a", 10**12, ["x"])])
    with pytest.raises(ConfigError, match=facts("43.66 TiB", "free", "--trained-rows")):
        export.export_start(job, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_every_optimizers_state_is_exported_under_its_name_in_torch(optimizer: str, tmp_path: Path) -> None:
    job = dlrm_job(tmp_path / "run", [("a", 30, ["x"])], optimizer)
    found = exported(with_checkpoint(job, [], (1,)), tmp_path / "out")
    states = {"sgd": set(), "rowwise_adagrad": {"sum"}, "adam": {"exp_avg", "exp_avg_sq"}}[optimizer]
    assert {name for name in found if name.startswith("optimizer.")} == {f"optimizer.a.{state}" for state in states}
    assert_equal_tensors(found, start_state(job, 13))


# stock PyTorch


def trained_dlrm(tmp_path: Path) -> tuple[InProcessRun, list[ScheduledBatch]]:
    job = dlrm_job(tmp_path / "run", [("a", 200, ["x", "y"]), ("b", 90, ["z"])])
    rng = np.random.default_rng(2)
    batches = [
        ScheduledBatch.at(step=step, kind="train", train_step=step, epoch=0, batch=make_batch(job, "multi", 32, rng))
        for step in range(6)
    ]
    slots = slots_for(group_specs(job), batches, "one batch")
    return with_checkpoint(job, batches[:5], slots), batches


def bags_and_model(job: Job, content: dict[str, Tensor], num_dense: int) -> tuple[nn.ModuleDict, DLRM]:
    """What a stranger would build: an nn.EmbeddingBag a table, and the published class for the rest."""
    bags = nn.ModuleDict({t.name: nn.EmbeddingBag(t.num_embeddings, t.embedding_dim, mode="sum") for t in job.tables})
    prefix = "embedding_bags."
    bags.load_state_dict(
        {name.removeprefix(prefix): tensor for name, tensor in content.items() if name.startswith(prefix)}
    )
    model = DLRM(job, num_dense)
    model.load_state_dict({name: t for name, t in content.items() if not name.startswith((prefix, "optimizer."))})
    return bags, model


def test_the_export_of_a_trained_dlrm_loads_into_torch_and_predicts_alike(
    tmp_path: Path,
) -> None:
    run, batches = trained_dlrm(tmp_path)
    bags, model = bags_and_model(run.job, exported(run, tmp_path / "out"), num_dense=4)
    batch = batches[5].batch
    assert batch.offsets is not None
    ids, offsets = torch.from_numpy(batch.ids), torch.from_numpy(batch.offsets)
    embeddings = []
    for feature, name in enumerate(["a", "a", "b"]):
        bounds = offsets[feature * 32 : (feature + 1) * 32 + 1]
        embeddings.append(bags[name](ids[bounds[0] : bounds[-1]], bounds[:-1] - bounds[0]))
    loss = mean_loss(model(torch.from_numpy(batch.dense), embeddings), torch.from_numpy(batch.labels))
    assert loss.item() == pytest.approx(evaluate_next(run, batches), rel=1e-6)


def evaluate_next(run: InProcessRun, batches: list[ScheduledBatch]) -> float:
    """The loss of the sixth batch after five steps, by a run that goes on to train it."""
    slots = slots_for(run.groups, batches, "one batch")
    return float(InProcessRun(run.job, batches, Settings(slots=slots)).run().results.losses[5])


# bounded memory


def test_an_export_takes_memory_for_a_block_and_a_file_of_each_layer_not_for_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "ROW_FILE_BYTES", 2**18)
    tables = (("a", 7, 4), ("large", 12 * export.BLOCK_ROWS + 3, 4))
    run = FakeRun(job_of_three_tables(tmp_path / "run", tables=tables), block=3000)
    run.train({1: list(range(0, tables[1][1], 10))})
    run.checkpoint_without_dense()
    run.train({1: list(range(0, tables[1][1], 100))})
    assert len(run.checkpoint_without_dense().layers) == 2
    blocks: list[int] = []

    def count(group: GroupSpec, seed: int, keys: Keys) -> Records:
        blocks.append(len(keys))
        return first_records(group, seed, keys)

    monkeypatch.setattr(stores, "first_records", count)
    out = tmp_path / "out"
    tracemalloc.start()
    export_run(run.job.run_dir, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    block_bytes = export.BLOCK_ROWS * run.groups[0].record_bytes
    assert blocks == [7, *[export.BLOCK_ROWS] * 12, 3]
    assert peak < 8 * block_bytes < out.stat().st_size
    weights = load_file(out)["embedding_bags.large.weight"].numpy()
    assert (weights[:, 1] == 20).sum() == len(range(0, tables[1][1], 100))
    assert (weights[:, 1] == 10).sum() == len(range(0, tables[1][1], 10)) - len(range(0, tables[1][1], 100))


def test_a_chosen_checkpoint_is_exported_and_by_default_the_newest_which_must_be_whole(tmp_path: Path) -> None:
    run = FakeRun(job_of_three_tables(tmp_path / "run"))
    run.train({0: [1, 2]})
    run.checkpoint_without_dense()
    run.train({0: [2]})
    newest = run.checkpoint_without_dense()
    out = tmp_path / "out"

    def second_column(checkpoint: str | None) -> list[float]:
        export_run(run.job.run_dir, out, checkpoint)
        return load_file(out)["embedding_bags.narrow_a.weight"][1:3, 1].tolist()

    assert second_column(None) == [10, 20]
    assert second_column("step-000000000010") == [10, 10]
    (run.checkpoints.root / newest.layers[-1].files[0].file).write_bytes(b"damaged")
    for chosen in (None, "step-000000000020"):
        with pytest.raises(DataError, match=facts("step-000000000020", "step-000000000010, for --checkpoint")):
            export_run(run.job.run_dir, out, chosen)
    with pytest.raises(ConfigError, match=facts("no checkpoint ../x", "step-000000000010", "step-000000000020")):
        export_run(run.job.run_dir, out, "../x")


# refusals


@pytest.mark.parametrize(("run", "why"), [("", "a run writes one at its end"), ("typo", "there is no such folder")])
def test_a_run_without_a_checkpoint_cannot_be_exported(run: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"holds no checkpoint; {why}"):
        export_run(tmp_path / run, tmp_path / "out")


@pytest.mark.parametrize("out", ["missing folder/out", "file/out", "folder"])
def test_an_output_that_cannot_be_written_is_refused_in_one_sentence(out: str, tmp_path: Path) -> None:
    trained_run(tmp_path / "run", num_steps=0)
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"could not be written.*--out|is a folder"):
        export_run(tmp_path / "run", tmp_path / out)
    assert not list(tmp_path.glob("*.partial"))


def test_an_existing_export_stays_whole_where_the_new_one_fails(tmp_path: Path) -> None:
    run, out = trained_run(tmp_path / "run", num_steps=2), tmp_path / "out"
    exported(run, out)
    before = out.read_bytes()
    manifest = newest_manifest(run.job.run_dir)
    (run.job.run_dir / "checkpoints" / manifest.layers[0].files[0].file).write_bytes(b"damaged")
    for name in (None, manifest.name):
        with pytest.raises(DataError):
            export_run(run.job.run_dir, out, name)
    assert out.read_bytes() == before
    assert list(tmp_path.glob("*.partial")) == []


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.uint8, torch.int64]
)
def test_dense_tensors_of_every_type_survive(dtype: torch.dtype, tmp_path: Path) -> None:
    run = trained_run(tmp_path / "run", num_steps=1)
    manifest, root = newest_manifest(run.job.run_dir), run.job.run_dir / "checkpoints"
    tensors = {"model.buffer": torch.arange(6).reshape(2, 3).to(dtype), "model.scalar": torch.ones((), dtype=dtype)}
    (root / manifest.name / "other.safetensors").write_bytes(
        torch_save(tensors | {"optimizer.buffer.sum": torch.ones(3)})
    )
    nbytes, checksum = file_checksum(root / manifest.name / "other.safetensors")
    dense = DenseFile(file=f"{manifest.name}/other.safetensors", nbytes=nbytes, checksum=checksum)
    out = io.BytesIO()
    rows = CheckpointRows(root, manifest.layers, run.groups, of_seed(run.job.job.seed), export.all_of(run.groups))
    state = SavedModelState(root, msgspec.structs.replace(manifest, dense=dense))
    export.write_safetensors(out, run.groups, rows.tensors(run.groups) | state.tensors, rows, state)
    loaded = torch_load(out.getvalue())
    assert loaded["buffer"].dtype == dtype
    assert torch.equal(loaded["buffer"], tensors["model.buffer"])
    assert torch.equal(loaded["scalar"], tensors["model.scalar"])
    assert "optimizer.buffer.sum" not in loaded
