"""Ranks in processes of their own, started by torchrun: over gloo they have the bits of the plain loop in parts.

Two ranks alone would show nothing about the order of additions: a + b = b + a.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.plain_loop import run_plain_loop
from rowcast.job.tables import group_specs
from tests.support.batches import NUM_DENSE
from tests.support.driver import start_state
from tests.support.full_capacity import bits
from tests.support.gloo_rank import CASES, workload
from tests.support.ranked_run import merged

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
RANKS = 3


def test_three_processes_have_the_bits_of_the_plain_loop_in_six_parts(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    started = subprocess.run(
        [*torchrun, "-m", "tests.support.gloo_rank", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert started.returncode == 0, started.stderr
    for optimizer, bags in CASES:
        job, batches = workload(optimizer, bags)
        losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches, 2 * RANKS)
        files = [tmp_path / f"{optimizer}-{number}.safetensors" for number in range(RANKS)]
        state = merged(group_specs(job), [load_file(file) for file in files])
        assert state.pop("losses").numpy().tobytes() == np.array(losses, np.float32).tobytes()
        assert state.keys() == end.keys()
        assert not [name for name, tensor in end.items() if not torch.equal(bits(state[name]), bits(tensor))]
