"""The curve in words: knee, stalls, what half of the capacity would do, and what was assumed."""

from collections.abc import Iterator

from rowcast.analysis.advise.advice import Advice, Assumed
from rowcast.analysis.advise.choice import KNEE_SAVING
from rowcast.analysis.format_shares import percent
from rowcast.runtime.telemetry.format_numbers import human_bytes


def sentences(advice: Advice) -> Iterator[str]:
    choice, predicted, half = advice.choice, advice.recommended.predicted, advice.recommended.half
    yield (
        "Rows and MiB are those of a step. Move ms: what the slowest stage takes to move its rows; least ms: a shorter step waits, in the "
        "busiest steps, for rows that a larger cache would have kept"
    )
    yield (
        f"Knee: {human_bytes(choice.knee_bytes)}, the smallest capacity from which on doubling it saves less than "
        f"{100 * KNEE_SAVING:g} % of the bytes fetched"
    )
    if choice.no_stall_bytes is not None:
        yield f"No stalls for want of room: from {human_bytes(choice.no_stall_bytes)} on, with steps of {advice.assumed.step_ms:g} ms"
    slowest_ms = max(predicted.move_ms, advice.assumed.plan_ms)
    yield f"Limit: at {human_bytes(predicted.capacity_bytes)} the slowest stage is {predicted.limit}, {slowest_ms:.2g} ms a step"
    if half is not None:
        more = half.lookahead.rows_fetched_per_step / max(1.0, predicted.lookahead.rows_fetched_per_step) - 1
        yield (
            f"Half of it, {human_bytes(half.capacity_bytes)}, would fetch {half.lookahead.rows_fetched_per_step:,.0f} rows a step, "
            f"{percent(max(0.0, more))} % more"
        )
    yield assumptions(advice.assumed)


def assumptions(assumed: Assumed) -> str:
    step = f"a step takes {assumed.step_ms:g} ms" + ("" if assumed.step_given else " (--step-ms)")
    link = f"the link moves {assumed.link_gbs:g} GB/s each way" + (
        "" if assumed.link_given else " (--link-gbs; PCIe 3.0 x16)"
    )
    if assumed.gather_given:
        rows = f"tables are read and written at {next(iter(assumed.tables_gbs.values()))['read']:g} GB/s"
        return f"Given or assumed: {step}, {link}, {rows}. Measured here, and doubled: planning takes {assumed.plan_ms:.2g} ms a batch"
    each = "; ".join(
        f"{own['read']:.2g} GB/s read, {own['first']:.2g} made for the first time, {own['write']:.2g} written"
        for own in assumed.tables_gbs.values()
    )
    return (
        f"Given or assumed: {step}, {link}. Measured here, of which half is counted on: rows of the tables, {each} (--gather-gbs); "
        f"planning takes {assumed.plan_ms:.2g} ms a batch"
    )
