"""An imported run begins with the rows and dense weights of a file; an export of it gives them back bit for bit."""

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from structlog.testing import capture_logs

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs, make_keys
from rowcast.prefetcher.checkpoints.export import export_run, table_tensors
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.import_checkpoint import import_run
from rowcast.prefetcher.checkpoints.restore import dense_content
from rowcast.prefetcher.stores.records import elements_of, first_records
from rowcast.runtime.checkpoint_manifest import Manifest, Position
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError
from tests.checkpoints.fake_run import restored, small_job
from tests.support.facts import facts
from tests.support.repeats import count

Tensors = dict[str, NDArray[np.generic]]


def table_content(job: Job, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    content = {
        name: rng.normal(size=spec.shape).astype(np.float32) for name, spec in table_tensors(group_specs(job)).items()
    }
    return {name: np.abs(own) if name.endswith(("sum", "exp_avg_sq")) else own for name, own in content.items()}


def saved(path: Path, content: Tensors) -> Path:
    save_file(content, path)
    return path


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


def test_dense_weights_stand_under_the_models_names_in_the_dense_file(tmp_path: Path) -> None:
    job = small_job(tmp_path / "run")
    manifest = import_run(job, saved(tmp_path / "in", table_content(job) | {"top.weight": np.arange(6.0)}), fresh=False)
    (tmp_path / "dense").write_bytes(b"".join(dense_content(job.run_dir / "checkpoints", manifest)))
    assert_equal(load_file(tmp_path / "dense"), {"model.top.weight": np.arange(6.0)})
    assert (manifest.position, manifest.step, manifest.finished, manifest.reason) == (Position(), None, False, "import")
    assert manifest.trained_on is None


DTYPES = (np.float32, np.float16, np.float64, np.int32, np.uint8)


@pytest.mark.parametrize("seed", range(count(60, soak=2000)))
def test_what_an_import_takes_gives_on_names_and_refuses_is_what_docs_recovery_says(seed: int, tmp_path: Path) -> None:
    """The table under "Import" there, over a random file: up to three tensors are left out or of another shape, dtype
    or name."""
    chance = np.random.default_rng(seed)
    job, content = small_job(tmp_path / "run", "adam"), Tensors()
    refused, missing = False, set[str]()
    whole = table_content(small_job(tmp_path / "run", "adam"), seed) | {"top.weight": np.ones((2, 3), np.float16)}
    for name, tensor in whole.items():
        is_weight, is_table = name.startswith("embedding_bags."), not name.startswith("top.")
        found = tensor
        match chance.integers(12):
            case 0:
                found, refused = (
                    found.astype(dtype := DTYPES[chance.integers(len(DTYPES))]),
                    refused or (is_table and dtype not in ((np.float32, np.float16) if is_weight else (np.float32,))),
                )
            case 1 if is_table:
                found, refused = found[:-1], True
            case 2 if is_table:
                refused, missing = refused or is_weight, missing | {name}
                continue
            case 3 if is_table and chance.integers(4) == 0:
                content[f"{name}x"], refused = tensor, True
        content[name] = found
    source = saved(tmp_path / "in", content)
    with capture_logs() as logs:
        if refused:
            with pytest.raises(ConfigError):
                import_run(job, source, fresh=False)
            assert not job.run_dir.exists()
            return
        import_run(job, source, fresh=False)
    named = [entry["of"] for entry in logs if "optimizer state is missing" in entry["event"]]
    assert (set(named[0].split(", ")) if named else set()) == missing
    export_run(job.run_dir, tmp_path / "out")
    exported = load_file(tmp_path / "out")
    for name in missing:
        assert not exported.pop(name).any(), "Adam's first value"
    kept = {name: tensor.astype(np.float32) if name != "top.weight" else tensor for name, tensor in content.items()}
    assert_equal(exported, kept)


def test_rows_that_were_never_trained_take_no_room(tmp_path: Path) -> None:
    job = small_job(tmp_path / "run")
    group = group_specs(job)[0]
    content = table_content(job)
    for table in group.tables:
        records = first_records(group, job.job.seed, make_keys(table.index, np.arange(table.num_embeddings)))
        for part in group.parts:
            name = (
                f"embedding_bags.{table.name}.weight"
                if part.name == "weight"
                else f"optimizer.{table.name}.{part.name}"
            )
            content[name] = elements_of(records, part).copy()
    content["embedding_bags.narrow_b.weight"][5, 2] += 1
    manifest = import_run(job, saved(tmp_path / "in", content), fresh=False)
    assert manifest.num_rows == 1 + 30
    assert sorted(restored(job.run_dir, job, manifest))[-1] == 2 << 48 | 5
    export_run(job.run_dir, tmp_path / "out")
    assert_equal(load_file(tmp_path / "out"), content)


# refusals


def change(content: Tensors, name: str, tensor: NDArray[np.generic] | None) -> Tensors:
    return {key: value for key, value in content.items() if key != name} | ({} if tensor is None else {name: tensor})


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("embedding_bags.wide.weight", None, "embedding_bags.wide.weight is missing"),
        (
            "embedding_bags.wide.weight",
            np.zeros((30, 9), np.float32),
            facts("F32 [30, 9]", "F32 [30, 8]"),
        ),
        (
            "embedding_bags.wide.weight",
            np.zeros((31, 8), np.float32),
            facts("F32 [31, 8]", "F32 [30, 8]"),
        ),
        ("embedding_bags.wide.weight", np.zeros((30, 8)), facts("F64 [30, 8]", "F32 [30, 8]")),
        (
            "optimizer.wide.sum",
            np.zeros((30, 1), np.float32),
            facts("optimizer.wide.sum", "F32 [30, 1]", "F32 [30, 8]"),
        ),
        (
            "optimizer.wide.exp_avg",
            np.zeros((30, 8), np.float32),
            "the job file has nothing for optimizer.wide.exp_avg",
        ),
        (
            "embedding_bags.more.weight",
            np.zeros((3, 8), np.float32),
            "the job file has nothing for embedding_bags.more.weight",
        ),
    ],
)
def test_a_file_that_does_not_fit_the_job_is_refused_in_one_sentence(
    name: str, tensor: NDArray[np.generic] | None, sentence: str, tmp_path: Path
) -> None:
    job = small_job(tmp_path / "run")
    source = saved(tmp_path / "in", change(table_content(job), name, tensor))
    with pytest.raises(ConfigError, match=sentence):
        import_run(job, source, fresh=False)
    assert not job.run_dir.exists(), "a refused import makes nothing"


def test_a_file_that_is_missing_or_something_else_is_refused(tmp_path: Path) -> None:
    job = small_job(tmp_path / "run")
    with pytest.raises(ConfigError, match=facts("--from", "No such file or directory")):
        import_run(job, tmp_path / "missing", fresh=False)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=facts("pipe", "not a regular file")):
        import_run(job, tmp_path / "pipe", fresh=False)
    whole = saved(tmp_path / "cut", table_content(job))
    whole.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(DataError, match="cut: not a safetensors file"):
        import_run(job, whole, fresh=False)
    for content in (b"", b"{}", b"\xff" * 100, (10**6).to_bytes(8, "little") + b"{}"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(DataError, match="other: not a safetensors file"):
            import_run(job, tmp_path / "other", fresh=False)


def test_a_run_directory_with_a_checkpoint_is_refused_unless_fresh(tmp_path: Path) -> None:
    job = small_job(tmp_path / "run")
    first = import_run(job, saved(tmp_path / "first", table_content(job, 1)), fresh=False)
    second = saved(tmp_path / "second", table_content(job, 2))
    with pytest.raises(ConfigError, match="holds a checkpoint; set another"):
        import_run(job, second, fresh=False)
    assert newest(job).checksum == first.checksum
    import_run(job, second, fresh=True)
    export_run(job.run_dir, tmp_path / "out")
    assert_equal(load_file(tmp_path / "out"), table_content(job, 2))


def newest(job: Job) -> Manifest:
    return Checkpoints(job.run_dir, Disk()).choose(None)
