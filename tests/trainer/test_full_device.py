"""Memory that a device or a system does not have is a sentence, wherever it is asked for after the cache."""

import numpy as np
import pytest
import torch

from rowcast.job.tables import group_specs
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.device.cuda import host_memory
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings


def refuse(*sizes: object, **options: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore lines")


def test_a_device_without_room_for_the_slots_of_a_barrier_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job("adagrad", "single")
    batches = small_batches(job, "single")
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"), seeded_streams=False))
    run.advance_until(lambda: run.trainer.loop.step_done == len(batches) - 1)
    monkeypatch.setattr(run.streams, "allocate", refuse)
    with pytest.raises(ConfigError) as refused:
        run.advance_until(lambda: run.trainer.loop.finished)
    nbytes = run.trainer.barrier._open.header.arrays_bytes
    assert str(refused.value) == (
        f"barrier 0 brings {nbytes} bytes of slots, for which cpu has no room (CUDA out of memory. Tried to allocate); "
        "make cache.capacity or data.batch_size smaller"
    )


def test_a_system_that_locks_no_pages_for_a_ring_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError) as refused:
        host_memory(np.zeros(4096, np.uint8), torch.device("cuda", 1), page_locked=False)
    assert str(refused.value) == (
        "transport.ring: no room for 4096 bytes of page-locked memory beside a ring (CUDA out of memory. Tried to "
        "allocate); raise `ulimit -l`, or make it smaller"
    )
