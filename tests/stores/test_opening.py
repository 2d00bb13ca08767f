"""Which store a job gets."""

import sys
import traceback
from pathlib import Path

import pytest

from rowcast.job.stores import ServerUrl, parse_server_url
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.tracked_store import open_row_store
from rowcast.runtime.errors import ConfigError
from tests.stores.every_store import GROUP, SEED, all_keys, finish, make_job, random_records, read
from tests.support.facts import facts


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
    ],
)
def test_a_store_that_cannot_be_is_refused_with_a_sentence(section: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_job(store=section)


REDIS = {"kind": "redis", "memory": "1GiB", "url": "redis://host"}


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
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
def test_a_server_that_cannot_be_is_refused_with_a_sentence(section: dict[str, str | None], sentence: str) -> None:
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
