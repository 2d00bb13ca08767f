"""Publishes the newest checkpoint of a run as a version. Reads the run's manifests and never touches training.

.v000000000007.partial  ->  v000000000007  ->  CURRENT names it  ->  old versions go
   files, each fsynced      one rename         one rename
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash

from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.saved_tables import saved_tables
from rowcast.runtime.checkpoint_manifest import (
    MANIFEST_NAME,
    RUN_ID,
    Manifest,
    RowLayer,
    readable,
    write_durably,
)
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import Disk, own_files_in, render, seal, try_lock
from rowcast.runtime.errors import ConfigError, DataError, RowcastError, advice
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.serving.raw_ids import id_rules
from rowcast.serving.row_layout import DType
from rowcast.serving.snapshot import LookupCounts, Snapshot, open_snapshot
from rowcast.serving.version_file import (
    CURRENT,
    FOLDER_NAME,
    FORMAT,
    MOST_STACKED,
    VERSION_NAME,
    Named,
    VersionFile,
    read_current,
    read_version,
    version_name,
)
from rowcast.serving.version_writer import Content, write_dense, write_tables

LOCK = ".publisher"
NUMBERED = re.compile(r"\.?v([0-9]{12})(?:\.partial|\.removed)?")
OWN_FILE = re.compile(r"[0-9]{3,}\.(?:rows|index)|dense\.safetensors|version\.json(?:\.partial)?")  # in a version
MOST_NUMBER = 10**12 - 1
TRIES = 5  # checkpoints may be removed while they are read


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What the next version has to hold."""

    layers: tuple[RowLayer, ...]  # the layers since the version before; () if they are not known
    reason: str  # why the version is whole; "" if it is not


class Overtaken(RowcastError):
    """A later try may succeed."""


@contextmanager
def held(root: Path, manifest: Manifest) -> Iterator[Path]:
    """Yields a folder with links to a checkpoint's files, which stay readable although the run may remove them.

    Raises DataError if one is missing. Errors of the block name files below `root`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rowcast-publish-")))
        for file in manifest.files:
            try:
                descriptor = os.open(root / file.file, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise DataError(f"{root / file.file}: a file of the checkpoint is missing") from error
            stack.callback(os.close, descriptor)
            (folder / file.file).parent.mkdir(exist_ok=True)
            (folder / file.file).symlink_to(f"/proc/self/fd/{descriptor}")
        try:
            yield folder
        except DataError as error:
            raise DataError(str(error).replace(str(folder), str(root))) from None


class Publisher:
    """Holds the folder from `lock` on. `behind_since`: Unix time since which a checkpoint waits, 0.0 if none does.
    `served_since`: when the checkpoint of the newest version was made, 0.0 if that is not known."""

    def __init__(self, run_dir: Path, to: Path, dtype: DType, keep: int) -> None:
        """`keep`: how many whole versions stay, with the changed ones after each."""
        self.behind_since = self.served_since = 0.0
        self.counts = {"whole": 0, "changed": 0}
        self.rows = self.nbytes = 0
        self._run_dir, self._to, self._dtype, self._keep = run_dir, to, dtype, keep
        self._before: Snapshot | None = None
        self._damage = ""
        self._left = set[Path]()  # folders that were not removed, and told

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Raises ConfigError if the folder cannot be made or another publisher holds it."""
        try:
            self._to.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._to / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"--to {self._to} cannot be written ({error.strerror}); name another folder") from None
        try:
            if not try_lock(descriptor, self._to / LOCK):
                raise ConfigError(f"--to {self._to}: another publisher writes there; stop it first")
            yield
        finally:
            os.close(descriptor)

    def check(self) -> None:
        """Reads all versions, and warns of damaged ones. If the newest needs one, the next version is a whole one."""
        named = {number: Named(number, "") for number in self._versions()}
        newest = Named(0, "")
        try:
            newest = read_current(self._to)
        except DataError as error:
            self._damage = str(error)
        for named_version in sorted({**named, newest.number: newest}.values()):
            try:
                if named_version.number:
                    open_snapshot(self._to, named_version, None, "all", LookupCounts())
            except DataError as error:
                get_logger().warning(
                    "a version is damaged", version=version_name(named_version.number), damage=str(error)
                )
                if named_version == newest:
                    self._damage = str(error)

    def publish(self, *, fresh: bool = False) -> VersionFile | None:
        """Writes the newest checkpoint, or that of the best evaluation if the run keeps it; None if it is published
        already, or if there is none yet.

        `fresh`: the folder may hold versions of another run. Raises ConfigError, DataError, and RowcastError if the
        disk fails, as `Overtaken` if the run removes checkpoints too soon.
        """
        for _ in range(TRIES):
            manifest = self._newest()
            if manifest is None:
                return None
            try:
                return self._publish(manifest, fresh=fresh)
            except OSError as error:
                raise RowcastError(
                    f"{self._to}: the version could not be written ({error.strerror}); "
                    f"{advice(error.errno, 'free space')}, the version before stays"
                ) from None
            except DataError:
                now = readable(self._root / manifest.name)
                if now is not None and now.checksum == manifest.checksum:
                    raise
        raise Overtaken(
            f"{self._root}: {TRIES} checkpoints were removed before they could be read; set a larger checkpoint.keep"
        )

    @property
    def has_checkpoint(self) -> bool:
        return self._newest() is not None

    def _newest(self) -> Manifest | None:
        checkpoints = Checkpoints(self._run_dir, Disk())
        self._root = checkpoints.root
        manifests = filter(None, map(checkpoints.readable, checkpoints.candidates()))
        chosen = (checkpoints.readable(manifest.best) if manifest.best else manifest for manifest in manifests)
        return next(filter(None, chosen), None)

    def _publish(self, manifest: Manifest, *, fresh: bool) -> VersionFile | None:
        current = self._current()
        self._check(manifest, current, fresh=fresh)
        if current is not None and read_current(self._to).number == 0:
            self._name(current)  # CURRENT was lost, or is not copied yet
        if current is not None and current.checkpoint == manifest.checksum and not self._damage:
            self.behind_since, self.served_since = 0.0, self._made(manifest)
            return None
        self.behind_since = self.behind_since or self._made(manifest)
        number = 1 + max(self._numbers(NUMBERED), default=0)
        if number > MOST_NUMBER:
            raise ConfigError(f"--to {self._to} holds version {MOST_NUMBER}, the last number; name another folder")
        self._clear(current)
        before = self._view(manifest, current)
        changes = self._changes(manifest, None if before is None else before.version, current)
        with held(self._root, manifest) as root:
            version = self._write(root, manifest, number, changes, before)
        self._before = self._open(version.named, before)
        self._damage = ""
        self._remove_old(version)
        self.counts[version.kind] += 1
        self.rows += version.num_rows
        self.nbytes += version.nbytes
        self.behind_since, self.served_since = 0.0, self._made(manifest)
        newest = self._newest()
        if newest is not None and newest.checksum != manifest.checksum:
            self.behind_since = self.behind_since or self._made(newest)
        return version

    def _made(self, manifest: Manifest) -> float:
        with suppress(OSError):
            return (self._root / manifest.name / MANIFEST_NAME).stat().st_mtime
        return time.time()

    def _current(self) -> VersionFile | None:
        try:
            named = read_current(self._to)
            if named.number:
                return read_version(self._to, named)
        except DataError as error:
            if not self._damage:
                raise DataError(f"{error}; add --check, which writes a whole version") from None
            return None
        newest = max(self._numbers(FOLDER_NAME), default=0)
        if not newest:
            return None
        try:
            return open_snapshot(self._to, Named(newest, ""), None, "all", LookupCounts()).version
        except DataError as error:
            raise ConfigError(
                f"--to {self._to} holds no {CURRENT}, and its newest version is not whole ({error}); copy it again, or "
                "name another folder"
            ) from None

    def _check(self, manifest: Manifest, current: VersionFile | None, *, fresh: bool) -> None:
        if manifest.dense is None or saved_tables(self._root, manifest).num_dense is None:
            raise ConfigError(
                f"{self._root / manifest.name} does not say how many dense features a sample has: an import or an "
                "older version wrote it; train one checkpoint further"
            )
        if current is None:
            return
        if current.run_id != manifest.run_id and not fresh:
            raise ConfigError(
                f"--to {self._to} holds versions of run {current.run_id}, but {self._run_dir} is run "
                f"{manifest.run_id}; name another folder, or add --fresh to go on there with this run"
            )
        if current.dtype != self._dtype:
            raise ConfigError(
                f"--dtype {self._dtype}: {self._to} holds versions of {current.dtype}; give --dtype {current.dtype}, "
                "or name another folder"
            )

    def _view(self, manifest: Manifest, current: VersionFile | None) -> Snapshot | None:
        """Returns the version before, open for look-ups, unless it is of another run or damaged."""
        if current is None or current.run_id != manifest.run_id or self._damage:
            return None
        if self._before is None or self._before.version.checksum != current.checksum:
            try:
                self._before = self._open(current.named, None)
            except DataError as error:
                raise DataError(f"{error}; add --check, which writes a whole version") from None
        return self._before

    def _open(self, named: Named, before: Snapshot | None) -> Snapshot:
        snapshot = open_snapshot(self._to, named, before, "changed", LookupCounts())
        for opened in snapshot.versions:
            opened.bring_neighbours()  # changed rows are spread over all of them
        return snapshot

    def _changes(self, manifest: Manifest, before: VersionFile | None, current: VersionFile | None) -> Changes:
        if self._damage:
            return Changes(layers=(), reason="a version is damaged")
        if before is None:
            return Changes(layers=(), reason="the first version" if current is None else "another run")
        if before.version != FORMAT:
            return Changes(layers=(), reason="an earlier rowcast wrote the version before")
        layers = layers_since(manifest, before)
        if layers is None and manifest.forgot >= max(1, before.position.train_step):
            return Changes(layers=(), reason=f"rows were forgotten after {manifest.forgot} train steps")
        if layers is None:
            return Changes(layers=(), reason="a layer was merged, or training went back")
        stacked = [before, *(read_version(self._to, named_version) for named_version in before.stands_on)][::-1]
        changed = sum(version.num_rows for version in stacked[1:]) + sum(layer.num_rows for layer in layers)
        if len(stacked) == MOST_STACKED:
            return Changes(layers=layers, reason=f"{MOST_STACKED} versions are stacked")
        if 2 * changed > stacked[0].num_rows:
            return Changes(layers=layers, reason="more than half of the last whole version has changed")
        return Changes(layers=layers, reason="")

    def _write(
        self, root: Path, manifest: Manifest, number: int, changes: Changes, before: Snapshot | None
    ) -> VersionFile:
        folder, partial = self._to / version_name(number), self._to / f".{version_name(number)}.partial"
        tables = saved_tables(self._root, manifest)
        content = Content(
            root=root,
            manifest=manifest,
            tables=tables,
            layers=manifest.layers if changes.reason else changes.layers,
            whole=tables.in_files if changes.reason else (),
            changed=changes.layers,
            before=before,
            dtype=self._dtype,
        )
        partial.mkdir()
        assert tables.num_dense is not None, "such a checkpoint is refused"
        below = () if changes.reason or before is None else tuple(opened.file.named for opened in before.versions[::-1])
        version = seal(
            VersionFile(
                version=FORMAT,
                number=number,
                base=below[0].number if below else number,
                below=below,
                reason=changes.reason,
                dtype=self._dtype,
                run_id=manifest.run_id,
                checkpoint=manifest.checksum,
                position=manifest.position,
                layers=tuple(tuple(map(layer_name, shard.layers)) for shard in manifest.shards),
                num_dense=tables.num_dense,
                ids=id_rules(tables.job, manifest.id_types),
                tables=write_tables(partial, content),
                dense=write_dense(partial, content),
                job=manifest.job or tables.job.content(),
            )
        )
        crash_point("version not described")
        write_durably(partial / VERSION_NAME, render(version))
        crash_point("version not renamed")
        partial.rename(folder)
        Disk().sync_folder(self._to)
        crash_point("version renamed")
        self._name(version)
        crash_point("version named")
        return version

    def _name(self, version: VersionFile) -> None:
        write_durably(self._to / CURRENT, f"{version_name(version.number)} {version.checksum}\n".encode())

    def _clear(self, current: VersionFile | None) -> None:
        """Removes what a killed publisher left: folders under another name, and versions that were never named."""
        newest = 0 if current is None else current.number
        for path in sorted(self._to.iterdir()):
            match = NUMBERED.fullmatch(path.name)
            if match and not (FOLDER_NAME.fullmatch(path.name) and (int(match[1]) <= newest or self._damage)):
                self._remove(path)

    def _numbers(self, names: re.Pattern[str]) -> list[int]:
        """Returns the numbers of everything with such a name, including what is not a version."""
        return sorted(int(match[1]) for path in self._to.iterdir() if (match := names.fullmatch(path.name)))

    def _versions(self) -> list[int]:
        return [
            number for number in self._numbers(FOLDER_NAME) if (self._to / version_name(number) / VERSION_NAME).exists()
        ]

    def _remove_old(self, newest: VersionFile) -> None:
        """Keeps the newest `keep` whole versions and those after them. A damaged one counts as changed."""
        numbers, bases = self._versions(), [newest.base]
        for number in numbers:
            with suppress(DataError):
                bases.append(read_version(self._to, Named(number, "")).base)
        kept = sorted({number for number in bases if number <= newest.base})[-self._keep :]
        for number in numbers:
            if number < kept[0]:
                self._remove(self._to / version_name(number))
                crash_point("old version removed")

    def _remove(self, folder: Path) -> None:
        """Removes a version, but leaves files that no publisher wrote, with one warning."""
        try:
            left = what_stays(folder)
        except OSError as error:
            left = f"{error.filename}: {error.strerror}"
        if left and folder not in self._left:
            self._left.add(folder)
            get_logger().warning("an old version is not removed", path=str(folder), because=left)


def what_stays(folder: Path) -> str:
    """Removes the files of a version in a folder, and then the folder. Returns why it stays, or "". Readers that have
    its files open keep them. Raises OSError."""
    if folder.is_symlink() or not folder.is_dir():
        return "it is a link or no folder"
    files = own_files_in(folder, OWN_FILE)
    named = [path for path in files if path.name == VERSION_NAME and RUN_ID.search(path.read_bytes())]  # maybe damaged
    if FOLDER_NAME.fullmatch(folder.name) and not named:
        return f"its {VERSION_NAME} is of no publisher"
    for path in sorted(files, key=lambda path: path.name == VERSION_NAME):  # last: it identifies the other files
        path.unlink(missing_ok=True)
    foreign = [path.name for path in sorted(folder.iterdir())]
    if not foreign:
        folder.rmdir()
    return f"no publisher wrote {', '.join(foreign)} in it" if foreign else ""


def layer_name(layer: RowLayer) -> str:
    """Returns what the layer's files are, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest("".join(f"{file.file} {file.checksum}\n" for file in layer.files).encode())


def layers_since(manifest: Manifest, before: VersionFile) -> tuple[RowLayer, ...] | None:
    """Returns the layers of all shards with what changed since a version; None if they are not known."""
    layers: list[RowLayer] = []
    for number, shard in enumerate(manifest.shards):
        names = [layer_name(layer) for layer in shard.layers]
        known = list(before.layers[number]) if len(manifest.shards) == len(before.layers) else []
        after = [index for index, layer in enumerate(shard.layers) if layer.after == before.checkpoint]
        if known and names[: len(known)] == known:
            layers += shard.layers[len(known) :]
        elif after:
            layers += shard.layers[after[0] :]
        else:
            return None
    return tuple(layers)
