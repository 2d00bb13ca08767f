"""First values, which rows a checkpoint must hold, and that it gets its barrier's: over stores of every kind."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.prefetcher.stores import tracked_store
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.prefetcher.stores.tracked_store import FrozenRows, TrackedStore
from tests.stores.every_store import (
    GROUP,
    SEED,
    STORES,
    all_keys,
    changed_rows,
    finish,
    first_floats,
    groups,
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


def as_rows(blocks: list[tuple[Keys, Records]]) -> dict[int, bytes]:
    return {int(key): record.tobytes() for keys, records in blocks for key, record in zip(keys, records, strict=True)}


def test_a_frozen_store_has_no_changed_row_until_one_is_written(store: TrackedStore) -> None:
    keys = all_keys()[:5]
    finish(store.write(keys, random_records(5)))
    store.freeze(1.0)
    assert store.num_changed == 0
    finish(store.write(keys[1:3], random_records(2, seed=1)))
    assert changed_rows(store).keys() == set(keys[1:3].tolist())


def test_there_is_room_again_once_rows_that_are_aside_were_handed_out(store: TrackedStore) -> None:
    keys = all_keys()[:10]
    finish(store.write(keys, random_records(10)))
    frozen = store.freeze(0.3)
    assert store.has_room(3)
    assert not store.has_room(4)
    finish(store.write(keys[[0, 2, 9]], random_records(3, seed=1)))
    assert not store.has_room(1)
    blocks = frozen.blocks(2 * GROUP.record_bytes)
    next(blocks)
    assert store.has_room(1), "row 0 was handed out"
    assert not store.has_room(2)
    next(blocks)
    assert store.has_room(2), "row 2 was handed out"
    finish(store.write(keys[[5, 6]], random_records(2, seed=2)))
    assert not store.has_room(1)
    for _ in blocks:
        pass
    assert store.has_room(10**9), "nothing is frozen that could be written over"


def test_a_row_is_set_aside_once_and_not_after_it_was_handed_out(store: TrackedStore) -> None:
    keys, rows = all_keys()[:4], random_records(4)
    finish(store.write(keys, rows))
    blocks = store.freeze(0.75).blocks(GROUP.record_bytes)
    handed_out = [next(blocks)]
    for seed in range(1, 4):
        finish(store.write(keys, random_records(4, seed)))
    assert as_rows([*handed_out, *blocks]) == as_rows([(keys, rows)])


row_sets = st.sets(st.integers(0, len(all_keys()) - 1), min_size=1, max_size=60)


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=40)
@given(
    frozen_rows_of=st.lists(row_sets, min_size=1, max_size=3),
    written=st.lists(st.one_of(row_sets, st.none()), max_size=12),
    block=st.integers(1, 9),
    share=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_any_writes_between_the_blocks_change_neither_them_nor_are_they_lost(
    kind: str, frozen_rows_of: list[set[int]], written: list[set[int] | None], block: int, share: float
) -> None:
    """None stands for the next block. They come by ascending key, each with rows of one table."""
    everything = all_keys()
    with opened(kind) as own:
        store = tracked(own)
        for number, trained in enumerate(frozen_rows_of):
            finish(store.write(everything[sorted(trained)], random_records(len(trained), number)))
        wanted, rows = changed_rows(store), dict[int, bytes]()
        blocks = store.freeze(share).blocks(block * GROUP.record_bytes)
        handed_out = []
        for number, chosen in enumerate(written, start=100):
            while chosen is not None and not store.has_room(len(chosen)):
                handed_out.append(next(blocks))
            if chosen is None:
                handed_out += [found for found in [next(blocks, None)] if found is not None]
            else:
                keys, records = everything[sorted(chosen)], random_records(len(chosen), number)
                finish(store.write(keys, records))
                rows |= as_rows([(keys, records)])
        handed_out += blocks
        store.thaw()
        assert as_rows(handed_out) == wanted
        keys = np.concatenate([np.empty(0, np.int64), *(found for found, _ in handed_out)])
        assert (np.diff(keys) > 0).all()
        assert all(1 <= len(found) <= block and len(set(found >> 48)) == 1 for found, _ in handed_out)
        assert changed_rows(store) == rows
        kept = np.array(sorted(wanted.keys() - rows.keys()), np.int64)
        assert as_rows([(kept, read(store, kept))]) == {key: wanted[key] for key in kept.tolist()}


def test_two_threads_give_the_same_rows_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's thread hands rows out while the write-back's writes over all of them, again and again."""
    monkeypatch.setattr(tracked_store, "COPIED_AT_ONCE", 16)
    [group] = [group for group in groups(scale=100) if group.tables[0].name == "first"]
    store = TrackedStore(MemoryStore(group), group, SEED)
    keys = np.concatenate([keys_of((t.index, list(range(t.num_embeddings)))) for t in group.tables])
    chance = np.random.default_rng(0)

    def records(value: int, count: int) -> Records:
        return np.full((count, group.record_bytes // 8), value, np.uint64).view(np.uint8)

    def collect(frozen: FrozenRows, handed_out: list[tuple[Keys, Records]]) -> None:
        handed_out.extend(frozen.blocks(40_000))

    for turn in range(5):
        finish(store.write(keys, records(turn, len(keys))))
        frozen = store.freeze(0.05)
        handed_out: list[tuple[Keys, Records]] = []
        collector = threading.Thread(target=collect, args=(frozen, handed_out))
        collector.start()
        while collector.is_alive():
            chosen = np.sort(chance.choice(len(keys), 200, replace=False))
            while not store.has_room(len(chosen)) and collector.is_alive():
                pass
            finish(store.write(keys[chosen], records(10**9, len(chosen))))
        collector.join()
        store.thaw()
        assert np.concatenate([found for found, _ in handed_out]).tolist() == keys.tolist()
        words = np.concatenate([rows for _, rows in handed_out]).view(np.uint64)
        assert (words == turn).all(), f"{(words != turn).any(axis=1).sum()} of {len(keys)} rows are not the barrier's"


def changed_keys(store: TrackedStore) -> list[int]:
    return [int(key) for table in GROUP.tables for key in store.changed_keys(table.index)]


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
