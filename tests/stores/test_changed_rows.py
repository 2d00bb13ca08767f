"""First values, and which rows a checkpoint must hold: over stores of every kind."""

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
    opened,
    random_records,
    read,
    tracked,
)


def changed_keys(store: TrackedStore) -> list[int]:
    return [int(key) for table in GROUP.tables for key in store.changed_keys(table.index)]


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
