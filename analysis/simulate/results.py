"""What a simulation has to show. Fields that report.json has too mean the same here."""

from dataclasses import dataclass

import msgspec
import numpy as np

from rowcast.analysis.simulate.grid import Setting
from rowcast.analysis.simulate.moves import Moves
from rowcast.analysis.simulate.recording import Recording
from rowcast.job.schema import Horizon


class StepArrays(msgspec.Struct, frozen=True, kw_only=True):
    """By step, all groups together."""

    step: list[int]
    kind: list[str]  # train | eval
    rows_fetched: list[int]
    rows_evicted: list[int]
    rows_written_back: list[int]  # dirty victims


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. Where `skipped` says why it cannot run, everything that moved is None."""

    policy: str
    capacity: str | int  # as asked for
    capacity_rows: int | None = None  # slots of all groups
    horizon: Horizon | None  # None: the policy looks at no future, or at all of it
    batch_size: int
    shuffle: str | None = None  # data.shuffle; None: the order is that of a trace
    skipped: str | None = None
    steps: int | None = None  # training steps
    eval_steps: int | None = None
    lookups: int | None = None
    unique_rows: int | None = None
    rows_fetched: int | None = None
    rows_evicted: int | None = None
    rows_written_back: int | None = None  # dirty victims and flushed rows
    rows_flushed: int | None = None  # those of the barrier at the end
    bytes_fetched: int | None = None  # row records
    bytes_written_back: int | None = None
    hit_ratio: float | None = None  # 1 - rows_fetched / unique_rows; None without a look-up
    bound_rows_fetched: int | None = None  # what the whole future known would fetch
    ratio_to_bound: float | None = None
    per_step: StepArrays | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one setting moved in these slots."""

    setting: Setting
    slots: tuple[int, ...]
    moves: Moves


def make_result(recording: Recording, outcome: Outcome, bound_rows: int, *, per_step: bool) -> Simulation:
    setting, moves = outcome.setting, outcome.moves
    record_bytes = np.array([group.record_bytes for group in recording.groups], np.int64)
    written_back = moves.written_back.sum(axis=0) + moves.flushed
    fetched, unique_rows = moves.fetched.sum(axis=0), recording.unique_rows
    rows_fetched = int(fetched.sum())
    return Simulation(
        policy=setting.policy,
        capacity=setting.job.cache.capacity,
        capacity_rows=sum(outcome.slots),
        horizon=setting.horizon,
        batch_size=setting.job.data.batch_size,
        shuffle=setting.job.data.shuffle,
        steps=recording.num_train,
        eval_steps=len(recording) - recording.num_train,
        lookups=recording.num_lookups,
        unique_rows=unique_rows,
        rows_fetched=rows_fetched,
        rows_evicted=int(moves.evicted.sum()),
        rows_written_back=int(written_back.sum()),
        rows_flushed=int(moves.flushed.sum()),
        bytes_fetched=int(fetched @ record_bytes),
        bytes_written_back=int(written_back @ record_bytes),
        hit_ratio=1 - rows_fetched / unique_rows if unique_rows else None,
        bound_rows_fetched=bound_rows,
        ratio_to_bound=rows_fetched / bound_rows if bound_rows else None,
        per_step=step_arrays(recording, moves) if per_step else None,
    )


def step_arrays(recording: Recording, moves: Moves) -> StepArrays:
    return StepArrays(
        step=[step.scheduled.step for step in recording.steps],
        kind=[step.scheduled.kind for step in recording.steps],
        rows_fetched=moves.fetched.sum(axis=1).tolist(),
        rows_evicted=moves.evicted.sum(axis=1).tolist(),
        rows_written_back=moves.written_back.sum(axis=1).tolist(),
    )


def skipped_result(setting: Setting, sentence: str) -> Simulation:
    job = setting.job
    return Simulation(
        policy=setting.policy,
        capacity=job.cache.capacity,
        horizon=setting.horizon,
        batch_size=job.data.batch_size,
        shuffle=job.data.shuffle,
        skipped=sentence,
    )
