"""The tables of the barrier's states, on either side: nothing but what they say happens, and all that they say does."""

from enum import StrEnum
from typing import Any

import pytest

import rowcast.prefetcher.pipeline.barrier
import rowcast.trainer.step.barrier
from examples.plain_loop import run_plain_loop
from rowcast.job.tables import group_specs
from rowcast.prefetcher.pipeline.fetcher import PlannedBarrier
from rowcast.runtime.errors import LocalProtocolError
from rowcast.runtime.stages import StateTable
from tests.support import driver
from tests.support.batches import NUM_DENSE, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.diagrams import barrier
from tests.support.driver import InProcessRun, MemoryCheckpointer, Settings, start_state

SIDES: dict[str, tuple[StateTable[Any, Any], type[StrEnum], type[StrEnum]]] = {
    "prefetcher": (
        rowcast.prefetcher.pipeline.barrier.TABLE,
        rowcast.prefetcher.pipeline.barrier.PrefetcherState,
        rowcast.prefetcher.pipeline.barrier.PrefetcherEvent,
    ),
    "trainer": (
        rowcast.trainer.step.barrier.TABLE,
        rowcast.trainer.step.barrier.TrainerState,
        rowcast.trainer.step.barrier.TrainerEvent,
    ),
}
every_side = pytest.mark.parametrize("side", SIDES)


@every_side
def test_an_event_that_the_table_does_not_allow_names_itself_state_and_side(side: str) -> None:
    table, states, events = SIDES[side]
    allowed = {(state, event) for state, event, _ in table.rows}
    refused = [(state, event) for state in states for event in events if (state, event) not in allowed]
    assert len(refused) > len(allowed)
    for state, event in refused:
        with pytest.raises(LocalProtocolError) as caught:
            table.after(state, event)
        assert all(f"'{name}'" in str(caught.value) for name in (state, event))
        assert side in str(caught.value)


@every_side
def test_every_state_is_drawn_and_leads_to_the_end(side: str) -> None:
    table, states, _ = SIDES[side]
    text = barrier(table)
    assert all(f'state "{state}" as {state.name}' in text for state in states)
    leads = {states["ENDED"]}
    for _ in states:
        leads |= {state for state, _, after in table.rows if after in leads}
    assert leads == set(states)


class EverySecond(MemoryCheckpointer):
    """Barriers without a checkpoint, too."""

    def begin(self, barrier: PlannedBarrier) -> bool:
        super().begin(barrier)
        return len(self.begun) % 2 == 1


def test_a_run_with_small_rings_and_barriers_of_both_kinds_takes_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[Any, Any]] = set()
    after = StateTable.after

    def noted(self: StateTable[Any, Any], state: Any, event: Any) -> Any:
        taken.add((state, event))
        return after(self, state, event)

    monkeypatch.setattr(StateTable, "after", noted)
    monkeypatch.setattr(driver, "MemoryCheckpointer", EverySecond)
    job = small_job("adagrad", "single", depth=2, horizon=3, checkpoint={"every": 3})
    batches = small_batches(job, "single", num_steps=10, eval_at=())
    slots = slots_for(group_specs(job), batches, "everything")
    run = InProcessRun(job, batches, Settings(slots=slots, ring_bytes=4096)).run()
    assert_equal_bits(run, *run_plain_loop(job, start_state(job, NUM_DENSE), batches))
    assert taken == {(state, event) for table, _, _ in SIDES.values() for state, event, _ in table.rows}
