"""The charts of `report.html`: learning over the whole run, speed and traffic from the marks of this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import cycle, pairwise
from math import ceil, isfinite
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np

from rowcast.job.schema import Job
from rowcast.runtime.arrays import F32, F64, I64
from rowcast.runtime.drawing import dress, new_figure, set_ticks, svg_text
from rowcast.runtime.telemetry.format_numbers import UNITS, human_bytes, human_count, human_seconds
from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.report.progress import HistoryMark
from rowcast.trainer.report.report_json import Report
from rowcast.trainer.step.metrics import StallReason

MOST_POINTS = 300  # more cannot be distinguished on a page
MOST_DOTS = 60
SMOOTHED = 20  # a smoothed loss is the mean of about one in this many points
USUAL = 0.98  # the fraction of losses that the axis must show; rare high ones may be cut off
TABLE_ROWS = 8
STACKED: tuple[StallReason, ...] = ("rows", "results", "barrier")  # the loop's waits; it has one at a time
BESIDE: dict[StallReason, str] = {"ring": "ring (the sender)"}  # it has a separate thread
AMONG_RANKS: dict[StallReason, str] = {"ranks": "ranks (within steps)"}
LEAST_TOP = 0.05  # least top of an axis of fractions, so that small fractions look small
NOTHING = "No step was done."
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
# what an axis counts if its end is at least twice as large, and how; of a share, the only one
SCALES: dict[Unit, Sequence[tuple[float, str]]] = {
    "seconds": ((86400, " d"), (3600, " h"), (60, " min"), (1, " s")),
    "bytes": (*((size, f" {name}") for size, name in UNITS), (1, " B")),
    "share": ((0.01, " %"),),
}


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
    """One without series has no data, and its caption says why."""

    title: str
    caption: str  # its content and how to read it
    mark: Callable[[Any], None] = lambda axes: None  # draws on matplotlib's axes
    x_label: str = ""
    x_unit: Unit = "steps"
    y_unit: Unit = "plain"
    x_end: float = 1.0  # the axis begins at 0
    y_range: tuple[float, float] = (0.0, 1.0)  # to be shown at least
    x: F64 = field(default_factory=lambda: np.empty(0))  # [n], of all series
    series: dict[str, F64] = field(default_factory=dict)  # name -> [n]: for the text and the table

    @property
    def svg(self) -> str:
        """A page scales it."""
        figure = new_figure(INCHES)
        axes = figure.subplots()
        self.mark(axes)
        axes.set(xlim=(0, self.x_end), ylim=self.y_range)
        axes.set_xlabel(self.x_label, color=MUTED, fontsize=13)
        for axis, unit, top in ((axes.xaxis, self.x_unit, self.x_end), (axes.yaxis, self.y_unit, self.y_range[1])):
            factor, suffix = next((own for own in SCALES.get(unit, ()) if top >= 2 * own[0]), (1, ""))
            set_ticks(axis, factor, suffix)
        axes.set_xlim(0, self.x_end)
        axes.tick_params(length=0, pad=8, labelsize=12, labelcolor=MUTED)
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
    highest, usual, low = float(buckets.high.max()), float(np.quantile(buckets.high, USUAL)), float(buckets.low.min())
    top, cut = min(highest, usual + (usual - low)), ""
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
        mark_starts(axes, run)

    return Chart(
        title="Loss",
        caption="Binary cross entropy of each train step, or the model's own loss, mean over its samples." + cut,
        mark=mark,
        x_label="train steps",
        x_end=last_step(run),
        y_range=with_room(low, top),
        x=buckets.last,
        series={"smoothed": smooth, "mean" if buckets.steps_each > 1 else "loss": buckets.mean},
    )


def mark_starts(axes: Any, run: RunRecord) -> None:
    for number, start in enumerate(sorted({start for start in run.starts if start})):
        label = {} if number else {"label": "this process continued here"}
        axes.axvline(start, color=TEXT, linewidth=1, linestyle=(0, (2, 3)), **label)


def last_step(run: RunRecord) -> float:
    return float(max([len(run.losses), 1, *(evaluation.train_step for evaluation in run.evaluations)]))


def evaluation_charts(run: RunRecord) -> list[Chart]:
    """AUC and log loss, then a chart for each of several labels, and for each k of eval.ranks."""
    tasks, ranking = (run.evaluations[-1].tasks, run.evaluations[-1].ranking) if run.evaluations else ([], {})
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
        evaluation_chart(run, "AUC", auc + mean, [own.auc for own in run.evaluations]),
        evaluation_chart(run, title, loss, [own.logloss for own in run.evaluations]),
        *(
            evaluation_chart(
                run, f"AUC of {task.label}", known.format(task.label), [own.tasks[i].auc for own in run.evaluations]
            )
            for i, task in enumerate(tasks)
        ),
        *(
            evaluation_chart(run, name.upper(), best, [own.ranking.get(name) for own in run.evaluations])
            for name in ranking
            if name.startswith("ndcg@")
        ),
    ]


def evaluation_chart(run: RunRecord, title: str, caption: str, values: Sequence[float | None]) -> Chart:
    """`values`: of each evaluation."""
    steps = [own.train_step for own in run.evaluations]
    pairs = zip(steps, values, strict=True)
    found = np.array([(step, number) for step, number in pairs if number is not None and isfinite(number)], np.float64)
    if not len(found):
        why = (
            "Every evaluation had labels of one kind only, outputs that are no logits, or a value that is not finite."
            if run.evaluations
            else "No evaluation was made; data.eval_fraction makes some."
        )
        return Chart(title=title, caption=why)
    x, y = found[spread(len(found), MOST_POINTS)].T

    def mark(axes: Any) -> None:
        dots = {"marker": "o", "markersize": 7} if len(y) <= MOST_DOTS else {}
        axes.plot(x, y, **LINES[0], **dots, clip_on=False, label="each evaluation")
        mark_starts(axes, run)

    return Chart(
        title=title,
        caption=caption,
        mark=mark,
        x_label="train steps",
        x_end=last_step(run),
        y_range=with_room(float(y.min()), float(y.max())),
        x=x,
        series={title: y},
    )


def with_room(low: float, high: float) -> tuple[float, float]:
    """On both sides if all values are equal."""
    room = 0.0 if low < high else abs(low) / 10 or 1.0
    return low - room, high + room


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
    found: Intervals,
    unit: Unit,
    series: dict[str, F64],
    top: float | None = None,
    mark: Callable[[Any], None] | None = None,
) -> Chart:
    """By default with a line for each of the series."""

    def lines(axes: Any) -> None:
        for (name, y), look in zip(series.items(), cycle(LINES), strict=False):
            axes.stairs(y, found.edges, baseline=None, **look, **({"label": name} if len(series) > 1 else {}))

    return Chart(
        title=title,
        caption=caption,
        mark=mark or lines,
        x_label="time since the first step",
        x_unit="seconds",
        x_end=float(found.edges[-1]),
        y_unit=unit,
        y_range=(0.0, top or max(float(y.max()) for y in series.values()) or 1.0),
        x=found.edges[1:],
        series=series,
    )


def samples_chart(run: RunRecord) -> Chart:
    if (found := intervals(run.marks, "time_s")) is None:
        return Chart(title="Samples a second", caption=NOTHING)
    caption = "An evaluation has no backward pass and no update, and so takes more of them."
    series = {"trained": found.ratio("samples", "time_s"), "evaluated": found.ratio("eval_samples", "time_s")}
    return timed_chart("Samples a second", caption, found, "count", series)


def stalls_chart(run: RunRecord) -> Chart:
    if (found := intervals(run.marks, "time_s")) is None:
        return Chart(title="Waits, as a share of time", caption=NOTHING)
    among_ranks = len(run.report.ranks) > 1
    beside = BESIDE | (AMONG_RANKS if among_ranks else {})
    series: dict[str, F64] = {reason: found.stalled(reason) for reason in (*STACKED, *beside)}
    tops = np.cumsum([series[reason] for reason in STACKED], axis=0)

    def mark(axes: Any) -> None:
        floors = [np.zeros_like(tops[0]), *tops[:-1]]
        for reason, low, high, (colour, edge) in zip(STACKED, floors, tops, AREAS, strict=True):
            look = {"facecolor": colour, "edgecolor": TEXT, "linewidth": 0.75, "linestyle": edge}
            axes.stairs(high, found.edges, baseline=low, fill=True, label=reason, **look)
        for (reason, name), look in zip(beside.items(), reversed(LINES), strict=False):
            axes.stairs(series[reason], found.edges, baseline=None, label=name, **look)

    caption = (
        "The main loop waited for rows, for results of the device, or at the barrier of a checkpoint; these waits add "
        "up. In parallel, the sender waited for space in the ring. Waits for rows: enlarge the cache, or give the "
        "prefetcher more cores." + (RANK_WAITS if among_ranks else "")
    )
    top = max(LEAST_TOP, float(tops.max()), *(float(series[reason].max()) for reason in beside))
    return timed_chart("Waits, as a share of time", caption, found, "share", series, top, mark)


def hits_chart(run: RunRecord) -> Chart:
    if (found := intervals(run.marks, "unique_rows")) is None:
        return Chart(title="Hit ratio", caption="No row was looked up.")
    caption = (
        "Distinct rows of a step that were on the device when it was planned. Low: the cache is small for this data."
    )
    return timed_chart("Hit ratio", caption, found, "share", {"hit ratio": found.ratio("hits", "unique_rows")}, top=1.0)


def bytes_chart(run: RunRecord) -> Chart:
    if (found := intervals(run.marks, "steps")) is None:
        return Chart(title="Bytes a step", caption=NOTHING)
    series = {
        "to the device": found.ratio("bytes_to_device", "steps"),
        "from the device": found.ratio("bytes_from_device", "steps"),
    }
    return timed_chart("Bytes a step", "Rows and plans there, trained rows back.", found, "bytes", series)
