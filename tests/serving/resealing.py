"""A process that changes one field or some bytes of versions, makes every checksum right again, and reads them.

    python -m tests.serving.resealing VERSIONS FIRST COUNT

`VERSIONS` has three versions; a reader stands at the second. Prints, for each number from FIRST on, what it changes,
and then `DataError`, or `served` if every row read has the bytes of such a row in the files, or its first value. The
reader must go on at its version. Ends with an exception if anything else happens. A hang or a signal is the parent's to
notice.
"""

import copy
import os
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from rowcast.job.tables import TableSpec
from rowcast.prefetcher.stores.records import rounded, widened
from rowcast.protocol.first_values import initial_rows
from rowcast.runtime.errors import DataError
from rowcast.serving.model import Model
from rowcast.serving.version_file import CURRENT, VERSION_NAME, version_name

BLOCK = 4 * 2**20
MOST_ROWS = 3000  # looked up in a table
NUMBERS = (-1, 0, 1, 2, 3, 7, 8, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**48, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63))
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    1.5,
    1e300,
    "",
    "x",
    "../x",
    "\x00",
    "int8",
    "fp16",
    [],
    [[]],
    {},
    {"x": 1},
)
Place = tuple[Any, Any]  # a container and a key in it


def digest(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def put(path: Path, content: bytes) -> None:
    """By rename, as versions are copied: an open reader keeps the file that it mapped."""
    partial = path.with_name("partial")
    partial.write_bytes(content)
    partial.rename(path)


def places_in(value: Any) -> Iterator[Place]:
    for key in range(len(value)) if isinstance(value, list) else list(value):
        yield value, key
        if isinstance(value[key], list | dict):
            yield from places_in(value[key])


@dataclass
class Versions:
    folder: Path
    rng: random.Random
    is_sealed_anew: bool = True

    def path(self, number: int, name: str) -> Path:
        return self.folder / version_name(number) / name

    def described(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.path(number, VERSION_NAME).read_bytes())
        return found

    def field(self, number: int) -> str:
        """Of `version.json`, with the job in it as one of many; in one version, or the same in all."""
        state, numbers = self.rng.getstate(), self.rng.choice(([number], [number], [1, 2, 3]))
        for own in numbers:
            self.rng.setstate(state)
            said = self._field(own)
        return f"version {' and '.join(map(str, numbers))}, {said}"

    def _field(self, number: int) -> str:
        found = self.described(number)
        whole = found["job"] if self.rng.random() < 0.3 else found
        tops = [key for key in whole if key not in ("job" if whole is found else "model", "checksum")]
        places = [(whole, key) for key in tops]
        places += [own for key in tops if isinstance(whole[key], list | dict) for own in places_in(whole[key])]
        place, key = self.rng.choice(places)
        before = place[key]
        near = [before + self.rng.choice((-1, 1)), before * 2] if type(before) is int else []
        others = [own[k] for own, k in places if type(own[k]) is type(before)]
        after = copy.deepcopy(self.rng.choice(self.rng.choice([near or VALUES, others, VALUES])))
        match self.rng.randrange(8):
            case 0:
                del place[key]
                after = "nothing"
            case 1 if isinstance(place, list):
                place.insert(int(key), after)
            case 1:
                place["new"] = after
            case _:
                place[key] = after
        put(self.path(number, VERSION_NAME), msgspec.json.encode(found))
        return f"{key}: {before!r:.60} -> {after!r:.60}"

    def bytes_of_a_file(self, number: int) -> str:
        path = self.rng.choice([own for own in sorted(self.path(number, "").iterdir()) if own.name != VERSION_NAME])
        content, way = bytearray(path.read_bytes()), self.rng.randrange(6)
        at = self.rng.randrange(len(content)) if content else 0
        size = self.rng.choice((1, 2, 4, 8, 64, len(content)))
        if way == 0:
            content[at : at + size] = b"\xff" * len(content[at : at + size])
        elif way == 1:
            content[at : at + size] = bytes(len(content[at : at + size]))
        elif way == 2 and len(content) > 8:
            at = at // 4 * 4
            content[at : at + 4] = struct.pack("<I", self.rng.choice((0, 60, 10_000, 2**31, 2**32 - 1)))[
                : len(content) - at
            ]
        elif way == 3:
            del content[at : at + size]
        elif way == 4:
            content[at:at] = self.rng.randbytes(size)
        elif content:
            content[at] ^= 1 << self.rng.randrange(8)
        put(path, bytes(content))
        return f"version {number}, {path.name}: way {way}, {size} bytes at {at}"

    def tags(self, number: int) -> str:
        """An index without an empty cell, or one in which all rows are at one place."""
        path = self.rng.choice(sorted(self.path(number, "").glob("*.index")))
        content = bytearray(path.read_bytes())
        cells = len(content) // 6
        if self.rng.random() < 0.5:
            content[4 * cells :] = struct.pack("<H", self.rng.choice((1, 7, 2**16 - 1))) * cells
        else:
            content[: 4 * cells] = struct.pack("<I", self.rng.choice((0, 5, 2**32 - 1))) * cells
        put(path, bytes(content))
        return f"version {number}, {path.name}: all tags or places alike"

    def kind_of_a_file(self, number: int) -> str:
        path = self.rng.choice([self.folder / CURRENT, *sorted(self.path(number, "").iterdir())])
        way = self.rng.choice(("fifo", "folder", "missing", "link to itself", "empty"))
        path.unlink()
        if way == "fifo":
            os.mkfifo(path)
        elif way == "folder":
            path.mkdir()
        elif way == "link to itself":
            path.symlink_to(path.name)
        elif way == "empty":
            path.touch()
        self.is_sealed_anew = False
        return f"{path.name} of version {number}: {way}"

    def current(self, number: int) -> str:
        path = self.folder / CURRENT
        content = bytearray(path.read_bytes())
        content[self.rng.randrange(len(content))] = self.rng.randrange(256)
        put(path, bytes(content))
        self.is_sealed_anew = False
        return f"CURRENT: {bytes(content)!r}"

    def seal(self) -> None:
        """Gives every file, every version below, and CURRENT the checksums that they have now."""
        below: dict[int, str] = {}
        for number in (1, 2, 3):
            found = self.described(number)
            for own in files_in(found):
                path = self.path(number, str(own.get("name")))
                if isinstance(own.get("name"), str) and "\x00" not in own["name"] and path.is_file():
                    content = path.read_bytes()
                    own["checksums"] = [digest(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK)]
                    if len(content) != own.get("nbytes") and self.rng.random() < 0.7:
                        own["nbytes"] = len(content)
            for entry in found["below"] if isinstance(found.get("below"), list) else []:
                if isinstance(entry, list) and entry and entry[0] in list(below) and len(entry) == 2:
                    entry[1] = below[entry[0]]
            ordered = {"version": found.pop("version", None)} | {"checksum": ""} | found | {"checksum": ""}
            content = msgspec.json.encode(ordered)
            own_checksum = digest(content)
            content = content.replace(b'"checksum":""', f'"checksum":"{own_checksum}"'.encode(), 1)
            put(self.path(number, VERSION_NAME), content)
            below[number] = own_checksum
        (self.folder / CURRENT).write_text(f"{version_name(3)} {below[3]}\n")


def files_in(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    tables = found.get("tables")
    for table in tables if isinstance(tables, list) else []:
        if isinstance(table, dict):
            yield from (own for own in (table.get("rows"), table.get("index")) if isinstance(own, dict))
    if isinstance(found.get("dense"), dict):
        yield found["dense"]


def assert_serves(model: Model) -> None:
    """Every row has the bytes of such a row in the files, read by nothing of the reader, or its first value."""
    now = model.now()
    for rule in now.version.ids:
        view = now.tables[rule.table]
        table: TableSpec = view.table
        ids = np.unique(np.concatenate([np.arange(min(MOST_ROWS, table.num_embeddings)), [table.num_embeddings - 1]]))
        if rule.rule != "row" or now.version.dtype != "fp32":
            for given in (ids, [f"u{own}" for own in ids]):
                with suppress(ValueError):  # text where training had integers
                    model.rows(rule.feature, given)
            continue
        found = model.rows(rule.feature, ids)
        first = widened(rounded(initial_rows(seed_of(model), table, ids), table.dtype), table.dtype)
        allowed = [{own.tobytes()} for own in np.ascontiguousarray(first)]
        for own in now.versions:
            files = own.file.tables[table.index]
            content = own.rows[table.index].tobytes()
            for at in range(0, len(content), files.stride):
                key = int.from_bytes(content[at : at + 8], "little")
                place = int(np.searchsorted(ids, key)) if key < 2**62 else len(ids)
                if place < len(ids) and ids[place] == key:
                    allowed[place].add(content[at + 8 : at + 8 + 4 * table.embedding_dim])
        for own, known in zip(found, allowed, strict=True):
            assert own.tobytes() in known, f"{table.name}: {own}"
        if not np.isnan(found).any() and table.pooling != "none" and not view_is_weighted(model, rule.feature):
            assert model.bags(rule.feature, ids, [0, len(ids)]).shape == (1, table.embedding_dim)
    assert all(isinstance(own, np.ndarray) for own in model.dense().values())


def seed_of(model: Model) -> int:
    return int(model.version.job["job"]["seed"])


def view_is_weighted(model: Model, feature: str) -> bool:
    return feature in model.version.job["data"]["columns"].get("weights", {})


WAYS: tuple[tuple[Callable[[Versions, int], str], int], ...] = (
    (Versions.field, 6),
    (Versions.bytes_of_a_file, 4),
    (Versions.tags, 1),
    (Versions.kind_of_a_file, 1),
    (Versions.current, 1),
)


def try_one(source: Path, seed: int) -> str:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "served"
        shutil.copytree(source, folder)
        newest = (folder / CURRENT).read_bytes()
        second = msgspec.json.decode((folder / version_name(2) / VERSION_NAME).read_bytes())["checksum"]
        (folder / CURRENT).write_text(f"{version_name(2)} {second}\n")
        reader = Model(folder)
        (folder / CURRENT).write_bytes(newest)
        expected = reader.rows("user", np.arange(60))
        versions = Versions(folder, rng)
        way = rng.choices([own for own, _ in WAYS], [often for _, often in WAYS])[0]
        sys.stdout.write(f"{seed} {way(versions, rng.choice((1, 2, 3, 3)))}: ")
        sys.stdout.flush()
        if versions.is_sealed_anew:
            versions.seal()
        before, results = reader.version, set()
        for call in (reader.refresh, lambda: Model(folder), lambda: Model(folder, check="all")):
            try:
                found = call()
            except DataError:
                results.add("DataError")
            else:
                assert_serves(found if isinstance(found, Model) else reader)
                results.add("served")
        if reader.version == before:
            assert reader.rows("user", np.arange(60)).tobytes() == expected.tobytes()
        return " and ".join(sorted(results))


def main() -> None:
    source, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, first + count):
        sys.stdout.write(f"{try_one(source, seed)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
