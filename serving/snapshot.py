"""One version, open for look-ups: it never changes, and any thread may use it."""

import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from rowcast.job.file import parse_manifest_job
from rowcast.job.schema import Job
from rowcast.job.tables import TableSpec
from rowcast.prefetcher.readers.arrow_rows import Rules
from rowcast.prefetcher.readers.id_check import (
    check_dense,
    check_offsets,
    dense_names,
    lookup_location,
    require_weights,
)
from rowcast.prefetcher.stores.records import rounded, widened
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.protocol.first_values import Initializer
from rowcast.runtime.arrays import F32, I64, U64, Bytes
from rowcast.runtime.disk import open_regular
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.mapped_pages import PAGE, ask_for
from rowcast.serving.index_loops import (
    AS_IS,
    PAGES_MISSING,
    Index,
    fill,
    is_index,
    join,
    look_up,
    num_cells,
    places_of,
    pool,
    touch,
    words_of,
)
from rowcast.serving.raw_ids import divided_by, prepared_numbers, rows_of
from rowcast.serving.row_layout import row_layout
from rowcast.serving.version_file import (
    CHECK_BYTES,
    DENSE_NAME,
    VERSION_NAME,
    FileChecksums,
    IdRule,
    Named,
    ServedJob,
    TableFiles,
    VersionFile,
    blocks_of,
    check_file,
    check_size,
    read_version,
    served_job,
    unreadable,
    version_name,
)

HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
INT64 = np.dtype(np.int64)
NO_WEIGHTS = np.empty(0, np.float32)
NOTHING = Index(np.zeros(1, np.uint32), np.zeros(1, np.uint16))  # a joined index without versions
BLOCK_ROWS = 65536
CHECKS = ("changed", "all")


@dataclass(slots=True)
class LookupCounts:
    """Of all look-ups since the model was opened."""

    lookups: int = 0
    trained: int = 0  # of these, rows that were found; the others have their first values
    waits: int = 0  # calls that asked for pages which were not in memory
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, lookups: int, trained: int, waits: int) -> None:
        with self.lock:
            self.lookups += lookups
            self.trained += trained
            self.waits += waits


class OpenVersion:
    """The mapped files of a version."""

    def __init__(self, folder: Path, file: VersionFile, check: str) -> None:
        """`file` passed `check_chain`. `check`: "all", or "changed": of a whole version only sizes and indexes. Raises
        DataError and OSError."""
        self.file = file
        self.path = folder / version_name(file.number)
        for checked in file.files:
            if check == "all" or not file.is_whole or checked.name.endswith(".index"):
                check_file(self.path, checked)
            else:
                check_size(self.path, checked)
        self._maps: list[mmap.mmap] = []
        self.rows = [self._mapped(table.rows) for table in file.tables]
        self.indexes = [self._index(table) for table in file.tables]
        self.dense = self._dense()

    def _dense(self) -> dict[str, Any]:
        with open_regular(self.path / DENSE_NAME) as file:
            content = file.read()
        try:
            return load(content)
        except (SafetensorError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"{self.path / DENSE_NAME}: not the dense weights of a version ({error})") from None

    def _index(self, table: TableFiles) -> Index:
        content, cells = self._mapped(table.index), num_cells(table.num_rows)
        index = Index(content[: 4 * cells].view(np.uint32), content[4 * cells :].view(np.uint16))
        if not is_index(index, table.num_rows):
            raise DataError(
                f"{self.path / table.index.name}: not an index of {table.num_rows} rows, though its checksum is right; "
                "`rowcast publish --check` writes a whole version"
            )
        return index

    def _mapped(self, checked: FileChecksums) -> Bytes:
        """Returns u8 [nbytes], mapped for reading at random."""
        if not checked.nbytes:
            return np.empty(0, np.uint8)
        with open_regular(self.path / checked.name) as file:
            if os.fstat(file.fileno()).st_size != checked.nbytes:
                raise DataError(f"{self.path / checked.name}: its size has changed; copy versions by rename only")
            memory = mmap.mmap(file.fileno(), checked.nbytes, prot=mmap.PROT_READ)
        memory.madvise(mmap.MADV_RANDOM)
        self._maps.append(memory)
        return np.frombuffer(memory, np.uint8)

    def bring_neighbours(self) -> None:
        """Lets a page fault also map nearby pages from now on, for readers of rows on nearly all pages."""
        for memory in self._maps:
            memory.madvise(mmap.MADV_NORMAL)


class TableView:
    """One table in several versions."""

    def __init__(self, table: TableSpec, first: Initializer, versions: list[OpenVersion]) -> None:
        """`first`: makes rows that no version has. `versions`: newest first, the last is whole."""
        self.table = table
        self._files = [version.rows[table.index] for version in versions]
        layout = row_layout(versions[0].file.dtype, table)
        counts = [version.file.tables[table.index].num_rows for version in versions]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        cells = num_cells(int(self.starts[-2])) if len(versions) > 1 else 0
        self._joined = Index(np.zeros(cells, np.uint32), np.zeros(cells, np.uint16)) if cells else NOTHING
        self._whole = versions[-1].indexes[table.index]
        self._addresses = np.array([file.ctypes.data for file in self._files], np.uint64)
        given = (self._joined, self._whole, self.starts, self._addresses)
        self.words = words_of(*given, table.num_embeddings, layout, first)
        self._stride = layout.stride
        for version, at, end in zip(
            versions[:-1], self.starts.tolist(), self.starts.tolist()[1:], strict=False
        ):  # newest first
            path = version.path / version.file.tables[table.index].rows.name
            for block in blocks_of(path, CHECK_BYTES // layout.stride * layout.stride):
                count = min(len(block) // layout.stride, end - at)  # if the file has grown meanwhile
                rows = np.frombuffer(block, np.int64, count * (layout.stride // 8))[:: layout.stride // 8].copy()
                join(self._joined, self.words, at, rows)
                at += len(rows)

    def places(self, rows: I64) -> I64:
        """Returns where each row is among all versions, newest first, or ABSENT. For the publisher."""
        places = np.empty(len(rows), np.int64)
        places_of(self.words, rows, places)
        return places

    def ask_for(self, places: I64) -> list[tuple[Bytes, I64]]:
        """Asks for the pages of these rows, and does not wait. Returns files, and the numbers of their rows."""
        ascending = np.sort(places[places != ABSENT])
        bounds = np.searchsorted(ascending, self.starts)
        parts = [
            (file, ascending[first:end] - start)
            for file, start, first, end in zip(self._files, self.starts, bounds, bounds[1:], strict=False)
            if end > first
        ]
        for file, numbers in parts:
            ask_for(file, 0, self._stride, numbers)
        return parts

    def wait_for(self, parts: list[tuple[Bytes, I64]]) -> None:
        for file, numbers in parts:
            touch(file, 0, self._stride, numbers)

    def warm(self, nbytes: int) -> None:
        """Reads that many bytes of the newest rows."""
        for file in self._files:
            part, nbytes = file[:nbytes], max(0, nbytes - len(file))
            if len(part):
                count = np.arange(-(-len(part) // PAGE))
                whole_pages = count[: len(part) // PAGE]
                ask_for(part, 0, PAGE, whole_pages)
                part[::PAGE].max()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedFeature:
    """The facts of a feature that a look-up needs."""

    rule: IdRule
    view: TableView
    number: int  # of the version's features
    division: int  # `divided_by`
    is_weighted: bool  # whether training multiplied its rows by weights
    prepare: Rules

    def rows(self, ids: Any) -> I64:
        return rows_of(self.rule, self.view.table.num_embeddings, ids, self.prepare)


def looked_up(
    features: list[ServedFeature], given: list[I64], rules: list[int], words: U64, counts: LookupCounts
) -> list[F32]:
    """Returns f32 [n, width] for each of `features`: the rows of ids i64 [n] by its rule (`to_rows`).

    `words`: those of the features' tables, u64 [features, WORDS].
    """
    bounds, ends, rows = [0], [0], list[F32]()
    for one, ids in zip(features, given, strict=True):
        bounds.append(bounds[-1] + len(ids))
        ends.append(ends[-1] + len(ids) * one.view.table.embedding_dim)
    numbers, places, trained = np.concatenate(given), np.empty(bounds[-1], np.int64), np.empty(len(given), np.int64)
    out, own_rules, waited = np.empty(ends[-1], np.float32), np.array(rules), 0
    call = (words, np.array(bounds), HALVES, numbers, places, trained, out)
    while (place := look_up(own_rules, np.empty(1, np.uint8), *call)) >= 0:
        numbers[bounds[place] : bounds[place + 1]] = features[place].rows(given[place])
        own_rules[place] = AS_IS
    if place == PAGES_MISSING:
        parts = [one.view.ask_for(places[at:end]) for one, at, end in zip(features, bounds, bounds[1:], strict=False)]
        for one, asked in zip(features, parts, strict=True):
            one.view.wait_for(asked)
        fill(*call)
        waited = 1
    counts.add(bounds[-1], int(trained.sum()), waited)
    for index, one in enumerate(features):
        table = one.view.table
        rows.append(out[ends[index] : ends[index + 1]].reshape(-1, table.embedding_dim))
        if table.dtype != "fp32" and trained[index] < len(rows[index]):
            new = places[bounds[index] : bounds[index + 1]] == ABSENT
            rows[index][new] = widened(rounded(rows[index][new], table.dtype), table.dtype)
    return rows


class Snapshot:
    """One version. `version` says which step of which run it is."""

    def __init__(self, versions: list[OpenVersion], job: ServedJob, counts: LookupCounts) -> None:
        """`versions`: newest first, the last is whole."""
        self.version = versions[0].file
        self.versions = versions
        self._counts, self._prepare, self._gradients = counts, job.prepare, job.gradients
        self.tables = {table.name: TableView(table, job.first(table), versions) for table in job.tables}
        self._features = {
            rule.feature: ServedFeature(
                rule=rule,
                view=self.tables[rule.table],
                number=number,
                division=divided_by(rule),
                is_weighted=rule.feature in job.weighted,
                prepare=job.prepare,
            )
            for number, rule in enumerate(self.version.ids)
        }
        self._words = np.stack([one.view.words for one in self._features.values()])

    @property
    def is_bound(self) -> bool:
        """Whether each version is the one on which those above it were made."""
        return self.version.is_bound or self.version.is_whole

    @cached_property
    def job(self) -> Job:
        """The job file of the run (`rowcast.Job`). Raises DataError if it has keys of a newer rowcast; look-ups do not
        need it."""
        try:
            return parse_manifest_job(self.version.job, VERSION_NAME)
        except (ConfigError, LookupError, TypeError) as error:
            raise DataError(str(error)) from None

    def rows(self, feature: str, ids: Any) -> F32:
        """Returns the rows of raw ids, f32 [n, width]; a linear weight is the last column.

        `ids`: n integers or texts, as in the training data: a numpy or pyarrow array or a list. Raises KeyError for an
        unknown feature, ValueError for ids that training would have refused.
        """
        return self.look_up({feature: ids})[feature]

    def look_up(self, ids: Mapping[str, Any]) -> dict[str, F32]:
        """Returns `rows` of several features, in one call: cheaper than a call for each."""
        features, given, rules = list[ServedFeature](), list[I64](), list[int]()
        for name, given_ids in ids.items():
            one = self._of(name)
            is_quick = (
                type(given_ids) is np.ndarray and given_ids.dtype == INT64 and given_ids.ndim == 1
            )  # a masked array is not
            rules.append(one.division if is_quick else AS_IS)
            given.append(given_ids if rules[-1] != AS_IS else one.rows(given_ids))
            features.append(one)
        if not features:
            return {}
        words = self._words[[one.number for one in features]]
        return dict(zip(ids, looked_up(features, given, rules, words, self._counts), strict=True))

    def bags(self, feature: str, ids: Any, offsets: Any, weights: Any = None) -> F32:
        """Returns the pooled rows of bags as the model takes them, f32 [bags, width], with the bits of training.

        Bag b has ids[offsets[b] : offsets[b + 1]]; `offsets` i64 [bags + 1] ascend from 0 to n. `weights`: f32 [n],
        only and always for a feature of data.columns.weights. Raises as `rows`, and ValueError for impossible offsets
        or weights and for a table with pooling = "none".
        """
        one, where = self._of(feature), f"feature {feature}"
        view = one.view
        if view.table.pooling == "none":
            raise ValueError(f'feature {feature}: table {view.table.name} has pooling = "none"; take rows')
        rows = self.rows(feature, ids)
        bounds = numbers_of(offsets, "iu", f"{where}: offsets are not integers").astype(np.int64)
        given = NO_WEIGHTS if weights is None else numbers_of(weights, "biuf", f"{where}: weights are not numbers")
        if not len(bounds):
            raise ValueError(f"{where}: offsets are empty; give one more than bags")
        try:
            require_weights(one.is_weighted, weights is not None, where)
            check_offsets(bounds, len(rows), where)
            own = check_dense(given[:, None], ["weights"], lookup_location(where, 0))[:, 0]
        except DataError as error:
            raise ValueError(str(error)) from None
        if weights is not None and len(own) != len(rows):
            raise ValueError(f"{where}: {len(own)} weights for {len(rows)} ids")
        out = np.empty((len(bounds) - 1, rows.shape[1]), np.float32)
        pool(rows, bounds, own, view.table.pooling == "mean", out)
        return self.taken(out)

    def taken(self, looked_up: F32) -> F32:
        """Returns rows without pooling as the model takes them, f32 [n, width], rounded by `ranks.gradients`."""
        return widened(rounded(looked_up, self._gradients), self._gradients)

    def dense_features(self, columns: Mapping[str, Any]) -> F32:
        """Returns n samples' dense features in the model's order, f32 [n, num_dense], prepared as in training.

        `columns`: n numbers, texts that the job maps, or times, for each column of data.columns.dense, as in the
        training data; None or NaN is missing. Raises KeyError for a column that is not given, ValueError for a value
        that training would have refused.
        """
        names = self.job.data.columns.dense or dense_names(self.version.num_dense)
        sources = {name: rule.of for name, rule in self._prepare.items() if rule.of}
        columns_of = [prepared_numbers(columns[sources.get(name, name)], self._prepare, name) for name in names]
        try:
            return check_dense(np.stack(columns_of, axis=1), names, lambda i: f"sample {i}")
        except (DataError, ValueError) as error:
            raise ValueError(str(error)) from None

    def dense(self) -> dict[str, Any]:
        """Returns the dense weights of the same step under the model's names, as numpy arrays. Do not change them."""
        return self.versions[0].dense

    def rows_of(self, version: OpenVersion, table: str) -> Iterator[tuple[I64, F32]]:
        """Yields the rows that the files of one of `versions` hold, in blocks: row numbers i64 [n], and f32 [n, width]
        as they are in this version. For copies to other stores."""
        view = self.tables[table]
        feature = next(one for one in self._features.values() if one.view is view)
        files = version.file.tables[view.table.index]
        numbers = version.rows[view.table.index].view(np.int64).reshape(-1, files.stride // 8)[:, 0]
        for first in range(0, len(numbers), BLOCK_ROWS):
            rows = numbers[first : first + BLOCK_ROWS].copy()
            yield rows, looked_up([feature], [rows], [AS_IS], view.words[None], LookupCounts())[0]

    def _of(self, feature: str) -> ServedFeature:
        try:
            return self._features[feature]
        except KeyError:
            raise KeyError(f"no feature {feature!r}; there is {', '.join(self._features)}") from None


def numbers_of(values: Any, kinds: str, wrong: str) -> Any:
    """Returns an array [n] of numbers of these kinds of numpy. Raises ValueError that starts with `wrong`."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{wrong} ({error})") from None
    if array.ndim != 1 or array.dtype.kind not in kinds or np.ma.isMaskedArray(values):
        raise ValueError(f"{wrong} in an array [n], but {array.dtype} {list(array.shape)}")
    return np.ascontiguousarray(array)


def open_snapshot(folder: Path, named: Named, before: "Snapshot | None", check: str, counts: LookupCounts) -> Snapshot:
    """Opens a version, and reuses the files that `before` has open. Raises DataError."""
    newest = read_version(folder, named)
    files = [newest, *(read_version(folder, named_version) for named_version in newest.stands_on)]
    job = check_chain(folder, files)
    held = {} if before is None else {opened.file.checksum: opened for opened in before.versions}
    try:
        return Snapshot([held.get(file.checksum) or OpenVersion(folder, file, check) for file in files], job, counts)
    except OSError as error:
        raise unreadable(folder / version_name(named.number), error) from None


def check_chain(folder: Path, files: list[VersionFile]) -> ServedJob:
    """`files`: newest first. Raises DataError unless all of them are versions of one run with the newest's layout."""
    newest = files[0]
    try:
        job = served_job(newest.job)
        rules = [(rule.feature, rule.table) for rule in newest.ids]
        if rules != [(feature, table.name) for table in job.tables for feature in table.features]:
            raise ValueError(f"ids has rules of {len(rules)} features, which are not those of the tables")
    except ValueError as error:
        raise DataError(f"{folder / version_name(newest.number) / VERSION_NAME}: {error}") from None
    layout = [(table.name, row_layout(newest.dtype, table).stride) for table in job.tables]
    expected = newest.run_id, newest.dtype, newest.base, layout
    for file in files:
        has = file.run_id, file.dtype, file.base, [(table.name, table.stride) for table in file.tables]
        path = folder / version_name(file.number) / VERSION_NAME
        for name, value, needed in zip(("run_id", "dtype", "base", "tables"), has, expected, strict=True):
            if value != needed:
                raise DataError(
                    f"{path}: {name} is {value}, but version {newest.number} needs {needed}; copy both from one folder"
                    ", or write a whole version by `rowcast publish --check`"
                )
        for table, spec in zip(file.tables, job.tables, strict=True):
            if table.num_rows > spec.num_embeddings:
                raise DataError(f"{path}: {table.num_rows} rows of table {table.name}, which has {spec.num_embeddings}")
    return job
