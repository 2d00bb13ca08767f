"""A checkpoint holds every row that was ever trained, in files that say what they are; unneeded files are removed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rowcast.prefetcher.checkpoints import row_files
from rowcast.prefetcher.checkpoints import writer as handover
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.writer import RowBlock
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME, Position, file_checksum
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import RowcastError
from tests.checkpoints.fake_run import FakeRun, assert_holds, small_job

pytestmark = pytest.mark.usefixtures("small_files")
EVERYTHING = {0: list(range(40)), 1: list(range(30)), 2: list(range(60))}


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(small_job(tmp_path / "run"))


def files_in(run: FakeRun) -> set[str]:
    root = run.checkpoints.root
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_the_first_checkpoint_is_a_base_of_all_trained_rows_in_ascending_files(run: FakeRun) -> None:
    run.train({0: [3, 1, 39], 1: [0], 2: list(range(0, 60, 2))})
    manifest = run.checkpoint()
    assert [layer.kind for layer in manifest.layers] == ["base"]
    assert manifest.layers[0].num_rows == 34
    assert len(manifest.layers[0].files) > 3, "every group fits one file"
    for file in manifest.layers[0].files:
        path = run.checkpoints.root / file.file
        keys = load_file(path)["keys"]
        assert (np.diff(keys) > 0).all()
        assert (file.first_key, file.last_key, file.num_rows) == (keys[0], keys[-1], len(keys))
        assert (file.nbytes, file.checksum) == file_checksum(path)
    assert_holds(run.job.run_dir, run.job, manifest, run.rows())


def test_the_manifest_says_where_training_goes_on_and_names_every_file_there_is(run: FakeRun) -> None:
    run.train(EVERYTHING, steps=100)
    manifest = run.checkpoint(finished=True)
    assert manifest.name == "step-000000000100"
    assert (manifest.step, manifest.train_steps, manifest.finished, manifest.reason) == (
        99,
        100,
        True,
        "checkpoint.every",
    )
    assert files_in(run) == {file.file for file in manifest.files} | {f"{manifest.name}/{MANIFEST_NAME}"}
    assert run.checkpoints.load(manifest.name).checksum == manifest.checksum
    assert (run.writer.num_files, run.writer.bytes_written) == (len(list(manifest.files)), manifest.nbytes)
    assert run.writer.seconds > 0


def test_a_checkpoint_without_a_change_adds_no_layer(run: FakeRun) -> None:
    run.train(EVERYTHING)
    base = run.checkpoint()
    run.train({})
    manifest = run.checkpoint()
    assert manifest.layers == base.layers
    assert manifest.dense != base.dense


def test_a_checkpoint_before_the_first_step_is_an_empty_base(run: FakeRun) -> None:
    manifest = run.checkpoint()
    assert (manifest.step, manifest.num_rows, len(manifest.layers)) == (None, 0, 1)
    run.train({0: [1]})
    after = run.checkpoint()
    assert [(layer.kind, layer.num_rows) for layer in after.layers] == [("base", 1)], "a delta to nothing is a base"
    assert_holds(run.job.run_dir, run.job, after, run.rows())


def test_a_second_checkpoint_at_a_step_replaces_the_first_and_keeps_its_files(run: FakeRun) -> None:
    run.train(EVERYTHING)
    first = run.checkpoint()
    second = run.checkpoint(finished=True)
    assert (first.name, first.layers) == (second.name, second.layers)
    assert first.dense is not None
    assert second.dense is not None
    assert first.dense.file != second.dense.file
    assert run.checkpoints.candidates() == [second.name]
    assert first.dense.file not in files_in(run), "nobody names it any more"
    assert_holds(run.job.run_dir, run.job, second, run.rows())


# merging


def test_deltas_with_more_rows_than_the_base_are_merged_into_it_and_what_changed_last_stays(run: FakeRun) -> None:
    run.train(EVERYTHING)
    run.checkpoint()
    for step in range(4):
        run.train({2: list(range(step, 60))})
        before = run.newest_checksum
        manifest = run.checkpoint()
        assert [layer.kind for layer in manifest.layers].count("delta") in (1, 2, 3)
        assert (manifest.layers[-1].num_rows, manifest.layers[-1].after) == (60 - step, before)
    assert [(layer.kind, layer.num_rows) for layer in manifest.layers] == [("base", 130), ("delta", 57)]
    assert_holds(run.job.run_dir, run.job, manifest, run.rows())


def test_a_delta_larger_than_the_base_is_merged_by_the_next_checkpoint(run: FakeRun) -> None:
    run.train({0: [1]})
    first = run.checkpoint()
    run.train({0: list(range(40))})
    second = run.checkpoint()
    assert [(layer.num_rows, layer.after) for layer in second.layers] == [(1, ""), (40, first.checksum)]
    run.train({0: [2]})
    third = run.checkpoint()
    assert [(layer.num_rows, layer.after) for layer in third.layers] == [(40, ""), (1, second.checksum)]
    assert_holds(run.job.run_dir, run.job, third, run.rows())


def test_there_are_never_more_than_sixteen_layers(run: FakeRun) -> None:
    run.train(EVERYTHING)
    counts = [len(run.checkpoint().layers)]
    for row in range(20):
        run.train({0: [row]})
        counts.append(len(run.checkpoint().layers))
    assert counts == [*range(1, 17), *range(2, 7)]
    assert run.writer.newest is not None
    assert_holds(run.job.run_dir, run.job, run.writer.newest, run.rows())


def test_a_merge_holds_one_file_of_each_layer_whatever_the_tables_size(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    load = row_files.LayerCursor._load

    def count_held(cursor: row_files.LayerCursor) -> None:
        load(cursor)
        if cursor._rows is not None:
            held.append(len(cursor._rows[0]))

    monkeypatch.setattr(row_files.LayerCursor, "_load", count_held)
    monkeypatch.setattr(row_files, "MERGE_BYTES", 100)
    run.train(EVERYTHING)
    run.checkpoint()
    run.train(EVERYTHING)
    manifest = run.checkpoint()
    run.train({0: [1]})
    assert [layer.kind for layer in manifest.layers] == ["base", "delta"]
    manifest = run.checkpoint()
    assert [layer.kind for layer in manifest.layers] == ["base", "delta", "delta"], "as many as the base are not more"
    run.train({0: [2]})
    manifest = run.checkpoint()
    assert [layer.kind for layer in manifest.layers] == ["base", "delta"]
    assert sum(held) == 261
    assert max(held) < 20
    assert_holds(run.job.run_dir, run.job, manifest, run.rows())


# keeping


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_so_many_checkpoints_stay_and_each_of_them_is_whole(tmp_path: Path, keep: int) -> None:
    run = FakeRun(small_job(tmp_path / "run"), keep=keep)
    rng = np.random.default_rng(keep)
    for number in range(8):
        run.train_at_random(rng, 0.3)
        run.checkpoint()
        names = run.checkpoints.candidates()
        assert len(names) == min(keep, number + 1)
        manifests = [run.checkpoints.load(name) for name in names]
        for manifest in manifests:
            run.checkpoints.verify(manifest)
            assert_holds(run.job.run_dir, run.job, manifest, run.states[manifest.position.step])
        named = {file.file for manifest in manifests for file in manifest.files}
        assert files_in(run) == named | {f"{name}/{MANIFEST_NAME}" for name in names}
        assert all(any(folder.iterdir()) for folder in run.checkpoints.root.iterdir()), "an empty folder was left"


def test_what_a_crash_left_is_removed_when_a_run_starts_writing(run: FakeRun) -> None:
    run.train(EVERYTHING)
    run.checkpoint()
    before = files_in(run)
    left_over = run.checkpoints.root / "step-000000000050"
    left_over.mkdir()
    (left_over / "fp32_d4_adagrad-00000.safetensors").write_bytes(b"torn")
    (left_over / "manifest.json.partial").write_bytes(b"{")
    (run.checkpoints.root / "step-000000000010" / "dense-00007.safetensors").write_bytes(b"of an abandoned one")
    for _ in run.checkpoints.collect_garbage(run.run_id):
        pass
    assert files_in(run) == before
    assert not left_over.exists()


def test_a_damaged_checkpoint_is_dropped_only_when_a_newer_one_is_durable(run: FakeRun) -> None:
    run.train(EVERYTHING)
    good = run.checkpoint()
    damaged = run.checkpoints.root / "step-000000000020"
    damaged.mkdir()
    (damaged / MANIFEST_NAME).write_bytes(b"{}")
    (damaged / "fp32_d4_adagrad-00000.safetensors").write_bytes(b"what the damaged manifest names, perhaps")
    before = files_in(run)
    for _ in run.checkpoints.collect_garbage(run.run_id):
        pass
    assert files_in(run) == before
    run.train({0: [3]}, steps=30)
    newest = run.checkpoint()
    assert run.checkpoints.candidates() == [newest.name, good.name]
    assert not damaged.exists()


# handing over


def test_a_full_queue_takes_nothing_until_something_was_written(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "QUEUE_BYTES", 300)
    run.begin()
    refused = 0
    for _ in range(100):
        while not run.writer.offer_dense(b"ten bytes."):
            refused += 1
            assert run.writer.advance()
    run.writer.finish(checksum(b"ten bytes." * 100), [])
    run.complete()
    assert refused > 10
    assert run.writer.newest is not None
    assert run.writer.newest.dense is not None
    assert run.writer.newest.dense.nbytes == 1000


def test_a_block_larger_than_the_queue_goes_in_alone_and_finish_always_does(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "QUEUE_BYTES", 1)
    run.begin()
    assert run.writer.offer_dense(b"large")
    assert not run.writer.offer_dense(b"another")
    run.writer.finish("0" * 16, [])
    with pytest.raises(RowcastError, match=f"checksum {checksum(b'large')}, but the trainer sent {'0' * 16}$"):
        run.complete()
    assert Checkpoints(run.job.run_dir, Disk()).newest_valid() is None


def test_what_waits_in_the_queue_never_exceeds_its_bytes(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "QUEUE_BYTES", 10)
    run.begin()
    assert run.writer.offer_dense(b"six by")
    assert not run.writer.offer_dense(b"five!"), "11 bytes would wait"
    assert run.writer.offer_dense(b"four")
    assert not run.writer.offer_dense(b"1")


def test_rows_are_read_when_all_but_one_file_of_those_before_them_is_written(run: FakeRun) -> None:
    run.train(EVERYTHING)
    run.begin()
    read: list[int] = []

    def blocks() -> Iterator[RowBlock]:
        for block in run.blocks():
            read.append(len(files_in(run)))
            yield block

    run.writer.finish(None, blocks())
    assert not read
    run.complete()
    assert run.writer.newest is not None
    assert run.writer.newest.num_rows == 130
    files = len(run.writer.newest.layers[0].files)
    assert read[-1] >= files - 2 > 3, "the last rows were read long before they were written"
    assert set(read) == set(range(read[-1] + 1))


def checksum(content: bytes) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(content)


def test_a_writer_that_waits_for_rows_says_that_it_did_nothing(run: FakeRun) -> None:
    assert not run.writer.advance(), "nothing was begun"
    run.begin()
    while run.writer.advance():
        pass
    assert run.writer.busy
    assert not run.writer.advance()


def test_an_abandoned_checkpoint_leaves_the_previous_one_valid_and_the_next_possible(
    run: FakeRun,
) -> None:
    run.train(EVERYTHING)
    first = run.checkpoint()
    run.train({0: [1, 2]})
    run.begin()
    run.writer.offer_dense(b"half of it")
    for _ in range(4):
        run.writer.advance()
    run.writer.abandon()
    while run.writer.advance():
        pass
    assert not run.writer.busy
    assert run.writer.newest == first
    second = run.checkpoint()
    assert second.position == Position(step=20, train_step=20)
    assert_holds(run.job.run_dir, run.job, second, run.rows())
    assert files_in(run) == {file.file for m in (first, second) for file in m.files} | {
        f"{m.name}/{MANIFEST_NAME}" for m in (first, second)
    }


def test_a_checkpoint_handed_over_as_a_whole_is_completed_even_when_abandoned(run: FakeRun) -> None:
    run.train(EVERYTHING)
    run.begin()
    run.hand_over()
    run.writer.abandon()
    run.complete()
    assert run.writer.newest is not None


def test_rows_out_of_order_are_our_own_mistake(run: FakeRun) -> None:
    run.train({0: [1, 2]})
    keys, records = next(run.stores[0].blocks(2))
    run.begin()
    run.writer.finish(None, [(0, keys[::-1], records)])
    with pytest.raises(AssertionError, match="ascending"):
        run.complete()


def test_an_empty_folder_of_checkpoints_is_step_zero(run: FakeRun) -> None:
    assert run.checkpoints.newest_valid() is None
    run.checkpoints.root.mkdir()
    assert run.checkpoints.newest_valid() is None


def test_row_files_are_about_as_large_as_agreed(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "ROW_FILE_BYTES", 1000)
    run.train(EVERYTHING)
    manifest = run.checkpoint()
    sizes = [file.nbytes for file in manifest.layers[0].files]
    assert all(1000 <= size < 1000 + 7 * 72 + 200 for size in sizes[:-1] if size > 900)
