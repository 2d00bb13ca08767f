"""What `prefetcher advise` has to say. Rows and bytes of a step are means over all steps that count, evaluation steps included."""

from dataclasses import dataclass

from rowcast.analysis.advise.memory import DeviceMemory, HostMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """What the rest rests on."""

    whole_run: bool  # False: a stretch of an epoch, of which the second half counts
    steps: int  # training steps
    eval_steps: int
    samples: int  # of both
    epoch_samples: int | None  # training samples of one epoch; None: the data does not say
    lookups: int
    followed_share: dict[str, float]  # of each group's rows
    followed_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Distinct rows."""

    median: int
    largest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkingSet:
    group: str
    record_bytes: int
    table_rows: int
    batch: Rows
    depth: int
    flight: Rows  # of `depth` batches that follow each other; an estimate
    touched: int  # by all that was read; an estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """An estimate, but for the share of the rows followed being 1."""

    rows_fetched: int | None  # by the whole run, as its report says; None where a part was read
    rows_flushed: int | None  # by the barrier at the end
    rows_fetched_per_step: float
    rows_written_back_per_step: float  # victims that were trained
    bytes_fetched_per_step: float
    bytes_written_back_per_step: float
    hit_ratio: float | None  # None without a look-up
    margin: float  # of the rows fetched, relative: three standard errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One capacity."""

    capacity_bytes: int
    capacity_rows: int  # slots of all groups
    lookahead: Traffic
    lru: Traffic
    doubling_saves: float  # share of the bytes fetched
    move_ms: float  # what the slowest of the stages that move rows takes for a step, on average
    limit: str  # that stage, or planning where this takes longer
    least_step_ms: float  # a shorter step waits for rows that a larger cache would have kept; 0: nothing to keep
    stalls: bool  # for such rows, at the step time that was assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    step_ms: float
    step_given: bool  # by the user
    link_gbs: float
    link_given: bool
    gather_given: bool  # otherwise the rates below were measured, and count half
    tables_gbs: dict[str, dict[str, float]]  # group -> read, first, write: bytes of rows a second, in 10^9
    plan_ms: float  # measured, doubled


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    knee_bytes: int
    no_stall_bytes: int | None  # None: the trainer waits most of the time with any capacity
    stalling_anyway: float  # share of the stretches of depth + 1 steps that take longer than a step with any capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    capacity: str
    depth: int
    id_bytes: str | None  # None: as the job has it
    reasons: dict[str, str]  # section.key -> a sentence
    toml: str
    predicted: Point
    half: Point | None  # what half the capacity would do; None where it does not hold a batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    read: Read
    working_sets: tuple[WorkingSet, ...]
    assumed: Assumed
    curve: tuple[Point, ...]  # by capacity, ascending; the last one holds all rows that were touched
    choice: Choice
    recommended: Recommendation
    host: HostMemory
    device: DeviceMemory
    notes: tuple[str, ...]  # what is guessed, and what else to know
