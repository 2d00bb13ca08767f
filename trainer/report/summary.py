"""Prints a run's summary at its end; the run report has the same rows."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rowcast.protocol.messages import TierTotals
from rowcast.runtime.telemetry.format_numbers import (
    human_bytes,
    human_count,
    human_seconds,
    percent,
    plural,
    stdout_console,
)
from rowcast.trainer.models.evaluate import TaskEvaluation
from rowcast.trainer.report.progress import evaluation_text, task_text, write
from rowcast.trainer.report.report_json import RECENT, Report

BESIDE = ("gather", "fill")
OPTIONAL = ("exchange", "backward", "update")  # not of a single trainer, nor of an evaluation


def print_summary(report: Report, console: Console | None = None, page: Path | None = None) -> None:
    """Prints the report, and the page's path, on stdout or `console`.

    A closed pipe is not an error, because the report is on disk."""
    table = Table.grid(padding=(0, 2))
    for name, value in summary_rows(report):
        table.add_row(name, value)
    target = console or stdout_console()
    next_start = "" if report.finished or not report.steps else "; start it again to continue"
    with target.capture() as text:
        target.print(summary_title(report) + next_start, style="bold", highlight=False, soft_wrap=True)
        target.print(table, highlight=False, soft_wrap=True)
    lines = [line.rstrip() for line in text.get().splitlines()]
    if page is not None:  # not wrapped, however long it is
        lines.append(f"{'report':{max(len(name) for name, _ in summary_rows(report)) + 2}}{page}")
    if len(report.ranks) > 1:
        lines += ["", *rank_lines(report)]
    write(target, "\n".join(["", *lines, ""]))


def rank_lines(report: Report) -> list[str]:
    """Returns a table with right-aligned numbers, which no terminal width truncates."""
    rows = [list(RANKS), *rank_rows(report)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def summary_title(report: Report) -> str:
    if report.eval_steps and not report.steps and report.finished:
        return f"rowcast: evaluated in {human_seconds(report.wall_s)}, after {report.train_steps:,} train steps"
    end = "ended early" if report.ended_early else "finished"
    how = end if report.finished else f"stopped by {report.stopped_by or 'request'}"
    here = "" if report.steps == report.train_steps else f" ({report.steps:,} of this process)"
    return f"rowcast: {how} after {report.train_steps:,} steps{here} in {human_seconds(report.wall_s)}"


def summary_rows(report: Report) -> list[tuple[str, str]]:
    share = report.device_bytes / report.table_bytes
    held = f"{human_bytes(report.device_bytes)} on the device{f' ({percent(share)})' if share <= 1 else ''}"
    rows = [("tables", f"{human_bytes(report.table_bytes)} in all, {held}")]
    if report.steps or not report.eval_steps:
        rows.append(("samples", f"{report.samples:,} ({human_count(report.samples_per_s)}/s)"))
        newest = min(RECENT, report.train_steps)
        loss = "none" if report.loss is None else f"{report.loss:.6f}, mean of the run's last {newest} train steps"
        rows.append(("loss", loss))
    if report.logloss is not None or report.ranking:
        rows.append(("evaluation", evaluation_text(report)))
    rows += [(f"label {task.label}", task_text(task)) for task in report.tasks]
    for best in [own for own in report.evaluations[:-1] if own.train_step == report.best_train_step]:
        rows.append(("best evaluation", f"after {best.train_step:,} train steps, {evaluation_text(best)}"))
    if report.ended_early:
        rows.append(("ended early", report.ended_early))
    lost = plural(report.lines_lost, "line")
    hits = "" if report.hit_ratio is None else f", hit ratio {percent(report.hit_ratio)}"
    return [
        *rows,
        ("look-ups", f"{report.lookups:,}, distinct within a step {report.unique_rows:,}{hits}"),
        (
            "rows",
            f"{report.rows_fetched:,} fetched, {report.rows_evicted:,} evicted, "
            f"{report.rows_written_back:,} written back",
        ),
        *([] if report.tier is None else tier_rows(report.tier)),
        *(exchange_rows(report) if len(report.ranks) > 1 else []),
        ("waited for rows", f"{human_seconds(report.trainer_wait_s)} ({percent(report.stall_share)} of the time)"),
        ("each step", phases(report.phase_ms, beside=False)),
        ("moving rows", phases(report.phase_ms, beside=True)),
        (
            "traffic",
            f"{human_bytes(report.bytes_to_device)} to the device, {human_bytes(report.bytes_from_device)} back",
        ),
        ("device memory", device_memory(report)),
        ("host memory", f"{human_bytes(report.host_bytes)} in the prefetcher"),
        ("processes", processes(report)),
        *([("log", f"incomplete: {lost} could not be written")] if report.lines_lost else []),
        ("device", f"{report.device}, threads: {report.threads}, {'pinned' if report.pinned else 'unpinned'} rings"),
        *(("hint", sentence) for sentence in hints(report)),
    ]


def exchange_rows(report: Report) -> list[tuple[str, str]]:
    names = ("rows_sent", "bytes_sent", "vector_bytes_sent")
    rows, nbytes, of_vectors = (sum(getattr(own, name) for own in report.ranks) for name in names)
    vectors = f"; pooled vectors and theirs, {human_bytes(of_vectors)}" if of_vectors else ""
    return [
        ("exchanged", f"{rows:,} rows and their gradients, {human_bytes(nbytes - of_vectors)}{vectors}"),
        ("rows of a rank", f"{report.rank_imbalance:.3f}, the most over the mean"),
    ]


RANKS = ("rank", "samples", "rows owned", "waited for rows", "waited for ranks", "sent", "received", "processes")


def rank_rows(report: Report) -> list[list[str]]:
    """Returns each rank's row, under the headings `RANKS`."""
    return [
        [
            str(own.rank),
            f"{own.samples:,}",
            f"{own.rows_owned:,}",
            human_seconds(own.waited_for_rows_s),
            human_seconds(own.waited_for_ranks_s),
            human_bytes(own.bytes_sent),
            human_bytes(own.bytes_received),
            f"{own.pids['prefetcher']}, {own.pids['trainer']}",
        ]
        for own in report.ranks
    ]


def processes(report: Report) -> str:
    if len(report.ranks) > 1:
        return f"{len(report.ranks)} prefetchers, {len(report.ranks)} trainers"
    return f"prefetcher {report.pids['prefetcher']}, trainer {report.pids['trainer']}"


def tier_rows(tier: TierTotals) -> list[tuple[str, str]]:
    disk = f"; {human_bytes(tier.disk_bytes)} of disk" if tier.disk_bytes else ""
    return [
        ("cold tier", f"{tier.rows_from_cold:,} rows from it, {tier.late_rows:,} late, {tier.rows_to_cold:,} to it"),
        ("its traffic", f"{human_bytes(tier.bytes_read)} read, {human_bytes(tier.bytes_written)} written{disk}"),
    ]


def device_memory(report: Report) -> str:
    parts = {"rows": report.cache_bytes, "staging": report.staging_bytes, "plans": report.plans_bytes}
    listed = ", ".join(f"{human_bytes(nbytes)} {name}" for name, nbytes in parts.items())
    return f"{listed}; all {human_bytes(report.device_bytes)}"


def phases(phase_ms: dict[str, float], *, beside: bool) -> str:
    """`beside`: True for the phases that move rows, in parallel with a step on a device; False for the others."""
    listed = [
        f"{name} {milliseconds:.1f}"
        for name, milliseconds in phase_ms.items()
        if (name in BESIDE) == beside and (name not in OPTIONAL or milliseconds)
    ]
    return f"{', '.join(listed)} ms"


# figures that are right, but that nobody wants: one sentence for each, and no error


HIGH_LOSS = 10.0  # untrained logits near 0 have a binary cross entropy of 0.69


def hints(report: Report) -> Iterator[str]:
    if report.accuracy is None or report.is_own_loss:
        return  # without logits, or with a loss of the model's own, each of these may be as it should
    if (report.first_loss or 0.0) > HIGH_LOSS:
        yield (
            f"the first loss was {report.first_loss:,.1f}, and small logits have 0.7; scale dense features, or take "
            "their logarithms (data.columns.prepare)"
        )
    labelled: tuple[Report | TaskEvaluation, ...] = report.tasks or (report,)
    for found in labelled:
        of = f"label {found.label}: " if isinstance(found, TaskEvaluation) else ""
        if found.auc is None and found.logloss is not None:
            yield (
                f"{of}all labels of the evaluation are equal, so AUC is undefined; hold out more or other samples "
                "(data.eval_fraction, data.eval_path)"
            )
        if (found.normalized_entropy or 0.0) > 1.0:
            yield (
                f"{of}normalized entropy is above 1: always answering the share of positive labels has a lower log "
                "loss; try other learning rates, scaled dense features, or fewer epochs"
            )
