"""A run that has been trained, in Python: `rowcast.load("runs/clicks")`. One process, no sockets."""

import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from rowcast.deploy.frames import FRAME, open_frame
from rowcast.deploy.local import run_both
from rowcast.deploy.score import scoring_content
from rowcast.job.file import parse_job, parse_manifest_job, read_content, set_key
from rowcast.job.formats import LabelValues
from rowcast.job.named_code import code_of, trusted
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, groups_at, make_keys, whole_groups
from rowcast.prefetcher.checkpoints.export import CheckpointRows, all_of
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import SavedRows, pieces_by_name, pieces_of, with_columns
from rowcast.prefetcher.readers.columns import bag_offsets
from rowcast.prefetcher.readers.id_check import check_id_types
from rowcast.prefetcher.readers.reader import id_types
from rowcast.prefetcher.stores.records import of_seed
from rowcast.prefetcher.stores.store import Records
from rowcast.protocol.batch import Batch
from rowcast.protocol.parts import belonging, part_of
from rowcast.runtime.arrays import F32
from rowcast.runtime.checkpoint_manifest import Manifest, checked_file
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import threads_of_run, usable_cores
from rowcast.runtime.process import Signals
from rowcast.trainer.device.cuda import choose_device
from rowcast.trainer.device.streams import on_device
from rowcast.trainer.kernels import part_of as field_of
from rowcast.trainer.models.evaluate import EvalMetrics
from rowcast.trainer.models.job_model import JobModel, set_precision
from rowcast.trainer.models.model_state import restore_model
from rowcast.trainer.models.trained import Bags, TrainedModel, arguments, rows_of_features
from rowcast.trainer.report.score_file import probabilities
from rowcast.trainer.run.machine import refuse_fewer_threads, set_threads

TRUSTED = set[str]()  # code that the caller has named in this process, in jobs of `train` or by `load`


def load(folder: str | Path, trust: Collection[str] = ()) -> "Run":
    """Opens the run in a run directory, with its newest or best whole checkpoint. Raises as `Run`.

    trust: code that its job names, `package.module:factory`, and that may be imported and run. That of jobs which
    `train` was given in this process may be, too."""
    TRUSTED.update(trust)
    return Run(folder)


def train(job: Any, **settings: Any) -> "Run":
    """Trains a job as `rowcast train` does, in child processes, and returns its run.

    job: a job file, a Job, what `new` returns, or a frame, which is trained by the job that `new` proposes for it and
    `label`, as in `train(frame, label="late")`. settings: keys of the job, `**{"optimizer.sparse.lr": 0.05}`. The
    children write to the terminal, or to the notebook, and to `<run_dir>/prefetcher.log`. An interrupt stops them in
    order, and the same call continues the run. Raises the error of `rowcast train`, a `RowcastError`."""
    from rowcast.deploy.new_job import NewJob, new  # loading a run does not need it

    if isinstance(job, Job):
        job = trusted(job, TRUSTED, partial(line_to_trust, job.run_dir))
    if not isinstance(job, str | Path | Job | NewJob):
        job = new(job, settings.pop("label", ""))
    content, source = (read_content(Path(job)), str(job)) if isinstance(job, str | Path) else (job.content(), "job")
    for name, value in settings.items():
        set_key(content, name, value)
    checked = parse_job(content, source)
    TRUSTED.update(code_of(checked).values())
    with TemporaryDirectory(prefix="rowcast-") as folder:
        config = Path(folder) / "job.json"
        config.write_bytes(msgspec.json.encode(checked.content()))
        run_both(checked, given := ["--config", str(config)], "run", given, Signals())
    return Run(checked.run_dir)


def compare(runs: Iterable["Run"]) -> Any:
    """Returns the evaluations of runs as a pyarrow.Table, a row each: `run`, its directory; `train_step`; the figures
    of `Run.evaluations`, null where a run has none. `.to_pandas()` makes a frame of pandas of it."""
    rows = [{"run": str(run.folder), **flat(evaluation)} for run in runs for evaluation in run.evaluations]
    return pa.table({name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))})


def flat(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures without those of each label."""
    figures = {name: value for name, value in evaluation.items() if name not in ("ranking", "means", "tasks")}
    return {**figures, **evaluation.get("ranking", {}), **evaluation.get("means", {})}


def line_to_trust(folder: Path, names: list[str]) -> str:
    return f"rowcast.load({str(folder)!r}, trust={names})"


class Run:
    """A run with the newest whole checkpoint that it had when it was loaded, or with that of its best evaluation if it
    keeps it. Raises the errors of `rowcast score`."""

    def __init__(self, folder: str | Path) -> None:
        """Reads the checkpoint once, to find damage. Raises ConfigError if there is none, DataError."""
        self.folder = Path(folder)
        checkpoints = Checkpoints(self.folder, Disk())
        self._root, self._manifest = checkpoints.root, checkpoints.choose(None)
        self._newest = checkpoints.load(checkpoints.candidates()[0])
        self.train_steps = self._manifest.train_steps  # before the checkpoint
        job = parse_manifest_job(self._manifest.job, str(self.folder))
        self.job = replace(job, job=replace(job.job, run_dir=str(self.folder)))
        self._groups, self._written = whole_groups(self.job), groups_at(self.job, self._manifest.points)

    def __repr__(self) -> str:
        return f"rowcast.load({str(self.folder)!r}), after {self.train_steps:,} train steps"

    @property
    def losses(self) -> F32:
        """Returns the loss of each train step, f32 [steps], up to the newest checkpoint."""
        return self._newest_state["losses"].numpy()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Returns each evaluation up to the newest checkpoint: its `train_step` and metrics, by the names in
        report.json."""
        return list(msgspec.json.decode(self._newest_state["evaluations"].numpy().tobytes()))

    def predict(self, frame: Any) -> F32:
        """Returns what `rowcast score` writes for the file that the frame came from: a logit of each sample, f32 [n]
        or, with T labels, [n, T].

        frame: a pandas or polars frame, an Arrow table, or a dict of arrays or lists, with the columns of the data;
        labels are not needed. Raises ConfigError for a missing column, DataError for a value."""
        logits = [torch.zeros((0, *self.job.data.columns.label_shape))]
        for model, outputs, _, _ in self._outputs(frame, "none"):
            logits.append(model.logits(outputs).float().cpu())
        return torch.cat(logits).numpy()

    def evaluate(self, frame: Any) -> dict[str, Any]:
        """Returns the evaluation of the file that the frame came from, as one of `evaluations`.

        frame: as for `predict`, with labels. Raises as `predict`, and ConfigError for a frame without rows."""
        labels, metrics = self.job.data.columns.labels, None
        for model, outputs, known, number in self._outputs(frame, self.job.data.columns.label_values):
            if metrics is None:
                metrics = EvalMetrics(known.device, self.job.ranks.num_parts, len(labels), model.eval_names)
            model.count(metrics, outputs, known, number)
        result = metrics and metrics.close().result(self.train_steps, labels, self.job.eval.ranks)
        if result is None:
            raise ConfigError(f"{FRAME} has no row; give the samples to evaluate")
        return dict(msgspec.json.decode(msgspec.json.encode(result)))

    def _outputs(self, frame: Any, label_values: LabelValues) -> Iterator[tuple[JobModel, Any, Tensor, int]]:
        """Yields the model, and its outputs for each part of each batch, with the part's labels and number."""
        job, num_dense, needs_labels = self._scoring_job, len(self._dense_columns), label_values != "none"
        reader, parts, of = open_frame(job, frame, label_values), job.ranks.num_parts, belonging(job)
        check_id_types(self._manifest, id_types(reader), [FRAME])
        with as_trained(job, self._manifest.machine.threads) as device, torch.no_grad():
            model = JobModel(self._buildable, num_dense, device, trains=False, needs_labels=needs_labels, parts=parts)
            restore_model(model.model, self._state)
            for batch in reader.batches("eval", 0):
                small, tables = self._small(batch)
                weights = [own.to(device) for own in tables]
                for number in range(parts):
                    if (part := part_of(small, number, parts, of)).size:
                        dense, ids, inputs = arguments(part, job.features, device)
                        rows = rows_of_features(job.tables, weights, ids, job.ranks.gradients)
                        outputs = model.forward(dense, rows, inputs, training=False)
                        yield model, outputs, torch.tensor(part.labels, device=device), number

    def probabilities(self, frame: Any) -> F32:
        """Returns what `rowcast score --probability` writes, as `predict`. Raises ConfigError if outputs are no
        logits."""
        if (name := self._model(()).score_name) != "logit":
            raise ConfigError(f"the model's outputs are called {name!r}, not logits, so they have no probabilities")
        return probabilities(self.predict(frame))

    def inputs(self, frame: Any) -> tuple[Tensor, dict[str, Bags], dict[str, Tensor]]:
        """Returns a frame as the arguments of `model()`, on the CPU. Raises as `predict`."""
        data = replace(self._scoring_job.data, batch_size=2**31 - 1)
        [batch] = open_frame(replace(self._scoring_job, data=data), frame).batches("eval", 0)
        return arguments(batch, self.job.features, torch.device("cpu"))

    def model(self) -> TrainedModel:
        """Returns the trained model with all rows of its tables, on the CPU, to be saved, exported or trained on.

        Raises ConfigError if the run names code that is not trusted, as all that build the model do."""
        first = of_seed(self._buildable.job.seed)
        rows = CheckpointRows(self._root, self._manifest.layers, self._written, first, all_of(self._groups))
        tables = {
            table.name: torch.cat([weights_of(group, records) for _, records in blocks])
            for group in self._groups
            for table, blocks in rows.tables(group)
        }
        return self._model([tables[table.name] for table in self.job.tables])

    def _model(self, tables: Sequence[Tensor]) -> TrainedModel:
        model = TrainedModel(self._buildable, len(self._dense_columns), tables)
        restore_model(model.model, self._state)
        return model

    @property
    def _buildable(self) -> Job:
        """The job with a model that may be imported. Raises ConfigError."""
        return trusted(self.job, TRUSTED, partial(line_to_trust, self.folder), "model.kind")

    @cached_property
    def _state(self) -> dict[str, Tensor]:
        return self._state_of(self._manifest)

    @cached_property
    def _newest_state(self) -> dict[str, Tensor]:
        return self._state_of(self._newest)

    def _state_of(self, manifest: Manifest) -> dict[str, Tensor]:
        """The model state of a checkpoint. Raises ConfigError."""
        if manifest.dense is None:
            raise ConfigError(f"{self.folder}: {manifest.name} was imported without dense weights; train it first")
        return load_file(checked_file(self._root, manifest.dense))

    @cached_property
    def _dense_columns(self) -> list[str]:
        """Those that it was trained on."""
        was, named = self._manifest.trained_on, self.job.data.columns.dense
        return list(was.dense_columns) if was is not None else named or []

    @cached_property
    def _scoring_job(self) -> Job:
        content = scoring_content(self._manifest, self.folder, str(FRAME))
        content["data"]["columns"]["dense"] = self._dense_columns
        return parse_manifest_job(content, f"the job of {self.folder}")

    @cached_property
    def _saved(self) -> list[SavedRows]:
        return [SavedRows(self._root, self._manifest, group, self.job.job.seed) for group in self._written]

    def _small(self, batch: Batch) -> tuple[Batch, list[Tensor]]:
        """Returns tables of the distinct rows of a batch, and the batch with the places of its ids in them."""
        ids, tables, first = np.empty_like(batch.ids), list[Tensor](), 0
        starts = bag_offsets(batch.ids, batch.offsets)[:: batch.size]
        by_name = pieces_by_name(self._written)
        of_table = {table.index: (group, table) for group in self._groups for table in group.tables}
        for t, table in enumerate(self.job.tables):
            span = slice(starts[first], starts[first := first + len(table.features)])
            rows, ids[span] = np.unique(batch.ids[span], return_inverse=True)
            pieces = pieces_of(of_table[t][1], by_name)
            saved = [self._saved[group.index].records(make_keys(piece.index, rows)) for group, piece in pieces]
            tables.append(weights_of(of_table[t][0], with_columns(of_table[t], pieces, saved)))
        return dataclasses.replace(batch, ids=ids), tables


def weights_of(group: GroupSpec, records: Records) -> Tensor:
    """Returns the weights of records, [n, width] in the tables' dtype."""
    return field_of(torch.from_numpy(np.ascontiguousarray(records)), group.parts[0])


@contextmanager
def as_trained(job: Job, threads: int) -> Iterator[torch.device]:
    """Computes as `rowcast score` does: on the job's device, in as many threads, with its precision. All this, and
    torch's random state, is as before afterwards. `threads`: of the run, 0 if it recorded none. Raises ConfigError."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    threads = threads_of_run(job.trainer.threads, job.first_threads(usable_cores()), threads, trains=False)
    refuse_fewer_threads(threads, os.environ)
    device = choose_device(job.trainer.device)
    try:
        with torch.random.fork_rng(), on_device(device):
            set_threads(threads)
            set_precision(job.model.precision, device)
            torch.manual_seed(job.job.seed)
            yield device
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
