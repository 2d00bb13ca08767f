"""Pieces of columns, each owned by one rank, have the bits of whole rows: in training, checkpoints and what reads them.

Pairs of prefetcher and trainer run in one thread, with their stores and checkpoint writers over one folder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.plain_loop import run_plain_loop
from rowcast.deploy.run import Run
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs, groups_at, make_keys, points_in, whole_groups, with_placements
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.import_checkpoint import import_run
from rowcast.prefetcher.checkpoints.restore import OwnShard, saved_rows
from rowcast.prefetcher.stores.records import first_records
from rowcast.prefetcher.stores.store import finish
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.serving import Model
from rowcast.serving.publisher import Publisher
from tests.support import jobs
from tests.support.batches import NUM_DENSE, Bags, make_batch, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits, differing
from tests.support.driver import Settings, start_state, table_state
from tests.support.facts import facts
from tests.support.ranked_run import RankedRun
from tests.support.restarts import Restarts, assert_ends_as, plain

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = [("a", 400, 16, ("f0", "f1")), ("b", 300, 8, ("f2",)), ("c", 2000, 4, ("f3",)), ("d", 100, 16, ("f4",))]
MIXED = ["columns:4", "columns:2", "rows", "table"]  # pieces of 4 columns beside a whole table of 4
ROWS = ["rows"] * 4


def wide_job(optimizer: str, bags: Bags = "multi", **sections: Any) -> Job:
    pooling = "mean" if bags == "mean" else "sum"
    tables = [jobs.table(name, rows, dim, *features, pooling=pooling) for name, rows, dim, features in WIDTHS]
    tables[1]["init"] = "normal:0.1"
    tables[3]["dtype"] = "bf16"
    return small_job(optimizer, bags, **{"tables": tables, **sections})


def on(job: Job, ranks: int, placements: Sequence[str]) -> Job:
    several = msgspec.structs.replace(job, ranks=msgspec.structs.replace(job.ranks, count=ranks, parts=4))
    return with_placements(several, placements)


def lives(folder: Path, job: Job, *each: tuple[int, int | None, Sequence[str]], **more: Any) -> Restarts:
    """A run over several lives, each with its ranks, last step and placements."""
    folder.mkdir(exist_ok=True)
    own = Restarts(folder, job, small_batches(job, "multi", num_steps=12, eval_at=(3, 9)), 4, **more)
    for ranks, num_steps, placements in each:
        own.job = on(job, ranks, placements)
        own.live(ranks, num_steps)
        newest = own.newest()
        assert newest is not None
        assert newest.points == points_in(group_specs(own.job))
    return own


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("bags", "optimizer"),
    [("single", "sgd"), ("multi", "adagrad"), ("weighted", "adam"), ("mean", "adagrad"), ("empty", "adam")],
)
def test_pieces_have_the_bits_of_the_plain_loop(bags: Bags, optimizer: str, ranks: int) -> None:
    job = wide_job(optimizer, bags, ranks={"gradients": "bf16" if optimizer == "adam" else "fp32"})
    batches = small_batches(job, bags, num_steps=4, eval_at=(2,))
    placed = on(job, ranks, MIXED)
    assert len(group_specs(placed)) == (2 if ranks > 1 else 4)
    settings = Settings(slots=slots_for(group_specs(placed), batches, "one batch"), seed=ranks)
    run = RankedRun(placed, batches, settings, ranks=ranks, parts=4).run()
    assert_equal_bits(run, *run_plain_loop(job, start_state(job, NUM_DENSE), batches, 4))
    run.assert_each_row_stays_with_its_owner()


@pytest.mark.parametrize("store", ["memory", "tiered"])
def test_each_restart_cuts_otherwise(tmp_path: Path, store: str) -> None:
    job = wide_job("adam", master=True)
    own = lives(
        tmp_path,
        job,
        (4, 2, ["columns:4", "columns:2", "rows", "rows"]),
        (4, 4, MIXED),
        (2, 6, ROWS),
        (1, 8, ["columns:2", "rows", "rows", "rows"]),
        (2, 10, ["columns:2", "table", "table", "columns:4"]),
        store=store,
    )
    own.job = on(job, 4, ["columns:4", "rows", "rows", "columns:2"])
    run = own.live(4)
    own.job = job
    assert_ends_as(run, plain(own, 4), tmp_path)


def test_a_lost_trainer_goes_back_to_a_checkpoint_of_other_pieces(tmp_path: Path) -> None:
    own = lives(tmp_path, wide_job("adam"), (4, 6, MIXED))
    own.job, newest = on(own.job, 2, ["columns:2", "rows", "table", "columns:4"]), own.newest()
    groups = group_specs(own.job)
    for number in range(2):
        tables = own._tables(OwnShard(number=number, count=2, points=points_in(groups)))
        tables.restore(newest)
        before = [table_state(group, store, 11) for group, store in zip(groups, tables.stores, strict=True)]
        for group, store in zip(groups, tables.stores, strict=True):
            keys = make_keys(group.tables[0].index, np.arange(50))
            finish(store.write(keys, np.ones((50, group.record_bytes), np.uint8)))
        tables.attempt_ended(newest, gave_up=False)
        tables.restore(newest)
        after = [table_state(group, store, 11) for group, store in zip(groups, tables.stores, strict=True)]
        assert [differing(*pair) for pair in zip(after, before, strict=True)] == [[]] * len(groups)
        tables.close()


def test_exports_and_versions_of_pieces_are_those_of_whole_rows(tmp_path: Path) -> None:
    job = wide_job("adagrad", checkpoint={"every": 2})
    models, exports = [], []
    for name, placements in (("pieces", MIXED), ("rows", ROWS)):
        own, reasons = lives(tmp_path / name, job), []
        rng = np.random.default_rng(5)
        small = [scheduled.holding(make_batch(job, "multi", 4, rng)) for scheduled in own.batches[10:]]
        own.batches[10:] = small  # which change few rows
        (tmp_path / name / "served").mkdir()
        publisher = Publisher(own.run_dir, tmp_path / name / "served", "fp32", 2)
        for num_steps in (10, 11, 13):
            own.job = on(job, 4, placements)
            own.live(4, num_steps)
            version = publisher.publish(fresh=False)
            assert version is not None
            reasons.append(version.reason)
        assert reasons == ["the first version", "", ""]
        models.append(Model(tmp_path / name / "served", check="all"))
        for trained_only in (False, True):
            export_run(own.run_dir, tmp_path / "out", trained_only=trained_only)
            exports.append((tmp_path / "out").read_bytes())
    assert exports[:2] == exports[2:]
    loaded = [Run(tmp_path / name / "run") for name in ("pieces", "rows")]
    looked_up = [run._small(make_batch(job, "multi", 50, np.random.default_rng(8)))[1] for run in loaded]
    assert all(map(torch.equal, *looked_up))
    for _, rows, _, features in WIDTHS:
        found = [model.rows(features[0], np.arange(rows)).tobytes() for model in models]
        assert found[0] == found[1]


def test_a_run_of_pieces_starts_from_another_and_others_from_it(tmp_path: Path) -> None:
    job = wide_job("adam")
    own = lives(tmp_path / "first", job, (4, 6, MIXED))
    expected = exported(own.run_dir)
    for number, placements in enumerate((ROWS, ["columns:2", "rows", "table", "columns:4"])):
        run_dir = tmp_path / f"next {number}"
        place = msgspec.structs.replace(job.job, run_dir=str(run_dir))
        manifest = import_run(on(msgspec.structs.replace(job, job=place), 2, placements), own.run_dir, fresh=False)
        assert manifest.points == ()
        found = exported(run_dir)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    export_run(run_dir, run_dir / "out")
    return load_file(run_dir / "out")


def test_a_damaged_piece_and_a_missing_one_are_found(tmp_path: Path) -> None:
    own = lives(tmp_path, wide_job("sgd"), (4, 6, MIXED))
    newest = own.newest()
    assert newest is not None
    root, saved = own.run_dir / "checkpoints", groups_at(own.job, newest.points)
    [group] = [group for group in whole_groups(own.job) if group.tables[0].name == "a"]
    owner = next(n for n, shard in enumerate(newest.shards) if shard.layers[0].of_group("fp32_d4_sgd"))
    others = tuple(layer for n, shard in enumerate(newest.shards) if n != owner for layer in shard.layers)
    with pytest.raises(DataError, match=facts("pieces of table a do not have the same rows")):
        list(saved_rows(root, group, saved, others))
    path = root / newest.shards[owner].layers[0].of_group("fp32_d4_sgd")[0].file
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    for read in (lambda: Checkpoints(own.run_dir, Disk()).choose(None), lambda: own.live(2)):
        own.job = on(own.job, 2, ROWS)
        with pytest.raises(DataError, match=facts(path.name, "checksum")):
            read()


def test_pieces_begin_with_the_columns_of_the_whole_row() -> None:
    job = on(wide_job("sgd"), 2, MIXED)
    whole = {table.name: (group, table) for group in whole_groups(job) for table in group.tables}
    for group in group_specs(job):
        for piece in group.tables:
            rows, columns = np.arange(50), slice(piece.first_column, piece.first_column + piece.embedding_dim)
            of, table = whole[piece.name]
            expected = first_records(of, 5, make_keys(table.index, rows)).view(np.uint16)[:, : 2 * table.embedding_dim]
            found = first_records(group, 5, make_keys(piece.index, rows)).view(np.uint16)
            halves = 2 if piece.dtype == "fp32" else 1
            cut = slice(halves * columns.start, halves * columns.stop)
            assert np.array_equal(found[:, : halves * piece.embedding_dim], expected[:, cut])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"placement": "columns:3"}, ["table a", '"columns:3"', "16 columns", "multiple of 4", '"columns:2"']),
        ({"placement": "columns:8"}, ["table a", '"columns:8"', '"columns:4"']),
        ({"placement": "columns:2", "embedding_dim": 6}, ["table a", "6 columns", 'placement = "table"']),
        ({"placement": "columns:0"}, ["table a", '"columns:0"', "rows, table, columns:K, auto"]),
        ({"placement": "cols"}, ["table a", '"cols"', "rows, table, columns:K, auto"]),
        ({"placement": "columns:2", "linear": True}, ["table a", "linear", "whole row", 'placement = "table"']),
        ({"placement": "columns:2", "pooling": "none"}, ["table a", "pooled", 'placement = "rows"']),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_nearest_that_works(change: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError, match=facts(*expected)):
        jobs.job(tables=[jobs.table("a", 40, 16) | change])


@pytest.mark.parametrize(
    ("rule", "sparse"),
    [("rowwise_adagrad", {"kind": "rowwise_adagrad"}), ("clip_rows", {"kind": "sgd", "clip_rows": 1.0})],
)
def test_rules_that_need_a_whole_row_are_refused(rule: str, sparse: dict[str, Any]) -> None:
    optimizer = {"sparse": {"lr": 0.1, **sparse}}
    assert jobs.job(tables=[jobs.table("a", 40, 16, placement="table")], optimizer=optimizer).tables[0].pieces == 1
    with pytest.raises(ConfigError, match=facts("table a", "whole row", 'placement = "table"', rule)):
        jobs.job(tables=[jobs.table("a", 40, 16, placement="columns:4")], optimizer=optimizer)
