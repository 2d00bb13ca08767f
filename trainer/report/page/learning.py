"""Charts learning over the whole run: the loss of every train step, and the evaluations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

import numpy as np

from rowcast.runtime.arrays import F32
from rowcast.trainer.report.page.axis import Axis, Floats, outwards
from rowcast.trainer.report.page.chart import Chart, Frame, Layer, NoChart, Series, describe, some_points
from rowcast.trainer.report.page.record import RunRecord
from rowcast.trainer.step.results import Evaluation

MOST_POINTS = 500  # more cannot be distinguished on a page
SMOOTHED = 20  # a smoothed loss is the mean of about one in this many points
USUAL = 0.98  # the fraction of losses that the axis must show; rare high ones may be cut off


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Consecutive train steps, grouped so that there are at most MOST_POINTS groups; all arrays are [n]."""

    last: Floats  # the last train step of each, from 1
    mean: Floats
    low: Floats
    high: Floats

    @property
    def steps_each(self) -> int:
        """Train steps per bucket; the last one may have fewer."""
        return int(self.last[0])

    def smoothed(self) -> tuple[Floats, int]:
        """Returns the mean of each bucket with earlier ones, and how many (fewer at the beginning)."""
        number = max(1, len(self.mean) // SMOOTHED)
        sums = np.concatenate([[0.0], np.cumsum(self.mean)])
        ends = np.arange(1, len(self.mean) + 1)
        begins = np.maximum(ends - number, 0)
        return (sums[ends] - sums[begins]) / (ends - begins), number


def in_buckets(losses: F32) -> Buckets:
    """Draws a step that a script left out, whose loss is NaN, as the one before."""
    known = np.flatnonzero(~np.isnan(losses))
    losses = losses[known[np.maximum(np.searchsorted(known, np.arange(len(losses)), side="right") - 1, 0)]]
    begins = np.arange(0, len(losses), ceil(len(losses) / MOST_POINTS))
    ends = np.append(begins[1:], len(losses))
    return Buckets(
        last=ends.astype(np.float64),
        mean=np.add.reduceat(losses, begins, dtype=np.float64) / (ends - begins),
        low=np.minimum.reduceat(losses, begins).astype(np.float64),
        high=np.maximum.reduceat(losses, begins).astype(np.float64),
    )


def loss_chart(run: RunRecord) -> Chart | NoChart:
    title = "Loss"
    if np.isnan(run.losses).all():
        return NoChart(title=title, caption="No train step was done.")
    if num_lost := np.count_nonzero(~np.isfinite(run.losses)):
        return NoChart(title=title, caption=f"{num_lost:,} of {len(run.losses):,} losses are not finite.")
    buckets = in_buckets(run.losses)
    smooth, number = buckets.smoothed()
    x = steps_axis(run)
    y, cut = loss_axis(buckets)
    frame = Frame(x=x, y=y)
    series = (
        Series(name="smoothed", y=smooth),
        Series(name="mean" if buckets.steps_each > 1 else "loss", y=buckets.mean),
    )
    return Chart(
        title=title,
        caption="Binary cross entropy of each train step, or the model's own loss, mean over its samples." + cut,
        x=x,
        y=y,
        layers=[
            raw_layer(frame, buckets),
            Layer(
                look="line-1",
                path=frame.line(buckets.last, smooth),
                name=f"mean of the last {number * buckets.steps_each:,} steps",
            ),
            *begin_layers(frame, run),
        ],
        text=describe(buckets.last, x, y, *series),
        table=some_points(buckets.last, x, y, *series),
    )


def raw_layer(frame: Frame, buckets: Buckets) -> Layer:
    if buckets.steps_each > 1:
        name = f"lowest to highest of {buckets.steps_each:,} steps"
        return Layer(look="band", path=frame.area(buckets.last, buckets.low, buckets.high), name=name)
    return Layer(look="raw", path=frame.line(buckets.last, buckets.mean), name="each step")


def loss_axis(buckets: Buckets) -> tuple[Axis, str]:
    highest, usual, low = float(buckets.high.max()), float(np.quantile(buckets.high, USUAL)), float(buckets.low.min())
    axis = outwards(low, min(highest, usual + (usual - low)), "loss", "plain")
    if highest <= axis.high:
        return axis, ""
    step = int(buckets.last[int(np.argmax(buckets.high))])
    return axis, f" The axis cuts off rare high ones: the highest is {highest:.4g}, by step {step:,}."


def begin_layers(frame: Frame, run: RunRecord) -> list[Layer]:
    path = "".join(frame.across(start) for start in sorted(set(run.starts)) if start)
    return [Layer(look="rule", path=path, name="this process continued here")] if path else []


def steps_axis(run: RunRecord) -> Axis:
    last = max([len(run.losses), 1, *(evaluation.train_step for evaluation in run.evaluations)])
    return Axis(label="train steps", unit="steps", low=0.0, high=float(last))


def auc_chart(run: RunRecord) -> Chart | NoChart:
    found = [evaluation for evaluation in run.evaluations if evaluation.auc is not None]
    caption = "Area under the ROC curve on the evaluation samples: 0.5 is guessing, 1 is a perfect order."
    if any(evaluation.tasks for evaluation in run.evaluations):
        caption += " It is the mean of the AUCs of all labels."
    return evaluation_chart(run, "AUC", caption, found, lambda evaluation: evaluation.auc or 0.0)


def task_auc_charts(run: RunRecord) -> list[Chart | NoChart]:
    """Returns one chart for each of several labels."""
    labels = [task.label for task in run.evaluations[-1].tasks] if run.evaluations else []
    return [task_auc_chart(run, index, label) for index, label in enumerate(labels)]


def task_auc_chart(run: RunRecord, index: int, label: str) -> Chart | NoChart:
    found = [evaluation for evaluation in run.evaluations if evaluation.tasks[index].auc is not None]
    caption = f"Area under the ROC curve on the evaluation samples whose label {label} is known."
    return evaluation_chart(run, f"AUC of {label}", caption, found, lambda own: own.tasks[index].auc or 0.0)


def ndcg_charts(run: RunRecord) -> list[Chart | NoChart]:
    """Returns one chart for each k of eval.ranks; none if the model has no ranks."""
    names = [name for name in run.evaluations[-1].ranking if name.startswith("ndcg@")] if run.evaluations else []
    return [ndcg_chart(run, name) for name in names]


def ndcg_chart(run: RunRecord, name: str) -> Chart | NoChart:
    found = [evaluation for evaluation in run.evaluations if name in evaluation.ranking]
    caption = "Mean over the positives of the evaluation; 1 is a positive that scores more than all other candidates."
    return evaluation_chart(run, name.upper(), caption, found, lambda evaluation: evaluation.ranking[name])


def logloss_chart(run: RunRecord) -> Chart | NoChart:
    found = [evaluation for evaluation in run.evaluations if evaluation.logloss is not None]
    title, what = "Log loss", "Mean binary cross entropy"
    if any(evaluation.is_own_loss for evaluation in found):
        title, what = "Loss of evaluations", "Mean of the model's own loss"
    caption = f"{what} on the evaluation samples; where it rises while the loss falls, the model overfits."
    return evaluation_chart(run, title, caption, found, lambda evaluation: evaluation.logloss or 0.0)


def evaluation_chart(
    run: RunRecord, title: str, caption: str, found: Sequence[Evaluation], value: Callable[[Evaluation], float]
) -> Chart | NoChart:
    found = [evaluation for evaluation in found if isfinite(value(evaluation))]
    if not found:
        why = (
            "Every evaluation had labels of one kind only, outputs that are no logits, or a value that is not finite."
            if run.evaluations
            else "No evaluation was made; data.eval_fraction makes some."
        )
        return NoChart(title=title, caption=why)
    steps = np.array([evaluation.train_step for evaluation in found], np.float64)
    series = Series(name=title, y=np.array([value(evaluation) for evaluation in found]))
    x = steps_axis(run)
    frame = Frame(x=x, y=outwards(float(series.y.min()), float(series.y.max()), title, "plain"))
    return Chart(
        title=title,
        caption=caption,
        x=x,
        y=frame.y,
        layers=[
            Layer(look="line-1", path=frame.line(steps, series.y)),
            Layer(look="dots", path=frame.dots(steps, series.y), name="each evaluation"),
            *begin_layers(frame, run),
        ],
        text=describe(steps, x, frame.y, series),
        table=some_points(steps, x, frame.y, series),
    )
