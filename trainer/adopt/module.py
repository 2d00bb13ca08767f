"""Implements `rowcast.EmbeddingBagCollection`: TorchRec's interface to tables larger than the device."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import torch
from torch import Tensor, nn

from rowcast.job.file import parse_job
from rowcast.job.row_optimizers import SparseOptimizer
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.checkpoint_manifest import newest_checkpoint
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt import run_folder, settings, table_files
from rowcast.trainer.adopt.batch import VALIDATION, check_features, check_ids
from rowcast.trainer.adopt.keyed_embeddings import JaggedTensor, KeyedEmbeddings
from rowcast.trainer.adopt.session import ScriptSession
from rowcast.trainer.device.streams import choose_device, on_device
from rowcast.trainer.models.runner import step_lookups
from rowcast.trainer.models.sequences import Embedded, Sequences
from rowcast.trainer.step.cache import ArrivedStep

NO_BATCH = (
    "there is no batch to look up: iterate over the loader that rowcast.connect(ebc, ...) gives, and call the model on "
    f"each batch before asking for the next; {VALIDATION}"
)

NOT_TRACED = (
    "a look-up of rowcast is not traced by torch.compile: it asks the session for the step and orders device work; the "
    "model around it is compiled, but not with fullgraph=True"
)


class EmbeddingBagCollection(nn.Module):
    """Pools embeddings of sparse features, from tables in the prefetcher's memory.

    Rows arrive on the device just before their batch and are updated in the backward pass, by the optimizer given here;
    so the module has no parameters. `rowcast.connect` provides the batches to look up.
    """

    kind = settings.BAGS

    def __init__(
        self,
        tables: Sequence[Any] = (),
        *,
        optimizer: SparseOptimizer | Mapping[str, Any] | None = None,
        capacity: str | int | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        run_dir: str | Path | None = None,
        job: Mapping[str, Any] | str | Path | None = None,
    ) -> None:
        """Describes the tables and how their rows are trained.

        tables: EmbeddingBagConfigs, rowcast's or TorchRec's.
        optimizer: of the rows, as `[optimizer.sparse]` of a job file.
        capacity: size of the device cache, as `cache.capacity`.
        device: as `trainer.device`; by default CUDA if there is a device.
        seed: as `job.seed`.
        run_dir: by default runs/<name of the script>.
        job: other keys of a job file, such as {"lookahead.depth": 4}; or the path of a job file, which sets everything.

        Raises ConfigError.
        """
        super().__init__()
        leave_untraced()
        default_dir = run_folder.default_run_dir() if run_dir is None else None
        if isinstance(job, str | Path):
            if any(setting is not None for setting in (optimizer, capacity, device)):
                raise ConfigError(
                    f"EmbeddingBagCollection: {job} sets optimizer, capacity and device; give either them or the job "
                    "file"
                )
            self._job_file: Path | None = Path(job)
            self._content = settings.file_content(self._job_file, tables)
        else:
            self._job_file = None
            self._content = settings.job_content(
                tables,
                kind=self.kind,
                optimizer=optimizer,
                capacity=capacity,
                device="auto" if device is None else str(device),
                seed=seed,
                run_dir=str(run_dir or default_dir),
                others=job or {},
            )
        self._job = self._parsed(self._content)
        self._has_default_dir = self._job_file is None and self._job.run_dir == default_dir
        for table in self._job.tables:
            self.kind.check(table.name, table.pooling)
        self._configs = list(tables) or settings.configs_of(self._job, self.kind)
        try:
            self.device = choose_device(self._job.trainer.device)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._groups = group_specs(self._job)
        self._session: ScriptSession | None = None
        self._is_connected = False  # to a loader
        self._is_launched = False  # the loader starts the prefetcher
        self._resumes = False  # the tables begin with the newest checkpoint in the run directory
        self._loaded: Path | None = None  # a file of tables to begin with
        self._has_tables = True  # state_dict holds the tables

    def extra_repr(self) -> str:
        tables = [
            f"{table.name}: {table.num_embeddings:,} x {table.embedding_dim} {table.dtype}, "
            f"{table.pooling} of {', '.join(table.features)}"
            for table in self._job.tables
        ]
        sparse, capacity = self._job.optimizer.sparse, self._job.cache.capacity
        optimizer = f"{sparse.kind}(lr={sparse.lr:g})"
        last = f"optimizer={optimizer}, capacity={capacity}, device={self.device}, run_dir={self._job.run_dir}"
        return "\n".join([*tables, last])

    def embedding_bag_configs(self) -> list[Any]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return bool(self._job.data.columns.weights)

    def forward(self, features: Any) -> Any:
        """Looks up the loader's last batch. Returns f32 [B, D] for each feature, as KeyedEmbeddings.

        In training mode, with gradients enabled and on a train batch, the backward pass updates the rows; otherwise
        this only looks up.

        features: the batch's sparse_features, or a KeyedJaggedTensor of the same ids.

        Raises RuntimeError.
        """
        session, step = self._session, None if self._session is None else self._session.step
        if session is None or step is None:
            raise RuntimeError(NO_BATCH)
        current = session.current
        has_ids = not check_features(features, session, step, current.slice, self._job.features)
        trains = self.training and torch.is_grad_enabled()
        with on_device(self.device):
            current.stream_order.await_rows(step)
            if has_ids:
                self._check_ids(features, step)
            if trains:
                current.mark_trained()
            elif torch.is_grad_enabled():
                current.note_eval_lookup()
            with torch.set_grad_enabled(trains):
                features_found = current.look_up()
            current.stream_order.record()
        return self._keyed(features_found)

    def _keyed(self, found: Sequence[Embedded]) -> Any:
        return KeyedEmbeddings(self._job.features, [own for own in found if isinstance(own, Tensor)])

    def _check_ids(self, features: Any, step: ArrivedStep) -> None:
        if self._job.data.on_invalid_id != "error":
            return  # the reader has replaced invalid ids
        for group, lookup in zip(self._groups, step_lookups(step), strict=True):
            check_ids(features, self._job.features, group.feature_positions, lookup.slots, lookup.lengths())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raises RuntimeError for False, which cannot freeze the rows."""
        if not requires_grad:
            raise RuntimeError(
                "rows are updated by their own optimizer, so requires_grad_(False) does not freeze them; give "
                "optimizer lr = 0, or look up under torch.no_grad()"
            )
        return super().requires_grad_(requires_grad)

    def __getstate__(self) -> object:
        """Allows copies until the loader begins; after that raises RuntimeError."""
        if self._session is not None:
            raise RuntimeError(
                "an EmbeddingBagCollection whose loader has begun cannot be copied, as its rows are on their way; copy "
                "the dense parts of the model, or save its state_dict()"
            )
        return self.__dict__

    # used by the loader

    @property
    def job(self) -> Job:
        return self._job

    @property
    def has_job_file(self) -> bool:
        """Whether the module was made from a job file, so that its prefetcher may be running already."""
        return self._job_file is not None

    @property
    def has_run(self) -> bool:
        """Whether the run directory holds a run with train steps; by default `rowcast.connect` continues it."""
        return run_folder.newest_run(self._job.run_dir) is not None

    @property
    def loaded(self) -> Path | None:
        """The file of tables given to load_state_dict()."""
        return self._loaded

    def says(self, section: str, key: str) -> bool:
        """Whether the user, or the job file, has set this key of the job."""
        return key in self._content.get(section, {})

    def adopt(self, changes: Mapping[str, Any], *, is_launched: bool, resumes: bool) -> Job:
        """Adds the loader's settings to the job; `connect` calls it once. Changes nothing if it raises ConfigError."""
        if self._is_connected:
            raise ConfigError(
                "connect: this EmbeddingBagCollection has a loader already; make another one for another run"
            )
        if self._has_default_dir:
            run_folder.check_owner(self._job.run_dir)
        content = deepcopy(self._content)
        for name, value in changes.items():
            settings.set_key(content, name, value)
        self._job, self._content = self._parsed(content), content
        self._is_connected, self._is_launched, self._resumes = True, is_launched, resumes
        return self._job

    def begin(self, session: ScriptSession) -> None:
        self._session = session

    def write_job_file(self) -> Path:
        """Writes the job to a file for a prefetcher. Raises ConfigError."""
        path = self._job.run_dir / settings.JOB_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._has_default_dir:
                run_folder.claim(path.parent)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self._content), indent=2))
        except OSError as error:
            raise ConfigError(f"{path}: the job cannot be written ({error.strerror}); set another run_dir") from None
        return path

    def _parsed(self, content: dict[str, Any]) -> Job:
        return parse_job(content, "EmbeddingBagCollection" if self._job_file is None else str(self._job_file))

    # state dicts

    @contextmanager
    def without_tables(self) -> Iterator[None]:
        self._has_tables = False
        try:
            yield
        finally:
            self._has_tables = True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._has_tables:
            weights = self._weights()
            for table in self._job.tables:
                destination[prefix + self.kind.weight_name(table)] = weights[table_files.weight_name(table)]

    def _weights(self) -> dict[str, Tensor]:
        """[num_embeddings, embedding_dim] of each table, mapped from a file. Before a run, loaded tables as given."""
        checkpoint = self._checkpoint()
        if checkpoint is not None:
            path = table_files.export_checkpoint(self._job, checkpoint)
        elif self._session is not None and self._session.train_steps:
            raise RuntimeError(
                f"after {self._session.train_steps} train steps the newest rows are on the device: the tables are "
                "whole at a checkpoint, so call state_dict() after every N-th step of connect(..., save_every=N), or "
                "after the last of the loader's epochs"
            )
        else:
            path = self._loaded or table_files.export_start(self._job, self.write_job_file())
        return table_files.read_tables(path, self._job.tables)

    def _checkpoint(self) -> str | None:
        if self._session is not None:
            return self._session.checkpoint_here()
        folder = newest_checkpoint(self._job.run_dir) if self._resumes else None
        return None if folder is None else folder.name

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if not self._has_tables:
            return
        tables = {prefix + self.kind.weight_name(table): table for table in self._job.tables}
        missing = [name for name in tables if name not in state_dict]
        missing_keys += missing
        unexpected_keys += [key for key in state_dict if strict and key.startswith(prefix) and key not in tables]
        wrong = [
            f"{name} is {list(state_dict[name].shape)}, but the table is {[table.num_embeddings, table.embedding_dim]}"
            for name, table in tables.items()
            if name not in missing and list(state_dict[name].shape) != [table.num_embeddings, table.embedding_dim]
        ]
        if missing and len(missing) < len(tables):
            wrong.append(f"{missing[0]} is missing: give all tables or none")
        error_msgs += wrong
        if not missing and not wrong:
            self._load({table_files.weight_name(table): state_dict[name] for name, table in tables.items()})

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        if self._session is not None:
            raise RuntimeError(
                "tables can be loaded only before the loader yields its first batch: from then on their rows move"
            )
        if self.has_job_file and not self._is_launched:
            raise RuntimeError(
                "the prefetcher of this job file has the tables: give it a file by `prefetcher import --from` before "
                "it is started, or let connect start it, by connect(ebc, dataset)"
            )
        self.write_job_file()
        self._loaded = self._job.run_dir / table_files.LOADED
        table_files.write_tables(self._loaded, self._job.tables, weights)


class EmbeddingCollection(EmbeddingBagCollection):
    """Looks up without pooling: as an EmbeddingBagCollection, but `forward` returns a JaggedTensor for each feature."""

    kind = settings.SEQUENCES

    def embedding_configs(self) -> list[Any]:
        return list(self._configs)

    def embedding_dim(self) -> int:
        return self._job.tables[0].embedding_dim

    def need_indices(self) -> bool:
        return False

    def _keyed(self, found: Sequence[Embedded]) -> dict[str, JaggedTensor]:
        """Each feature's rows f32 [n, D], with the offsets of the samples; the batch's, if its look-ups are the batch's
        (data.of), are those of the first sample."""
        sequences = (own for own in found if isinstance(own, Sequences))
        return {
            name: JaggedTensor(own.values, own.offsets) for name, own in zip(self._job.features, sequences, strict=True)
        }


@cache
def leave_untraced() -> None:
    """Makes torch.compile run look-ups uncompiled, in all modules.

    Called for the first module, because torch.compiler imports torch._dynamo, which takes seconds: a script that makes
    an optimizer imports it anyway, but a prefetcher that imports the script does not.
    """
    disable = cast(Any, torch.compiler.disable)  # it has no types
    untraced = disable(EmbeddingBagCollection.forward, reason=NOT_TRACED)
    EmbeddingBagCollection.forward = untraced  # type: ignore[method-assign]
