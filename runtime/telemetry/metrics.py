"""Defines every metric of both processes in one table, and builds a scrape's families from it.

Both processes count the same events (the prefetcher when it plans, sends or applies; the trainer when it executes), so
their totals agree at the end of a run: compare them, never add them. Each pair of processes counts its rank's work.
Sums over ranks are valid for what ranks divide (samples, look-ups, rows, bytes), not for steps and states.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

Process = Literal["prefetcher", "trainer", "publisher"]
BOTH: tuple[Process, ...] = ("prefetcher", "trainer")
PREFETCHER: tuple[Process, ...] = ("prefetcher",)
TRAINER: tuple[Process, ...] = ("trainer",)
PUBLISHER: tuple[Process, ...] = ("publisher",)

RANK = "rank"  # the first label of every metric, "0" for a single trainer

Sample = tuple[str, tuple[str, ...], float]  # metric name, the values of its labels but for the rank, value


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    type: Literal["counter", "gauge"]
    labels: tuple[str, ...]  # besides the rank
    help: str
    processes: tuple[Process, ...]

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self.type == "counter" else GaugeMetricFamily
        return kind(self.name, self.help, labels=(RANK, *self.labels))


METRICS = (
    Metric("rowcast_train_steps_total", "counter", (), "Training steps.", BOTH),
    Metric("rowcast_eval_steps_total", "counter", (), "Evaluation steps.", BOTH),
    Metric("rowcast_samples_total", "counter", (), "Samples of training steps.", BOTH),
    Metric("rowcast_eval_samples_total", "counter", (), "Samples of evaluation steps.", BOTH),
    Metric("rowcast_lookups_total", "counter", ("group",), "Look-ups of rows, duplicates included.", BOTH),
    Metric("rowcast_unique_rows_total", "counter", ("group",), "Distinct rows of each step, added up.", BOTH),
    Metric(
        "rowcast_hits_total",
        "counter",
        ("group",),
        "Distinct rows of a step that were resident when it was planned.",
        BOTH,
    ),
    Metric("rowcast_rows_fetched_total", "counter", ("group",), "Rows brought to the device.", BOTH),
    Metric("rowcast_rows_evicted_total", "counter", ("group",), "Rows that left their slot, clean and dirty.", BOTH),
    Metric(
        "rowcast_rows_written_back_total",
        "counter",
        ("group",),
        "Trained rows brought home: dirty victims and flushed rows.",
        BOTH,
    ),
    Metric(
        "rowcast_rows_flushed_total", "counter", ("group",), "Rows written back by barriers, which stay resident.", BOTH
    ),
    Metric("rowcast_row_bytes_total", "counter", ("group", "direction"), "Bytes of row records that crossed.", BOTH),
    Metric(
        "rowcast_exchange_rows_total",
        "counter",
        ("group", "direction"),
        "Distinct rows of each step that went to other ranks or came from them, added up.",
        BOTH,
    ),
    Metric(
        "rowcast_exchange_bytes_total",
        "counter",
        ("group", "direction"),
        "Bytes of these rows, and of their gradients, which go the other way.",
        BOTH,
    ),
    Metric(
        "rowcast_plan_bytes_total",
        "counter",
        ("direction",),
        "Bytes of batch, plan and barrier arrays that crossed.",
        BOTH,
    ),
    Metric("rowcast_phase_seconds_total", "counter", ("phase",), "Time in each phase of a step.", BOTH),
    Metric(
        "rowcast_stall_seconds_total",
        "counter",
        ("reason",),
        "Time that work stood still, by what it waited for.",
        BOTH,
    ),
    Metric("rowcast_queue_depth", "gauge", ("queue",), "Entries in a queue between two stages.", BOTH),
    Metric(
        "rowcast_queue_blocked_seconds_total",
        "counter",
        ("queue", "side"),
        "Time that each side of a queue was blocked on it.",
        BOTH,
    ),
    Metric(
        "rowcast_ring_used_bytes", "gauge", ("direction",), "Bytes in use in the ring that this process writes.", BOTH
    ),
    Metric("rowcast_ring_size_bytes", "gauge", ("direction",), "Bytes of the ring that this process writes.", BOTH),
    Metric(
        "rowcast_state",
        "gauge",
        ("state",),
        "1 for the state that the process is in; connecting: it waits for the other one.",
        BOTH,
    ),
    Metric(
        "rowcast_last_progress_timestamp_seconds",
        "gauge",
        (),
        "Unix time of the last completed step, or of the start.",
        BOTH,
    ),
    Metric(
        "rowcast_frames_refused_total",
        "counter",
        (),
        "Messages and callers turned away: not allowed, not known or not whole.",
        BOTH,
    ),
    Metric("rowcast_depth_steps", "gauge", (), "Steps whose rows may be in flight.", PREFETCHER),
    Metric("rowcast_in_flight_steps", "gauge", (), "Steps sent whose StepDone has not come.", PREFETCHER),
    Metric("rowcast_horizon_batches", "gauge", (), "Batches of ids that a plan looks ahead.", PREFETCHER),
    Metric("rowcast_known_batches", "gauge", (), "Batches of ids known now beyond the newest plan.", PREFETCHER),
    Metric("rowcast_slots_free", "gauge", ("group",), "Slots that hold no row.", PREFETCHER),
    Metric("rowcast_slots_clean", "gauge", ("group",), "Slots whose row has the value of the store.", PREFETCHER),
    Metric("rowcast_slots_dirty", "gauge", ("group",), "Slots whose row was trained since its fill.", PREFETCHER),
    Metric(
        "rowcast_write_back_lag_steps",
        "gauge",
        (),
        "Steps between the newest one done and the newest one in the store.",
        PREFETCHER,
    ),
    Metric(
        "rowcast_rows_verified_total",
        "counter",
        ("kind",),
        "Rows whose checksum was compared under `--verify`.",
        PREFETCHER,
    ),
    Metric("rowcast_tier_rows", "gauge", ("group", "tier"), "Rows that lie in a tier of the store.", PREFETCHER),
    Metric(
        "rowcast_tier_reads_total",
        "counter",
        ("group", "tier"),
        "Rows that were asked of the store, by where they lay; untouched: nowhere, as they were never trained.",
        PREFETCHER,
    ),
    Metric(
        "rowcast_tier_moved_rows_total",
        "counter",
        ("group", "from", "to"),
        "Rows that went from one tier to another; to none: dropped, as the cold tier has the same bytes or they were "
        "never trained.",
        PREFETCHER,
    ),
    Metric(
        "rowcast_tier_late_rows_total",
        "counter",
        ("group",),
        "Rows that were to be in memory when they were asked for and still lay in the cold tier.",
        PREFETCHER,
    ),
    Metric(
        "rowcast_tier_bytes_total",
        "counter",
        ("group", "direction"),
        "Bytes read from the cold tier and written to it, whole pages.",
        PREFETCHER,
    ),
    Metric(
        "rowcast_tier_read_seconds_total",
        "counter",
        ("group",),
        "Time in reads of the cold tier, added up over threads.",
        PREFETCHER,
    ),
    Metric(
        "rowcast_store_index_bytes", "gauge", ("group",), "Bytes of memory that say where each row lies.", PREFETCHER
    ),
    Metric("rowcast_store_disk_used_bytes", "gauge", ("group",), "Bytes that the cold tier takes.", PREFETCHER),
    Metric(
        "rowcast_store_disk_garbage_bytes", "gauge", ("group",), "Bytes of them with old copies of rows.", PREFETCHER
    ),
    Metric(
        "rowcast_shared_memory_size_bytes", "gauge", (), "Bytes of the file system in which the rings lie.", PREFETCHER
    ),
    Metric("rowcast_shared_memory_free_bytes", "gauge", (), "Bytes of it that are free.", PREFETCHER),
    Metric("rowcast_checkpoints_total", "counter", (), "Checkpoints that became durable.", PREFETCHER),
    Metric(
        "rowcast_checkpoint_seconds_total",
        "counter",
        (),
        "Time from a checkpoint's barrier until it was durable.",
        PREFETCHER,
    ),
    Metric("rowcast_checkpoint_bytes_total", "counter", (), "Bytes written to files of checkpoints.", PREFETCHER),
    Metric(
        "rowcast_checkpoint_last_timestamp_seconds",
        "gauge",
        (),
        "Unix time of the newest checkpoint, or of the start.",
        PREFETCHER,
    ),
    Metric(
        "rowcast_checkpoint_every_steps",
        "gauge",
        (),
        "Train steps between checkpoints; 0: by epochs, only at the end, or not known yet.",
        PREFETCHER,
    ),
    Metric(
        "rowcast_train_step",
        "gauge",
        (),
        "Train steps of the run that are done, those before a restart included.",
        TRAINER,
    ),
    Metric(
        "rowcast_expected_train_steps", "gauge", (), "Train steps of the whole run, where the reader knows.", TRAINER
    ),
    Metric("rowcast_eval_auc", "gauge", (), "AUC of the last evaluation.", TRAINER),
    Metric("rowcast_eval_logloss", "gauge", (), "Log loss of the last evaluation.", TRAINER),
    Metric("rowcast_eval_accuracy", "gauge", (), "Accuracy of the last evaluation.", TRAINER),
    Metric(
        "rowcast_eval_normalized_entropy",
        "gauge",
        (),
        "Log loss of the last evaluation over that of the labels' base rate.",
        TRAINER,
    ),
    Metric(
        "rowcast_eval_ranking",
        "gauge",
        ("figure",),
        "HR, NDCG and MRR at each k of eval.ranks, of the last evaluation.",
        TRAINER,
    ),
    Metric("rowcast_eval_task_auc", "gauge", ("task",), "The same AUC of each of several labels.", TRAINER),
    Metric("rowcast_eval_task_logloss", "gauge", ("task",), "The same log loss of each of several labels.", TRAINER),
    Metric("rowcast_loss", "gauge", (), "Loss of the last training step.", TRAINER),
    Metric(
        "rowcast_rank_imbalance",
        "gauge",
        (),
        "Rows of the last training step that each rank owns, the most over the mean; every rank knows it.",
        TRAINER,
    ),
    Metric("rowcast_learning_rate", "gauge", ("optimizer",), "Learning rate of the next training step.", TRAINER),
    Metric(
        "rowcast_build_info",
        "gauge",
        ("process", "version", "python", "job_name"),
        "Always 1; the labels say what runs.",
        BOTH,
    ),
    Metric(
        "rowcast_publish_lag_seconds",
        "gauge",
        (),
        "Time since the first checkpoint that is not published became durable; 0: all are.",
        PUBLISHER,
    ),
    Metric("rowcast_publish_versions_total", "counter", ("kind",), "Versions published, whole or changed.", PUBLISHER),
    Metric("rowcast_publish_rows_total", "counter", (), "Rows in these versions.", PUBLISHER),
    Metric("rowcast_publish_bytes_total", "counter", (), "Bytes of these versions.", PUBLISHER),
)


def families(process: Process, samples: Iterable[Sample], rank: int = 0) -> Iterator[Family]:
    """Yields a family per metric of the process, in the table's order, even without samples.

    Raises KeyError for a name that is not in the table."""
    by_name = {metric.name: metric.family() for metric in METRICS if process in metric.processes}
    for name, labels, value in samples:
        by_name[name].add_metric((str(rank), *labels), value)
    yield from by_name.values()


def metric_table() -> str:
    """Returns the table in docs/metrics.md: every metric of both processes, in Markdown."""
    lines = ["| metric | type | labels | served by | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        served_by = "both" if metric.processes == BOTH else metric.processes[0]
        lines.append(f"| `{metric.name}` | {metric.type} | {labels} | {served_by} | {metric.help} |")
    return "\n".join(lines) + "\n"
