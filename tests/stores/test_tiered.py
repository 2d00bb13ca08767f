"""The tiered store: which rows are in memory, whatever order reads, writes, plans and its own work come in."""

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.prefetcher.stores.store import Keys
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.runtime.errors import DataError, RowcastError
from tests.stores.every_store import GROUP, all_keys, finish, present, random_records, read
from tests.support.cold_dict import ColdDict
from tests.support.tiers import NO_KEYS, check_tier, tier_plan, tiered


def opened(num_slots: int) -> tuple[TieredStore, ColdDict]:
    cold = ColdDict()
    return tiered(GROUP, num_slots, cold), cold


def settle(store: TieredStore, home_through: int | None) -> None:
    while store.advance(home_through):
        pass
    check_tier(store)


def with_rows(num_slots: int, num_rows: int) -> tuple[TieredStore, ColdDict, Keys]:
    """Rows that were restored before any plan."""
    store, cold = opened(num_slots)
    keys = all_keys()[:num_rows]
    finish(store.write(keys, random_records(num_rows)))
    return store, cold, keys


def test_a_planned_row_is_in_memory_when_it_is_read_and_leaves_once_its_step_is_home() -> None:
    store, cold, keys = with_rows(5, 20)
    store.stage(0, tier_plan(load=keys[:5]))
    store.stage(1, tier_plan(load=keys[5:8], spill=keys[:3]))
    settle(store, None)
    assert (store.num_in_memory, store.counts().loaded) == (5, 5), "step 0 is not home, so nobody has left"
    before = cold.rows_read
    assert read(store, keys[:5]).tobytes() == random_records(20)[:5].tobytes()
    assert (cold.rows_read, store.counts().late) == (before, 0)
    settle(store, 0)
    assert (store.num_in_memory, store.counts().loaded) == (5, 5), "they leave after step 1"
    settle(store, 1)
    assert (store.num_in_memory, store.counts().loaded) == (5, 8)
    assert read(store, keys[3:8]).tobytes() == random_records(20)[3:8].tobytes()
    assert cold.rows_read == before + 3


def test_a_row_that_has_not_changed_leaves_without_being_written_again() -> None:
    store, cold, keys = with_rows(5, 5)
    written = cold.rows_written
    store.stage(0, tier_plan(load=keys))
    store.stage(1, tier_plan(spill=keys))
    settle(store, None)
    finish(store.write(keys[:2], random_records(2, seed=1)))
    settle(store, 1)
    assert (store.num_in_memory, store.counts().spilled) == (0, 2)
    assert cold.rows_written - cold.moved_rows == written + 2
    assert sorted(cold.places) == keys.tolist()


def test_a_row_that_was_never_written_takes_a_slot_and_nothing_else() -> None:
    store, cold = opened(5)
    keys = all_keys()[:5]
    store.stage(0, tier_plan(load=keys))
    store.stage(1, tier_plan(spill=keys))
    settle(store, None)
    assert (store.num_in_memory, store.counts().untouched_loaded, present(store)) == (5, 5, {})
    finish(store.write(keys[:1], random_records(1)))
    settle(store, 1)
    assert (store.num_in_memory, list(cold.places)) == (0, keys[:1].tolist())
    assert list(present(store)) == keys[:1].tolist()


def test_a_row_that_is_needed_again_before_it_has_left_stays() -> None:
    store, cold, keys = with_rows(5, 5)
    store.stage(0, tier_plan(load=keys))
    store.stage(1, tier_plan(spill=keys))
    store.stage(2, tier_plan(load=keys[:2]))
    store.stage(3, tier_plan(spill=keys[:1]))
    settle(store, None)
    before = cold.rows_read
    settle(store, 2)
    assert (store.num_in_memory, store.counts().loaded) == (2, 5)
    assert read(store, keys[:2]).tobytes() == random_records(5)[:2].tobytes()
    assert cold.rows_read == before
    settle(store, 3)
    assert store.num_in_memory == 1


def test_rows_without_a_free_slot_come_once_others_have_left() -> None:
    store, _, keys = with_rows(4, 10)
    store.stage(0, tier_plan(load=keys[:4]))
    store.stage(1, tier_plan(load=keys[4:8], spill=keys[:4]))
    settle(store, 0)
    assert (store.counts().loaded, store.counts().late) == (4, 0)
    assert read(store, keys[4:8]).tobytes() == random_records(10)[4:8].tobytes()
    assert (store.counts().late, store.counts().cold_reads) == (4, 4)
    settle(store, 1)
    assert (store.num_in_memory, store.counts().loaded) == (4, 8)


def test_a_read_of_rows_that_no_plan_has_named_makes_none_of_them_late() -> None:
    store, _, keys = with_rows(4, 10)
    assert read(store, keys).tobytes() == random_records(10).tobytes()
    assert (store.counts().late, store.counts().cold_reads) == (0, 10)


def test_a_row_that_is_loading_comes_once_it_is_loaded() -> None:
    store, cold, keys = with_rows(5, 5)
    store.stage(0, tier_plan(load=keys))
    out = np.zeros((5, GROUP.record_bytes), np.uint8)
    tickets = []

    def ask() -> None:
        cold.on_read = lambda: None
        tickets.append(store.read(keys, out))
        assert not tickets[0].done()

    cold.on_read = ask
    settle(store, None)
    assert tickets[0].done()
    assert out.tobytes() == random_records(5).tobytes()
    assert (store.counts().late, store.counts().cold_reads) == (5, 0)


def test_a_write_wins_over_a_load_under_way() -> None:
    store, cold, keys = with_rows(5, 5)
    rows = random_records(2, seed=1)
    store.stage(0, tier_plan(load=keys))
    cold.on_read = lambda: finish(store.write(keys[:2], rows))
    settle(store, None)
    cold.on_read = lambda: None
    assert read(store, keys[:2]).tobytes() == rows.tobytes()
    assert sorted(cold.places) == keys[2:].tolist()


def test_a_write_wins_over_a_spill_under_way() -> None:
    store, cold, keys = with_rows(5, 5)
    rows = random_records(5, seed=1)
    store.stage(0, tier_plan(load=keys, spill=NO_KEYS))
    store.stage(1, tier_plan(spill=keys))
    settle(store, None)
    finish(store.write(keys, random_records(5, seed=2)))

    def write_again() -> None:
        cold.on_write = lambda: None
        finish(store.write(keys[:2], rows[:2]))
        assert read(store, keys[2:]).tobytes() == random_records(5, seed=2)[2:].tobytes(), "readable while it leaves"

    cold.on_write = write_again
    settle(store, 1)
    assert store.num_in_memory == 2
    assert read(store, keys[:2]).tobytes() == rows[:2].tobytes()
    assert sorted(cold.places) == keys[2:].tolist()


def test_a_row_that_gets_a_slot_while_it_is_written_past_memory_has_the_written_bytes() -> None:
    store, cold, keys = with_rows(5, 10)
    rows = random_records(10, seed=1)

    def stage() -> None:
        cold.on_write = lambda: None
        store.stage(0, tier_plan(load=keys[:3]))
        settle(store, None)

    cold.on_write = stage
    finish(store.write(keys, rows))
    check_tier(store)
    assert read(store, keys).tobytes() == rows.tobytes()
    assert sorted(cold.places) == keys[3:].tolist()


@pytest.mark.parametrize("error", [DataError("a page is broken"), RowcastError("the disk is full")])
def test_what_the_cold_tier_raises_ends_the_work_and_loses_no_row(error: Exception) -> None:
    store, cold, keys = with_rows(5, 10)
    store.stage(0, tier_plan(load=keys[:5]))
    cold.fails = error
    with pytest.raises(type(error), match=str(error)):
        store.advance(None)
    check_tier(store)
    assert store.num_in_memory == 0
    store.begin(5)
    store.stage(0, tier_plan(load=keys[:5]))
    store.stage(1, tier_plan(spill=keys[:5]))
    settle(store, 0)
    finish(store.write(keys[:5], random_records(5, seed=1)))
    cold.fails = error
    with pytest.raises(type(error), match=str(error)):
        store.advance(1)
    check_tier(store)
    assert store.num_in_memory == 5
    assert read(store, keys[:5]).tobytes() == random_records(5, seed=1).tobytes()


@pytest.mark.parametrize("num_slots", [0, 3, 40])
def test_a_new_attempt_begins_with_an_empty_memory_of_any_size_and_all_rows(num_slots: int) -> None:
    store, cold, keys = with_rows(8, 20)
    store.stage(0, tier_plan(load=keys[:8]))
    store.stage(1, tier_plan(load=keys[8:12]))
    settle(store, None)
    finish(store.write(keys[:4], random_records(4, seed=1)))
    store.begin(num_slots)
    check_tier(store)
    assert (store.num_in_memory, store.num_slots) == (0, num_slots)
    assert sorted(cold.places) == keys.tolist()
    expected = np.concatenate([random_records(4, seed=1), random_records(20)[4:]])
    assert read(store, keys).tobytes() == expected.tobytes()
    store.stage(0, tier_plan(load=keys))
    settle(store, None)
    assert store.num_in_memory == min(20, num_slots)
    assert read(store, keys).tobytes() == expected.tobytes()


row_sets = st.sets(st.integers(0, len(all_keys()) - 1), max_size=60)
operations = st.one_of(
    st.tuples(st.just("stage"), row_sets, row_sets),
    st.tuples(st.just("advance"), st.integers(-1, 12), st.just(None)),
    st.tuples(st.sampled_from(["read", "write"]), row_sets, st.just(None)),
)


@settings(max_examples=100)
@given(num_slots=st.integers(0, 80), history=st.lists(operations, max_size=30))
def test_any_order_of_plans_work_reads_and_writes_agrees_with_a_dictionary(
    num_slots: int, history: list[tuple[str, set[int] | int, set[int] | None]]
) -> None:
    everything = all_keys()
    expected: dict[int, bytes] = {}
    store, _ = opened(num_slots)
    step = 0
    for number, (operation, chosen, others) in enumerate(history):
        if operation == "advance":
            store.advance(None if chosen == -1 else step - 13 + chosen)  # type: ignore[operator]
            check_tier(store)
            continue
        keys = everything[sorted(chosen)]  # type: ignore[arg-type]
        if operation == "stage":
            store.stage(step, tier_plan(load=keys, spill=everything[sorted(others or ())]))
            step += 1
        elif operation == "write":
            rows = random_records(len(keys), number)
            finish(store.write(keys, rows))
            expected |= {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}
        else:
            assert_reads(store, keys, expected)
    check_tier(store)
    assert present(store) == expected


def assert_reads(store: TieredStore, keys: Keys, expected: dict[int, bytes]) -> None:
    out = np.zeros((len(keys), GROUP.record_bytes), np.uint8)
    ticket = store.read(keys, out)
    finish(ticket)
    absent = {int(keys[i]) for i in ticket.absent}
    assert absent == {key for key in keys.tolist() if key not in expected}
    for key, row in zip(keys.tolist(), out, strict=True):
        assert row.tobytes() == expected.get(key, b"\0" * GROUP.record_bytes)


def test_four_threads_at_once_never_see_other_bits() -> None:
    """One stages and advances, one writes half of the rows, one reads these between two writes, one reads the rest."""
    everything = all_keys()
    written, still = everything[::2], everything[1::2]
    still_rows = random_records(len(still), seed=9)
    store, cold = opened(60)
    finish(store.write(still, still_rows))
    failures: list[BaseException] = []
    ended = threading.Event()
    turn = threading.Lock()  # nobody reads a row while it is written
    expected: dict[int, bytes] = {}

    def has_come_to_it() -> bool:
        return min(store.counts().loaded, store.counts().spilled, store.counts().cold_reads, cold.moved_rows) > 0

    def staging() -> None:
        chance, step, before = random.Random(1), 0, NO_KEYS
        while not ended.is_set():
            load = everything[sorted(chance.sample(range(len(everything)), 40))]
            store.stage(step, tier_plan(load=load, spill=before))
            for _ in range(4):
                store.advance(step - 1)
            step, before = step + 1, load

    def writing() -> None:
        chance = random.Random(2)
        for number in range(10_000):
            if number > 300 and has_come_to_it():
                return
            chosen = written[sorted(chance.sample(range(len(written)), 30))]
            rows = random_records(len(chosen), number)
            with turn:
                finish(store.write(chosen, rows))
                expected.update({int(key): row.tobytes() for key, row in zip(chosen, rows, strict=True)})

    def reading_written() -> None:
        chance = random.Random(3)
        while not ended.is_set():
            chosen = written[sorted(chance.sample(range(len(written)), 30))]
            with turn:
                assert_reads(store, chosen, expected)

    def reading_still() -> None:
        chance = random.Random(4)
        while not ended.is_set():
            first = chance.randrange(len(still) - 30)
            assert read(store, still[first : first + 30]).tobytes() == still_rows[first : first + 30].tobytes()

    def keep(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
            failures.append(error)
            ended.set()

    threads = [threading.Thread(target=keep, args=(work,)) for work in (staging, reading_written, reading_still)]
    for thread in threads:
        thread.start()
    keep(writing)
    ended.set()
    for thread in threads:
        thread.join()
    assert failures == []
    check_tier(store)
    assert has_come_to_it()
    assert_reads(store, everything, expected | {int(k): r.tobytes() for k, r in zip(still, still_rows, strict=True)})
