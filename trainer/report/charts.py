"""The charts of `report.html`: learning over the whole run, speed and traffic from the marks of this process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import cycle, pairwise
from math import ceil, isfinite
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np

from rowcast.job.schema import Job
from rowcast.runtime.arrays import F32, F64, I64
from rowcast.runtime.drawing import dress, new_figure, svg_text
from rowcast.runtime.telemetry.format_numbers import human_bytes, human_count, human_seconds, metric_text
from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.report.progress import HistoryMark
from rowcast.trainer.report.report_json import Report
from rowcast.trainer.step.metrics import StallReason

MOST_POINTS = 300  # more cannot be distinguished on a page
MOST_DOTS = 60
SMOOTHED = 20  # a smoothed loss is the mean of about one in this many points
USUAL = 0.99  # the fraction of losses that the axis shows; rare high ones are cut off
TABLE_ROWS = 8
STACKED: tuple[StallReason, ...] = ("rows", "results", "barrier")  # the loop's waits; it has one at a time
BESIDE: dict[StallReason, str] = {"ring": "ring (the sender)"}  # it has a separate thread
AMONG_RANKS: dict[StallReason, str] = {"ranks": "ranks (within steps)"}
LEAST_TOP = 0.05  # of an axis over time, so that small fractions look small
NOTHING = "No step was done."
NO_LEVELS: Mapping[str, float] = {}
MEAN = "The model's own figure: the sum over the weight that its eval_sums gave."
RANK_WAITS = " Within its steps, rank 0 waited for the other ranks: until they had come as far, and for what they sent."

THEME = {  # colour -> the page's variable, which is another colour on a dark screen
    **{"#1d5c9e": "--one", "#a8480c": "--two", "#7aa9d8": "--area-2", "#c9dcef": "--area-3"},
    **{"#1b1c1e": "--text", "#5a5f66": "--muted", "#dfe2e6": "--hair"},
}
ONE, TWO, AREA_2, AREA_3, TEXT, MUTED, HAIR = THEME
LINES = ({"color": ONE, "linewidth": 2}, {"color": TWO, "linewidth": 2, "linestyle": (0, (3, 2))})
AREAS = ((ONE, "-"), (AREA_2, (0, (5, 3))), (AREA_3, (0, (1.5, 2.5))))
LEGEND = {"fontsize": 12, "labelcolor": TEXT, "frameon": False, "borderpad": 0}
INCHES = (6.1, 3.9)

Unit = Literal["steps", "seconds", "count", "share", "bytes", "plain"]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of a run report."""

    job: Job
    report: Report
    losses: F32  # one per train step of the whole run
    evaluations: Sequence[Evaluation]  # those of the whole run
    marks: Sequence[HistoryMark]  # of this process
    starts: Sequence[int]  # train steps of the run before each attempt of this process
    ended_at: datetime  # UTC


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart without series has no data, and its caption explains why."""

    title: str
    caption: str  # its content and how to read it
    mark: Callable[[Any], None] = lambda axes: None  # draws on matplotlib's axes
    x_label: str = "train steps"
    x_unit: Unit = "steps"
    y_unit: Unit = "plain"
    x: F64 = field(default_factory=lambda: np.empty(0))  # [n], of all series
    series: dict[str, F64] = field(default_factory=dict)  # name -> [n]: for the text and the table

    @property
    def svg(self) -> str:
        """A page scales it."""
        figure = new_figure(INCHES)
        axes = figure.subplots()
        self.mark(axes)
        axes.set_xlabel(self.x_label, color=MUTED, fontsize=13)
        for axis, unit in ((axes.xaxis, self.x_unit), (axes.yaxis, self.y_unit)):
            if unit in TICKS:
                axis.set_major_formatter(TICKS[unit])
        axes.tick_params(length=0, pad=8, labelsize=12, labelcolor=MUTED)
        axes.tick_params(axis="x", pad=14)  # its first number is then below the zero of the other axis
        dress(axes, "y", ("top", "right", "left", "bottom"), HAIR)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside upper left", ncols=2, **LEGEND)
        drawn = svg_text(figure, self.title)
        for colour, variable in THEME.items():
            drawn = drawn.replace(colour, f"var({variable})")
        return drawn

    @property
    def text(self) -> str:
        """For readers who cannot see the chart."""
        say, where = WORDS[self.y_unit], WORDS[self.x_unit]
        sentences = [f"Over {self.x_label} from {where(self.x[0])} to {where(self.x[-1])}."]
        for name, y in self.series.items():
            low, high = int(np.argmin(y)), int(np.argmax(y))
            sentences.append(
                f"{name}: first {say(y[0])}, last {say(y[-1])}, least {say(y[low])} at {where(self.x[low])}, "
                f"largest {say(y[high])} at {where(self.x[high])}."
            )
        return " ".join(sentences)

    @property
    def some_points(self) -> list[list[str]]:
        """Rows of a table: x, and the value of each series."""
        chosen = spread(len(self.x), TABLE_ROWS)
        say, where = WORDS[self.y_unit], WORDS[self.x_unit]
        return [[where(float(self.x[i])), *(say(float(y[i])) for y in self.series.values())] for i in chosen]


def spread(number: int, most: int) -> I64:
    """Returns at most `most` of the first `number` whole numbers, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, number - 1, min(most, number)).round().astype(np.int64))


def share(value: float) -> str:
    """Formats a fraction with two significant digits, even a very small one."""
    return f"{100 * value:.1f} %" if value >= 0.01 or not value else f"{100 * value:.2g} %"


WORDS: dict[Unit, Callable[[float], str]] = {
    "steps": lambda value: f"{value:,.0f}",
    "seconds": human_seconds,
    "count": human_count,
    "share": share,
    "bytes": human_bytes,
    "plain": lambda value: f"{value:.4f}",
}  # a number in running text
TICKS: dict[Unit, Callable[[float, int], str]] = {
    "steps": lambda value, _: f"{value:,.0f}",
    "seconds": lambda value, _: human_seconds(value),
    "count": lambda value, _: human_count(value),
    "share": lambda value, _: f"{100 * value:.3g} %",
    "bytes": lambda value, _: f"{human_count(value)}B",
}  # those of other units are matplotlib's


# learning


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Consecutive train steps, grouped so that there are at most MOST_POINTS groups; all arrays are [n]."""

    last: F64  # the last train step of each, from 1
    mean: F64
    low: F64
    high: F64

    @property
    def steps_each(self) -> int:
        """Train steps per bucket; the last one may have fewer."""
        return int(self.last[0])

    def smoothed(self) -> tuple[F64, int]:
        """Returns the mean of each bucket with earlier ones, and how many (fewer at the beginning)."""
        number = max(1, len(self.mean) // SMOOTHED)
        sums = np.concatenate([[0.0], np.cumsum(self.mean)])
        ends = np.arange(1, len(self.mean) + 1)
        begins = np.maximum(ends - number, 0)
        return (sums[ends] - sums[begins]) / (ends - begins), number


def in_buckets(losses: F32) -> Buckets:
    begins = np.arange(0, len(losses), ceil(len(losses) / MOST_POINTS))
    ends = np.append(begins[1:], len(losses))
    return Buckets(
        last=ends.astype(np.float64),
        mean=np.add.reduceat(losses, begins, dtype=np.float64) / (ends - begins),
        low=np.minimum.reduceat(losses, begins).astype(np.float64),
        high=np.maximum.reduceat(losses, begins).astype(np.float64),
    )


def loss_chart(run: RunRecord) -> Chart:
    if not len(run.losses):
        return Chart(title="Loss", caption="No train step was done.")
    if num_lost := np.count_nonzero(~np.isfinite(run.losses)):
        return Chart(title="Loss", caption=f"{num_lost:,} of {len(run.losses):,} losses are not finite.")
    buckets = in_buckets(run.losses)
    smooth, number = buckets.smoothed()
    highest, low, cut = float(buckets.high.max()), float(buckets.low.min()), ""
    top = float(np.quantile(buckets.high, USUAL, method="higher"))
    if highest > top:
        step = int(buckets.last[int(np.argmax(buckets.high))])
        cut = f" The axis cuts off rare high ones: the highest is {highest:.4g}, by step {step:,}."

    def mark(axes: Any) -> None:
        if buckets.steps_each > 1:
            name = f"lowest to highest of {buckets.steps_each:,} steps"
            axes.fill_between(buckets.last, buckets.low, buckets.high, color=ONE, alpha=0.17, linewidth=0, label=name)
        else:
            axes.plot(buckets.last, buckets.mean, color=MUTED, linewidth=1, alpha=0.75, label="each step")
        axes.plot(buckets.last, smooth, **LINES[0], label=f"mean of the last {number * buckets.steps_each:,} steps")
        mark_steps(axes, run)
        axes.set_ylim(low, top if low < top else None)

    return Chart(
        title="Loss",
        caption="Binary cross entropy of each train step, or the model's own loss, mean over its samples." + cut,
        mark=mark,
        x=buckets.last,
        series={"smoothed": smooth, "mean" if buckets.steps_each > 1 else "loss": buckets.mean},
    )


def mark_steps(axes: Any, run: RunRecord) -> None:
    """Shows all train steps of the run, and where this process began."""
    axes.set_xlim(0, max([len(run.losses), 1, *(evaluation.train_step for evaluation in run.evaluations)]))
    for number, start in enumerate(sorted({start for start in run.starts if start})):
        label = {} if number else {"label": "this process continued here"}
        axes.axvline(start, color=TEXT, linewidth=1, linestyle=(0, (2, 3)), **label)


def evaluation_charts(run: RunRecord) -> list[Chart]:
    """AUC and log loss, then a chart for each of several labels, each k of eval.ranks, and each of eval_names."""
    last = run.evaluations[-1] if run.evaluations else None
    tasks, ranking, means = (last.tasks, last.ranking, last.means) if last else ([], {}, {})
    is_own_loss = any(evaluation.is_own_loss for evaluation in run.evaluations if evaluation.logloss is not None)
    title, what = "Log loss", "Mean binary cross entropy"
    if is_own_loss:
        title, what = "Loss of evaluations", "Mean of the model's own loss"
    auc = "Area under the ROC curve on the evaluation samples: 0.5 is guessing, 1 is a perfect order."
    mean = " It is the mean of the AUCs of all labels." if tasks else ""
    loss = f"{what} on the evaluation samples; where it rises while the loss falls, the model overfits."
    known = "Area under the ROC curve on the evaluation samples whose label {} is known."
    best = "Mean over the positives of the evaluation; 1 is a positive that scores more than all other candidates."
    return [
        evaluation_chart(run, "AUC", auc + mean, [evaluation.auc for evaluation in run.evaluations]),
        evaluation_chart(run, title, loss, [evaluation.logloss for evaluation in run.evaluations], constant(run)),
        *(
            evaluation_chart(
                run,
                f"AUC of {task.label}",
                known.format(task.label),
                [evaluation.tasks[i].auc for evaluation in run.evaluations],
            )
            for i, task in enumerate(tasks)
        ),
        *(
            evaluation_chart(run, name.upper(), best, [evaluation.ranking.get(name) for evaluation in run.evaluations])
            for name in ranking
            if name.startswith("ndcg@")
        ),
        *(
            evaluation_chart(run, name, MEAN, [evaluation.means.get(name) for evaluation in run.evaluations])
            for name in means
        ),
    ]


def constant(run: RunRecord) -> dict[str, float]:
    """Returns the log loss of always answering the share of positive labels, if an evaluation has it."""
    known = [(last.logloss, last.normalized_entropy) for last in run.evaluations]
    levels = [loss / entropy for loss, entropy in known if loss is not None and entropy]
    return {"always the share of positives": levels[-1]} if levels else {}


def evaluation_chart(
    run: RunRecord, title: str, caption: str, values: Sequence[float | None], levels: Mapping[str, float] = NO_LEVELS
) -> Chart:
    """`values`: of each evaluation. `levels`: to compare them with."""
    steps = [evaluation.train_step for evaluation in run.evaluations]
    pairs = zip(steps, values, strict=True)
    points = np.array([(step, number) for step, number in pairs if number is not None and isfinite(number)], np.float64)
    if not len(points):
        why = (
            "Every evaluation had labels of one kind only, outputs that are no logits, no weight, or a value that is "
            "not finite."
            if run.evaluations
            else "No evaluation was made; data.eval_fraction makes some."
        )
        return Chart(title=title, caption=why)
    if len(points) == 1:
        [(step, value)] = points
        text = partial(metric_text, num_samples=run.evaluations[-1].num_samples)
        compared = "".join(f"; {text(level)} is {name}" for name, level in levels.items())
        return Chart(title=title, caption=f"{text(value)} after {step:,.0f} train steps{compared}. {caption}")
    x, y = points[spread(len(points), MOST_POINTS)].T

    def mark(axes: Any) -> None:
        dots = {"marker": "o", "markersize": 7} if len(y) <= MOST_DOTS else {}
        axes.plot(x, y, **LINES[0], **dots, clip_on=False, label="each evaluation")
        for name, level in levels.items():
            axes.axhline(level, **LINES[1], label=name)
        mark_steps(axes, run)

    return Chart(
        title=title,
        caption=caption,
        mark=mark,
        x=x,
        series={title: y},
    )


# speed and traffic: each value is the mean between two marks


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Intervals between marks: `edges` [n + 1], seconds since the first step; the marks before and after each."""

    edges: F64
    pairs: list[tuple[HistoryMark, HistoryMark]]

    def ratio(self, name: str, to: str) -> F64:
        return self.gain(attrgetter(name)) / self.gain(attrgetter(to))

    def gain(self, count: Callable[[HistoryMark], float]) -> F64:
        return np.array([count(last) - count(first) for first, last in self.pairs], np.float64)

    def stalled(self, reason: StallReason) -> F64:
        index = get_args(StallReason).index(reason)
        return self.gain(lambda mark: mark.stalls[index]) / self.gain(attrgetter("time_s"))


def intervals(marks: Sequence[HistoryMark], grows: str) -> Intervals | None:
    """Returns the intervals between marks in which the counter `grows` grew; None if it never did."""
    kept: list[HistoryMark] = []
    for mark in marks:
        if not kept or getattr(mark, grows) > getattr(kept[-1], grows):
            kept.append(mark)
    if len(kept) < 2:
        return None
    kept = [*kept[: -1 : ceil(len(kept) / MOST_POINTS)], kept[-1]]
    return Intervals(
        edges=np.array([mark.time_s - kept[0].time_s for mark in kept], np.float64), pairs=list(pairwise(kept))
    )


def timed_chart(
    title: str,
    caption: str,
    between: Intervals,
    unit: Unit,
    series: dict[str, F64],
    top: float | None = None,
    mark: Callable[[Any], None] | None = None,
) -> Chart:
    """By default with a line for each of the series. `top`: of the axis."""

    def lines(axes: Any) -> None:
        for (name, y), look in zip(series.items(), cycle(LINES), strict=False):
            axes.stairs(y, between.edges, baseline=None, **look, **({"label": name} if len(series) > 1 else {}))

    def from_zero(axes: Any) -> None:
        (mark or lines)(axes)
        axes.set(xlim=(0, between.edges[-1]), ylim=(0, top or max(axes.get_ylim()[1], LEAST_TOP)))

    return Chart(
        title=title,
        caption=caption,
        mark=from_zero,
        x_label="time since the first step",
        x_unit="seconds",
        y_unit=unit,
        x=between.edges[1:],
        series=series,
    )


def samples_chart(run: RunRecord) -> Chart:
    if (between := intervals(run.marks, "time_s")) is None:
        return Chart(title="Samples a second", caption=NOTHING)
    caption = "An evaluation has no backward pass and no update, and so takes more of them."
    series = {"trained": between.ratio("samples", "time_s"), "evaluated": between.ratio("eval_samples", "time_s")}
    return timed_chart("Samples a second", caption, between, "count", series)


def stalls_chart(run: RunRecord) -> Chart:
    if (between := intervals(run.marks, "time_s")) is None:
        return Chart(title="Waits, as a share of time", caption=NOTHING)
    among_ranks = len(run.report.ranks) > 1
    beside = BESIDE | (AMONG_RANKS if among_ranks else {})
    series: dict[str, F64] = {reason: between.stalled(reason) for reason in (*STACKED, *beside)}
    tops = np.cumsum([series[reason] for reason in STACKED], axis=0)

    def mark(axes: Any) -> None:
        floors = [np.zeros_like(tops[0]), *tops[:-1]]
        for reason, low, high, (colour, edge) in zip(STACKED, floors, tops, AREAS, strict=True):
            look = {"facecolor": colour, "edgecolor": TEXT, "linewidth": 0.75, "linestyle": edge}
            axes.stairs(high, between.edges, baseline=low, fill=True, label=reason, **look)
        for (reason, name), look in zip(beside.items(), reversed(LINES), strict=False):
            axes.stairs(series[reason], between.edges, baseline=None, label=name, **look)

    caption = (
        "The main loop waited for rows, for results of the device, or at the barrier of a checkpoint; these waits add "
        "up. In parallel, the sender waited for space in the ring. Waits for rows: enlarge the cache, or give the "
        "prefetcher more cores." + (RANK_WAITS if among_ranks else "")
    )
    return timed_chart("Waits, as a share of time", caption, between, "share", series, mark=mark)


def hits_chart(run: RunRecord) -> Chart:
    if (between := intervals(run.marks, "unique_rows")) is None:
        return Chart(title="Hit ratio", caption="No row was looked up.")
    caption = (
        "Distinct rows of a step that were on the device when it was planned. Low: the cache is small for this data."
    )
    return timed_chart(
        "Hit ratio", caption, between, "share", {"hit ratio": between.ratio("hits", "unique_rows")}, top=1.0
    )


def bytes_chart(run: RunRecord) -> Chart:
    if (between := intervals(run.marks, "steps")) is None:
        return Chart(title="Bytes a step", caption=NOTHING)
    series = {
        "to the device": between.ratio("bytes_to_device", "steps"),
        "from the device": between.ratio("bytes_from_device", "steps"),
    }
    return timed_chart("Bytes a step", "Rows and plans there, trained rows back.", between, "bytes", series)
