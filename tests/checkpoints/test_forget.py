"""`rowcast forget` gives rows that were not trained for long their first values, whatever was merged and who wrote."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from examples.plain_loop import PlainTable, run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out
from rowcast.prefetcher.checkpoints.forget import forget_rows
from rowcast.prefetcher.checkpoints.restore import OwnShard
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import RunDirectory, pair_folder
from rowcast.serving.model import Model
from tests.checkpoints.fake_run import FakeRun, assert_holds, restored
from tests.checkpoints.fake_run import small_job as rows_only
from tests.serving.served_run import SMALL, ServedRun, publish, serving_job
from tests.support.batches import NUM_DENSE, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import Past, Settings, start_state
from tests.support.ranked_run import RankedRun


def goes_on(run: FakeRun) -> FakeRun:
    """The same run in another process."""
    checkpoints = Checkpoints(run.job.run_dir, run.disk)
    newest = checkpoints.newest_valid()
    assert newest is not None
    again = FakeRun(run.job, newest=newest, keep=run.keep)
    for group, store in zip(again.groups, again.stores, strict=True):
        own = {table.index for table in group.tables}
        rows = restored(run.job.run_dir, run.job, newest)
        store.rows |= {key: record for key, record in rows.items() if key >> 48 in own}
    return again


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize(
    ("every", "untrained_for", "longest"), [(30, 30, 30), (30, 60, 60), (40, 20, 40), (10, 80, 90)]
)
@pytest.mark.parametrize("merges", [False, True])
def test_rows_stay_as_long_as_promised_whatever_was_merged(
    every: int, untrained_for: int, longest: int, *, merges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are born for ever: each step trains two of the first ten and one that comes only once."""
    if merges:
        monkeypatch.setattr("rowcast.prefetcher.checkpoints.row_files.MAX_LAYERS", 3)
    run, last, left_out = FakeRun(rows_only(tmp_path / "run")), dict[int, int](), 0
    rng = np.random.default_rng(every)
    for step in range(10, 181, 10):
        run.train({2: [*rng.integers(0, 10, 2), 10 + step // 10], 0: [step // 10]})
        changed = {key for store in run.stores for key in store.changed}
        last |= dict.fromkeys(changed, step)
        run.checkpoint()
        if step % every:
            continue
        before = set(run.rows())
        manifest, count = forget_rows(run.job.run_dir, untrained_for)
        run = goes_on(run)
        gone = before - set(run.rows())
        assert count >= len(gone)
        left_out += count
        assert not any(last[key] > step - untrained_for for key in gone), "a row was trained in these steps"
        assert not any(last[key] <= step - longest for key in run.rows()), "a row stays too long"
        assert len(run.rows()) <= 10 + 2 * longest // 10, "births make it grow"
        assert_holds(run.job.run_dir, run.job, manifest, run.rows())
    assert left_out > 10


def test_a_run_that_forgets_goes_on_as_the_plain_loop_with_these_rows_set_back(tmp_path: Path) -> None:
    """Killed at any time, with another number of ranks from one `forget` to the next."""
    job = small_job(
        "adagrad",
        "multi",
        job={"run_dir": str(tmp_path / "run")},
        data={"format": "synthetic"},
        checkpoint={"every": 4, "keep": 1},
        ranks={"parts": 2},
    )
    job.run_dir.mkdir()
    batches, stops, untrained_for = small_batches(job, "multi", num_steps=30, eval_at=()), (6, 12, 18, 24), 12
    losses, end = forgetful_plain_loop(job, batches, stops, untrained_for)
    chance, left_out = random.Random(5), []
    for stop, ranks in zip(stops, (1, 2, 2, 1), strict=True):
        begun(job, batches[:stop], stop, ranks).advance(chance.randrange(5_000))
        begun(job, batches[:stop], stop + 1, ranks).run()
        left_out.append(forget_rows(job.run_dir, untrained_for)[1])
    assert [rows > 100 for rows in left_out] == [False, False, True, True]
    assert_equal_bits(begun(job, batches, 9, 2).run(), losses, end)


def begun(job: Job, batches: Sequence[ScheduledBatch], seed: int, ranks: int) -> RankedRun:
    pasts = []
    for number in range(ranks):
        checkpoints = Checkpoints(job.run_dir, Disk())
        carry_out(checkpoints.withdraw(OwnShard(number=number, count=ranks)))
        pasts.append(Past(checkpoints=checkpoints, newest=checkpoints.newest_valid()))
    settings = Settings(slots=slots_for(group_specs(job), batches, "more"), seed=seed)
    return RankedRun(job, batches, settings, ranks=ranks, parts=2, pasts=pasts)


def forgetful_plain_loop(
    job: Job, batches: Sequence[ScheduledBatch], stops: Sequence[int], untrained_for: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The dense optimizer is SGD without a state."""
    first, losses = start_state(job, NUM_DENSE), []
    state, begins = first, 0
    for stop in (*stops, len(batches)):
        own, state = run_plain_loop(job, state, batches[begins:stop], 2)
        losses += own
        if stop in stops and stop - untrained_for in stops:  # known since then
            for table in job.tables:
                own_features = PlainTable(table, job.features.index(table.features[0]), job, state)
                old = torch.ones(table.num_embeddings, dtype=torch.bool)
                for scheduled in batches[stop - untrained_for : stop]:
                    old[scheduled.batch.ids[own_features.lookups(scheduled.batch)[1]]] = False
                for name in (f"embedding_bags.{table.name}.weight", f"optimizer.{table.name}.sum"):
                    state[name][old] = first[name][old]
        begins = stop
    return losses, state


def test_a_version_after_it_is_whole_and_says_why(tmp_path: Path) -> None:
    run = ServedRun(serving_job(tmp_path / "run", SMALL))
    run.train({0: list(range(60)), 1: list(range(30)), 2: [1, 2, 3]})
    run.checkpoint()
    forget_rows(run.job.run_dir, 10)
    again = ServedRun(run.job, newest=Checkpoints(run.job.run_dir, run.disk).newest_valid())
    for store, own in zip(again.stores, run.stores, strict=True):
        store.rows |= own.rows
    for row in range(2):
        again.train({0: [row], 1: [row], 2: [row]})
        again.checkpoint()
        publish(again, tmp_path / "versions")
    forgotten, count = forget_rows(run.job.run_dir, 20)
    assert count == 60 + 30 + 3
    version = publish(again, tmp_path / "versions")
    assert (version.is_whole, version.reason) == (True, "rows were forgotten after 30 train steps")
    for store in again.stores:
        store.rows.clear()
    rows = restored(run.job.run_dir, run.job, forgotten)
    again.stores[0].rows |= rows
    model = Model(tmp_path / "versions", check="all")
    for name in ("user", "item", "site"):
        expected = again.expected(name)
        assert np.array_equal(model.rows(name, np.arange(len(expected))), expected)


@pytest.mark.parametrize("point", ["manifest not renamed", "manifest renamed"])
def test_killed_on_either_side_of_the_rename_one_of_both_manifests_is_whole(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(rows_only(tmp_path / "run"))
    run.train({0: [1, 2]})
    run.checkpoint()
    forget_rows(run.job.run_dir, 10)
    run = goes_on(run)
    run.train({0: [2]})
    before = run.checkpoint()

    class Killed(BaseException):
        pass

    def killed(name: str) -> None:
        if name == point:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("rowcast.prefetcher.checkpoints.commit.crash_point", killed)
        with pytest.raises(Killed):
            forget_rows(run.job.run_dir, 10)
    newest = Checkpoints(run.job.run_dir, Disk()).newest_valid()
    assert newest is not None
    assert (newest.checksum == before.checksum) == (point == "manifest not renamed")
    again, _ = forget_rows(run.job.run_dir, 10)
    assert [layer.num_rows for layer in again.layers] == [1]
    assert {key & 0xFFFF for key in goes_on(run).rows()} == {2}


def test_a_run_that_trains_and_too_few_steps_are_refused(tmp_path: Path) -> None:
    run = FakeRun(rows_only(tmp_path / "run"))
    run.train({0: [1, 2]})
    run.checkpoint()
    with RunDirectory(run.job.run_dir, "prefetcher"), pytest.raises(ConfigError, match="is held by a prefetcher"):
        forget_rows(run.job.run_dir, 10)
    job = rows_only(tmp_path / "other")
    every, ranks = structs.replace(job.checkpoint, every=50), structs.replace(job.ranks, count=2)
    other = FakeRun(structs.replace(job, checkpoint=every, ranks=ranks))
    other.train({0: [1, 2]})
    other.checkpoint()
    with pytest.raises(ConfigError, match="--untrained-for 49 is less than the 50 train steps between two"):
        forget_rows(other.job.run_dir, 49)
    folder = pair_folder(other.job.run_dir, 1, 2)
    with RunDirectory(folder, "prefetcher"), pytest.raises(ConfigError, match=f"{folder} is held by a prefetcher"):
        forget_rows(other.job.run_dir, 50)
    with pytest.raises(ConfigError, match="there is no such folder"):
        forget_rows(tmp_path / "none", 10)
    assert not (tmp_path / "none").exists()
