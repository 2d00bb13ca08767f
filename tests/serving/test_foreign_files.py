"""Publishing deletes what publishers wrote, and nothing else; numbers go on above everything in the folder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.serving.model import Model
from rowcast.serving.version_file import Named, read_version, version_name
from tests.serving.served_run import ServedRun, publish, publisher_of, serving_job
from tests.support.facts import facts

Files = dict[str, bytes | str]


@pytest.fixture
def run(tmp_path: Path) -> ServedRun:
    return ServedRun(serving_job(tmp_path / "run", (("user", 60, 4, {}),)))


def published(run: ServedRun, to: Path, count: int = 1, keep: int = 1) -> list[str]:
    """Publishes so many whole versions; returns the warnings, each folder once."""
    publisher = publisher_of(run, to, keep=keep)
    with capture_logs() as logs:
        for _ in range(count):
            run.train_some(0.9)
            run.checkpoint()
            assert publisher.publish() is not None
    return [entry["path"] for entry in logs if "not removed" in entry["event"]]


def contents(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a user's")
    return path


def folder_of_a_user(to: Path) -> list[Path]:
    return [put(to / version_name(1000) / "thesis.txt"), put(to / version_name(1000) / "drafts" / "000.rows")]


def partial_of_a_user(to: Path) -> list[Path]:
    return [
        put(to / f".{version_name(1000)}.partial" / "thesis.txt"),
        put(to / f"{version_name(7)}.removed" / "a" / "b"),
    ]


def file_in_a_version(to: Path) -> list[Path]:
    return [put(to / version_name(1) / "notes.txt"), put(to / version_name(1) / "old" / "000.rows")]


def linked_version(to: Path) -> list[Path]:
    archive = to.parent / "archive"
    (to / version_name(1)).rename(archive)
    (to / version_name(1)).symlink_to(archive)
    return [put(archive / "own.txt"), *(path for path in archive.iterdir() if path.is_file()), to / version_name(1)]


def links_and_files_with_names_of_ours(to: Path) -> list[Path]:
    put(to.parent / "elsewhere")
    (to / version_name(1) / "007.rows").symlink_to(to.parent / "elsewhere")
    (to / version_name(1) / "008.rows").mkdir()
    (to / f"{version_name(2)}.removed").symlink_to(to.parent)
    return [
        to.parent / "elsewhere",
        to / version_name(1) / "007.rows",
        put(to / version_name(1) / "008.rows" / "x"),
        put(to / version_name(2000)),
        to / f"{version_name(2)}.removed",
    ]


WAYS = [folder_of_a_user, partial_of_a_user, file_in_a_version, linked_version, links_and_files_with_names_of_ours]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_foreign_is_deleted(way: Callable[[Path], list[Path]], run: ServedRun, tmp_path: Path) -> None:
    to = tmp_path / "served"
    published(run, to)
    foreign = way(to)
    before = {path: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in foreign}
    warnings = published(run, to, 3)
    assert {path: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in foreign} == before
    assert 1 <= len(warnings) == len(set(warnings)), "one warning for each folder that stays"
    numbers = [int(path.name.lstrip(".")[1:13]) for path in to.iterdir() if path.name.lstrip(".")[:1] == "v"]
    assert Model(to, check="all").version.number == max(numbers)
    own = [path for path in to.glob("v*/version.json") if not path.parent.is_symlink()]
    assert len(own) == 1, "what publishers wrote is removed as before"


def test_a_version_that_was_never_named_and_stays_takes_no_other_with_it(run: ServedRun, tmp_path: Path) -> None:
    to = tmp_path / "served"
    published(run, to)
    archive = shutil.copytree(to / version_name(1), tmp_path / "archive")
    other = msgspec.structs.replace(read_version(to, Named(1, "")), number=2, base=2)
    (archive / "version.json").write_bytes(render(seal(other)))
    (to / version_name(2)).symlink_to(archive)
    run.train_some(0.02)
    run.checkpoint()
    version = publish(run, to, keep=1)
    assert (version.number, version.base) == (3, 1)
    assert Model(to, check="all").rows("user", np.arange(60)).tobytes() == run.expected("user").tobytes()


@pytest.mark.parametrize("last", [1, 3])
def test_a_folder_whose_current_is_lost_goes_on(last: int, run: ServedRun, tmp_path: Path) -> None:
    to = tmp_path / "served"
    published(run, to, last, keep=9)
    put(to / version_name(1) / "notes.txt")
    before, current = contents(to), (to / "CURRENT").read_bytes()
    (to / "CURRENT").unlink()
    assert publisher_of(run, to, keep=9).publish() is None, "the newest checkpoint is published already"
    assert (to / "CURRENT").read_bytes() == current
    (to / "CURRENT").unlink()
    run.train_some(0.1)
    run.checkpoint()
    assert publish(run, to, keep=9).number == last + 1
    assert before.items() <= (contents(to) | {"CURRENT": current}).items()


def no_description(folder: Path) -> None:
    (folder / "version.json").unlink()


def half_copied(folder: Path) -> None:
    os.truncate(folder / "000.rows", 8)


def of_a_user(folder: Path) -> None:
    put(folder.with_name(version_name(9)) / "thesis.txt")


@pytest.mark.parametrize("change", [no_description, half_copied, of_a_user])
def test_a_folder_without_current_whose_newest_version_is_not_whole_is_refused(
    change: Callable[[Path], None], run: ServedRun, tmp_path: Path
) -> None:
    to = tmp_path / "served"
    published(run, to, 2, keep=9)
    (to / "CURRENT").unlink()
    change(to / version_name(2))
    before = contents(to)
    publisher = publisher_of(run, to)
    for _ in range(2):
        with pytest.raises(ConfigError, match=facts(to, "CURRENT")):
            publisher.publish()
        publisher.check()
    assert contents(to) == before


def test_numbers_end_with_twelve_digits(run: ServedRun, tmp_path: Path) -> None:
    to = tmp_path / "served"
    published(run, to)
    put(to / version_name(10**12 - 1) / "x")
    with pytest.raises(ConfigError, match=facts(to, 10**12 - 1)):
        published(run, to)


def test_an_own_version_that_is_damaged_goes_in_its_turn(run: ServedRun, tmp_path: Path) -> None:
    to = tmp_path / "served"
    published(run, to)
    path = to / version_name(1) / "version.json"
    path.write_bytes(path.read_bytes().replace(b'"number": 1', b'"number": 2'))
    publisher = publisher_of(run, to, keep=1)
    run.train_some(0.9)
    run.checkpoint()
    with pytest.raises(DataError, match="--check"):
        publisher.publish()
    publisher.check()
    assert publisher.publish() is not None
    assert [own.name for own in to.glob("v*")] == [version_name(2)]
    shutil.rmtree(to)
