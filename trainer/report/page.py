"""Shows a run at its end: a summary on the terminal, and `report.html`, which has the same rows.

The page is self-contained, without scripts or network requests.
"""

import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from rowcast.job.schema import Job
from rowcast.protocol.messages import DataDelay, TierTotals
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.drawing import find_cache
from rowcast.runtime.machine import processor, usable_cores
from rowcast.runtime.telemetry.format_numbers import (
    UNDEFINED,
    human_bytes,
    human_count,
    human_seconds,
    metric_text,
    percent,
    plural,
    stdout_console,
)
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation
from rowcast.trainer.report.charts import (
    Chart,
    RunRecord,
    bytes_chart,
    evaluation_charts,
    hits_chart,
    loss_chart,
    samples_chart,
    share,
    stalls_chart,
)
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
        rows.append(("loss", f"{loss_text(report)}, mean of the run's last {newest} train steps"))
    rows += [("evaluation", evaluation_text(last)) for last in report.evaluations[-1:]]
    rows += [(f"label {task.label}", task_text(task)) for task in report.tasks]
    best = best_evaluation(report)
    if best is not None and best is not report.evaluations[-1]:
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
        *([] if report.data_delay is None else [("new files", delay_text(report.data_delay))]),
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


def best_evaluation(report: Report) -> Evaluation | None:
    return next((one for one in report.evaluations if one.train_step == report.best_train_step), None)


def exchange_rows(report: Report) -> list[tuple[str, str]]:
    names = ("rows_sent", "bytes_sent", "vector_bytes_sent")
    rows, nbytes, of_vectors = (sum(getattr(figures, name) for figures in report.ranks) for name in names)
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
            str(figures.rank),
            f"{figures.samples:,}",
            f"{figures.rows_owned:,}",
            human_seconds(figures.waited_for_rows_s),
            human_seconds(figures.waited_for_ranks_s),
            human_bytes(figures.bytes_sent),
            human_bytes(figures.bytes_received),
            f"{figures.pids['prefetcher']}, {figures.pids['trainer']}",
        ]
        for figures in report.ranks
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


def delay_text(delay: DataDelay) -> str:
    times = "none trained to its end"
    if delay.last_s is not None:
        times = (
            f"the last was trained after {human_seconds(delay.last_s)}, the slowest {human_seconds(delay.longest_s)}"
        )
    return f"{delay.waiting_files:,} waiting; {times}"


def device_memory(report: Report) -> str:
    parts = {"rows": report.cache_bytes, "staging": report.staging_bytes, "plans": report.plans_bytes}
    listed = ", ".join(f"{human_bytes(nbytes)} {name}" for name, nbytes in parts.items())
    return f"{listed}; all {human_bytes(report.device_bytes)}"


def phases(phase_ms: dict[str, float], *, beside: bool) -> str:
    """`beside`: True for the phases that move rows in parallel with a step on a device; False for the others."""
    listed = [
        f"{name} {milliseconds:.1f}"
        for name, milliseconds in phase_ms.items()
        if (name in BESIDE) == beside and (name not in OPTIONAL or milliseconds)
    ]
    return f"{', '.join(listed)} ms"


# correct figures that nobody wants: one sentence for each, and no error


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
    for task in labelled:
        of = f"label {task.label}: " if isinstance(task, TaskEvaluation) else ""
        if task.auc is None and task.logloss is not None:
            yield (
                f"{of}all labels of the evaluation are equal, so AUC is undefined; hold out more or other samples "
                "(data.eval_fraction, data.eval_path)"
            )
        if (task.normalized_entropy or 0.0) > 1.0:
            yield (
                f"{of}normalized entropy is above 1: always answering the share of positive labels has a lower log "
                "loss; try other learning rates, scaled dense features, or fewer epochs"
            )


# the page


TEMPLATE = "page.html"
RANKS_TEXT = (
    "The trainers shared every batch. A rank that waited less for the others than they waited was the one they waited "
    "for."
)
TABLE_COLUMNS = ("name", "rows", "width", "dtype", "pooling", "first values", "features")


def write_page(path: Path, run: RunRecord) -> None:
    """Writes the page. Only logs a warning if that fails: the run must not end."""
    try:
        find_cache(path.parent)
        write_durably(path, render(run).encode())
    except OSError as error:
        path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
        get_logger().warning(
            "the run report was not written; report.json has its figures", path=str(path), error=error.strerror
        )
    except Exception:  # noqa: BLE001 - our bug, logged with its traceback; the run itself succeeded
        get_logger().exception("the run report was not written; report.json has its figures", path=str(path))


def render(run: RunRecord) -> str:
    """Renders the page. Escapes all text, so that users' names and sentences cannot become markup."""
    template = Template(resources.files(__package__ or "").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    begun = continuation(run.report, list(run.starts))
    ranks = grid(RANKS, rank_rows(run.report), "What each rank did")
    return template.substitute(
        name=escape(run.job.job.name),
        outcome=escape(summary_title(run.report).removeprefix("rowcast: ")),
        verdict=(sentence := verdict(run.report)) and f"<p>{escape(sentence)}</p>",
        ended=run.ended_at.strftime("%Y-%m-%d %H:%M UTC"),
        continuation=begun and f'<p class="note">{escape(begun)}</p>',
        key_figures="\n".join(map(key_figure, key_figures(run))),
        charts="\n".join(section(title, plots(section_charts)) for title, section_charts in charts(run).items()),
        summary=pairs(summary_rows(run.report)),
        ranks=section("Ranks", f'<p class="muted">{RANKS_TEXT}</p>\n{ranks}') if len(run.report.ranks) > 1 else "",
        job="\n".join(f"<pre>{escape(text)}</pre>" for text in job_sections(run.job)),
        num_tables=plural(len(run.job.tables), "table"),
        tables=grid(TABLE_COLUMNS, table_rows(run.job), "Tables of the job"),
        machine=pairs(machine_rows(run.report)),
    )


# elements


def section(title: str, content: str) -> str:
    """`content` is HTML."""
    return f"<section>\n  <h2>{escape(title)}</h2>\n{content}\n</section>"


def grid(columns: Iterable[str], rows: Iterable[Sequence[str]], label: str) -> str:
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    lines = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table></div>"
    )


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    return (
        '<dl class="pairs">\n'
        + "\n".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in rows)
        + "\n</dl>"
    )


def key_figure(figure: tuple[str, str, str]) -> str:
    name, value, of = map(escape, figure)
    return f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd class="of">{of}</dd></div>'


def plots(drawn: Sequence[Chart]) -> str:
    return "\n".join(['<div class="plots">', *map(plot, drawn), "</div>"])


def plot(chart: Chart) -> str:
    caption = f"<figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.caption)}</p></figcaption>"
    if not chart.series:
        return f'<figure class="plot">{caption}</figure>'
    label = escape(f"{chart.title}. {chart.text}")
    drawn = chart.svg.replace("<svg", '<svg aria-hidden="true"', 1)
    points = grid([chart.x_label, *chart.series], chart.some_points, f"Some points of: {chart.title}")
    return (
        f'<figure class="plot">{caption}\n'
        f'<div class="drawing" role="img" aria-label="{label}">{drawn}</div>\n'
        f"<details><summary>Some of the points</summary>\n{points}\n</details></figure>"
    )


# content


def charts(run: RunRecord) -> dict[str, list[Chart]]:
    return {
        "Learning": [loss_chart(run), *evaluation_charts(run)],
        "Speed": [samples_chart(run), stalls_chart(run)],
        "Cache and traffic": [hits_chart(run), bytes_chart(run)],
    }


def key_figures(run: RunRecord) -> list[tuple[str, str, str]]:
    """Returns (name, value, explanation) of the figures that readers look for first."""
    report = run.report
    per_step = report.bytes_to_device / max(1, report.steps + report.eval_steps)
    number = partial(metric_text, num_samples=sum(last.num_samples for last in report.evaluations[-1:]))
    figures = [
        ("tables", human_bytes(report.table_bytes), "with optimizer state"),
        ("on the device", human_bytes(report.device_bytes), "at most"),
        ("time", human_seconds(report.wall_s), f"{report.steps + report.eval_steps:,} steps"),
        ("samples a second", human_count(report.samples_per_s), f"{report.samples:,} samples"),
        ("loss", loss_text(report), "of the last 100 steps"),
        ("AUC", number(report.auc), "last evaluation, mean of the labels" if report.tasks else "last evaluation"),
        ("loss of an evaluation" if report.is_own_loss else "log loss", number(report.logloss), "last evaluation"),
        ("normalized entropy", number(report.normalized_entropy), "last evaluation"),
        *((name.upper(), number(value), "last evaluation") for name, value in report.ranking.items()),
        *((name, number(value), "last evaluation") for name, value in report.means.items()),
        ("waited for rows", share(report.stall_share), "of the time"),
        ("hit ratio", UNDEFINED if report.hit_ratio is None else share(report.hit_ratio), "of distinct rows"),
        ("to the device", human_bytes(per_step), "a step"),
    ]
    return [figure for figure in figures if figure[1] != UNDEFINED]


def verdict(report: Report) -> str:
    """Returns a sentence that judges the model by its best evaluation; "" without a log loss to compare it with."""
    best = best_evaluation(report)
    if best is None or best.normalized_entropy is None:
        return ""
    which = "below" if best.normalized_entropy < 1 else "above"
    return (
        f"The best evaluation, after {best.train_step:,} train steps, has a log loss "
        f"{percent(abs(1 - best.normalized_entropy))} {which} that of always answering the share of positive labels."
    )


def loss_text(report: Report) -> str:
    """The mean of the last train steps."""
    return metric_text(report.loss, min(RECENT, report.train_steps) * report.samples // max(1, report.steps))


def job_sections(job: Job) -> list[str]:
    """Lists all values of the job, set or default, as sections of TOML; tables are listed separately."""
    content = msgspec.to_builtins(job)
    del content["tables"], content["tables_from"]
    content["optimizer"]["dense"] = content["optimizer"]["dense"] or "the model's own"
    return [text for name, section in content.items() for text in section_texts(name, section)]


def section_texts(name: str, section: dict[str, Any]) -> Iterator[str]:
    keys = {key: value for key, value in section.items() if value is not None and not isinstance(value, dict)}
    if keys:
        yield "\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items())])
    for key, value in section.items():
        if isinstance(value, dict):
            yield from section_texts(f"{name}.{key}", value)


def toml_value(value: object) -> str:
    """Writes JSON: its strings, numbers and lists are valid TOML."""
    return json.dumps(value, ensure_ascii=False, default=str)


def table_rows(job: Job) -> list[list[str]]:
    return [
        [
            table.name,
            f"{table.num_embeddings:,}",
            f"{table.embedding_dim} + 1" if table.linear else str(table.embedding_dim),
            table.dtype,
            table.pooling,
            table.init,
            ", ".join(table.features),
        ]
        for table in job.tables
    ]


def machine_rows(report: Report) -> list[tuple[str, str]]:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return [
        *report.versions.items(),
        ("device", report.device),
        ("processor", processor()),
        ("cores for the trainer", str(usable_cores())),
        ("memory of the machine", human_bytes(pages * page_bytes)),
        ("system", f"{platform.system()} {platform.release()}"),
    ]


def continuation(report: Report, starts: list[int]) -> str:
    """Returns which steps of the run this process did; "" if all."""
    first = next(iter(starts), 0)
    if not first and len(starts) < 2:
        return ""
    which = f"This process began after train step {first:,}" if first else "This process began the run"
    again = (
        f" and continued from a checkpoint after train step {', '.join(f'{start:,}' for start in starts[1:])}"
        if starts[1:]
        else ""
    )
    return (
        f"{which}{again}; it made {report.steps:,} of the run's {report.train_steps:,} train steps. "
        "Losses and evaluations are those of the whole run; speeds, waits, hits and bytes are those of this process."
    )
