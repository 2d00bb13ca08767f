"""`rowcast advise`: works out from its data how much cache a job needs.

data --> observed: the rows of each step --> planner of training over the followed rows --> rows moved at each capacity
         (of some rows, all uses)            look-ahead and LRU, from one batch to all               |
                                                                                                     v
this machine's rates, a step's time -------------------------> what moving them takes --> knee, no stalls --> sections
"""

from dataclasses import dataclass, replace
from typing import Annotated

from typer import Option

from rowcast.analysis.advise.cost import (
    COUNTED,
    STAGES,
    Demand,
    Rates,
    RowRates,
    cores_need,
    demand,
    least_step,
    probe_decoding,
    probe_planning,
    probe_rows,
)
from rowcast.analysis.advise.read import Observed, observe, what_was_read
from rowcast.analysis.advise.recommend import (
    MOST_STALLING,
    Advice,
    CapacityChoice,
    ChosenValues,
    Point,
    Recommendation,
    enough_depth,
    first_without,
    knee,
    notes,
    parts,
    reasons,
    sections,
    toml,
)
from rowcast.analysis.advise.trials import Trials, capacity_slots, rounded_up
from rowcast.analysis.show import AnalysisProgress, ProgressBar, show
from rowcast.job.file import load_job, with_values
from rowcast.job.schema import Job
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.planner import SHARE
from rowcast.prefetcher.readers.reader import Reader, expected_train_steps, open_reader, stream_columns
from rowcast.prefetcher.run.sizing import stage_threads
from rowcast.protocol.parts import belonging
from rowcast.runtime.command_options import AsJson, Config, MaxSteps, Overrides, options_of
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import free_memory
from rowcast.runtime.telemetry.format_numbers import size_text

STEP_MS, LINK_GBS, GIVEN = 10.0, 12.0, ("step_ms", "link_gbs", "gather_gbs")
# a larger id budget, as a multiple of the job's, is recommended if it saves this share of the rows
LARGER_BUDGET, WORTH = 4, 0.01
LARGER_BATCH = 1.1  # than any batch that was read, of a run that may go on
MEMORY_SHARE = 0.5  # share of the free memory that the followed rows may take


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviseOptions:
    """A value of None is assumed, or measured on this machine."""

    sample: Annotated[float, Option(help="Share of the rows to follow through every batch.")] = 0.05
    max_steps: MaxSteps = None
    step_ms: Annotated[float | None, Option(help="What a step takes to compute.", show_default="10")] = None
    link_gbs: Annotated[float | None, Option(help="10^9 bytes/s to the device, and back.", show_default="12")] = None
    gather_gbs: Annotated[
        float | None, Option(help="10^9 bytes/s of rows from and to the tables.", show_default="measured")
    ] = None
    json: AsJson = False

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            raise ConfigError(f"--sample {self.sample}: give a share above 0, at most 1")
        for name in GIVEN:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number above 0")


def advise_job(
    job: Job, request: AdviseOptions, progress: AnalysisProgress, memory_share: float = MEMORY_SHARE
) -> Advice:
    """Reads the data, then simulates. `memory_share`: of the free memory, that the followed rows may take. Raises
    ConfigError and DataError."""
    memory_bytes = memory_share * free_memory()
    # a plan with the model's arrays is measured with them
    reader = open_reader(job, "all" if job.data.columns.inputs else stream_columns(job)[0])
    tick = progress.begin("reading the data", expected_train_steps(job, reader, request.max_steps))
    observed = observe(job, reader, request.sample, request.max_steps, memory_bytes, tick)
    trials = Trials(observed, job, progress)
    rates = machine_rates(observed, job, request, trials.smallest, reader)
    return Adviser(job, request, observed, rates, trials).advice()


def machine_rates(observed: Observed, job: Job, request: AdviseOptions, capacity_bytes: int, reader: Reader) -> Rates:
    plan_s, plan_bytes = probe_planning(
        observed, belonging(job), job.lookahead.depth, capacity_slots(observed, capacity_bytes), stage_threads(job)
    )
    batch = observed.measured[0].batch
    if batch.dense.shape[1] < len(reader.dense_names):  # only ids were read
        plan_bytes += 4 * (len(reader.dense_names) - batch.dense.shape[1]) * batch.size // job.ranks.count
    given = {name: getattr(request, name) for name in GIVEN if getattr(request, name) is not None}
    gather_gbs = given.get("gather_gbs")
    return Rates(
        rows={
            group.name: probe_rows(group, job.job.seed, COUNTED)
            if gather_gbs is None
            else RowRates(*[1e9 * gather_gbs] * 3)
            for group in observed.groups
        },
        decode_s=probe_decoding(reader, observed.rank),
        plan_s=plan_s,
        plan_bytes=plan_bytes,
        step_ms=given.get("step_ms", STEP_MS),
        link_gbs=given.get("link_gbs", LINK_GBS),
        given=tuple(given),
    )


class Adviser:
    def __init__(self, job: Job, request: AdviseOptions, observed: Observed, rates: Rates, trials: Trials) -> None:
        self._job, self._observed, self._rates, self._trials = job, observed, rates, trials
        self._least_bytes = trials.smallest * (1 if request.max_steps is None else LARGER_BATCH)
        self._everything = self._demand(trials.capacities[-1])

    def advice(self) -> Advice:
        job, observed = self._job, self._observed
        curve = tuple(map(self._at, self._trials.capacities))
        choice = self._choice(curve)
        capacity_bytes = rounded_up(max(choice.knee_bytes, choice.no_stall_bytes or 0, self._least_bytes))
        predicted = self._at(capacity_bytes)
        chosen = self._chosen(predicted)
        why = reasons(job, chosen, choice)
        advice = Advice(
            read=what_was_read(observed),
            assumed=self._rates,
            cores=cores_need(self._demand(capacity_bytes), self._rates),
            curve=curve,
            choice=choice,
            recommended=Recommendation(
                capacity=size_text(capacity_bytes),
                depth=chosen.depth,
                id_bytes=None if chosen.id_bytes is None else size_text(chosen.id_bytes),
                reasons=why,
                toml=toml(sections(chosen), why),
                predicted=predicted,
            ),
            notes=(),
        )
        return replace(advice, notes=tuple(notes(job, advice)))

    def _demand(self, capacity_bytes: int) -> Demand:
        return demand(self._observed, self._trials.moved(capacity_bytes), self._rates, self._job.lookahead.depth)

    def _at(self, capacity_bytes: int) -> Point:
        here = self._demand(capacity_bytes)
        of_stages, least_s = here.seconds.mean(axis=1).tolist(), least_step(here, self._everything)
        fetched, after = (
            self._trials.fetched_bytes(nbytes)
            for nbytes in (capacity_bytes, min(2 * capacity_bytes, self._trials.capacities[-1]))
        )
        return Point(
            capacity_bytes=capacity_bytes,
            traffic=self._trials.traffic(capacity_bytes),
            doubling_saves=max(0.0, 1 - after / fetched) if fetched else 0.0,
            move_ms=1e3 * max(of_stages),
            limit=STAGES[of_stages.index(max(of_stages))] if max(of_stages) > self._rates.plan_s else "planning",
            least_step_ms=1e3 * least_s,
            stalls=1e3 * least_s > self._rates.step_ms,
        )

    def _choice(self, curve: tuple[Point, ...]) -> CapacityChoice:
        anyway = 1.0 - float(self._everything.fits(self._rates.step_ms / 1e3).mean())
        enough = curve[first_without([point.stalls for point in curve])].capacity_bytes
        return CapacityChoice(
            knee_bytes=curve[knee([point.doubling_saves for point in curve])].capacity_bytes,
            no_stall_bytes=enough if anyway <= MOST_STALLING else None,
            stalling_anyway=anyway,
        )

    def _chosen(self, predicted: Point) -> ChosenValues:
        capacity_bytes, lookahead = predicted.capacity_bytes, self._job.lookahead
        travel_s = self._demand(capacity_bytes).travel_s
        horizon = self._trials.moved(capacity_bytes).horizon
        id_bytes = self._larger_budget(capacity_bytes, horizon)
        known = min(horizon + 1, len(self._observed))
        return ChosenValues(
            predicted=predicted,
            depth=max(lookahead.depth, enough_depth(travel_s, self._rates.step_ms / 1e3)),
            travel_ms=1e3 * travel_s,
            step_ms=self._rates.step_ms,
            horizon=known - 1,
            known_bytes=int(min(known * self._observed.id_bytes, id_bytes or parse_bytes(lookahead.id_bytes))),
            id_bytes=id_bytes,
        )

    def _larger_budget(self, capacity_bytes: int, horizon: int) -> int | None:
        """Returns a larger budget for ids, if the job's horizon is so short that more rows are fetched."""
        budget = parse_bytes(self._job.lookahead.id_bytes)
        wanted = (1 + 1 / SHARE) * (horizon + 1) * self._observed.id_bytes
        if wanted < budget or horizon + 1 >= len(self._observed):
            return None
        larger = rounded_up(LARGER_BUDGET * budget)
        job = with_values(self._job, {"lookahead": {"id_bytes": larger}})
        before, after = (self._trials.moved_with(capacity_bytes, own).fetched.sum() for own in (self._job, job))
        return larger if after < (1 - WORTH) * before else None


def run_advise(job: Job, options: AdviseOptions) -> None:
    with ProgressBar() as progress:
        advice = advise_job(job, options, progress)
    show(advice, parts(advice), as_json=options.json)


@options_of(AdviseOptions)
def advise(config: Config, overrides: Overrides = None, *, options: AdviseOptions) -> None:
    run_advise(load_job(config, tuple(overrides or ())), options)
