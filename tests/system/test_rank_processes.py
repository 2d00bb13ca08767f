"""Ranks as real processes: they have the bits of the plain loop in as many parts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.file import load_job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from tests.support.driver import start_state
from tests.support.full_capacity import bits
from tests.support.processes import Session

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 12
SMALL = {
    "data": {"batch_size": 50, "synthetic": {"samples": 20_000}},
    "optimizer": {"dense": {"kind": "adam", "lr": 0.01}},
}


def plain(config: Path, parts: int, steps: int = STEPS) -> tuple[bytes, dict[str, Tensor]]:
    """Losses and the end of the plain loop."""
    job = load_job(config)
    batches = list(schedule(job, open_reader(job), steps))
    losses, end = run_plain_loop(job, start_state(job, batches[0].batch.dense.shape[1]), batches, parts)
    return np.array(losses, np.float32).tobytes(), end


def differing(ours: dict[str, Tensor], end: dict[str, Tensor]) -> Sequence[str]:
    return [name for name, tensor in end.items() if name not in ours or not torch.equal(bits(ours[name]), bits(tensor))]


def test_one_trainer_of_six_parts_has_the_bits_of_the_plain_loop_in_six_parts(session: Session) -> None:
    session.write_job(**SMALL, ranks={"parts": 6})
    for process in session.start_both("--max-steps", str(STEPS)):
        process.ended().quiet()
    losses, end = plain(session.config, 6)
    assert (session.run_dir / "losses.f32").read_bytes() == losses
    out = session.folder / "model.safetensors"
    session.export(out).quiet()
    assert differing(load_file(out), end) == []
    assert differing(load_file(out), plain(session.config, 1)[1]) != []


@pytest.mark.parametrize(("count", "parts"), [(2, 4), (3, 3), (4, 4)])
def test_several_ranks_have_the_bits_of_the_plain_loop(count: int, parts: int, session: Session) -> None:
    session.write_job(**SMALL, ranks={"count": count, "parts": parts})
    session.start("local", "--max-steps", str(STEPS)).ended(300).quiet()
    losses, end = plain(session.config, parts)
    assert (session.run_dir / "losses.f32").read_bytes() == losses
    out = session.folder / "model.safetensors"
    session.export(out).quiet()
    assert differing(load_file(out), end) == []
    assert session.remains() == []
