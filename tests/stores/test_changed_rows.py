"""First values, which rows a checkpoint must hold, and how a store goes back to one: over stores of every kind."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.prefetcher.stores.tracked_store import TrackedStore
from tests.stores.every_store import (
    GROUP,
    STORES,
    all_keys,
    changed_rows,
    finish,
    first_floats,
    keys_of,
    opened,
    random_records,
    read,
    tracked,
)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[TrackedStore]:
    with opened(request.param) as store:
        yield tracked(store)


def changed_keys(store: TrackedStore) -> list[int]:
    return [int(key) for table in GROUP.tables for key in store.changed_keys(table.index)]


def test_a_row_that_was_never_written_has_its_first_value(store: TrackedStore) -> None:
    keys = all_keys()
    assert read(store, keys).tobytes() == first_floats(keys).tobytes()
    assert read(store, keys[5:6]).tobytes() == first_floats(keys[5:6]).tobytes()
    rows = random_records(2)
    finish(store.write(keys[5:7], rows))
    expected = first_floats(keys[4:8]).view(np.uint8)
    expected[1:3] = rows
    assert read(store, keys[4:8]).tobytes() == expected.tobytes()


def test_a_row_has_changed_from_its_write_until_the_store_is_settled(store: TrackedStore) -> None:
    assert store.num_changed == 0
    keys = keys_of((0, [0, 39]), (2, [0, 1, 299]), (3, [6]))
    for _ in range(2):
        finish(store.write(keys, random_records(len(keys))))
        assert store.num_changed == len(keys)
        assert changed_keys(store) == keys.tolist()
        store.settle()
        assert store.num_changed == 0
        assert changed_keys(store) == []


def test_reading_changes_no_row(store: TrackedStore) -> None:
    read(store, all_keys())
    assert store.num_changed == 0


def test_a_forgotten_row_reads_as_if_it_was_never_written(store: TrackedStore) -> None:
    keys = keys_of((0, [3, 4, 5]), (3, [0]))
    rows = random_records(len(keys))
    finish(store.write(keys, rows))
    store.forget(keys[1:3])
    assert read(store, keys).tobytes() == rows[:1].tobytes() + first_floats(keys[1:3]).tobytes() + rows[3:].tobytes()
    assert changed_keys(store) == [int(keys[0]), int(keys[3])]
    finish(store.write(keys[1:2], rows[1:2]))
    assert read(store, keys[1:2]).tobytes() == rows[1:2].tobytes()
    assert changed_keys(store) == keys[[0, 1, 3]].tolist()


row_sets = st.sets(st.integers(0, len(all_keys()) - 1), min_size=1, max_size=60)
operations = st.one_of(
    st.tuples(st.sampled_from(["write", "forget"]), row_sets), st.tuples(st.just("settle"), st.just(set[int]()))
)


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=40)
@given(history=st.lists(operations, max_size=12))
def test_any_writes_settlings_and_forgettings_agree_with_a_dictionary_and_a_set(
    kind: str, history: list[tuple[str, set[int]]]
) -> None:
    everything = all_keys()
    rows: dict[int, bytes] = {}
    changed: set[int] = set()
    with opened(kind) as own:
        store = tracked(own)
        for step, (operation, chosen) in enumerate(history):
            keys = everything[sorted(chosen)]
            if operation == "write":
                records = random_records(len(keys), step)
                finish(store.write(keys, records))
                rows |= {int(key): record.tobytes() for key, record in zip(keys, records, strict=True)}
                changed |= set(keys.tolist())
            elif operation == "forget":
                store.forget(keys)
                rows = {key: record for key, record in rows.items() if key not in keys}
                changed -= set(keys.tolist())
            else:
                store.settle()
                changed.clear()
            assert changed_keys(store) == sorted(changed)
            assert store.num_changed == len(changed)
            assert changed_rows(store) == {key: rows[key] for key in changed}
        first = zip(everything.tolist(), first_floats(everything), strict=True)
        assert read(store, everything).tobytes() == b"".join(rows.get(key, floats.tobytes()) for key, floats in first)


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=25)
@given(saved=row_sets, lost=row_sets)
def test_a_rollback_of_the_changed_rows_alone_gives_the_checkpoint_back(
    kind: str, saved: set[int], lost: set[int]
) -> None:
    everything = all_keys()
    with opened(kind) as own:
        store = tracked(own)
        keys = everything[sorted(saved)]
        finish(store.write(keys, random_records(len(keys), 1)))
        checkpoint, bits = changed_rows(store), read(store, everything).tobytes()
        store.settle()
        keys = everything[sorted(lost)]
        finish(store.write(keys, random_records(len(keys), 2)))

        changed = changed_keys(store)
        assert changed == keys.tolist()
        store.forget(np.array(changed))
        assert changed_keys(store) == []
        back = np.array([key for key in changed if key in checkpoint], np.int64)
        records = np.frombuffer(b"".join(checkpoint[int(key)] for key in back), np.uint8).reshape(
            len(back), GROUP.record_bytes
        )
        finish(store.write(back, records))
        assert changed_keys(store) == back.tolist()
        store.settle()

        assert read(store, everything).tobytes() == bits
        assert changed_keys(store) == []
        assert store.num_changed == 0
