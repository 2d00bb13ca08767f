"""Stores are told of every plan before its rows are asked for, and of the steps whose rows are home."""

import pytest

from rowcast.job.tables import group_specs
from rowcast.prefetcher.stores.store import Keys, ReadTicket, Records, RowStore, Ticket
from rowcast.protocol.plan import GroupPlan
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings


class Told(RowStore):
    """Checks that hints are true when they are given, and that rows are asked for as they said."""

    works_ahead = True

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self.numbers = store.numbers
        self.staged = list[tuple[int, GroupPlan]]()
        self._left_to_read = list[int]()  # keys, in the order of the plans
        self._written = 0  # rows
        self.home = list[int]()  # what `advance` was told

    def stage(self, step: int, plan: GroupPlan) -> None:
        assert step == len(self.staged)
        self.staged.append((step, plan))
        self._left_to_read += plan.fetch_keys.tolist()

    def advance(self, home_through: int | None) -> bool:
        if home_through is not None:
            self.home.append(home_through)
            promised = sum(plan.num_dirty for step, plan in self.staged if step <= home_through)
            assert self._written >= promised, f"{self._written} rows are written of {promised} that are said to be"
        return False

    def read(self, keys: Keys, out: Records) -> ReadTicket:
        assert self._left_to_read[: len(keys)] == keys.tolist()
        del self._left_to_read[: len(keys)]
        return self._store.read(keys, out)

    def write(self, keys: Keys, rows: Records) -> Ticket:
        self._written += len(keys)
        return self._store.write(keys, rows)

    def close(self) -> None:
        self._store.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_store_hears_of_every_plan_before_its_rows_are_read_and_of_home_only_what_is_written(seed: int) -> None:
    job = small_job("adagrad", "multi")
    batches = small_batches(job, "multi", num_steps=12)
    slots, told = slots_for(group_specs(job), batches, "one batch"), list[Told]()

    def tell(store: RowStore) -> RowStore:
        told.append(Told(store))
        return told[-1]

    run = InProcessRun(job, batches, Settings(slots=slots, seed=seed, late_store=True, harm=tell)).run()
    for index, store in enumerate(told):
        assert len(run.plans) == len(store.staged) > 12, "evaluations count"
        for (step, group), plan in zip(store.staged, run.plans, strict=True):
            assert step == plan.step
            assert group is plan.groups[index]
        assert store.home == sorted(store.home)
        assert store.home[-1] == run.plans[-1].step
    assert sum(plan.num_dirty for store in told for _, plan in store.staged) > 0
