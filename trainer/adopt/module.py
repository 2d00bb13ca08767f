"""`rowcast.EmbeddingBagCollection`: TorchRec's face over tables that do not fit on the device."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn

from rowcast.job.file import parse_job
from rowcast.job.schema import Job, SparseOptimizer
from rowcast.job.tables import group_specs
from rowcast.runtime.checkpoint_manifest import newest_checkpoint
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt import run_folder, settings
from rowcast.trainer.adopt import table_files as files
from rowcast.trainer.adopt.batch import VALIDATION, check_features, check_ids
from rowcast.trainer.adopt.keyed_embeddings import KeyedEmbeddings
from rowcast.trainer.adopt.session import ScriptSession
from rowcast.trainer.execute.cache import ArrivedStep
from rowcast.trainer.execute.streams import choose_device, on_device
from rowcast.trainer.models.runner import step_lookups

NO_BATCH = (
    "there is no batch to look up: iterate over the loader that rowcast.connect(ebc, ...) gives, and call the model on each batch before "
    f"asking for the next; {VALIDATION}"
)


class EmbeddingBagCollection(nn.Module):
    """Pooled embeddings of sparse features; rows come to the device just before the batch that needs them, and are updated in backward.

    It has no parameters: its optimizer is the one it was given. `rowcast.connect` gives it the batches that it can look up.
    """

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
        """`tables`: TorchRec's EmbeddingBagConfigs or ours. `optimizer` of the rows, `capacity` of the device's cache and `seed` are
        `[optimizer.sparse]`, `cache.capacity` and `job.seed` of a job file, and `job` any others by name, such as {"lookahead.depth": 4};
        or `job` is a job file, which has all of them. `run_dir` is runs/<name of the script> unless it is given. Raises ConfigError.
        """
        super().__init__()
        default_dir = run_folder.default_run_dir() if run_dir is None else None
        if isinstance(job, str | Path):
            if any(own is not None for own in (optimizer, capacity, device)):
                raise ConfigError(
                    f"EmbeddingBagCollection: optimizer, capacity and device stand in {job}; give either them or the job file"
                )
            self._job_file: Path | None = Path(job)
            self._content = settings.file_content(self._job_file, tables)
        else:
            self._job_file = None
            own_device = "auto" if device is None else str(device)
            self._content = settings.job_content(
                tables,
                optimizer=optimizer,
                capacity=capacity,
                device=own_device,
                seed=seed,
                run_dir=str(run_dir or default_dir),
                others=job or {},
            )
        self._job = self._parsed(self._content)
        self._has_default_dir = self._job_file is None and self._job.run_dir == default_dir
        self._configs = list(tables) or settings.configs_of(self._job)
        for table in self._job.tables:
            if table.pooling == "none":
                raise ConfigError(
                    f'table {table.name}: pooling = "none" is none of an EmbeddingBagCollection; use sum or mean'
                )
        try:
            self.device = choose_device(self._job.trainer.device)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._groups = group_specs(self._job)
        self._session: ScriptSession | None = None
        self._is_connected = self._is_launched = False  # to a loader, and one that starts the prefetcher
        # where a loader is connected: a checkpoint in the run directory is where the tables begin
        self._resumes = False
        self._loaded: Path | None = None  # tables to begin with
        self._has_tables = True  # in state_dict

    def extra_repr(self) -> str:
        """For print(model): the tables, how their rows are trained, and where."""
        tables = [
            f"{table.name}: {table.num_embeddings:,} x {table.embedding_dim} {table.dtype}, {table.pooling} of {', '.join(table.features)}"
            for table in self._job.tables
        ]
        sparse = self._job.optimizer.sparse
        own = f"optimizer={sparse.kind}(lr={sparse.lr:g}), capacity={self._job.cache.capacity}, device={self.device}"
        return "\n".join([*tables, f"{own}, run_dir={self._job.run_dir}"])

    def embedding_bag_configs(self) -> list[Any]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return bool(self._job.data.columns.weights)

    def forward(self, features: Any) -> KeyedEmbeddings:
        """`features` of the batch that the loader yielded last: its token, or a KeyedJaggedTensor of the same ids. In training mode, with
        gradients enabled and on a train batch, the backward pass updates the rows; otherwise this only looks up. Raises RuntimeError."""
        session, step = self._session, None if self._session is None else self._session.current
        if session is None or step is None:
            raise RuntimeError(NO_BATCH)
        hand = session.hand
        has_ids = not check_features(features, session, step, hand.slice, self._job.features)
        session.hand.uses.await_rows(step)
        if has_ids:
            self._check_ids(features, step)
        trains = self.training and torch.is_grad_enabled()
        if trains:
            hand.mark_trained()
        elif torch.is_grad_enabled():
            hand.note_eval_lookup()
        with on_device(self.device), torch.set_grad_enabled(trains):
            found = hand.look_up()
        session.hand.uses.record()
        return KeyedEmbeddings(self._job.features, [own for own in found if isinstance(own, Tensor)])

    def _check_ids(self, features: Any, step: ArrivedStep) -> None:
        if self._job.data.on_invalid_id != "error":
            return  # the ids that were looked up are others then
        for group, lookup in zip(self._groups, step_lookups(step), strict=True):
            check_ids(features, self._job.features, group.feature_positions, lookup.slots, lookup.offsets)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raises RuntimeError for False: there are no parameters that it could hold back."""
        if not requires_grad:
            raise RuntimeError(
                "rows are updated by their own optimizer, so requires_grad_(False) does not freeze them; give optimizer lr = 0, or look up "
                "under torch.no_grad()"
            )
        return super().requires_grad_(requires_grad)

    def __getstate__(self) -> object:
        """For copies. Raises RuntimeError once a prefetcher is at the other end."""
        if self._session is not None:
            raise RuntimeError(
                "an EmbeddingBagCollection whose loader has begun cannot be copied, as its rows are on their way; copy the dense parts of "
                "the model, or save its state_dict()"
            )
        return self.__dict__

    # its loader

    @property
    def job(self) -> Job:
        return self._job

    @property
    def has_job_file(self) -> bool:
        """Whether a job file says everything, so that its prefetcher may run already."""
        return self._job_file is not None

    @property
    def has_run(self) -> bool:
        """Whether the run directory holds a run with train steps, which `rowcast.connect` goes on with unless it is given fresh=True."""
        return run_folder.newest_run(self._job.run_dir) is not None

    @property
    def loaded(self) -> Path | None:
        """A file of the tables that a state dict has given."""
        return self._loaded

    def says(self, section: str, key: str) -> bool:
        """Whether a key of the job was set, by hand or in the job file."""
        return key in self._content.get(section, {})

    def adopt(self, changes: Mapping[str, Any], *, is_launched: bool, resumes: bool) -> Job:
        """Called once, by `connect`, with what the loader adds to the job. Raises ConfigError, and is as it was then."""
        if self._is_connected:
            raise ConfigError(
                "connect: this EmbeddingBagCollection has a loader already; make another one for another run"
            )
        if self._has_default_dir:
            run_folder.check_owner(self._job.run_dir)
        content = deepcopy(self._content)
        for name, value in changes.items():
            settings.lay(content, name, value)
        self._job, self._content = self._parsed(content), content
        self._is_connected, self._is_launched, self._resumes = True, is_launched, resumes
        return self._job

    def begin(self, session: ScriptSession) -> None:
        """From now on the tables are the session's."""
        self._session = session

    def write_job_file(self) -> Path:
        """The job as a file that a prefetcher can be started with. Raises ConfigError."""
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
        """Within it, state dicts neither hold nor load the tables."""
        self._has_tables = False
        try:
            yield
        finally:
            self._has_tables = True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._has_tables:
            for name, weight in self._weights().items():
                destination[prefix + name] = weight

    def _weights(self) -> dict[str, Tensor]:
        """[num_embeddings, embedding_dim] of each table, mapped from a file; those that were loaded are as they came until a run begins."""
        checkpoint = self._checkpoint()
        if checkpoint is not None:
            path = files.export_checkpoint(self._job, checkpoint)
        elif self._session is not None and self._session.train_steps:
            raise RuntimeError(
                f"after {self._session.train_steps} train steps the newest rows are on the device: the tables are whole where a checkpoint "
                "falls, so call state_dict() after every N-th step of connect(..., save_every=N), or behind the last of the loader's epochs"
            )
        else:
            path = self._loaded or files.export_start(self._job, self.write_job_file())
        return files.read_tables(path, self._job.tables)

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
        tables = {prefix + files.weight_name(table): table for table in self._job.tables}
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
            self._load({files.weight_name(table): state_dict[name] for name, table in tables.items()})

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        if self._session is not None:
            raise RuntimeError(
                "tables can be loaded only before the loader yields its first batch: from then on their rows move"
            )
        if self.has_job_file and not self._is_launched:
            raise RuntimeError(
                "the prefetcher of this job file has the tables: give it a file by `prefetcher import --from` before it is started, or let "
                "connect start it, by connect(ebc, dataset)"
            )
        self.write_job_file()
        self._loaded = self._job.run_dir / files.LOADED
        files.write_tables(self._loaded, self._job.tables, weights)
