"""Implements `rowcast.EmbeddingBagCollection`: TorchRec's interface to tables larger than the device."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from rowcast.job.optimizers import SparseOptimizer
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.connect import run_folder, settings
from rowcast.trainer.adopt.connect.batch import VALIDATION, JaggedTensor, KeyedEmbeddings, check_features
from rowcast.trainer.adopt.connect.settings import ScriptTables
from rowcast.trainer.device.streams import on_device
from rowcast.trainer.models.embedding import Embedded, Sequences

NO_BATCH = (
    "there is no batch to look up: iterate over the loader that rowcast.connect(ebc, ...) gives, and call the model on "
    f"each batch before asking for the next; {VALIDATION}"
)

NOT_TRACED = (
    "a look-up of rowcast is not traced by torch.compile: it asks the session for the step and orders device work; the "
    "model around it is compiled, but not with fullgraph=True"
)
CAST = (
    "look-ups of rowcast are fp32: use torch.autocast(..., dtype=torch.{0}), or cast only the other modules and call "
    ".to(torch.{0}) on the looked-up rows"
)


class EmbeddingBagCollection(nn.Module):
    """Pools embeddings of sparse features, from tables in the prefetcher's memory.

    Rows arrive on the device just before their batch and are updated in the backward pass, by the optimizer given here;
    so the module has no parameters. `rowcast.connect` provides the batches to look up."""

    kind = settings.BAGS

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        optimizer: SparseOptimizer | Mapping[str, Any] | None = None,
        capacity: str | int | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        run_dir: str | Path | None = None,
        job: Mapping[str, Any] | None = None,
    ) -> None:
        """Describes the tables and how their rows are trained.

        tables: EmbeddingBagConfigs, rowcast's or TorchRec's. optimizer: of the rows, as `[optimizer.sparse]` of a job
        file. capacity: size of the device cache, as `cache.capacity`. device: as `trainer.device`; by default CUDA if
        there is a device. seed: as `job.seed`. run_dir: by default runs/<name of the script>. job: other keys of a job
        file, such as {"lookahead.depth": 4}.

        Raises ConfigError."""
        super().__init__()
        leave_untraced()
        if not isinstance(job, Mapping | None):
            raise ConfigError(
                f"{self.kind.name}: job = {str(job)!r} is no mapping of settings; `rowcast train` trains a job file, "
                "with a model of your own (docs/models.md)"
            )
        folder = run_dir or run_folder.default_run_dir()
        own = {"job.seed": seed, "job.run_dir": str(folder), "trainer.device": str(device or "auto")}
        content = settings.job_content(tables, self.kind, optimizer, capacity, own | dict(job or {}))
        self.shared = ScriptTables(content)
        self._tables = list(self.job.tables)
        self._features = [name for table in self._tables for name in table.features]
        for table in self._tables:
            self.kind.check(table.name, table.pooling)
        self._configs = list(tables)

    def extra_repr(self) -> str:
        tables = [
            f"{table.name}: {table.num_embeddings:,} x {table.embedding_dim} {table.dtype}, "
            f"{table.pooling} of {', '.join(table.features)}"
            for table in self._tables
        ]
        sparse, capacity = self.job.optimizer.sparse, self.job.cache.capacity
        optimizer = f"{sparse.kind}(lr={sparse.lr:g})"
        last = f"optimizer={optimizer}, capacity={capacity}, device={self.device}, run_dir={self.job.run_dir}"
        return "\n".join([*tables, last])

    def embedding_bag_configs(self) -> list[Any]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return bool(self.job.data.columns.weights)

    def forward(self, features: Any) -> Any:
        """Looks up the loader's last batch. Returns f32 [B, D] for each feature, as KeyedEmbeddings.

        In training mode, with gradients enabled and on a train batch, the backward pass updates the rows; otherwise
        this only looks up.

        features: the batch's sparse_features.

        Raises RuntimeError."""
        session = self.shared.session
        if session is None or (step := session.step) is None:
            raise RuntimeError(NO_BATCH)
        current = session.current
        check_features(features, session, step)
        trains = self.training and torch.is_grad_enabled()
        with on_device(self.device):
            current.stream_order.await_batch()
            found = current.look_up(trains=trains)
            current.stream_order.record()
        return self._keyed([found[self.job.features.index(name)] for name in self._features])

    def _keyed(self, found: Sequence[Embedded]) -> Any:
        """`found`: of each of the module's features."""
        return KeyedEmbeddings(self._features, [own for own in found if isinstance(own, Tensor)])

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raises RuntimeError for False, which cannot freeze the rows."""
        if not requires_grad:
            raise RuntimeError(
                "rows are updated by their own optimizer, so requires_grad_(False) does not freeze them; give "
                "optimizer lr = 0, or look up under torch.no_grad()"
            )
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Raises RuntimeError for a change of dtype, which rows do not take part in."""
        dtype = fn(torch.zeros((), dtype=torch.float32, device="cpu")).dtype
        if dtype != torch.float32:
            raise RuntimeError(CAST.format(str(dtype).removeprefix("torch.")))
        return cast(Self, cast(Any, super())._apply(fn, recurse))

    def __getstate__(self) -> object:
        """Allows copies until the loader begins; after that raises RuntimeError."""
        if self.shared.session is not None:
            raise RuntimeError(
                "an EmbeddingBagCollection whose loader has begun cannot be copied, as its rows are on their way; copy "
                "the dense parts of the model, or save its state_dict()"
            )
        return self.__dict__

    @property
    def has_run(self) -> bool:
        """Whether the run directory holds a run with train steps; by default `rowcast.connect` continues it."""
        return run_folder.newest_run(self.job.run_dir) is not None

    # used by the loader

    @property
    def job(self) -> Job:
        return self.shared.job

    @property
    def device(self) -> torch.device:
        return self.shared.device

    # state dicts

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.shared.has_tables:
            for table, weight in zip(self._tables, self.shared.weights(self._tables), strict=False):
                destination[prefix + self.kind.weight_name(table)] = weight

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
        if not self.shared.has_tables:
            return
        tables = {prefix + self.kind.weight_name(table): table for table in self._tables}
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
            self.shared.load(self._tables, [state_dict[name] for name in tables])


class EmbeddingCollection(EmbeddingBagCollection):
    """Looks up without pooling: as an EmbeddingBagCollection, but `forward` returns a JaggedTensor for each feature."""

    kind = settings.SEQUENCES

    def embedding_configs(self) -> list[Any]:
        return list(self._configs)

    def embedding_dim(self) -> int:
        return self._tables[0].embedding_dim

    def need_indices(self) -> bool:
        return False

    def _keyed(self, found: Sequence[Embedded]) -> dict[str, JaggedTensor]:
        """Each feature's rows f32 [n, D], with the offsets of the samples; the batch's, if its look-ups are the batch's
        (data.of), are those of the first sample."""
        sequences = (own for own in found if isinstance(own, Sequences))
        return {
            name: JaggedTensor(own.values, own.offsets) for name, own in zip(self._features, sequences, strict=True)
        }


@cache
def leave_untraced() -> None:
    """Makes torch.compile run look-ups uncompiled, in all modules.

    Called for the first module, because torch.compiler imports torch._dynamo, which takes seconds: a script that makes
    an optimizer imports it anyway, but a prefetcher that imports the script does not."""
    disable = cast(Any, torch.compiler.disable)  # it has no types
    untraced = disable(EmbeddingBagCollection.forward, reason=NOT_TRACED)
    EmbeddingBagCollection.forward = untraced  # type: ignore[method-assign]
