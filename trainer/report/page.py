"""Writes `report.html`, one self-contained page about a run, without scripts or network requests."""

import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from rowcast.job.schema import Job
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.drawing import find_cache
from rowcast.runtime.machine import processor, usable_cores
from rowcast.runtime.telemetry.format_numbers import human_bytes, human_count, human_seconds, plural
from rowcast.runtime.telemetry.logs import get_logger
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
from rowcast.trainer.report.report_json import Report
from rowcast.trainer.report.summary import RANKS, rank_rows, summary_rows, summary_title

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
        ended=run.ended_at.strftime("%Y-%m-%d %H:%M UTC"),
        continuation=begun and f'<p class="note">{escape(begun)}</p>',
        key_figures="\n".join(map(key_figure, key_figures(run))),
        charts="\n".join(section(title, plots(found)) for title, found in charts(run).items()),
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


def plots(found: Sequence[Chart]) -> str:
    return "\n".join(['<div class="plots">', *map(plot, found), "</div>"])


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
    found = [
        ("tables", human_bytes(report.table_bytes), "with optimizer state"),
        ("on the device", human_bytes(report.device_bytes), "at most"),
        ("time", human_seconds(report.wall_s), f"{report.steps + report.eval_steps:,} steps"),
        ("samples a second", human_count(report.samples_per_s), f"{report.samples:,} samples"),
        ("loss", number(report.loss), "of the last 100 steps"),
        ("AUC", number(report.auc), "last evaluation, mean of the labels" if report.tasks else "last evaluation"),
        ("loss of an evaluation" if report.is_own_loss else "log loss", number(report.logloss), "last evaluation"),
        ("normalized entropy", number(report.normalized_entropy), "last evaluation"),
        *((name.upper(), number(value), "last evaluation") for name, value in report.ranking.items()),
        *((name, number(value), "last evaluation") for name, value in report.means.items()),
        ("waited for rows", share(report.stall_share), "of the time"),
        ("hit ratio", "none" if report.hit_ratio is None else share(report.hit_ratio), "of distinct rows"),
        ("to the device", human_bytes(per_step), "a step"),
    ]
    return [figure for figure in found if figure[1] != "none"]


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


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
    """Says which steps of the run this process did; "" if all."""
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
