"""Damage is detected and never restored: the next older checkpoint is taken; without one the run refuses to begin."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from rowcast.prefetcher.checkpoints.restore import dense_content
from rowcast.prefetcher.checkpoints.row_files import read_rows
from rowcast.runtime.checkpoint_manifest import (
    MANIFEST_NAME,
    Manifest,
    Position,
    RowFile,
    RowLayer,
    file_checksum,
    read_manifest,
)
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import DataError
from tests.checkpoints.fake_run import FakeRun, damages, restored, small_job
from tests.support.facts import facts
from tests.support.repeats import count

pytestmark = pytest.mark.usefixtures("small_files")


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """Two checkpoints that share a base; the newer one has two deltas of its own history."""
    run = FakeRun(small_job(tmp_path / "run"), keep=3)
    rng = np.random.default_rng(4)
    for share in (0.7, 0.1, 0.1):
        run.train_at_random(rng, share)
        run.checkpoint()
    return run


def flip(path: Path, bit: int) -> bytes:
    """Returns what was there."""
    content = path.read_bytes()
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    return content


def newest(run: FakeRun) -> Manifest:
    assert run.writer.newest is not None
    return run.writer.newest


def test_flipped_bits_are_detected_and_never_restored(run: FakeRun) -> None:
    root, rng = run.checkpoints.root, np.random.default_rng(6)
    paths = [root / newest(run).name / MANIFEST_NAME, *(root / file.file for file in newest(run).files)]
    kinds = {path.name.rpartition("-")[0] for path in paths}
    assert kinds >= {"dense", "fp32_d4_adagrad", "fp32_d8_adagrad"}
    assert len({path.parent for path in paths}) == 3, "base and both deltas"
    for number in range(count(60, 500)):
        path = paths[number % len(paths)]
        content = flip(path, int(rng.integers(path.stat().st_size * 8)))
        check_flipped(run, path)
        path.write_bytes(content)
    run.checkpoints.verify(run.checkpoints.load(newest(run).name))


def check_flipped(run: FakeRun, path: Path) -> None:
    shared = path.parent.name == "step-000000000010" and not path.name.startswith("dense")
    if shared:
        with damages() as found, pytest.raises(DataError, match=facts("none of 3 checkpoints", "--fresh")):
            run.checkpoints.newest_valid()
    else:
        with damages() as found:
            older = run.checkpoints.newest_valid()
        assert older is not None
        assert older.position.step < 30
        assert restored(run.job.run_dir, run.job, older) == run.states[older.position.step]
    assert str(path) in found[0]
    if path.name != MANIFEST_NAME:
        with pytest.raises(DataError, match=path.name):
            read_everything(run)


def read_everything(run: FakeRun) -> None:
    restored(run.job.run_dir, run.job, newest(run))
    list(dense_content(run.checkpoints.root, newest(run)))


def test_a_flipped_bit_anywhere_in_the_manifest_is_refused(run: FakeRun) -> None:
    folder = run.checkpoints.root / newest(run).name
    path = folder / MANIFEST_NAME
    for byte in range(0, path.stat().st_size, count(23, 1)):
        content = flip(path, byte * 8 + byte % 8)
        with pytest.raises(DataError, match="manifest"):
            read_manifest(folder)
        path.write_bytes(content)
    assert read_manifest(folder).checksum == newest(run).checksum


@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "empty"])
def test_a_file_of_another_length_or_none_is_refused_by_naming_it(run: FakeRun, damage: str) -> None:
    for file in newest(run).files:
        path = run.checkpoints.root / file.file
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes({"truncated": content[:-1], "longer": content + b"\0", "empty": b""}[damage])
        with pytest.raises(DataError, match=path.name):
            run.checkpoints.verify(newest(run))
        with pytest.raises(DataError, match=path.name):
            read_everything(run)
        path.write_bytes(content)


def test_a_damaged_dense_file_gives_not_one_byte(run: FakeRun) -> None:
    dense = newest(run).dense
    assert dense is not None
    flip(run.checkpoints.root / dense.file, dense.nbytes * 8 - 1)
    with pytest.raises(DataError):
        next(dense_content(run.checkpoints.root, newest(run)))


def test_a_manifest_of_another_version_is_refused_with_both_numbers(run: FakeRun) -> None:
    folder = run.checkpoints.root / newest(run).name
    (folder / MANIFEST_NAME).write_bytes(b'{"version": 1, "shards": []}')
    with pytest.raises(DataError, match=facts("manifest version 1", 3, 4)):
        read_manifest(folder)


def test_a_manifest_in_another_checkpoints_folder_is_refused(run: FakeRun) -> None:
    folder = run.checkpoints.root / "step-000000000099"
    folder.mkdir()
    (folder / MANIFEST_NAME).write_bytes(render(newest(run)))
    with pytest.raises(DataError, match=facts("step-000000000030", "another checkpoint")):
        read_manifest(folder)


# hostile manifests: whole, with a right checksum, and wrong


HOSTILE = {
    "a name outside": {"file": "../../etc/passwd"},
    "an absolute name": {"file": "/etc/passwd"},
    "a name through a parent": {"file": "step-000000000010/../../x.safetensors"},
    "a hidden name": {"file": "step-000000000010/.x.safetensors"},
    "a name with a line end": {"file": "step-000000000010/x.safetensors\n"},
    "negative bytes": {"nbytes": -1},
    "negative rows": {"num_rows": -1},
    "more rows than keys": {"num_rows": 10**9},
    "a negative key": {"first_key": -1},
    "keys that descend": {"first_key": 9, "last_key": 3},
    "a key beyond 63 bits": {"last_key": 2**63},
    "a checksum that is none": {"checksum": "../../../../../../etc/x"},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_row_file_is_refused_when_the_manifest_is_read(run: FakeRun, change: dict[str, object]) -> None:
    content = msgspec.json.decode(render(newest(run)))
    content["shards"][0]["layers"][0]["files"][0] |= change
    refuse(run, content)


@pytest.mark.parametrize(
    "change",
    [
        {"shards": "twice"},
        {"position": {"step": -1}},
        {"position": {"step": 5, "train_step": 6}},
        {"position": {"step": 30, "eval_batch": -1}},
        {"position": {"step": 10**12}},
        {"shards": []},
        {"shards": [{"layers": []}]},
        {"shards": [{"layers": [{"kind": "delta", "num_rows": 0, "files": []}]}]},
        {"shards": [{"layers": [{"kind": "base", "num_rows": 3, "files": []}]}]},
        {"unknown": 1},
        {"block_bits": 63},
        {"dense": {"file": "../x", "nbytes": 0, "checksum": "0" * 16}},
    ],
    ids=str,
)
def test_a_hostile_manifest_is_refused_when_it_is_read(run: FakeRun, change: dict[str, object]) -> None:
    content = msgspec.to_builtins(newest(run))
    refuse(run, content | ({"shards": 2 * content["shards"]} if change == {"shards": "twice"} else change))


def refuse(run: FakeRun, content: dict[str, object]) -> None:
    folder = run.checkpoints.root / newest(run).name
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.encode(content))
    with pytest.raises(DataError, match="not a manifest"):
        read_manifest(folder)


def test_files_of_one_layer_must_not_overlap(run: FakeRun) -> None:
    file = newest(run).layers[0].files[0]
    with pytest.raises(ValueError, match="begins at key"):
        RowLayer(kind="base", num_rows=2 * file.num_rows, files=(file, file))
    other = msgspec.structs.replace(file, group="other")
    again = msgspec.structs.replace(file, first_key=file.last_key + 1, last_key=file.last_key + 1000)
    with pytest.raises(ValueError, match="in two places"):
        RowLayer(kind="base", num_rows=3 * file.num_rows, files=(file, other, again))


RECORDS, KEYS = np.zeros((2, 32), np.uint8), np.array([3, 4])
ROW_KEYS = {
    "keys of another table": [1 << 48 | 3, 1 << 48 | 4],
    "a row beyond its table": [3, 40],
    "keys that descend": [4, 3],
    "a key twice": [3, 3],
    "a negative key": [-3, 3],
}
ROW_CONTENT = {name: (keys, {"keys": np.array(keys), "records": RECORDS}) for name, keys in ROW_KEYS.items()} | {
    "narrower records": ([3, 4], {"keys": KEYS, "records": RECORDS[:, :31].copy()}),
    "more records": ([3, 4], {"keys": KEYS, "records": np.zeros((3, 32), np.uint8)}),
    "flat records": ([3, 4], {"keys": KEYS, "records": RECORDS.reshape(64)}),
    "no records": ([3, 4], {"keys": KEYS}),
    "no keys": ([3, 4], {"records": RECORDS}),
}


@pytest.mark.parametrize(("keys", "content"), ROW_CONTENT.values(), ids=ROW_CONTENT)
def test_rows_that_no_table_has_are_refused_before_a_store_sees_them(
    run: FakeRun, keys: list[int], content: "dict[str, np.ndarray]"
) -> None:
    path = run.checkpoints.root / newest(run).name / "hostile.safetensors"
    path.write_bytes(save(content))
    nbytes, checksum = file_checksum(path)
    first, last = max(0, min(keys)), max(max(keys), min(keys) + 1)
    file = RowFile(
        group=run.groups[0].name,
        file=f"{newest(run).name}/hostile.safetensors",
        first_key=first,
        last_key=last,
        num_rows=2,
        nbytes=nbytes,
        checksum=checksum,
    )
    with pytest.raises(DataError, match=r"hostile\.safetensors"):
        read_rows(run.checkpoints.root, run.groups[0], file)


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    run = FakeRun(small_job(tmp_path / "run"), keep=9)
    manifest = run.checkpoint()
    for step in (6, 10**11, 9):
        other = seal(msgspec.structs.replace(manifest, position=Position(step=step)))
        folder = run.checkpoints.root / other.name
        folder.mkdir()
        (folder / MANIFEST_NAME).write_bytes(render(other))
    (run.checkpoints.root / "step-000000000011").mkdir()
    assert run.checkpoints.candidates() == [f"step-{step:012d}" for step in (10**11, 9, 6, 0)]
