"""Several ranks make one checkpoint, which exists once all shards are on the disk and agree; any number restores it."""

from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from rowcast.prefetcher.checkpoints import commit, row_files
from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out
from rowcast.prefetcher.checkpoints.restore import OwnShard, restore_changed, restore_rows
from rowcast.prefetcher.checkpoints.row_files import read_rows
from rowcast.prefetcher.run.starting_point import Tables
from rowcast.prefetcher.stores.store import finish
from rowcast.protocol.parts import BLOCK_BITS
from rowcast.runtime.checkpoint_manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    read_shard_file,
    shard_name,
    writer_of,
)
from rowcast.runtime.disk import Disk, render, seal
from rowcast.runtime.errors import DataError
from tests.checkpoints.fake_ranks import FakeRanks
from tests.checkpoints.fake_run import TABLES, FakeRun, Rows, assert_holds, damages, small_job
from tests.support.facts import facts

pytestmark = pytest.mark.usefixtures("small_files")
EVERYTHING = {number: list(range(rows)) for number, (_, rows, _) in enumerate(TABLES)}
BIG = (("narrow_a", 1000, 4), ("wide", 700, 8), ("narrow_b", 2000, 4))  # blocks for every rank


def ranks(folder: Path, count: int, **settings: object) -> FakeRanks:
    return FakeRanks(small_job(folder / "run", tables=BIG), count, **settings)  # type: ignore[arg-type]


def some(rng: np.random.Generator, share: float) -> dict[int, list[int]]:
    return {table: np.flatnonzero(rng.random(rows) < share).tolist() for table, (_, rows, _) in enumerate(BIG)}


def files_in(run: FakeRanks) -> set[str]:
    root = run.checkpoints.root
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def named_by(*manifests: Manifest) -> set[str]:
    return {file.file for m in manifests for file in m.files} | {f"{m.name}/{MANIFEST_NAME}" for m in manifests}


def checksum(manifest: Manifest | None) -> str:
    assert manifest is not None
    return manifest.checksum


@pytest.mark.parametrize("count", [2, 3, 8])
def test_each_rank_writes_its_rows_and_one_manifest_names_them_all(tmp_path: Path, count: int) -> None:
    run, rng = ranks(tmp_path, count, keep=2, seed=count), np.random.default_rng(count)
    before = None
    for share in (0.5, 0.02, 0.02, 0.9, 0.9):
        run.train(some(rng, share))
        manifest = run.checkpoint()
        assert [len(manifest.shards), manifest.shards[0].layers[0].kind] == [count, "base"]
        for number, shard in enumerate(manifest.shards):
            own = OwnShard(number=number, count=count)
            for layer in shard.layers:
                for file in layer.files:
                    assert f"-r{number:03d}-" in file.file
                    [group] = [group for group in run.ranks[0].groups if group.name == file.group]
                    assert own.owns(group, read_rows(run.checkpoints.root, group, file)[0]).all()
        assert_holds(run.job.run_dir, run.job, manifest, run.rows())
        assert_holds(run.job.run_dir, run.job, manifest, run.rows(), count)
        kept = (manifest,) if before is None else (before, manifest)
        assert files_in(run) == named_by(*kept), "something is left, or gone"
        before = manifest


@pytest.mark.parametrize("counts", [(1, 4, 2), (2, 3, 1, 8), (4, 1), (8, 6, 4, 3, 2, 1)], ids=str)
def test_another_number_of_ranks_goes_on_with_every_row(tmp_path: Path, counts: tuple[int, ...]) -> None:
    rng, newest = np.random.default_rng(len(counts)), None
    rows: Rows = {}
    for index, count in enumerate(counts):
        run = ranks(tmp_path, count, newest=newest, start=rows, seed=index)
        assert run.rows() == rows
        for share in (0.4, 0.05):
            run.train(some(rng, share))
            newest, rows = run.checkpoint(), run.rows()
            assert len(newest.shards) == count
            for readers in (1, 2, 3, 4, 7):
                assert_holds(run.job.run_dir, run.job, newest, rows, readers)
        kept = [read_manifest(run.checkpoints.root / name) for name in run.checkpoints.candidates()]
        assert files_in(run) == named_by(*kept), "something is left, or gone"


def test_tables_are_placed_otherwise_at_each_restart(tmp_path: Path) -> None:
    rng, newest = np.random.default_rng(7), None
    rows: Rows = {}
    lives = [(4, "rows table rows"), (4, "table rows rows"), (2, "table table table"), (3, ""), (3, "rows table table")]
    for index, (count, placements) in enumerate(lives):
        run = ranks(tmp_path, count, newest=newest, start=rows, seed=index, placements=placements.split())
        assert run.rows() == rows
        for share in (0.4, 0.05):
            run.train(some(rng, share))
            newest, rows = run.checkpoint(), run.rows()
            assert any(newest.points) == ("table" in placements)
            for number in range(len(BIG)):
                owners = {n for n, rank in enumerate(run.ranks) for key in rank.rows() if key >> 48 == number}
                assert (len(owners) == 1) == (placements.split()[number : number + 1] == ["table"])
            for readers in (1, 2, 4):
                assert_holds(run.job.run_dir, run.job, newest, rows, readers)
        run.train(some(rng, 0.3))
        assert newest is not None
        for rank in run.ranks:
            restore_changed(run.checkpoints.root, newest, rank.groups, rank.stores, rank.shard)
        assert run.rows() == rows


@pytest.mark.parametrize("counts", [(4, 4), (2, 4), (4, 1), (1, 2), (1, 1)], ids=str)
def test_a_checkpoint_of_an_earlier_version_whose_blocks_are_larger_goes_on_with_every_row(
    tmp_path: Path, counts: tuple[int, int]
) -> None:
    rng, newest = np.random.default_rng(sum(counts)), None
    rows: Rows = {}
    for index, (count, block_bits) in enumerate(zip(counts, (6, BLOCK_BITS), strict=True)):
        run = ranks(tmp_path, count, newest=newest, start=rows, seed=index, block_bits=block_bits)
        assert run.rows() == rows
        before, share = newest, 0.4 if index == 0 else 0.05
        run.train(some(rng, share))
        newest, rows = run.checkpoint(), run.rows()
        assert newest.block_bits == block_bits
        for readers in (1, 2, 4):
            assert_holds(run.job.run_dir, run.job, newest, rows, readers)
    assert before is not None
    assert newest is not None
    assert (before.layers[0] in newest.layers) == (counts == (1, 1)), "one shard has all rows, whatever its blocks"


def test_stores_that_an_earlier_look_has_opened_are_filled_again_if_tables_are_placed_otherwise(tmp_path: Path) -> None:
    run = ranks(tmp_path, 2, placements=["table", "rows", "rows"])
    run.train(some(np.random.default_rng(9), 0.9))
    manifest, first = run.checkpoint(), run.ranks[0]
    tables = Tables(run.job, first.groups, run.checkpoints, OwnShard(number=0, count=2))
    for shard in (OwnShard(number=0, count=2), first.shard):
        tables.place(run.job, first.groups, shard)
        tables.restore(manifest)
    for group, store in zip(first.groups, tables.stores, strict=True):
        keys = np.array([key for key in first.rows() if key >> 48 in {own.index for own in group.tables}], np.int64)
        records = np.empty((len(keys), group.record_bytes), np.uint8)
        finish(store.read(keys, records))
        assert [record.tobytes() for record in records] == [first.rows()[key] for key in keys.tolist()]
    tables.close()


def test_a_row_in_the_files_of_a_rank_that_does_not_own_its_table_is_damage(tmp_path: Path) -> None:
    run = ranks(tmp_path, 2, placements=["table", "rows", "rows"])
    run.train(some(np.random.default_rng(8), 0.9))
    manifest = run.checkpoint()
    other = msgspec.structs.replace(manifest, points=manifest.points[1:] + manifest.points[:1])
    with pytest.raises(DataError, match=facts("is not of shard", "of 2")):
        restore_rows(run.checkpoints.root, other, run.ranks[0].groups, run.ranks[0].stores, run.ranks[0].shard)


def test_the_first_checkpoint_of_another_number_of_ranks_is_a_base_of_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    run = ranks(tmp_path, 2)
    run.train(some(rng, 0.9))
    run.checkpoint()
    run.train(some(rng, 0.01))
    newest = run.checkpoint()
    assert [layer.kind for layer in newest.shards[1].layers] == ["base", "delta"]
    after = ranks(tmp_path, 4, newest=newest, start=run.rows())
    after.train({0: [1]})
    manifest = after.checkpoint()
    assert sorted([layer.kind for layer in shard.layers] for shard in manifest.shards) == [["base"]] * 3 + [
        ["base", "delta"]
    ]
    bases = [shard.layers[0].num_rows for shard in manifest.shards]
    assert sum(bases) == len(run.rows()), "no row is in two shards"


def test_a_shard_reads_only_the_files_that_overlap_its_range(tmp_path: Path) -> None:
    run = ranks(tmp_path, 4)
    run.train(some(np.random.default_rng(2), 0.5))
    manifest = run.checkpoint()
    read = [[part.held.number for part in OwnShard(number=n, count=2).parts_of(manifest)] for n in range(2)]
    assert read == [[0, 1], [2, 3]]
    read = [[part.held.number for part in OwnShard(number=n, count=8).parts_of(manifest)] for n in range(8)]
    assert read == [[n // 2] for n in range(8)]
    read = [[part.held.number for part in OwnShard(number=n, count=3).parts_of(manifest)] for n in range(3)]
    assert read == [[0, 1], [1, 2], [2, 3]]
    for file in manifest.shards[3].layers[0].files:
        (run.checkpoints.root / file.file).unlink()
    assert len(run.ranks[0].rows()) > 0
    stores = FakeRun(run.job, shard=OwnShard(number=0, count=2))
    restore_changed(run.checkpoints.root, manifest, stores.groups, stores.stores, stores.shard)


@pytest.mark.parametrize(("count", "before"), [(3, 3), (3, 1), (2, 4), (1, 3)])
def test_a_rank_rolls_back_what_changed_since_a_checkpoint_of_any_number(
    tmp_path: Path, count: int, before: int
) -> None:
    rng = np.random.default_rng(count)
    run = ranks(tmp_path, before)
    for share in (0.3, 0.05):
        run.train(some(rng, share))
        newest = run.checkpoint()
    later = ranks(tmp_path, count, newest=newest, start=run.rows())
    later.train(some(rng, 0.5))
    for rank in later.ranks:
        restore_changed(later.checkpoints.root, newest, rank.groups, rank.stores, rank.shard)
    assert later.rows() == run.rows()


def test_the_manifest_waits_for_the_last_shard(tmp_path: Path) -> None:
    run = ranks(tmp_path, 3)
    run.train(some(np.random.default_rng(3), 0.3))
    run.begin()
    run.hand_over()
    for rank in run.ranks[:2]:
        for _ in range(300):
            rank.writer.advance()
        assert rank.writer.busy
        assert rank.writer.newest is None
    folder = run.checkpoints.root / "step-000000000010"
    assert run.checkpoints.candidates() == []
    assert (folder / shard_name(1)).exists()
    run.complete()
    assert run.checkpoints.candidates() == [folder.name]
    assert not list(folder.glob("shard-*")), "what a rank has said is used once"


def test_a_second_checkpoint_at_a_step_waits_for_the_new_shards(tmp_path: Path) -> None:
    run = ranks(tmp_path, 3)
    run.train(EVERYTHING)
    first = run.checkpoint()
    second = run.checkpoint(finished=True)
    assert (first.name, first.shards) == (second.name, second.shards)
    assert first.checksum != second.checksum
    assert_holds(run.job.run_dir, run.job, second, run.rows(), 3)
    run.train(EVERYTHING)
    third = run.checkpoint()
    assert files_in(run) == named_by(second, third), "what the second has replaced is removed with the next"


def test_a_rank_may_write_the_next_checkpoint_while_rank_0_removes_old_ones(tmp_path: Path) -> None:
    run, rng = ranks(tmp_path, 2, keep=1), np.random.default_rng(8)
    run.train(some(rng, 0.5))
    run.checkpoint()
    run.train(some(rng, 0.1))
    run.begin()
    run.hand_over()
    first, other = run.ranks
    while first.writer.newest is None or first.writer.newest.position.step < 20 or other.writer.busy:
        for rank in run.ranks:
            if rank is other or first.writer.newest is None or first.writer.newest.position.step < 20:
                rank.writer.advance()
    assert first.writer.busy, "it has the old manifest to remove"
    for rank in run.ranks:
        rank.settle()
    run.train(some(rng, 0.1))
    other.begin()
    other.hand_over()
    for _ in range(300):
        other.writer.advance()
    assert (run.checkpoints.root / "step-000000000030" / shard_name(1)).exists()
    while first.writer.busy:
        first.writer.advance()
    first.begin()
    first.hand_over()
    run.complete()
    assert run.durable is not None
    assert_holds(run.job.run_dir, run.job, run.durable, run.rows(), 2)


# ranks that do not agree


def test_replicas_that_differ_never_become_a_checkpoint_and_the_rank_is_named(tmp_path: Path) -> None:
    run = ranks(tmp_path, 4)
    run.train(EVERYTHING)
    first = run.checkpoint()
    run.train(EVERYTHING)
    run.begin()
    for rank in run.ranks[:3]:
        rank.hand_over()
    run.ranks[3].writer.finish("0123456789abcdef", run.ranks[3].blocks())
    with pytest.raises(DataError, match=facts("shard-003.json", "rank 3", "model state", "step 19")):
        run.complete()
    assert checksum(run.checkpoints.newest_valid()) == first.checksum


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "another"},
        {"after": "0" * 16},
        {"count": 4},
        {"number": 0},
        {"position": {"step": 10, "train_step": 10, "epoch": 1}},
    ],
    ids=str,
)
def test_a_shard_of_another_checkpoint_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    run = ranks(tmp_path, 3)
    path = shard_of_rank_2(run)
    shard = read_shard_file(path)
    assert shard is not None
    changed = msgspec.convert(msgspec.to_builtins(shard) | change, type(shard))
    path.write_bytes(render(seal(changed)))
    with pytest.raises(DataError, match=r"shard-002\.json: rank \d of \d.* step 10"):
        run.complete()


def shard_of_rank_2(run: FakeRanks) -> Path:
    run.train(EVERYTHING)
    run.begin()
    run.hand_over()
    path = run.checkpoints.root / "step-000000000010" / shard_name(2)
    while not path.exists():
        run.ranks[2].writer.advance()
    return path


def test_a_flipped_bit_anywhere_in_a_shard_file_is_refused(tmp_path: Path) -> None:
    path = shard_of_rank_2(ranks(tmp_path, 3))
    content = path.read_bytes()
    for byte in range(0, len(content), 11):
        changed = bytearray(content)
        changed[byte] ^= 1 << byte % 8
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"shard-002\.json"):
            read_shard_file(path)
    path.write_bytes(content)
    assert read_shard_file(path) is not None


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"version": 9}', b"\xff" * 20, b"[" * 100_000])
def test_a_shard_file_that_is_none_ends_rank_0_with_its_name(tmp_path: Path, damage: bytes) -> None:
    run = ranks(tmp_path, 3)
    shard_of_rank_2(run).write_bytes(damage)
    with pytest.raises(DataError, match=r"shard-002\.json: (not a shard file|shard file version 9)"):
        run.complete()


HOSTILE = {
    "a shard beyond the count": {"number": 3},
    "a negative shard": {"number": -1},
    "no checksum": {"model_state": "../etc/passwd"},
    "a step before the first": {"position": {"step": -1}},
    "something unknown": {"unknown": 1},
    "no layers, as checked wherever a manifest has them": {"shard": {"layers": []}},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_shard_file_is_refused_when_it_is_read(tmp_path: Path, change: dict[str, object]) -> None:
    path = shard_of_rank_2(ranks(tmp_path, 3))
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | change))
    with pytest.raises(DataError, match="not a shard file"):
        read_shard_file(path)


def test_rows_that_stand_in_another_shard_are_refused_by_their_file(tmp_path: Path) -> None:
    run = ranks(tmp_path, 2)
    run.train(some(np.random.default_rng(4), 0.5))
    manifest = run.checkpoint()
    swapped = msgspec.structs.replace(manifest, shards=manifest.shards[::-1])
    with pytest.raises(DataError, match=r"-r001-00000\.safetensors: key \d+ .* 0 of 2"):
        assert_holds(run.job.run_dir, run.job, swapped, run.rows())


def test_a_damaged_shard_leads_all_ranks_to_the_same_older_checkpoint(tmp_path: Path) -> None:
    run, rng = ranks(tmp_path, 3), np.random.default_rng(5)
    run.train(some(rng, 0.5))
    first = run.checkpoint()
    run.train(some(rng, 0.1))
    second = run.checkpoint()
    path = run.checkpoints.root / second.shards[1].layers[1].files[0].file
    path.write_bytes(path.read_bytes()[:-1])
    for _ in run.ranks:
        with damages() as damaged:
            assert checksum(Checkpoints(run.job.run_dir, Disk()).newest_for_ranks(None)) == first.checksum
        assert str(path) in damaged[0]


# attempts


def test_a_shard_of_an_attempt_that_ended_is_never_used(tmp_path: Path) -> None:
    """Rank 0 would name files that their rank removes."""
    rng = np.random.default_rng(6)
    run = ranks(tmp_path, 3)
    run.train(some(rng, 0.5))
    first, rows = run.checkpoint(), run.rows()
    run.train(some(rng, 0.2))
    run.begin()
    run.hand_over()
    while not run.checkpoints.root.joinpath("step-000000000020", shard_name(2)).exists():
        run.ranks[2].writer.advance()
    later = ranks(tmp_path, 3, newest=first, start=rows, seed=9)
    assert not list(run.checkpoints.root.rglob("shard-*"))
    later.train(some(rng, 0.2))
    later.begin()
    later.hand_over()
    for rank in later.ranks[:2]:
        for _ in range(300):
            rank.writer.advance()
    assert later.ranks[0].writer.busy, "rank 2 has said nothing in this attempt"
    later.complete()
    assert later.durable is not None
    assert_holds(later.job.run_dir, later.job, later.durable, later.rows(), 3)
    assert files_in(later) == named_by(first, later.durable), "what the first attempt left is still there"


@pytest.mark.parametrize("abandoned_by", [0, 1, 2])
def test_a_checkpoint_that_lacks_a_shard_is_given_up_once_nobody_writes(tmp_path: Path, abandoned_by: int) -> None:
    run = ranks(tmp_path, 3)
    run.train(EVERYTHING)
    first = run.checkpoint()
    run.train(EVERYTHING)
    run.begin()
    for rank in run.ranks:
        if rank.shard.number != (abandoned_by or 2):  # whose process is gone
            rank.hand_over()
    waiting = run.ranks[0 if abandoned_by != 0 else 1]
    with patch("time.monotonic", lambda: 0.0):
        for _ in range(300):
            waiting.writer.advance()
        waiting.writer.abandon()
        for _ in range(300):
            waiting.writer.advance()
        assert waiting.writer.busy, "others may be writing"
    with patch.object(commit, "GIVE_UP_S", -1.0):
        while waiting.writer.busy:
            waiting.writer.advance()
    assert waiting.writer.gave_up
    assert checksum(waiting.writer.newest) == first.checksum
    assert checksum(run.checkpoints.newest_valid()) == first.checksum


def test_a_checkpoint_that_all_handed_over_is_completed_although_the_attempt_is_over(tmp_path: Path) -> None:
    run = ranks(tmp_path, 3)
    run.train(EVERYTHING)
    run.begin()
    run.hand_over()
    for rank in run.ranks:
        rank.writer.abandon()
    run.complete()
    assert run.durable is not None
    assert not any(rank.writer.gave_up for rank in run.ranks)


def test_others_write_as_long_as_a_file_grows(tmp_path: Path) -> None:
    now_s = 0.0
    progress = commit.OthersProgress(tmp_path, lambda: now_s)
    (tmp_path / "file").write_bytes(b"1")
    for now_s in (0.5, 5.0, 9.9, 10.0, 14.0):
        grown = progress.changed()
        assert grown == (now_s == 5.0)
        assert not progress.ended
    (tmp_path / "file").write_bytes(b"12")
    now_s = 15.1
    assert progress.ended
    assert progress.changed()
    assert not progress.ended


def test_a_rank_that_looks_again_sees_a_checkpoint_that_it_had_not_seen(tmp_path: Path) -> None:
    run = ranks(tmp_path, 2)
    run.train(EVERYTHING)
    first = run.checkpoint()
    other = Checkpoints(run.job.run_dir, Disk())
    assert checksum(other.newest_for_ranks(None)) == first.checksum
    for file in first.files:
        path = run.checkpoints.root / file.file
        path.rename(path.with_name("moved"))
        assert other.newest_for_ranks(first) == first, "what is known is not read again"
        path.with_name("moved").rename(path)
    run.train(EVERYTHING)
    second = run.checkpoint()
    assert checksum(other.newest_for_ranks(first)) == second.checksum


def test_a_fresh_run_of_ranks_replaces_the_earlier_one_with_its_first_checkpoint(tmp_path: Path) -> None:
    earlier = ranks(tmp_path, 2)
    earlier.train(EVERYTHING)
    old = earlier.checkpoint()
    fresh = ranks(tmp_path, 2, run_id="ba9876543210")
    carry_out(fresh.checkpoints.begin_fresh(fresh.ranks[0].shard))
    assert fresh.ranks[1].checkpoints.newest_for_ranks(None) is None, "it sees the fresh run"
    fresh.train({0: [3]})
    fresh.begin()
    fresh.hand_over()
    for _ in range(300):
        fresh.ranks[1].writer.advance()
    assert fresh.ranks[1].writer.busy, "the earlier run has a manifest of this step, which is not this one's"
    assert Checkpoints(fresh.job.run_dir, Disk()).load(old.name).checksum == old.checksum
    fresh.complete()
    assert fresh.durable is not None
    assert fresh.durable.name == old.name
    assert not fresh.ranks[1].checkpoints.are_fresh
    fresh.train({0: [4]})
    assert_holds(fresh.job.run_dir, fresh.job, fresh.checkpoint(), fresh.rows(), 2)
    assert not list(fresh.job.run_dir.glob(".checkpoints.*"))


def test_each_rank_clears_what_it_left_and_rank_0_all_else(tmp_path: Path) -> None:
    run = ranks(tmp_path, 2)
    current, other = (run.checkpoints.root / f"step-{step:012d}" for step in (10, 20))
    for folder in (current, other):
        folder.mkdir(parents=True)
        for name in (
            "dense-00003",
            "fp32_d4_adagrad-r000-00000",
            "fp32_d4_adagrad-r001-00000",
            "fp32_d4_adagrad-r002-00000",
        ):
            (folder / f"{name}.safetensors").write_bytes(b"torn")
    run.train(EVERYTHING)
    run.begin()
    for _ in range(20):
        run.ranks[1].writer.advance()
    assert not (current / "fp32_d4_adagrad-r001-00000.safetensors").exists()
    assert (current / "fp32_d4_adagrad-r002-00000.safetensors").exists(), "not its own"
    run.hand_over()
    run.complete()
    assert run.durable is not None
    assert files_in(run) == named_by(run.durable)


def test_names_say_which_rank_writes_a_file() -> None:
    names = [
        "fp32_d4_sgd-r003-00000.safetensors",
        "shard-003.json",
        "shard-003.json.partial",
        "g-r1234-00001.safetensors",
    ]
    assert [writer_of(name, 2000) for name in names] == [3, 3, 3, 1234]
    assert [writer_of(name, 3) for name in names] == [0, 0, 0, 0], "no rank of this run"
    others = ["dense-00000.safetensors", "manifest.json.partial", "fp32_d4_sgd-00003.safetensors", "a folder"]
    assert [writer_of(name, 2000) for name in others] == [0, 0, 0, 0]


def test_deltas_of_a_shard_are_merged_when_they_outgrow_its_base(tmp_path: Path) -> None:
    run, rng = ranks(tmp_path, 2), np.random.default_rng(7)
    run.train(some(rng, 0.5))
    base = run.checkpoint()
    [group] = [group for group in run.ranks[0].groups if group.tables[0].index == 1]
    keys = np.arange(700) + (1 << 48)
    own = (keys[run.ranks[1].shard.owns(group, keys)] - (1 << 48)).tolist()
    for _ in range(row_files.MAX_LAYERS):
        run.train({1: own})
        manifest = run.checkpoint()
    assert manifest.shards[0].layers == base.shards[0].layers, "rank 0 had nothing to add"
    assert 1 <= len(manifest.shards[1].layers) < row_files.MAX_LAYERS
    assert manifest.shards[1].layers[0] != base.shards[1].layers[0]
    assert manifest.shards[1].layers[-1].after, "what changed last stays"
    assert_holds(run.job.run_dir, run.job, manifest, run.rows(), 2)
