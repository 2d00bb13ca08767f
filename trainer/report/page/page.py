"""Writes `report.html`, one self-contained page about a run, without scripts or network requests."""

from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.telemetry.format_numbers import human_bytes, human_count, human_seconds
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.report.page.axis import share
from rowcast.trainer.report.page.chart import Chart, NoChart
from rowcast.trainer.report.page.facts import continuation, job_sections, machine_rows, table_rows
from rowcast.trainer.report.page.learning import auc_chart, logloss_chart, loss_chart, ndcg_charts, task_auc_charts
from rowcast.trainer.report.page.record import RunRecord
from rowcast.trainer.report.page.speed import bytes_chart, hits_chart, samples_chart, stalls_chart
from rowcast.trainer.report.summary import RANKS, rank_rows, summary_rows, summary_title

TEMPLATE = "page.html"
SECTIONS = {
    "Learning": (loss_chart, auc_chart, logloss_chart),
    "Speed": (samples_chart, stalls_chart),
    "Cache and traffic": (hits_chart, bytes_chart),
}


def write_page(path: Path, run: RunRecord) -> None:
    """Writes the page. Only logs a warning if that fails: the run must not end."""
    try:
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
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        resources.files(__package__ or "").joinpath(TEMPLATE).read_text(encoding="utf-8")
    )
    page = template.render(
        name=run.job.job.name,
        outcome=summary_title(run.report).removeprefix("rowcast: "),
        ended=run.ended_at.strftime("%Y-%m-%d %H:%M UTC"),
        continuation=continuation(run.report, list(run.starts)),
        key_figures=key_figures(run),
        sections={name: charts(run, name) for name in SECTIONS},
        summary=summary_rows(run.report),
        rank_names=RANKS,
        ranks=rank_rows(run.report) if len(run.report.ranks) > 1 else [],
        tables=table_rows(run.job),
        job=job_sections(run.job),
        machine=machine_rows(run.report),
    )
    return page.strip() + "\n"


def charts(run: RunRecord, section: str) -> list[Chart | NoChart]:
    found = [chart(run) for chart in SECTIONS[section]]
    return [*found, *task_auc_charts(run), *ndcg_charts(run)] if section == "Learning" else found


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
        ("waited for rows", share(report.stall_share), "of the time"),
        ("hit ratio", "none" if report.hit_ratio is None else share(report.hit_ratio), "of distinct rows"),
        ("to the device", human_bytes(per_step), "a step"),
    ]
    return [figure for figure in found if figure[1] != "none"]


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
