"""`prefetcher simulate`: what a run would move under other policies, capacities, horizons and batch sizes, before anything is trained.

    data set or trace --batches--> record: the distinct rows of each step    once a batch size
                                       |
                                       +--> belady: the bound                once a capacity
                                       +--> each policy and horizon

It runs the planner of training over the schedule of training, with slots divided as in training, so it says step by step what a run of
the job would report, as far as the policy exists there.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from prefetcher.analysis.grid import BOUND, Grid, Setting, batch_size_jobs, capacity_jobs, settings
from prefetcher.analysis.moves import Moves, new_planner, planned_moves
from prefetcher.analysis.policies import ttl_moves, window_moves
from prefetcher.analysis.progress import Progress, Silent
from prefetcher.analysis.recording import Recording, record
from prefetcher.analysis.replay import PlanWatcher, planned_beside
from prefetcher.analysis.results import Outcome, Simulation, make_result, skipped_result
from prefetcher.planner.capacity import MEASURED_BATCHES, job_slots
from protocol.batch import ScheduledBatch
from protocol.errors import ConfigError
from protocol.job import Job
from protocol.tables import group_specs

OpenBatches = Callable[[Job], Iterable[ScheduledBatch]]
Slots = tuple[int, ...]
Watch = Callable[[Setting, Slots], PlanWatcher | None]  # who watches the whole plans of a setting, if anybody does


def simulate(
    job: Job,
    grid: Grid,
    open_batches: OpenBatches,
    *,
    watch: Watch = lambda setting, slots: None,
    progress: Progress | None = None,
    per_step: bool = False,
) -> list[Simulation]:
    """A result for each setting: batch size by batch size, capacity by capacity, policies and horizons in the order given.

    `open_batches` gives the batches of a run of a job, from its first step. A setting that cannot run is a result that says why. Raises
    ConfigError for values that no job can have, and what reading the data raises.
    """
    results: list[Simulation] = []
    for own in batch_size_jobs(job, grid):
        results += Simulator(own, grid, watch, progress or Silent(), per_step).run(open_batches(own))
    return results


class Simulator:
    """All settings of one batch size."""

    def __init__(self, job: Job, grid: Grid, watch: Watch, progress: Progress, per_step: bool) -> None:
        self._groups = group_specs(job)
        self._settings = [(own, settings(own, grid)) for own in capacity_jobs(job, grid)]
        self._watch, self._progress, self._per_step = watch, progress, per_step

    def run(self, batches: Iterable[ScheduledBatch]) -> list[Simulation]:
        left = iter(batches)
        measured = list(islice(left, MEASURED_BATCHES))
        slots = [self._slots(job, measured) for job, _ in self._settings]
        recording = Recording(self._groups, [])
        if not all(isinstance(some, ConfigError) for some in slots):
            tick = self._progress.begin("reading the data", None)
            recording = record(self._groups, self._watched(chain(measured, left), slots), tick)
        return [
            result for (_, own), some in zip(self._settings, slots, strict=True) for result in self._results(recording, own, some)
        ]  # fmt: skip

    def _slots(self, job: Job, measured: list[ScheduledBatch]) -> Slots | ConfigError:
        try:
            return job_slots(job, self._groups, measured)
        except ConfigError as error:
            return error

    def _watched(self, batches: Iterable[ScheduledBatch], slots: list[Slots | ConfigError]) -> Iterable[ScheduledBatch]:
        """The batches, and whole plans beside them for whoever watches a setting."""
        for (_, own), some in zip(self._settings, slots, strict=True):
            for setting in own:
                watcher = None if isinstance(some, ConfigError) else self._watch(setting, some)
                if watcher is not None and not isinstance(some, ConfigError):
                    batches = planned_beside(batches, new_planner(setting, self._groups, some), watcher)
        return batches

    def _results(self, recording: Recording, own: list[Setting], slots: Slots | ConfigError) -> Iterator[Simulation]:
        """Of one capacity."""
        try:
            if isinstance(slots, ConfigError):
                raise slots
            bound = self._moves(recording, Setting(policy=BOUND, horizon=None, job=own[0].job), slots)
        except ConfigError as error:
            yield from (skipped_result(setting, str(error)) for setting in own)
            return
        for setting in own:
            try:
                moves = bound if setting.policy == BOUND else self._moves(recording, setting, slots)
            except ConfigError as error:
                yield skipped_result(setting, str(error))
                continue
            outcome = Outcome(setting=setting, slots=slots, moves=moves)
            yield make_result(recording, outcome, int(bound.fetched.sum()), per_step=self._per_step)

    def _moves(self, recording: Recording, setting: Setting, slots: Slots) -> Moves:
        tick = self._progress.begin(description(setting), len(recording))
        match setting.policy:
            case "window":
                return window_moves(recording, slots, setting.horizon_batches, setting.job.job.seed, tick)
            case "ttl":
                return ttl_moves(recording, slots, setting.horizon_batches, tick)
            case _:
                return planned_moves(recording, new_planner(setting, self._groups, slots, len(recording)), tick)


def description(setting: Setting) -> str:
    """`lookahead, horizon 64, capacity 70000 rows, batches of 2048`."""
    horizon = "" if setting.horizon is None else f", horizon {setting.horizon}"
    return f"{setting.policy}{horizon}, capacity {setting.job.cache.capacity}, batches of {setting.job.data.batch_size}"
