"""A chain of versions is bound by contents: mixed ones are refused, and so is a CURRENT that goes back."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from rowcast.runtime.errors import DataError
from rowcast.serving.model import Model
from tests.checkpoints.fake_run import damages
from tests.serving.served_run import SMALL, ServedRun, publish, publisher_of, serving_job, versions_of
from tests.support.facts import facts

TODAY = Path(__file__).parent / "chain_without_checksums"  # written by commit dc3fb19


def resealed(path: Path, **fields: Any) -> None:
    """Changes fields of a `version.json`, with a checksum that is right, and CURRENT if it is named there."""
    found = msgspec.json.decode(path.read_bytes()) | fields | {"checksum": ""}
    content = msgspec.json.format(msgspec.json.encode(found), indent=1)
    own = xxhash.xxh3_64_hexdigest(content)
    path.write_bytes(content.replace(b'"checksum": ""', f'"checksum": "{own}"'.encode(), 1))
    current = path.parent.parent / "CURRENT"
    if current.read_text().startswith(path.parent.name):
        current.write_text(f"{path.parent.name} {own}\n")


def name(number: int) -> str:
    return f"v{number:012d}"


def mixed(folder: Path, way: str) -> Path:
    mine = versions_of(folder, "mine")
    if way == "the newest says int8":
        resealed(mine / name(3) / "version.json", dtype="int8")
        return mine
    other = versions_of(
        folder,
        "other",
        dtype="int8" if way == "an int8 base" else "fp32",
        seed=4,
        run_id="ba9876543210" if way == "another run's base" else "0123456789ab",
    )
    shutil.rmtree(mine / name(1))
    shutil.copytree(other / name(1), mine / name(1))
    return mine


@pytest.mark.parametrize(
    "way", ["another run's base", "an int8 base", "the newest says int8", "the same run's base, published again"]
)
def test_a_mixed_chain_is_refused_by_readers_and_found_by_the_publisher(way: str, tmp_path: Path) -> None:
    folder = mixed(tmp_path, way)
    with pytest.raises(DataError, match=facts(folder)):
        Model(folder, check="all")
    with pytest.raises(DataError, match=facts(folder)):
        Model(folder)
    run = ServedRun(serving_job(tmp_path / "run of mine", SMALL))
    publisher = publisher_of(run, folder, "int8" if way == "the newest says int8" else "fp32")
    with damages() as damaged:
        publisher.check()
    assert damaged
    version = publisher.publish()
    assert version is not None
    assert (version.reason, version.number, version.is_whole) == ("a version is damaged", 4, True)
    assert Model(folder, check="all").version == version


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "ba9876543210"},
        {"dtype": "int8"},
        {"tables": lambda tables: [{**tables[0], "name": "users"}, *tables[1:]]},
        {"tables": lambda tables: tables[::-1]},
        {
            "tables": lambda tables: [
                {**own, "stride": 32, "num_rows": own["num_rows"] * own["stride"] // 32} for own in tables
            ]
        },
    ],
    ids=["run", "dtype", "name", "order", "stride"],
)
def test_a_chain_of_an_earlier_rowcast_opens_only_if_its_versions_agree(change: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "served"
    shutil.copytree(TODAY, folder)
    with pytest.warns(UserWarning, match="earlier rowcast") as told:
        model = Model(folder, check="all")
    assert not model.refresh()
    assert len(told) == 1
    for table, rows in np.load(folder / "expected.npz").items():
        assert model.rows(table, np.arange(len(rows))).tobytes() == rows.tobytes()
    path = folder / name(1) / "version.json"
    before = msgspec.json.decode(path.read_bytes())
    resealed(path, **{key: own(before[key]) if callable(own) else own for key, own in change.items()})
    with pytest.raises(DataError, match=facts(folder / name(1) / "version.json")):
        Model(folder)


def test_after_a_chain_of_an_earlier_rowcast_comes_a_whole_version(tmp_path: Path) -> None:
    run, folder = ServedRun(serving_job(tmp_path / "run", SMALL)), tmp_path / "served"
    for share in (0.6, 0.1):
        run.train_some(share)
        run.checkpoint()
    assert run.writer.newest is not None
    shutil.copytree(TODAY, folder)
    for number, file in ((1, folder / name(1)), (2, folder / name(2))):  # of this run's checkpoints
        resealed(
            file / "version.json", number=number, checkpoint=run.writer.newest.checksum if number == 2 else "0" * 16
        )
    (folder / "CURRENT").write_text(f"{name(2)}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = Model(folder)
    run.train_some(0.02)
    run.checkpoint()
    version = publish(run, folder)
    assert (version.number, version.reason) == (3, "an earlier rowcast wrote the version before")
    assert reader.refresh()
    for table, rows, *_ in SMALL:
        assert reader.rows(table, np.arange(rows)).tobytes() == run.expected(table).tobytes()


def test_one_bit_of_current_never_leads_to_another_version(tmp_path: Path) -> None:
    folder = versions_of(tmp_path, "served")
    path, reader = folder / "CURRENT", Model(folder)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        broken = bytearray(content)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        for call in (lambda: Model(folder, check="all"), reader.refresh):
            with pytest.raises(DataError, match=str(folder)):
                call()
    path.write_bytes(content)
    assert not reader.refresh()


def went_back(folder: Path) -> None:
    (folder / "CURRENT").write_bytes((folder.parent / "CURRENT of 2").read_bytes())


def lost(folder: Path) -> None:
    (folder / "CURRENT").unlink()


def began_again(folder: Path) -> None:
    shutil.rmtree(folder)
    versions_of(folder.parent, folder.name, seed=5)


def began_again_without_seals(folder: Path) -> None:
    began_again(folder)
    (folder / "CURRENT").write_text(f"{name(3)}\n")


@pytest.mark.parametrize("change", [went_back, lost, began_again, began_again_without_seals])
def test_a_reader_says_when_the_folder_goes_back(change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "served"
    run = ServedRun(serving_job(tmp_path / "run of served", SMALL))
    for share in (0.6, 0.1, 0.1):
        run.train_some(share)
        run.checkpoint()
        if publish(run, folder).number == 2:
            shutil.copy(folder / "CURRENT", tmp_path / "CURRENT of 2")
    reader = Model(folder)
    if change is not went_back:
        shutil.rmtree(tmp_path / "run of served")
    rows = reader.rows("user", np.arange(60))
    change(folder)
    for _ in range(2):
        with pytest.raises(DataError, match=facts("CURRENT", 3, reader.version.checksum)):
            reader.refresh()
    assert reader.rows("user", np.arange(60)).tobytes() == rows.tobytes()


def test_a_job_with_keys_of_a_newer_rowcast_opens(tmp_path: Path) -> None:
    folder = versions_of(tmp_path, "served")
    reader = Model(folder)
    expected = reader.rows("user", np.arange(60))
    path = folder / name(3) / "version.json"
    job = msgspec.json.decode(path.read_bytes())["job"]
    for own in (job, job["job"], job["data"], job["data"]["columns"], job["model"], *job["tables"]):
        own["of a newer rowcast"] = {"x": 1}
    resealed(path, job=job)
    model = Model(folder, check="all")
    assert model.rows("user", np.arange(60)).tobytes() == expected.tobytes()
    with pytest.raises(DataError, match="of a newer rowcast"):
        assert model.now().job
    resealed(path, version=3)
    with pytest.raises(DataError, match=facts(3, 1, 2)):
        Model(folder)
