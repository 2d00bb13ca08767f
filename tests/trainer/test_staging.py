"""Pieces in staging: none lies over one whose use was not issued. A device that is full is refused by name."""

import random

import numpy as np
import pytest
import torch

from rowcast.job.tables import group_specs
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.device.cuda import host_memory
from rowcast.trainer.device.streams import PlainStreams
from rowcast.trainer.step.memory import Staging, StagingSpan
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings
from tests.support.seeded_streams import SeededEvent


class FullDevice(PlainStreams):
    def allocate(self, nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore lines")


def taken(staging: Staging, nbytes: int) -> StagingSpan:
    place = staging.take(nbytes)
    assert place is not None
    return place


def span(staging: Staging, place: StagingSpan) -> tuple[int, int]:
    start = int(place.content.storage_offset())
    return start, start + len(place.content)


def test_a_piece_as_large_as_staging_waits_for_the_use_of_the_one_before() -> None:
    staging = Staging(PlainStreams(), 4096)
    first = taken(staging, 4096)
    assert first.after is None
    assert staging.take(64) is None
    assert staging.take(4096) is None, "asking changes nothing"
    first.used = SeededEvent()
    second = taken(staging, 4096)
    assert second.after is first.used


def test_small_pieces_lie_beside_each_other_and_wait_for_what_lay_there() -> None:
    staging = Staging(PlainStreams(), 4096)
    pieces = [taken(staging, 1000) for _ in range(4)]
    assert [span(staging, piece)[0] for piece in pieces] == [0, 1024, 2048, 3072]
    assert staging.take(1) is None
    for piece in pieces[:2]:
        piece.used = SeededEvent()
    assert staging.take(2049) is None, "the third is still in use"
    assert taken(staging, 2048).after is pieces[1].used


def test_a_piece_without_bytes_takes_no_room() -> None:
    staging = Staging(PlainStreams(), 128)
    whole = taken(staging, 128)
    assert len(taken(staging, 0).content) == 0
    assert staging.take(64) is None
    whole.used = SeededEvent()
    assert taken(staging, 128).after is whole.used


def test_whatever_is_taken_lies_over_nothing_that_is_in_use() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        staging = Staging(PlainStreams(), 64 * chance.randint(1, 40))
        open_places: list[StagingSpan] = []
        done: list[tuple[StagingSpan, tuple[int, int]]] = []
        # uses that the writing stream has waited for: it waits in order, so for all before them too
        waited: set[int] = set()
        for _ in range(300):
            if open_places and chance.random() < 0.5:
                place = open_places.pop(0)
                place.used = SeededEvent()
                done.append((place, span(staging, place)))
                continue
            new = staging.take(chance.randint(1, staging.nbytes))
            if new is None:
                assert open_places, "with nothing in use any piece fits"
                continue
            begin, end = span(staging, new)
            assert begin % 64 == 0
            assert all(end <= a or b <= begin for a, b in (span(staging, place) for place in open_places))
            if new.after is not None:
                waited.update(range(1 + next(i for i, (place, _) in enumerate(done) if place.used is new.after)))
            over = [i for i, (_, (a, b)) in enumerate(done) if begin < b and a < end]
            assert set(over) <= waited, "it is written before the use of what lay there is awaited"
            open_places.append(new)


def test_a_device_without_room_for_staging_is_a_sentence() -> None:
    with pytest.raises(ConfigError) as refusal:
        Staging(FullDevice(), 12345)
    assert str(refusal.value) == (
        "no room for 12345 bytes of staging on cpu (CUDA out of memory. Tried to allocate); make cache.capacity or "
        "data.batch_size smaller"
    )


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
