"""A checkpoint holds every trained row and the dense side, whole or not at all, and says so in one sentence when it was damaged."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from prefetcher import checkpoint
from prefetcher.checkpoint import RunCheckpointer
from prefetcher.export import export_run
from protocol.errors import DataError, RowcastError
from protocol.manifest import MANIFEST_NAME, Manifest, newest_checkpoint, read_manifest
from protocol.plan import BarrierPlan
from protocol.tables import group_specs
from tests.driver import InProcessRun, Settings
from tests.workloads import slots_for, small_batches, small_job
from trainer.runner import DENSE_FILE, StepRunner

SMALL_SHARD = 4_000  # bytes: a table's rows need several


def trained_run(run_dir: Path, num_steps: int = 6) -> InProcessRun:
    """A run in one process, to its end; `save_checkpoint` writes what the two processes would have written."""
    job = small_job("adagrad", "multi", job={"run_dir": str(run_dir)})
    batches = small_batches(job, "multi", num_steps=num_steps, eval_at=(2,)) if num_steps else []
    slots = slots_for(group_specs(job), batches, "one batch") if batches else (1, 1)
    return InProcessRun(job, batches, Settings(slots=slots)).run()


def begin_checkpoint(run: InProcessRun) -> tuple[RunCheckpointer, BarrierPlan, Path]:
    checkpointer = RunCheckpointer(run.job, run.groups, run.plain_stores, "0123456789ab", run.job.training_digest([]))
    for plan in run.plans:
        checkpointer.planned(plan)
    after = run.plans[-1].step if run.plans else None
    barrier = BarrierPlan(barrier=0, after_step=after, dirty=(), reason="end of data", finished=True)
    return checkpointer, barrier, Path(checkpointer.begin(barrier))


def save_checkpoint(run: InProcessRun) -> Path:
    checkpointer, barrier, folder = begin_checkpoint(run)
    assert not checkpointer.saved()
    checkpointer.accept(StepRunner.save(run.runner, folder))
    assert checkpointer.saved()
    checkpointer.finish(barrier)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> InProcessRun:
    return trained_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def folder(run: InProcessRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh checkpoint of several shards a table."""
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", SMALL_SHARD)
    return save_checkpoint(run)


def present(run: InProcessRun) -> dict[int, bytes]:
    return {
        int(key): record.tobytes()
        for group, store in zip(run.groups, run.plain_stores, strict=True)
        for table in group.tables
        for keys, records in store.scan(table.index, 1000)
        for key, record in zip(keys, records, strict=True)
    }


def test_the_shards_hold_exactly_the_rows_of_the_store_by_ascending_key(run: InProcessRun, folder: Path) -> None:
    manifest = read_manifest(folder)
    rows: dict[int, bytes] = {}
    assert len(manifest.shards) > len(run.job.tables), "every table fits one shard"
    for shard in manifest.shards:
        content = load_file(folder / shard.file)
        keys, records = content["keys"], content["records"]
        assert (np.diff(keys) > 0).all()
        assert (shard.first_key, shard.last_key, shard.num_rows) == (keys[0], keys[-1], len(keys))
        assert (folder / shard.file).stat().st_size == shard.nbytes < 2 * SMALL_SHARD
        assert not rows.keys() & set(keys.tolist()), "a row is in two shards"
        rows |= {int(key): record.tobytes() for key, record in zip(keys, records, strict=True)}
    assert rows == present(run)


def test_the_manifest_names_all_files_of_the_checkpoint_and_the_whole_job(run: InProcessRun, folder: Path) -> None:
    manifest = read_manifest(folder)
    named = {manifest.dense.file, *(shard.file for shard in manifest.shards), MANIFEST_NAME}
    assert {path.name for path in folder.iterdir()} == named
    assert (manifest.step, manifest.train_steps, manifest.finished, manifest.reason) == (6, 6, True, "end of data")
    assert manifest.job["tables"][0]["name"] == "narrow_a"
    assert newest_checkpoint(run.job.run_dir) == folder


def test_the_dense_side_holds_the_models_weights(run: InProcessRun, folder: Path) -> None:
    content = load_file(folder / DENSE_FILE)
    for name, tensor in run.runner.model.state_dict().items():
        assert content[f"model.{name}"].tobytes() == tensor.numpy().tobytes()


def test_a_checkpoint_without_its_manifest_does_not_exist(run: InProcessRun, folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()
    assert newest_checkpoint(run.job.run_dir) is None
    with pytest.raises(DataError, match="no checkpoint here"):
        read_manifest(folder)


def test_the_newest_checkpoint_is_that_of_the_highest_step(run: InProcessRun, folder: Path) -> None:
    for name in ("step-000000000006", "step-000000000010", "step-000000000009"):
        other = folder.with_name(name)
        other.mkdir(exist_ok=True)
        (other / MANIFEST_NAME).write_bytes((folder / MANIFEST_NAME).read_bytes())
    (folder.with_name("step-000000000011")).mkdir()
    assert newest_checkpoint(run.job.run_dir) == folder.with_name("step-000000000010")
    for name in ("step-000000000006", "step-000000000010", "step-000000000009"):
        (folder.with_name(name) / MANIFEST_NAME).unlink()


def test_a_checkpoint_at_the_same_step_replaces_what_an_earlier_attempt_left(run: InProcessRun, folder: Path) -> None:
    (folder / "left over").write_text("from a run that was killed")
    assert not (save_checkpoint(run) / "left over").exists()


def test_a_checkpoint_before_the_first_step_holds_no_row(tmp_path: Path) -> None:
    manifest = read_manifest(save_checkpoint(trained_run(tmp_path, num_steps=0)))
    assert (manifest.step, manifest.train_steps, manifest.shards) == (None, 0, ())


def test_a_disk_that_cannot_be_written_ends_in_one_sentence(run: InProcessRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    checkpointer, barrier, folder = begin_checkpoint(run)
    checkpointer.accept(StepRunner.save(run.runner, folder))
    monkeypatch.setattr(checkpoint, "write_durably", full)
    with pytest.raises(RowcastError, match=r"could not be written \(No space left on device\); free space and run again"):
        checkpointer.finish(barrier)
    assert newest_checkpoint(run.job.run_dir) is None, "a checkpoint that failed must not be taken for one"


# damage


def flipped(path: Path, position: int) -> bytes:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << position % 8
    return bytes(content)


def refusal(run: InProcessRun, out: Path) -> str:
    with pytest.raises(DataError) as error:
        export_run(run.job.run_dir, out)
    assert list(out.parent.iterdir()) == [], "a failed export leaves nothing"
    return str(error.value)


def test_a_flipped_bit_in_any_file_is_refused_by_naming_the_file(run: InProcessRun, folder: Path, tmp_path: Path) -> None:
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for position in (0, 7, len(content) // 3, len(content) // 2, len(content) - 1):
            path.write_bytes(flipped(path, position))
            sentence = refusal(run, tmp_path / "out.safetensors")
            assert str(path) in sentence, f"byte {position} of {path.name}: {sentence}"
            path.write_bytes(content)
    export_run(run.job.run_dir, tmp_path / "out.safetensors")


def test_a_flipped_bit_anywhere_in_the_manifest_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(flipped(path, position))
        with pytest.raises(DataError, match="manifest"):
            read_manifest(folder)
        path.write_bytes(content)
    assert isinstance(read_manifest(folder), Manifest)


@pytest.mark.parametrize("damage", ["missing", "truncated", "longer"])
def test_a_file_of_another_length_or_none_is_refused(run: InProcessRun, folder: Path, tmp_path: Path, damage: str) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(content[:-1] if damage == "truncated" else content + b"\0")
        assert str(path) in refusal(run, tmp_path / "out.safetensors")
        path.write_bytes(content)


def test_a_manifest_of_another_version_is_refused_with_both_numbers(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 7'))
    with pytest.raises(DataError, match="manifest version 7, but this version reads 1"):
        read_manifest(folder)
