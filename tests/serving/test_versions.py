"""What is served is what was trained: every bit of every row, in versions of which readers see only whole ones."""

import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from rowcast.prefetcher.stores.records import elements_of
from rowcast.runtime import crash_points
from rowcast.runtime.checkpoint_manifest import checkpoint_folders
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from rowcast.runtime.process import Signals
from rowcast.serving import publisher
from rowcast.serving.command import PublishCollector, follow
from rowcast.serving.model import Model
from rowcast.serving.publisher import Publisher
from rowcast.serving.row_layout import DTYPES, DType
from rowcast.serving.snapshot import Snapshot
from rowcast.serving.version_file import read_current, version_name
from rowcast.serving.version_writer import Content, write_tables
from tests.checkpoints.fake_ranks import FakeRanks
from tests.checkpoints.fake_run import damages
from tests.serving.served_run import NUM_DENSE, SMALL, TABLES, ServedRun, publish, publisher_of, serving_job
from tests.support.facts import facts
from tests.support.repeats import count


@pytest.fixture
def run(tmp_path: Path) -> ServedRun:
    return ServedRun(serving_job(tmp_path / "run"))


def assert_serves(model: Model | Snapshot, run: ServedRun) -> None:
    for name, rows, _, _ in TABLES:
        found = model.rows(name, np.arange(rows))
        assert found.tobytes() == run.expected(name).tobytes(), name
    assert model.dense().keys() == {"weight"}
    assert model.dense()["weight"].tolist() == np.full((2, 3), run.step).tolist()
    assert model.version.position.step == run.step
    assert model.version.num_dense == NUM_DENSE


def trained(run: ServedRun, *shares: float) -> None:
    for share in shares:
        run.train_some(share)
        run.checkpoint()


def test_every_row_has_the_bits_of_the_checkpoint_in_every_version(run: ServedRun, tmp_path: Path) -> None:
    served, kinds = tmp_path / "served", []
    trained(run, 0.5)
    publish(run, served)
    model = Model(served, warm="1MiB")
    assert_serves(model, run)
    first = model.now()
    before = {name: first.rows(name, np.arange(rows)) for name, rows, _, _ in TABLES}
    for share in (0.05, 0.0, 0.1, 0.6, 0.02, 0.3, 0.02):
        trained(run, share)
        version = publish(run, served)
        kinds.append(version.reason or "changed")
        assert model.refresh()
        assert not model.refresh()
        assert_serves(model, run)
    assert_serves(Model(served, check="all"), run)
    assert [kind.split()[-1] for kind in kinds] == [*["changed"] * 6, "changed"]
    assert [kind.split()[0] for kind in kinds] == ["changed"] * 3 + ["more"] + ["changed"] * 3
    for name, rows, _, _ in TABLES:
        assert first.rows(name, np.arange(rows)).tobytes() == before[name].tobytes(), "a version never changes"
    counts = model.counts()
    assert counts["lookups"] > counts["trained"] > 0


def test_a_publisher_that_skips_checkpoints_skips_no_change_and_says_why_a_version_is_whole(
    run: ServedRun, tmp_path: Path
) -> None:
    """At a third of the pace of the checkpoints. When older layers were merged meanwhile, nobody knows what changed."""
    run.keep, kinds = 9, []
    for shares in ((0.5,), (0.1, 0.6, 0.1), (0.05, 0.05, 0.05), (0.02, 0.02, 0.02), (0.1, 0.1, 0.1)):
        trained(run, *shares)
        kinds.append(publish(run, tmp_path / "served").reason or "changed")
        assert_serves(Model(tmp_path / "served", check="all"), run)
    assert kinds == [
        "the first version",
        "a layer was merged, or training went back",
        "changed",
        "changed",
        "more than half of the last whole version has changed",
    ]


def test_a_checkpoint_that_the_run_removes_while_it_is_read_is_published(
    run: ServedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.keep = 1
    trained(run, 0.5)
    for share in (0.1, 0.7):
        rows = {name: run.expected(name) for name, *_ in TABLES}
        step, (folder, *_) = run.step, checkpoint_folders(run.job.run_dir / "checkpoints")

        def write(partial: Path, content: Content, share: float = share, folder: Path = folder) -> Any:
            while folder.exists():  # until the rows of its layers were merged into others
                trained(run, share)
            return write_tables(partial, content)

        monkeypatch.setattr(publisher, "write_tables", write)
        assert publish(run, tmp_path / "served").position.step == step
        model = Model(tmp_path / "served", check="all")
        assert {name: model.rows(name, np.arange(len(own))).tobytes() for name, own in rows.items()} == {
            name: own.tobytes() for name, own in rows.items()
        }
        assert model.dense()["weight"].tolist() == np.full((2, 3), step).tolist()


def test_a_publisher_that_follows_goes_on_after_checkpoints_that_it_could_not_open(
    run: ServedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.keep, served, signals, left = 1, tmp_path / "served", Signals(), [publisher.TRIES]
    read = publisher.Publisher._newest

    def newest(self: publisher.Publisher) -> Any:
        """The run removes it before its files are open, as often as `left` says."""
        found = read(self)
        assert found is not None
        left[0] -= 1
        while left[0] >= 0 and (self._root / found.name).exists():
            trained(run, 0.7)
        return found

    def wait(seconds: float) -> None:
        if Path(served, "CURRENT").exists():
            signals.stop_reason = "enough"

    trained(run, 0.5)
    monkeypatch.setattr(publisher.Publisher, "_newest", newest)
    monkeypatch.setattr(signals.bell, "wait", wait)
    with capture_logs() as logs:
        follow(publisher_of(run, served), 0.001, signals, fresh=False)
    assert [log["event"] for log in logs] == ["nothing is published; it tries again at the next interval", "published"]
    assert f"{publisher.TRIES} checkpoints" in logs[0]["because"]
    assert_serves(Model(served), run)


def test_a_checkpoint_that_lacks_a_file_is_refused_with_its_name(run: ServedRun, tmp_path: Path) -> None:
    trained(run, 0.5)
    [folder] = checkpoint_folders(run.job.run_dir / "checkpoints")
    file = next(folder.glob("*.safetensors"))
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(DataError, match=facts(str(file), "missing")):
        publish(run, tmp_path / "served")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=facts(str(file), "checksum")):
        publish(run, tmp_path / "served")


def test_at_most_sixteen_versions_are_stacked(run: ServedRun, tmp_path: Path) -> None:
    trained(run, 0.9)
    versions = [publish(run, tmp_path / "served")]
    model = Model(tmp_path / "served")
    for _ in range(17):
        trained(run, 0.002)
        versions.append(publish(run, tmp_path / "served", keep=1))
    assert model.refresh()
    assert_serves(model, run)
    assert [version.number for version in versions if version.is_whole] == [1, 17]
    assert {path.name for path in (tmp_path / "served").glob("v*")} == {"v000000000017", "v000000000018"}


def test_training_that_goes_back_another_run_and_other_shards(run: ServedRun, tmp_path: Path) -> None:
    served = tmp_path / "served"
    trained(run, 0.5)
    publish(run, served)
    rows = [dict(store.rows) for store in run.stores]
    newest, step = run.writer.newest, run.step
    trained(run, 0.1)
    publish(run, served)
    back = ServedRun(run.job, newest=newest, rng=np.random.default_rng(8))
    back.step = step
    for store, own in zip(back.stores, rows, strict=True):
        store.rows = own
    trained(back, 0.05)
    assert publish(back, served).reason == "a layer was merged, or training went back"
    assert_serves(Model(served), back)
    other = ServedRun(serving_job(tmp_path / "other"), run_id="ba9876543210")
    trained(other, 0.3)
    with pytest.raises(ConfigError, match=facts("--to", "0123456789ab", "ba9876543210", "--fresh")):
        publish(other, served)
    version = publish(other, served, fresh=True)
    assert (version.reason, version.number) == ("another run", 4)
    assert_serves(Model(served), other)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_shards_of_ranks_are_one_version(ranks: int, tmp_path: Path) -> None:
    job = serving_job(tmp_path / "run")
    run = FakeRanks(job, ranks, made=ServedRun)
    for number in range(4):
        for rank in run.ranks:
            assert isinstance(rank, ServedRun)
            rank.train_some(0.5 if number == 0 else 0.05)
        run.checkpoint()
        version = publish(run.ranks[0], tmp_path / "served")
        assert version.is_whole == (number == 0)
        model = Model(tmp_path / "served", check="all")
        for name, rows, _, _ in TABLES:
            found = model.rows(name, np.arange(rows))
            assert found.tobytes() == expected_of(run, name).tobytes()


def expected_of(run: FakeRanks, table: str) -> Any:
    whole = ServedRun(run.job)
    for store in whole.stores:
        store.rows = run.rows()
    return whole.expected(table)


@pytest.mark.parametrize(("dtype", "within"), [("fp16", 2.0**-11), ("int8", 0.5 / 255)])
def test_rounded_rows_are_as_near_as_their_dtype_allows(
    dtype: Any, within: float, run: ServedRun, tmp_path: Path
) -> None:
    trained(run, 0.4)
    publish(run, tmp_path / "served", dtype)
    model = Model(tmp_path / "served")
    for name, rows, dim, _ in TABLES:
        found, exact = model.rows(name, np.arange(rows)), run.expected(name)
        scale = np.abs(exact).max(1) if dtype == "fp16" else np.ptp(exact[:, :dim], axis=1)
        assert (np.abs(found - exact)[:, :dim].max(1) <= scale * (within + 1e-6) + 1e-7).all()
        assert (found != exact).any() or (name, dtype) == ("item", "fp16"), "fp16 holds every bf16 of this size"
        assert found[:, dim:].tobytes() == exact[:, dim:].tobytes(), "a linear weight stays fp32"
        untrained = np.setdiff1d(np.arange(rows), [key & 0xFFFFFFFF for key in run.rows()])
        assert found[untrained].tobytes() == exact[untrained].tobytes()
    trained(run, 0.1)
    with pytest.raises(ConfigError, match=facts("--dtype fp32", dtype)):
        publish(run, tmp_path / "served")


def test_a_value_that_the_dtype_cannot_hold_is_refused_with_its_row(run: ServedRun, tmp_path: Path) -> None:
    trained(run, 0.1)
    key = min(run.stores[0].rows)
    run.stores[0].rows[key] = np.full(len(run.stores[0].rows[key]) // 4, 1e38, np.float32).tobytes()
    run.stores[0].changed.add(key)
    run.step += 10
    run.checkpoint()
    with pytest.raises(ConfigError, match=facts(f"row {key & 0xFFFFFFFF}", "table user", "fp16")):
        publish(run, tmp_path / "served", "fp16")


def test_a_full_disk_is_told_with_both_numbers(run: ServedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run, 0.1)
    usage = shutil.disk_usage(tmp_path)._replace(free=2000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(RowcastError, match=facts("14.63 KiB", "1.953 KiB")):
        publish(run, tmp_path / "served")
    monkeypatch.undo()
    publish(run, tmp_path / "served")
    assert_serves(Model(tmp_path / "served"), run)


# damage and kills


def test_a_flipped_bit_anywhere_is_found(run: ServedRun, tmp_path: Path) -> None:
    """In a whole version or in the changed one after it: by a reader that checks all, and by `publish --check`."""
    served = tmp_path / "served"
    trained(run, 0.01)
    publish(run, served)
    trained(run, 0.002)
    publish(run, served)
    rng, publisher = np.random.default_rng(5), publisher_of(run, served)
    for path in sorted(served.glob("v*/*")):
        content = path.read_bytes()
        bits = 8 * len(content)
        for bit in rng.permutation(bits)[: count(8, bits)].tolist():
            broken = bytearray(content)
            broken[bit // 8] ^= 1 << bit % 8
            path.write_bytes(broken)
            with pytest.raises(DataError, match=str(path)):
                Model(served, check="all")
            with damages() as damaged:
                publisher.check()
            assert str(path) in damaged[0], bit
        path.write_bytes(content)
    assert_serves(Model(served, check="all"), run)


def test_a_damaged_version_is_not_taken_and_a_check_replaces_it(run: ServedRun, tmp_path: Path) -> None:
    served = tmp_path / "served"
    trained(run, 0.5)
    publish(run, served)
    model = Model(served)
    for name in ("000.rows", "001.index", "dense.safetensors", "version.json"):
        trained(run, 0.05)
        publish(run, served)
        path = served / f"v{read_current(served).number:012d}" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
        before = model.version
        with pytest.raises(DataError, match=facts(name)):
            model.refresh()
        assert model.version == before
        publisher = publisher_of(run, served)
        trained(run, 0.05)
        with pytest.raises(DataError, match=facts(name, "--check")):
            publisher.publish()
        publisher.check()
        version = publisher.publish()
        assert version is not None
        assert version.reason == "a version is damaged"
        assert publisher.publish() is None
        assert model.refresh()
        assert_serves(model, run)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("point", [point for point in crash_points.CRASH_POINTS if "version" in point])
def test_a_publisher_that_stops_anywhere_leaves_the_version_before_or_the_new_one(
    point: str, run: ServedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    trained(run, 0.5)
    publish(run, served, keep=1)
    trained(run, 0.5)
    publish(run, served, keep=1)
    model, step = Model(served), run.step
    trained(run, 0.6)

    def killed(self: Any) -> None:
        raise Killed

    monkeypatch.setattr(crash_points, "ARMED", crash_points.Armed(point))
    monkeypatch.setattr(crash_points.Armed, "passed", killed)
    with pytest.raises(Killed):
        publish(run, served, keep=1)
    monkeypatch.undo()
    is_new = model.refresh()
    assert is_new == (point in ("version named", "old version removed"))
    assert model.version.position.step == (run.step if is_new else step)
    trained(run, 0.1)
    publish(run, served, keep=1)
    assert model.refresh()
    assert_serves(model, run)
    left = {path.name for path in served.iterdir() if path.is_dir()}
    assert left == {version_name(own.number) for own in (model.version.named, *model.version.stands_on)}


def test_a_request_of_26_tables_sees_one_version_and_never_an_older_one(tmp_path: Path) -> None:
    """Rows say in which step they were written."""
    run = ServedRun(serving_job(tmp_path / "run", tuple((f"t{number}", 60, 4, {}) for number in range(26))))
    served, every = tmp_path / "served", {table: list(range(60)) for table in range(26)}
    run.train(every)
    run.checkpoint()
    publish(run, served)
    model, torn, made, ended = Model(served), [], [0, 0], threading.Event()
    ids = {f"t{number}": np.arange(1, 40) for number in range(26)}

    def requests(reader: int) -> None:
        newest = 0
        while not ended.is_set():
            now = model.now()
            steps = set(np.unique([rows[:, 1:3] for rows in now.look_up(ids).values()]).tolist())
            steps.add(float(now.dense()["weight"].max()))
            if steps != {float(now.version.position.step)} or now.version.position.step < newest:
                torn.append((steps, newest))
            newest = now.version.position.step
            made[reader] += 1

    threads = [threading.Thread(target=requests, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in itertools.count():
            if number >= 8 and sum(made) >= count(0, 100_000):
                break
            run.train({table: list(range(40)) for table in range(26)} if number % 5 else every)
            run.checkpoint()
            publish(run, served, keep=1)
            assert model.refresh()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not torn


def test_a_folder_without_a_version_and_a_run_without_a_checkpoint(run: ServedRun, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=facts("served", "rowcast publish")):
        Model(tmp_path / "served")
    assert publisher_of(run, tmp_path / "served").publish() is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_is_refused_by_every_dtype_with_advice_that_helps(
    dtype: DType, tmp_path: Path
) -> None:
    run = ServedRun(serving_job(tmp_path / "run"))
    run.train_some(0.1)
    records = np.zeros((1, run.groups[0].record_bytes), np.uint8)
    elements_of(records, run.groups[0].parts[0])[0, 1] = np.nan
    run.stores[0].write(np.array([6]), records)
    run.checkpoint()
    with pytest.raises(ConfigError, match=facts("row 6 of table user", "not finite", "older checkpoint")):
        publish(run, tmp_path / "served", dtype)


def test_what_is_served_is_as_old_as_the_checkpoint_of_the_newest_version(tmp_path: Path) -> None:
    run = ServedRun(serving_job(tmp_path / "run", SMALL))
    first = publisher_of(run, tmp_path / "versions")
    assert delay_of(first) == 0, "nothing is served"
    run.train_some(0.5)
    for at_s in (1000.0, 3000.0):
        manifest = run.checkpoint()
        path = run.checkpoints.root / manifest.name / "manifest.json"
        os.utime(path, (at_s, at_s))
        first.publish()
        assert first.served_since == at_s
        run.train_some(0.1)
    again = publisher_of(run, tmp_path / "versions")
    assert again.publish() is None, "it is published already"
    assert again.served_since == 3000.0
    assert delay_of(again) > 10**9


def delay_of(publisher: Publisher) -> float:
    [delay] = [value for name, _, value in PublishCollector(publisher)._samples() if name.startswith("rowcast_serving")]
    return delay
