"""A run of real processes goes on with another number of ranks, from what the ranks before wrote."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.plain_loop import run_plain_loop
from rowcast.job.file import load_job
from rowcast.prefetcher.checkpoints.commands import verify
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from tests.support.driver import start_state
from tests.support.full_capacity import bits
from tests.support.processes import Session

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {
    "data": {"batch_size": 50, "synthetic": {"samples": 20_000}},
    "cache": {"capacity": "4KiB"},
    "optimizer": {"dense": {"kind": "adam", "lr": 0.01}},
}
STEPS = (5, 8, 12)
STORES = ({"kind": "memory"}, {"kind": "tiered", "memory": "128 rows"}, {"kind": "memory"})


def test_one_rank_then_four_then_two_have_the_bits_of_the_plain_loop(session: Session) -> None:
    for ranks, steps, store in zip((1, 4, 2), STEPS, STORES, strict=True):
        session.write_job(**SMALL, checkpoint={"every": 3}, ranks={"count": ranks, "parts": 4}, store=store)
        session.start("local", "--max-steps", str(steps)).ended(300).quiet()
        manifest = session.manifest()
        assert (manifest.train_steps, len(manifest.shards)) == (steps, ranks)
    job = load_job(session.config)
    batches = list(schedule(job, open_reader(job), STEPS[-1]))
    losses, end = run_plain_loop(job, start_state(job, batches[0].batch.dense.shape[1]), batches, 4)
    assert (session.run_dir / "losses.f32").read_bytes() == np.array(losses, np.float32).tobytes()
    out = session.folder / "model.safetensors"
    session.export(out).quiet()
    ours = load_file(out)
    assert [name for name, tensor in end.items() if not torch.equal(bits(ours[name]), bits(tensor))] == []
    assert verify(session.run_dir, None) == 0
    assert session.remains() == []
