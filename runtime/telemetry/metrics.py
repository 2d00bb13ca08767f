"""Defines every metric of both processes in one table, builds a scrape's families from it, and keeps the state.

Both processes count the same events (the prefetcher when it plans, sends or applies; the trainer when it executes), so
their totals agree at the end of a run: compare them, never add them. Each pair of processes counts its rank's work.
Sums over ranks are valid for what ranks divide (samples, look-ups, rows, bytes), not for steps and states.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

Process = Literal["prefetcher", "trainer", "publisher"]
BOTH: tuple[Process, ...] = ("prefetcher", "trainer")
PREFETCHER: tuple[Process, ...] = ("prefetcher",)
TRAINER: tuple[Process, ...] = ("trainer",)
PUBLISHER: tuple[Process, ...] = ("publisher",)

Type = Literal["counter", "gauge"]

RANK = "rank"  # the first label of every metric, "0" for a single trainer

Sample = tuple[str, tuple[str, ...], float]  # metric name, the values of its labels but for the rank, value


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    type: Type
    labels: tuple[str, ...]  # besides the rank
    help: str
    processes: tuple[Process, ...]

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self.type == "counter" else GaugeMetricFamily
        return kind(self.name, self.help, labels=(RANK, *self.labels))


def metrics_of(processes: tuple[Process, ...], described: Mapping[str, str]) -> Iterator[Metric]:
    """`described`: "name", or "name{label,label}" -> help. Names of counters end in `_total`."""
    for key, help in described.items():
        name, _, labels = key.rstrip("}").partition("{")
        kind: Type = "counter" if name.endswith("_total") else "gauge"
        yield Metric(name, kind, tuple(filter(None, labels.split(","))), help, processes)


OF_BOTH = {
    "rowcast_train_steps_total": "Training steps.",
    "rowcast_eval_steps_total": "Evaluation steps.",
    "rowcast_samples_total": "Samples of training steps.",
    "rowcast_eval_samples_total": "Samples of evaluation steps.",
    "rowcast_lookups_total{group}": "Look-ups of rows, duplicates included.",
    "rowcast_unique_rows_total{group}": "Distinct rows of each step, added up.",
    "rowcast_hits_total{group}": "Distinct rows of a step that were resident when it was planned.",
    "rowcast_rows_fetched_total{group}": "Rows brought to the device.",
    "rowcast_rows_evicted_total{group}": "Rows that left their slot, clean and dirty.",
    "rowcast_rows_written_back_total{group}": "Trained rows brought home: dirty victims and flushed rows.",
    "rowcast_rows_flushed_total{group}": "Rows written back by barriers, which stay resident.",
    "rowcast_row_bytes_total{group,direction}": "Bytes of row records that crossed.",
    "rowcast_exchange_rows_total{group,direction}": (
        "Distinct rows of each step that went to other ranks or came from them, added up."
    ),
    "rowcast_exchange_bytes_total{group,direction}": (
        "Bytes of these rows and their gradients, and in the trainer of pooled vectors and theirs."
    ),
    "rowcast_plan_bytes_total{direction}": "Bytes of batch, plan and barrier arrays that crossed.",
    "rowcast_phase_seconds_total{phase}": "Time in each phase of a step.",
    "rowcast_stall_seconds_total{reason}": "Time that work stood still, by what it waited for.",
    "rowcast_queue_depth{queue}": "Entries in a queue between two stages.",
    "rowcast_queue_blocked_seconds_total{queue,side}": "Time that each side of a queue was blocked on it.",
    "rowcast_ring_used_bytes{direction}": "Bytes in use in the ring that this process writes.",
    "rowcast_ring_size_bytes{direction}": "Bytes of the ring that this process writes.",
    "rowcast_state{state}": "1 for the state that the process is in; connecting: it waits for the other one.",
    "rowcast_last_progress_timestamp_seconds": "Unix time of the last completed step, or of the start.",
    "rowcast_lines_lost_total": "Lines that stdout, stderr or the log could not take.",
    "rowcast_frames_refused_total": "Messages and callers turned away: not allowed, not known or not whole.",
}
OF_PREFETCHER = {
    "rowcast_depth_plans": "Plans whose rows may be in flight.",
    "rowcast_in_flight_plans": "Plans sent whose PlanDone has not come.",
    "rowcast_horizon_batches": "Batches of ids that a plan looks ahead.",
    "rowcast_known_batches": "Batches of ids known now beyond the newest plan.",
    "rowcast_data_waiting_files": "Files in the folder that are not trained to their end (data.follow).",
    "rowcast_data_delay_seconds": (
        "Time from the end of writing the last trained file until its last step was done (data.follow)."
    ),
    "rowcast_slots_free{group}": "Slots that hold no row.",
    "rowcast_slots_clean{group}": "Slots whose row has the value of the store.",
    "rowcast_slots_dirty{group}": "Slots whose row was trained since its fill.",
    "rowcast_write_back_lag_plans": "Plans between the newest one done and the newest one in the store.",
    "rowcast_tier_rows{group,tier}": "Rows that lie in a tier of the store.",
    "rowcast_tier_reads_total{group,tier}": (
        "Rows that were asked of the store, by where they lay; untouched: nowhere, as they were never trained."
    ),
    "rowcast_tier_moved_rows_total{group,from,to}": (
        "Rows that went from one tier to another; to none: dropped, as the cold tier has the same bytes or they were "
        "never trained."
    ),
    "rowcast_tier_late_rows_total{group}": (
        "Rows that were to be in memory when they were asked for and still lay in the cold tier."
    ),
    "rowcast_tier_bytes_total{group,direction}": "Bytes read from the cold tier and written to it, whole pages.",
    "rowcast_tier_read_seconds_total{group}": "Time in reads of the cold tier, added up over threads.",
    "rowcast_store_index_bytes{group}": "Bytes of memory that say where each row lies.",
    "rowcast_store_disk_used_bytes{group}": "Bytes that the cold tier takes.",
    "rowcast_store_disk_garbage_bytes{group}": "Bytes of them with old copies of rows.",
    "rowcast_shared_memory_size_bytes": "Bytes of the file system in which the rings lie.",
    "rowcast_shared_memory_free_bytes": "Bytes of it that are free.",
    "rowcast_checkpoints_total": "Checkpoints that became durable.",
    "rowcast_checkpoint_seconds_total": "Time from a checkpoint's barrier until it was durable.",
    "rowcast_checkpoint_bytes_total": "Bytes written to files of checkpoints.",
    "rowcast_checkpoint_last_timestamp_seconds": "Unix time of the newest checkpoint, or of the start.",
    "rowcast_checkpoint_every_steps": "Train steps between checkpoints; 0: by time, by epochs, or only at the end.",
    "rowcast_checkpoint_every_seconds": "Time between checkpoints; 0: by steps, by epochs, or only at the end.",
}
OF_TRAINER = {
    "rowcast_train_step": "Train steps of the run that are done, those before a restart included.",
    "rowcast_expected_train_steps": "Train steps of the whole run, where the reader knows.",
    "rowcast_eval_auc": "AUC of the last evaluation.",
    "rowcast_eval_logloss": "Log loss of the last evaluation.",
    "rowcast_eval_accuracy": "Accuracy of the last evaluation.",
    "rowcast_eval_normalized_entropy": "Log loss of the last evaluation over that of the labels' base rate.",
    "rowcast_eval_ranking{figure}": "HR, NDCG and MRR at each k of eval.ranks, of the last evaluation.",
    "rowcast_eval_mean{figure}": "The sum over weight of each of the model's eval_names, of the last evaluation.",
    "rowcast_eval_task_auc{task}": "The same AUC of each of several labels.",
    "rowcast_eval_task_logloss{task}": "The same log loss of each of several labels.",
    "rowcast_loss": "Loss of the last training step.",
    "rowcast_rank_imbalance": (
        "Rows of the last training step that each rank owns, the most over the mean; every rank knows it."
    ),
    "rowcast_learning_rate{optimizer}": "Learning rate of the next training step.",
}
OF_PUBLISHER = {
    "rowcast_publish_lag_seconds": "Time since the first checkpoint that is not published became durable; 0: all are.",
    "rowcast_serving_delay_seconds": "Time since the checkpoint of the newest version was made; 0: there is none.",
    "rowcast_publish_versions_total{kind}": "Versions published, whole or changed.",
    "rowcast_publish_rows_total": "Rows in these versions.",
    "rowcast_publish_bytes_total": "Bytes of these versions.",
}
METRICS = (
    *metrics_of(BOTH, OF_BOTH),
    *metrics_of(PREFETCHER, OF_PREFETCHER),
    *metrics_of(TRAINER, OF_TRAINER),
    *metrics_of(BOTH, {"rowcast_build_info{process,version,python,job_name}": "Always 1; the labels say what runs."}),
    *metrics_of(PUBLISHER, OF_PUBLISHER),
)


def samples_of(owner: object, *labels: str, prefix: str = "") -> Iterator[Sample]:
    """Yields the metrics that `owner` keeps in a field of their name: `rowcast_hits_total` is `owner.hits`.

    `prefix`: what the metrics' names have before that of the field. A value that is None has no sample."""
    for metric in METRICS:
        field = metric.name.removeprefix(f"rowcast_{prefix}").removesuffix("_total")
        if len(metric.labels) == len(labels) and (value := getattr(owner, field, None)) is not None:
            yield metric.name, labels, value


def families(process: Process, samples: Iterable[Sample], rank: int = 0) -> Iterator[Family]:
    """Yields a family per metric of the process, in the table's order, even without samples.

    Raises KeyError for a name that is not in the table."""
    by_name = {metric.name: metric.family() for metric in METRICS if process in metric.processes}
    for name, labels, value in samples:
        by_name[name].add_metric((str(rank), *labels), value)
    yield from by_name.values()


State = Literal["starting", "connecting", "running", "stopping", "stopped", "failed"]
# connecting: waits for the peer, the first time or after a loss
# stopping: a stop was requested, and the plans already made are finished


@dataclass(slots=True)
class Health:
    """The state of a process for /healthz, /readyz and `rowcast_state`.

    The process sets `state`; `dead_stage` returns the name of a stage whose thread has died, or None."""

    state: State = "starting"
    dead_stage: Callable[[], str | None] = lambda: None

    def healthz(self) -> tuple[bool, str]:
        dead = self.dead_stage()
        return dead is None, "ok" if dead is None else f"{dead} is dead"

    def readyz(self) -> tuple[bool, str]:
        healthy, word = self.healthz()
        return healthy and self.state == "running", self.state if healthy else word


def rowcast_version() -> str:
    """Returns the installed version; "uninstalled" if the source runs without an installation."""
    try:
        return metadata.version("rowcast")
    except metadata.PackageNotFoundError:
        return "uninstalled"


def versions(*distributions: str) -> dict[str, str]:
    named = {name: metadata.version(name) for name in distributions}
    return {"rowcast": rowcast_version(), **named, "python": platform.python_version()}


def build_info(process: Process, job_name: str) -> dict[str, str]:
    """Returns the labels of `rowcast_build_info`, in the order of the metrics table."""
    return {"process": process, "version": rowcast_version(), "python": platform.python_version(), "job_name": job_name}
