"""Charts speed and traffic from the marks of this process; each value is the mean between two marks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import numpy as np

from rowcast.trainer.report.history import HistoryMark
from rowcast.trainer.report.page.axis import Axis, Floats, Unit, outwards
from rowcast.trainer.report.page.chart import Chart, Frame, Layer, NoChart, Series, describe, some_points, stairs
from rowcast.trainer.report.page.record import RunRecord
from rowcast.trainer.step.metrics import StallReason

STACKED: tuple[StallReason, ...] = ("rows", "results", "barrier")  # the loop's waits; it has one at a time
BESIDE: dict[StallReason, str] = {"ring": "ring (the sender)"}  # it has a separate thread
AMONG_RANKS: dict[StallReason, str] = {"ranks": "ranks (within steps)"}
LEAST_TOP = 0.05  # least top of an axis of fractions, so that small fractions look small
NOTHING = "No step was done."
RANK_WAITS = " Within its steps, rank 0 waited for the other ranks: until they had come as far, and for what they sent."


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Intervals between marks: `edges` [n + 1], seconds since the first step; the marks before and after each."""

    edges: Floats
    first: list[HistoryMark]
    last: list[HistoryMark]

    @property
    def ends(self) -> Floats:
        return self.edges[1:]

    def gain(self, name: str) -> Floats:
        return np.array(
            [getattr(last, name) - getattr(first, name) for first, last in zip(self.first, self.last, strict=True)],
            np.float64,
        )

    def ratio(self, name: str, to: str) -> Floats:
        return self.gain(name) / self.gain(to)

    def stalled(self, reason: StallReason) -> Floats:
        index = get_args(StallReason).index(reason)
        gains = [last.stalls[index] - first.stalls[index] for first, last in zip(self.first, self.last, strict=True)]
        return np.array(gains, np.float64) / self.gain("time_s")


def intervals(marks: Sequence[HistoryMark], grows: str) -> Intervals | None:
    """Returns the intervals between marks in which the counter `grows` grew; None if it never did."""
    kept: list[HistoryMark] = []
    for mark in marks:
        if not kept or getattr(mark, grows) > getattr(kept[-1], grows):
            kept.append(mark)
    if len(kept) < 2:
        return None
    pairs = list(pairwise(kept))
    return Intervals(
        edges=np.array([mark.time_s - kept[0].time_s for mark in kept], np.float64),
        first=[first for first, _ in pairs],
        last=[last for _, last in pairs],
    )


def samples_chart(run: RunRecord) -> Chart | NoChart:
    found = intervals(run.marks, "time_s")
    if found is None:
        return NoChart(title="Samples a second", caption=NOTHING)
    series = [
        Series(name="trained", y=found.ratio("samples", "time_s")),
        Series(name="evaluated", y=found.ratio("eval_samples", "time_s")),
    ]
    return lines(
        "Samples a second",
        "An evaluation has no backward pass and no update, and so takes more of them.",
        found,
        "count",
        series,
    )


def stalls_chart(run: RunRecord) -> Chart | NoChart:
    title, found = "Waits, as a share of time", intervals(run.marks, "time_s")
    if found is None:
        return NoChart(title=title, caption=NOTHING)
    beside = BESIDE | (AMONG_RANKS if len(run.report.ranks) > 1 else {})
    series = [Series(name=reason, y=found.stalled(reason)) for reason in (*STACKED, *beside)]
    others = series[len(STACKED) :]
    tops = np.cumsum([one.y for one in series[: len(STACKED)]], axis=0)
    highest = max(float(one.y.max()) for one in others)
    frame = Frame(x=time_axis(found), y=outwards(0.0, max(LEAST_TOP, float(tops.max()), highest), "share", "share"))
    floors = [np.zeros_like(found.ends), *tops[:-1]]
    areas = [
        Layer(look=f"area area-{number}", path=stairs_area(frame, found, low, high), name=name)
        for number, (name, low, high) in enumerate(zip(STACKED, floors, tops, strict=True), start=1)
    ]
    return Chart(
        title=title,
        caption="The main loop waited for rows, for results of the device, or at the barrier of a checkpoint; these "
        "waits add up. In parallel, the sender waited for space in the ring. Waits for rows: enlarge the cache, or "
        "give the prefetcher more cores." + (RANK_WAITS if len(run.report.ranks) > 1 else ""),
        x=frame.x,
        y=frame.y,
        layers=[
            *areas,
            *(
                Layer(look=look, path=frame.line(*stairs(found.edges, one.y)), name=name)
                for look, one, name in zip(("line-2", "line-1"), others, beside.values(), strict=False)
            ),
        ],
        text=describe(found.ends, frame.x, frame.y, *series),
        table=some_points(found.ends, frame.x, frame.y, *series),
    )


def stairs_area(frame: Frame, found: Intervals, low: Floats, high: Floats) -> str:
    x, top = stairs(found.edges, high)
    return frame.area(x, np.repeat(low, 2), top)


def hits_chart(run: RunRecord) -> Chart | NoChart:
    found = intervals(run.marks, "unique_rows")
    if found is None:
        return NoChart(title="Hit ratio", caption="No row was looked up.")
    caption = (
        "Distinct rows of a step that were on the device when it was planned. Low: the cache is small for this data."
    )
    return lines(
        "Hit ratio", caption, found, "share", [Series(name="hit ratio", y=found.ratio("hits", "unique_rows"))], top=1.0
    )


def bytes_chart(run: RunRecord) -> Chart | NoChart:
    found = intervals(run.marks, "steps")
    if found is None:
        return NoChart(title="Bytes a step", caption=NOTHING)
    series = [
        Series(name="to the device", y=found.ratio("bytes_to_device", "steps")),
        Series(name="from the device", y=found.ratio("bytes_from_device", "steps")),
    ]
    return lines("Bytes a step", "Rows and plans there, trained rows back.", found, "bytes", series)


def lines(
    title: str, caption: str, found: Intervals, unit: Unit, series: list[Series], top: float | None = None
) -> Chart:
    frame = Frame(
        x=time_axis(found), y=outwards(0.0, top or max(float(one.y.max()) for one in series) or 1.0, title, unit)
    )
    named = len(series) > 1
    return Chart(
        title=title,
        caption=caption,
        x=frame.x,
        y=frame.y,
        layers=[
            Layer(look=f"line-{number}", path=frame.line(*stairs(found.edges, one.y)), name=one.name if named else "")
            for number, one in enumerate(series, start=1)
        ],
        text=describe(found.ends, frame.x, frame.y, *series),
        table=some_points(found.ends, frame.x, frame.y, *series),
    )


def time_axis(found: Intervals) -> Axis:
    return Axis(label="time since the first step", unit="seconds", low=0.0, high=float(found.edges[-1]))
