"""The page about a run: what it says, that it needs nothing but itself, and that no run is lost for it."""

import re
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.job.file import load_job, parse_job
from rowcast.runtime.drawing import new_figure
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation
from rowcast.trainer.report import page
from rowcast.trainer.report.charts import (
    MOST_POINTS,
    Chart,
    RunRecord,
    evaluation_charts,
    in_buckets,
    loss_chart,
    stalls_chart,
)
from rowcast.trainer.report.page import charts, job_sections, render, write_page
from rowcast.trainer.report.progress import MAX_MARKS, HistoryMark
from rowcast.trainer.report.report_json import make_report
from rowcast.trainer.step.metrics import new_counters
from tests.support import three_steps
from tests.support.three_steps import facts

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "demo.toml"
VOID = {"meta", "link"}


def mark(number: int) -> HistoryMark:
    """After `number` seconds, each of 10 steps of 64 samples."""
    return HistoryMark(
        time_s=100.0 + number,
        train_step=10 * number,
        train_steps=10 * number,
        steps=10 * number,
        samples=640 * number,
        eval_samples=64 * number,
        stalls=(0.1 * number, 0.02 * number, 0.3 * number, 0.05 * number, 0.04 * number),
        unique_rows=1000 * number,
        hits=750 * number,
        bytes_to_device=2**20 * number,
        bytes_from_device=2**19 * number,
    )


def record(
    *, losses: int = 50, evaluations: int = 3, marks: int = 6, starts: tuple[int, ...] = (0,), name: str = "a job"
) -> RunRecord:
    _, counters = three_steps.run_of_three_steps() if losses else (None, new_counters(three_steps.groups()))
    results = [
        Evaluation(train_step=10 * (i + 1), num_samples=452, auc=0.6 + 0.05 * i, logloss=0.7 - 0.05 * i, accuracy=0.8)
        for i in range(evaluations)
    ]
    rng = np.random.default_rng(0)
    return RunRecord(
        job=load_job(JOB, (f'job.name="{name}"',)),
        report=make_report(counters, **facts(evaluation=results[-1] if results else None, train_steps=losses)),
        losses=(
            0.7 - 0.2 * np.arange(losses, dtype=np.float32) / max(1, losses) + 0.02 * rng.standard_normal(losses)
        ).astype(np.float32),
        evaluations=results,
        marks=[mark(number) for number in range(marks)],
        starts=starts,
        ended_at=datetime(2026, 2, 3, 4, 5, tzinfo=UTC),
    )


class Page(HTMLParser):
    """A page's elements, with every tag closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += f"{data} "

    def found(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def plots(self) -> list[dict[str, str | None]]:
        return [drawing for drawing in self.found("div") if drawing.get("role") == "img"]


def all_charts(run: RunRecord) -> list[Chart]:
    return [chart for found in charts(run).values() for chart in found]


def text(run: RunRecord) -> str:
    return " ".join(Page(render(run)).words.split())


# what it says


def test_the_page_answers_first_what_a_person_asks_first() -> None:
    words = text(record())
    assert "a job rowcast run, finished after 50 steps (2 of this process) in 4.0 s ended 2026-02-03 04:05 UTC" in words
    for answer in (
        "samples a second 16 64 samples",
        "AUC 0.700 last evaluation",
        "hit ratio 60.0 %",
        "waited for rows 0.0 % of the time",
    ):
        assert answer in words


def test_every_plot_has_a_table_and_a_text_with_its_main_values() -> None:
    made = Page(render(record()))
    assert len(made.plots) == 7
    assert len(made.found("svg")) == len(made.plots)
    for plot in made.plots:
        label = plot["aria-label"] or ""
        assert re.search(r"first \S+.*, last \S+.*, least \S+.* at .*, largest \S+.* at ", label), label
    assert made.words.count("Some of the points") == len(made.plots)
    auc = next(plot["aria-label"] or "" for plot in made.plots if (plot["aria-label"] or "").startswith("AUC"))
    assert "AUC: first 0.6000, last 0.7000, least 0.6000 at 10, largest 0.7000 at 30." in auc


def test_the_job_is_shown_as_it_was_read_and_can_be_read_again() -> None:
    job = load_job(JOB, ("data.batch_size=77",))
    content: dict[str, Any] = tomllib.loads("\n".join(job_sections(job)))
    assert content["data"]["batch_size"] == 77
    assert content["checkpoint"]["keep"] == 2, "a value by default is there as well"
    again = parse_job({**content, "tables": msgspec.to_builtins(job.tables)})
    assert again == job


def test_what_this_process_did_not_see_is_said() -> None:
    assert "This process began" not in text(record())
    words = text(record(starts=(20,)))
    assert (
        "This process began after train step 20; it made 2 of the run's 50 train steps. "
        "Losses and evaluations are those of the" in words
    )
    assert "this process continued here" in words
    words = text(record(starts=(0, 20, 30)))
    assert "This process began the run and continued from a checkpoint after train step 20, 30; it made" in words


# that it needs nothing but itself


def test_nothing_is_asked_for_over_a_network_and_nothing_runs() -> None:
    html = render(record())
    made = Page(html)
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import", html)
    assert not {"script", "iframe", "img", "object", "embed", "form", "base"} & {tag for tag, _ in made.elements}
    assert [link["href"] for link in made.found("link")] == ["data:,"]
    assert not [name for _, attributes in made.elements for name in attributes if name.startswith("on")]
    policy = next(meta["content"] for meta in made.found("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_names_and_sentences_of_users_stay_text() -> None:
    hostile = "<script>alert(1)</script><b a='"
    run = record(name=hostile)
    report = msgspec.structs.replace(run.report, stopped_by='"><script>x</script>', finished=False)
    evaluations = [
        msgspec.structs.replace(
            own,
            tasks=(TaskEvaluation(label=hostile, num_labels=4, auc=0.5, logloss=0.6),),
            means={f"$own {hostile}$": 0.5, "never": None},
        )
        for own in run.evaluations
    ]
    html = render(replace(run, report=report, evaluations=evaluations))
    made = Page(html)
    assert f"AUC of {hostile}" in made.words
    assert f"$own {hostile}$" in made.words
    assert "no weight" in made.words
    assert len(made.plots) == len(Page(render(run)).plots) + 2, "a label and a figure with weight"
    assert not made.found("script")
    assert hostile in made.words
    assert '"><script>x</script>' in made.words
    assert html.count("<script") == 0


# runs of every length


def test_a_run_without_a_step_says_so_in_every_plot() -> None:
    run = record(losses=0, evaluations=0, marks=0, starts=())
    assert not any(chart.series for chart in all_charts(run))
    made = Page(render(run))
    assert made.plots == []
    assert "No train step was done." in made.words
    assert "nan" not in made.words


def test_a_page_is_small_however_long_the_run_was() -> None:
    run = record(losses=2_000_000, evaluations=20_000, marks=MAX_MARKS)
    assert len(render(run)) < 300_000


@pytest.mark.parametrize("losses", [1, 2, MOST_POINTS - 1, MOST_POINTS, MOST_POINTS + 1, 12_345])
def test_buckets_take_every_loss_once(losses: int) -> None:
    values = np.random.default_rng(losses).random(losses, np.float32)
    buckets = in_buckets(values)
    assert len(buckets.last) == losses if losses <= MOST_POINTS else MOST_POINTS / 2 <= len(buckets.last) <= MOST_POINTS
    assert buckets.last[-1] == losses
    assert (buckets.low.min(), buckets.high.max()) == (values.min(), values.max())
    sizes = np.diff([0, *buckets.last])
    assert np.sum(buckets.mean * sizes) == pytest.approx(np.sum(values, dtype=np.float64), rel=1e-6)
    smooth, number = buckets.smoothed()
    assert smooth[-1] == pytest.approx(np.mean(buckets.mean[-number:]))
    assert smooth[0] == buckets.mean[0]


def test_rare_high_losses_do_not_flatten_the_others_and_are_told() -> None:
    run = record(losses=200)
    run.losses[3] = 50.0
    chart = loss_chart(run)
    axes = new_figure((5, 3)).subplots()
    chart.mark(axes)
    assert axes.get_ylim()[1] < 2
    assert "the highest is 50, by step 4." in chart.caption
    assert "largest 50.0000 at 4" in chart.text


# what the plots show


def test_speeds_waits_hits_and_bytes_are_those_between_two_marks() -> None:
    run = record()
    tables = {chart.title: chart for chart in all_charts(run)}
    assert tables["Samples a second"].some_points[0] == ["1.0 s", "640", "64"]
    assert [*tables["Waits, as a share of time"].series] == ["rows", "results", "barrier", "ring"]
    assert tables["Waits, as a share of time"].some_points[-1] == ["5.0 s", "10.0 %", "30.0 %", "5.0 %", "2.0 %"]
    assert tables["Hit ratio"].some_points[-1] == ["5.0 s", "75.0 %"]
    assert tables["Bytes a step"].some_points[-1] == ["5.0 s", "102.4 KiB", "51.2 KiB"]


def test_the_loops_waits_lie_on_top_of_each_other() -> None:
    axes = new_figure((5, 3)).subplots()
    stalls_chart(record()).mark(axes)
    steps = {patch.get_label(): patch.get_data() for patch in axes.patches}
    assert [*steps] == ["rows", "results", "barrier", "ring (the sender)"]
    assert [steps[name].values[-1] for name in ("rows", "results", "barrier")] == pytest.approx([0.1, 0.4, 0.45])
    assert [steps[name].baseline[-1] for name in ("rows", "results", "barrier")] == pytest.approx([0.0, 0.1, 0.4])


def test_of_several_ranks_the_page_has_a_table_and_the_waits_for_each_other() -> None:
    run = record()
    (own,) = run.report.ranks
    other = msgspec.structs.replace(own, rank=1, samples=4321)
    run = replace(run, report=msgspec.structs.replace(run.report, ranks=(own, other)))
    chart = stalls_chart(run)
    assert chart.some_points[-1] == ["5.0 s", "10.0 %", "30.0 %", "5.0 %", "2.0 %", "4.0 %"]
    page = render(run)
    assert "<h2>Ranks</h2>" in page
    assert "ring (the sender)" in page
    assert "ranks (within steps)" in page
    assert "4,321" in page
    assert "<h2>Ranks</h2>" not in render(record())


def test_time_in_which_no_step_ended_makes_no_division_by_zero() -> None:
    run = record()
    still = [mark(5), *(replace(mark(5), time_s=105.0 + i) for i in range(1, 4))]
    run = replace(run, marks=[*run.marks, *still])
    assert all(np.isfinite(y).all() for chart in all_charts(run) for y in chart.series.values())


def test_values_that_are_not_finite_are_said_or_left_out_and_the_page_is_made() -> None:
    run = record()
    losses = run.losses.copy()
    losses[3:5] = np.nan, np.inf
    run = replace(
        run,
        losses=losses,
        evaluations=[msgspec.structs.replace(run.evaluations[0], logloss=np.nan), *run.evaluations[1:]],
    )
    assert "2 of 50 losses are not finite." in Page(render(run)).words
    alone = [msgspec.structs.replace(own, logloss=np.nan) for own in run.evaluations]
    assert any("not finite" in chart.caption for chart in all_charts(replace(run, evaluations=alone)))


def test_evaluations_with_labels_of_one_kind_have_no_auc() -> None:
    alone = [Evaluation(train_step=5, auc=None, logloss=0.5, accuracy=1.0)]
    chart = evaluation_charts(replace(record(), evaluations=alone))[0]
    assert not chart.series
    assert "labels of one kind" in chart.caption


def test_one_evaluation_is_a_figure_and_several_are_compared_with_a_constant_answer() -> None:
    better = Evaluation(train_step=5, num_samples=10_000, auc=0.7, logloss=0.45, accuracy=0.8, normalized_entropy=0.9)
    run = replace(record(), evaluations=[better])
    auc, loss = evaluation_charts(run)
    assert (auc.series, loss.series) == ({}, {})
    assert auc.caption.startswith("0.7000 after 5 train steps. ")
    assert loss.caption.startswith("0.4500 after 5 train steps; 0.5000 is always the share of positives. ")
    several = [better, msgspec.structs.replace(better, train_step=9)]
    axes = new_figure((5, 3)).subplots()
    evaluation_charts(replace(run, evaluations=several))[1].mark(axes)
    assert [*axes.lines[1].get_ydata()] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(("entropy", "words"), [(0.9, "10.0 % below"), (1.25, "25.0 % above"), (None, "")])
def test_the_page_has_a_verdict_in_a_sentence(entropy: float | None, words: str) -> None:
    run = record()
    best = Evaluation(train_step=1234, auc=0.7, logloss=0.45, accuracy=0.8, normalized_entropy=entropy)
    report = msgspec.structs.replace(run.report, evaluations=(best, *run.report.evaluations), best_train_step=1234)
    said = Page(render(replace(run, report=report))).words
    assert (f"The best evaluation, after 1,234 train steps, has a log loss {words} that of" in said) == bool(words)
    assert ("that of always answering the share of positive labels." in said) == bool(words)


# no run is lost for it


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer")
    write_page(tmp_path / "no folder" / "report.html", record())
    assert "the run report was not written; report.json has its figures" in capsys.readouterr().err


def test_a_disk_that_is_full_leaves_no_part_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        path.with_name(f"{path.name}.partial").write_bytes(content[:10])
        raise OSError(28, "No space left on device")

    setup_logging("trainer")
    monkeypatch.setattr(page, "write_durably", full)
    write_page(tmp_path / "report.html", record())
    assert list(tmp_path.iterdir()) == []


def test_a_bug_in_the_page_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(run: RunRecord) -> str:
        raise ZeroDivisionError("a bug")

    setup_logging("trainer")
    monkeypatch.setattr(page, "render", broken)
    write_page(tmp_path / "report.html", record())
    assert "ZeroDivisionError" in capsys.readouterr().err
