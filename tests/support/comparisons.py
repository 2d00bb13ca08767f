"""What a run came to, beside the plain loop: in one thread, or by real processes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from tests.support.driver import InProcessRun, start_state
from tests.support.full_capacity import bits
from tests.support.processes import Session

if TYPE_CHECKING:
    from tests.support.ranked_run import RankedRun

Plain = tuple[list[float], dict[str, Tensor]]  # losses, and the state at the end


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of what has other bits, or is missing."""
    return [
        name for name, own in expected.items() if name not in found or not torch.equal(bits(found[name]), bits(own))
    ]


def assert_equal_bits(run: "InProcessRun | RankedRun", losses: list[float], end: dict[str, Tensor]) -> None:
    assert np.array(run.losses(), np.float32).tobytes() == np.array(losses, np.float32).tobytes(), "losses differ"
    state = run.state()
    assert state.keys() == end.keys()
    assert differing(state, end) == []


def exported(session: Session) -> dict[str, Tensor]:
    out = session.folder / "model.safetensors"
    session.export(out).quiet()
    return load_file(out)


def assert_trained_as_the_plain_loop(session: Session, steps: int | None = None, parts: int = 1) -> Plain:
    """Losses and export of a session's run, which has ended. Returns the plain loop's."""
    job = load_job(session.config)
    batches = list(schedule(job, open_reader(job), steps))
    losses, end = run_plain_loop(job, start_state(job, batches[0].batch.dense.shape[1]), batches, parts)
    assert (session.run_dir / "losses.f32").read_bytes() == np.array(losses, np.float32).tobytes()
    assert differing(exported(session), end) == []
    return losses, end


def assert_tested_what_it_claims(run: InProcessRun, job: Job) -> None:
    """Below full capacity, a run shows nothing unless it evicts a dirty row and brings it back under `after_plan`."""
    assert sum(group.num_dirty for plan in run.plans for group in plan.groups) > 0, "no dirty row was evicted"
    assert any(after is not None for after in run.after_plans), "no evicted row was fetched again under after_plan"
    if job.lookahead.depth > 1:
        assert run.max_in_flight >= 2, "never two plans in flight"
