"""How sure all that is, and what else to know."""

from collections.abc import Iterator
from dataclasses import dataclass

from rowcast.analysis.advise.advice import Assumed, Choice, Point, Read
from rowcast.analysis.format_shares import percent
from rowcast.job.schema import Job
from rowcast.runtime.telemetry.format_numbers import plural

SETTLED = 0.05  # a stretch half as long may differ by so much and still tell


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What notes are about."""

    job: Job
    read: Read
    assumed: Assumed
    choice: Choice
    predicted: Point
    everything: Point  # every row that was touched is on the device
    shorter_rows_per_step: float | None  # fetched, as a stretch half as long would have it; None for a whole run


def notes(facts: Facts) -> Iterator[str]:
    yield sureness(facts.read, facts.predicted)
    if facts.shorter_rows_per_step is not None:
        yield settling(facts.read, facts.predicted, facts.shorter_rows_per_step)
    if facts.assumed.plan_ms > facts.assumed.step_ms:
        yield (
            f"Planning takes {facts.assumed.plan_ms:.2g} ms a batch, more than a step of {facts.assumed.step_ms:g} ms, at any capacity; "
            f"larger prefetcher.threads may help"
        )
    if facts.choice.no_stall_bytes is None:
        yield (
            f"A step of {facts.assumed.step_ms:g} ms waits most of the time with any capacity: with every row on the device the slowest "
            f"stage still takes {facts.everything.move_ms:.3g} ms for those that are new. The capacity goes by the knee"
        )
    elif facts.choice.stalling_anyway > 0:
        yield (
            f"{percent(facts.choice.stalling_anyway)} % of all stretches of {plural(facts.job.lookahead.depth + 1, 'step')} wait with any "
            f"capacity, as at the start, where every row is new"
        )
    yield from left_out(facts.job)


def sureness(read: Read, predicted: Point) -> str:
    least = min(read.followed_share.values())
    of_what = "every batch of the run" if read.whole_run else "every batch that was read"
    if least == 1.0:
        return f"Every row was followed through {of_what}, so what they move there was counted, not estimated"
    return (
        f"{percent(least)} % of the rows, {read.followed_rows:,} chosen by a hash of their keys, were followed through {of_what}; what "
        f"they move stands for all rows, ± {percent(predicted.lookahead.margin)} % of the rows fetched (three standard errors). How many "
        f"rows each batch touches was counted"
    )


def settling(read: Read, predicted: Point, shorter: float) -> str:
    """Only a stretch was read."""
    now = predicted.lookahead.rows_fetched_per_step
    far = read.steps // 2
    what = (
        f"{plural(read.samples, 'sample')} from the middle of an epoch were read, and the second half of these steps counts; half as many "
        f"would have said {shorter:,.0f} rows fetched a step instead of {now:,.0f}. What a larger cache would save by rows that come back "
        f"after more than {plural(far, 'step')} cannot be seen"
    )
    if now and abs(shorter / now - 1) < SETTLED:
        return what
    return (
        f"{what}: take this for a first guess, and the capacity for too small; give more --samples, or leave them away"
    )


def left_out(job: Job) -> Iterator[str]:
    for name, given in (("cache.groups", bool(job.cache.groups)), ("cache.pin", job.cache.pin is not None)):
        if given:
            yield f"{name} of the job was left out of account, and is not in the sections below"
