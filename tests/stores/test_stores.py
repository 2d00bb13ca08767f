"""What every store promises: one suite for all that `job/stores.py` names, and which of them a job gets."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.stores import ServerUrl, parse_server_url
from rowcast.job.tables import make_keys
from rowcast.prefetcher.stores import touched_rows
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import ABSENT, RowStore
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.prefetcher.stores.tracked_store import open_row_store
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import Part, Result, ThreadPool
from tests.stores.every_store import (
    GROUP,
    SEED,
    STORES,
    all_keys,
    finish,
    groups,
    make_job,
    open_numbered_as_touched,
    opened,
    present,
    random_records,
    read,
)
from tests.support.facts import facts


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[RowStore]:
    with opened(request.param) as store:
        yield store


def test_a_store_can_be_closed_twice_and_has_no_rows_then(store: RowStore) -> None:
    store.close()
    store.close()
    with pytest.raises(AssertionError, match="is closed, but 3 rows were requested"):
        read(store, all_keys()[:3])


def test_reads_and_writes_of_different_rows_may_run_at_once_in_two_threads(store: RowStore) -> None:
    keys = all_keys()
    mine, theirs = keys[::2], keys[1::2]
    rows = random_records(len(keys))
    finish(store.write(keys, rows))

    def write_often() -> None:
        for _ in range(50):
            finish(store.write(theirs, rows[1::2]))

    writer = threading.Thread(target=write_often)
    writer.start()
    seen = {read(store, mine).tobytes() for _ in range(50)}
    writer.join()
    assert seen == {rows[::2].tobytes()}
    assert read(store, theirs).tobytes() == rows[1::2].tobytes()


row_sets = st.sets(st.integers(0, len(all_keys()) - 1), max_size=60)


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=40)
@given(operations=st.lists(st.tuples(st.booleans(), row_sets), max_size=12))
def test_any_reads_and_writes_agree_with_a_plain_dictionary(kind: str, operations: list[tuple[bool, set[int]]]) -> None:
    everything = all_keys()
    expected: dict[int, bytes] = {}
    with opened(kind) as store:
        for step, (writes, chosen) in enumerate(operations):
            keys = everything[sorted(chosen)]
            if writes:
                rows = random_records(len(keys), step)
                finish(store.write(keys, rows))
                expected |= {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}
                rows[:] = 0  # they belong to the store only until the ticket is done
            else:
                found = zip(keys.tolist(), read(store, keys), strict=True)
                assert {key: row.tobytes() for key, row in found if key in expected} == {
                    key: expected[key] for key in keys.tolist() if key in expected
                }
        assert present(store) == expected


# what only the late store does


class CountingPool(ThreadPool):
    def __init__(self) -> None:
        super().__init__(3, least=4)
        self.counts: list[int] = []

    def over(self, parts: Sequence[Part], work: Callable[[Part], Result]) -> list[Result]:
        self.counts.append(len(parts))
        return super().over(parts, work)


def test_threads_share_long_look_ups_reads_and_writes_and_no_short_ones() -> None:
    store, pool = open_numbered_as_touched(), CountingPool()
    store.numbers.pool = pool
    for num_rows, num_shares in ((12, 3), (11, 2), (7, 1)):
        keys, rows = all_keys()[:num_rows], random_records(num_rows)
        store.write(keys, rows)
        assert (read(store, keys) == rows).all()
        assert pool.counts == [num_shares] * 4  # found and written, found and read
        pool.counts.clear()


# what only the memory store does


def test_rows_lie_one_after_the_other_as_they_are_first_written() -> None:
    """Rows in table order would take a page each if they lie far apart."""
    store = MemoryStore(GROUP)
    for keys in (all_keys()[[5, 300]], all_keys()[[2, 5, 340]]):
        finish(store.write(keys, random_records(len(keys))))
    assert store.numbers.of(all_keys()[[2, 5, 7, 300, 340]]).tolist() == [2, 0, ABSENT, 1, 3]


def test_tables_beyond_memory_take_what_is_touched_and_nothing_else() -> None:
    [group, *_] = groups(scale=2**38)
    store = MemoryStore(group)
    keys = make_keys(2, np.array([0, 5, 300 * 2**38 - 1]))
    rows = random_records(len(keys))
    finish(store.write(keys, rows))
    assert read(store, keys).tobytes() == rows.tobytes()
    assert isinstance(store.numbers, TouchedRows)
    assert store.numbers.count == 3


def test_more_addresses_than_a_process_may_reserve_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_rows, "MOST_INDEXED", 2**80)
    with pytest.raises(ConfigError, match=facts("group fp32_d6_adagrad", "GiB of addresses")):
        MemoryStore(groups(scale=2**38)[0])


REDIS = {"kind": "redis", "memory": "1GiB", "url": "redis://host"}


def test_tables_are_in_memory_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    store = open_row_store(make_job(job={"run_dir": str(tmp_path), "seed": SEED}), GROUP)
    assert isinstance(store, MemoryStore)
    store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"path": "somewhere"}, "path belongs to kind = \"tiered\", not 'memory'"),
        ({"memory": "1GiB"}, 'memory belongs to kind = "tiered" or "redis", not \'memory\''),
        ({"disk": "1GiB"}, "disk belongs to kind = \"tiered\", not 'memory'"),
        ({"kind": "tiered"}, facts("memory is missing", 'memory = "8GiB"')),
        ({"kind": "tiered", "memory": "lots"}, "'lots' is not a size"),
        ({"kind": "tiered", "memory": "1GiB", "disk": "0"}, "'0' must be more than 0"),
        ({"kind": "tiered", "memory": "1GiB", "path": ""}, "path is empty; name a folder"),
        ({"kind": "disk"}, facts('store.kind = "disk"', '"memory"', '"redis"', '"tiered"')),
        ({"url": "redis://host"}, "url belongs to kind = \"redis\", not 'memory'"),
        ({"kind": "tiered", "memory": "1GiB", "timeout": "5s"}, "timeout belongs to kind = \"redis\", not 'tiered'"),
        (REDIS | {"disk": "1GiB"}, "disk belongs to kind = \"tiered\", not 'redis'"),
        (REDIS | {"url": None}, facts("store.url = null", 'url = "redis://host:6379"')),
        (REDIS | {"memory": None}, "store.memory = null must be text in quotes"),
        (REDIS | {"url": "host:6379"}, "url must be redis://host:6379, or rediss://host:6379 for TLS"),
        (REDIS | {"url": "redis://host/1"}, "nothing may follow the port"),
        (REDIS | {"url": "redis://host#1"}, "nothing may follow the port"),
        (REDIS | {"url": "redis://host:port"}, "url is no URL of a server; write redis://host:6379"),
        (REDIS | {"timeout": "0s"}, 'timeout = \'0s\' must be from "10ms" to "1h"'),
        (REDIS | {"timeout": "soon"}, "'soon' is not a duration"),
    ],
)
def test_a_store_that_cannot_be_is_refused_with_a_sentence(section: dict[str, str | None], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_job(store=section)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@host",
        "redis://user:s3cret@host:6379",
        "redis://user:s3cret@host:port",
        "redis://user:s3/cret@host",
        "redis://user:s3#cret@host",
        "redis://host?password=s3cret",
        "redis://user:@host",
        "http://user:s3cret@host",
        "user:s3cret@host",
    ],
)
def test_a_url_with_a_password_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_job(store=REDIS | {"url": url})
    assert "cret" not in "".join(traceback.format_exception(raised.value))


def test_a_user_may_stand_in_the_url() -> None:
    assert parse_server_url("rediss://a%40b@[::1]") == ServerUrl(host="::1", port=6379, tls=True, user="a@b")
    assert parse_server_url("redis://host:7") == ServerUrl(host="host", port=7, tls=False, user=None)


@pytest.mark.parametrize("package", ["redis", "hiredis"])
def test_a_package_that_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=facts(f"package {package}", "rowcast[redis]")):
        open_row_store(make_job(store=REDIS), GROUP)


def test_a_memory_tier_is_refused_with_a_policy_that_does_not_look_ahead() -> None:
    with pytest.raises(ConfigError, match=facts('store.kind = "tiered"', '"lru"', "cache.policy")):
        make_job(store={"kind": "tiered", "memory": "1GiB"}, cache={"policy": "lru"})


def test_nothing_of_a_tiered_store_is_left_on_the_disk(tmp_path: Path) -> None:
    section = {"kind": "tiered", "memory": "1GiB", "path": str(tmp_path / "tables")}
    job = make_job(job={"run_dir": str(tmp_path / "run"), "seed": SEED}, store=section)
    store = open_row_store(job, GROUP)
    rows = random_records(5)
    finish(store.write(all_keys()[:5], rows))
    assert read(store, all_keys()[:5]).tobytes() == rows.tobytes()
    assert list((tmp_path / "tables").iterdir()) == []
    store.close()
    assert list(tmp_path.rglob("*")) == [tmp_path / "tables"]
