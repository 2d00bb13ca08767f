"""`rowcast check` of a job that several ranks share, and of histories that are cut or fall."""

import re
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.analysis.check import machine
from rowcast.analysis.check.check import check_job
from rowcast.analysis.check.data import (
    ALL,
    Seen,
    SeenHistories,
    check_histories,
    check_opens,
    check_ranks,
    check_samples,
    check_start,
    shard_rows,
)
from rowcast.analysis.check.machine import Device, check_device, check_ports, check_rings, check_run_directory
from rowcast.analysis.show import Finding
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs, make_keys
from rowcast.prefetcher.planner.first_batches import measure
from rowcast.protocol.batch import Batch
from rowcast.protocol.parts import Rank, Shards
from rowcast.runtime.run_directory import RunDirectory, pair_folder
from tests.support.facts import facts
from tests.support.jobs import job_content
from tests.support.jobs import table as table_of
from tests.support.next_item import LENGTH, job_of


def ranked_job(folder: Path, **sections: Any) -> Job:
    data = {"format": "synthetic", "batch_size": 64, "synthetic": {"samples": 5000}}
    return parse_job(job_content(folder / "run", **{"data": data, "ranks": {"count": 4, "parts": 8}} | sections))


def of_ranks(job: Job) -> list[Finding]:
    return list(check_ranks(job, group_specs(job)))


def test_a_trainer_that_is_alone_has_no_finding(tmp_path: Path) -> None:
    assert of_ranks(ranked_job(tmp_path, ranks={})) == []


def test_parts_are_compared_with_the_batch(tmp_path: Path) -> None:
    [parts, shards] = of_ranks(ranked_job(tmp_path))
    assert parts.sentence == "4 ranks of 2 parts, each of 8 of the 64 samples of a batch"
    assert (parts.level, shards.level) == ("ok", "ok")
    few = {"format": "synthetic", "batch_size": 5, "synthetic": {"samples": 5000}}
    [empty, _] = of_ranks(ranked_job(tmp_path, data=few))
    assert empty.level == "warning"
    assert "data.batch_size = 5 leaves 3 of 8 parts without a sample; set 8 or more" in empty.sentence


def test_the_rows_of_a_shard_are_counted_by_blocks(tmp_path: Path) -> None:
    job = ranked_job(tmp_path)
    for group in group_specs(job):
        for table in group.tables:
            owners = Shards([table], 4).owners(make_keys(table.index, np.arange(table.num_embeddings)))
            assert shard_rows(table, 4).tolist() == np.bincount(owners, minlength=4).tolist()
    [_, shards] = of_ranks(
        ranked_job(tmp_path, ranks={"count": 1024}, data={"format": "synthetic", "batch_size": 2048})
    )
    assert shards.level == "warning"
    assert "use fewer ranks" in shards.sentence


def test_each_table_says_where_it_goes_and_why(tmp_path: Path) -> None:
    tables = [
        table_of("t", 2000, 4, "cat_0", "cat_1", placement="table"),
        table_of("u", 9, 4, "cat_2", placement="auto"),
    ]
    job = ranked_job(tmp_path, tables=[*tables, table_of("v", 9, 4, "cat_3")])
    seen = Seen(groups=group_specs(job), count=4)
    assert [finding.level for finding in check_opens(job, seen)] == ["ok"]
    pooled, rows, every = check_start(job, seen, lambda: None)
    assert {own.subject for own in (pooled, rows, every)} == {"placement"}
    # vectors of two features and of 16 samples a rank, for three of four ranks' samples, there and back
    assert pooled.sentence.startswith("table t: rank 0 pools it for all, 768 B a rank and step; by rows ")
    assert rows.sentence.startswith("table u: rows travel, ")
    assert rows.sentence.endswith(" a rank and step; as pooled vectors 384 B")
    assert "all tables: " in every.sentence
    assert "with all tables by rows" in every.sentence
    assert seen.groups[0].tables[0].point == 0
    assert shard_rows(seen.groups[0].tables[0], 4).tolist() == [2000, 0, 0, 0]
    assert "; 1 table with one owner each" in of_ranks(job)[1].sentence
    little = ranked_job(tmp_path, tables=tables, ranks={"count": 4, "memory": "2000B"})
    seen = Seen(groups=group_specs(little), count=4)
    assert [finding.level for finding in check_opens(little, seen)] == ["ok"]
    short, *_ = check_start(little, seen, lambda: None)
    assert (short.level, short.subject) == ("warning", "placement")
    assert re.search(facts("ranks.memory", "2000B", "rank 0"), short.sentence)


def test_tables_by_rows_say_nothing_of_placement(tmp_path: Path) -> None:
    job = ranked_job(tmp_path)
    seen = Seen(groups=group_specs(job), count=4)
    assert [finding.level for finding in check_opens(job, seen)] == ["ok"]
    assert list(check_start(job, seen, lambda: None)) == []


def test_ranks_on_several_hosts_need_one_folder(tmp_path: Path) -> None:
    found = of_ranks(ranked_job(tmp_path, ranks={"count": 4, "per_host": 2}))[-1]
    assert found.level == "warning"
    assert "must be the same folder on all of them" in found.sentence


def test_every_pair_of_a_host_has_ports_of_its_own(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        metrics = {"prefetcher": f"127.0.0.1:{port - 4}", "trainer": "127.0.0.1:0"}
        found = list(check_ports(ranked_job(tmp_path, metrics=metrics)))
    assert any(finding.level == "error" and str(port) in finding.sentence for finding in found)
    assert found[-1].level == "ok"


def test_rings_of_all_pairs_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_shared_memory", lambda: 10 * 2**20)
    monkeypatch.setattr(machine, "check_shared_memory", lambda nbytes: None)
    assert next(check_rings(2**20, 5)).level == "ok"
    refused = next(check_rings(2**20, 6))
    assert refused.level == "error"
    assert "two rings of each of 6 pairs, of 1 MiB each, need 12 MiB of /dev/shm" in refused.sentence


def test_each_rank_of_a_host_needs_a_device(tmp_path: Path) -> None:
    device = Device(name="cuda:0", free_bytes=2**40, count=2)
    few, enough = check_device(device, ranked_job(tmp_path), 1, 1)
    assert "4 ranks of a host need as many devices, and there are 2; set ranks.per_host = 2" in few.sentence
    assert (few.level, enough.level) == ("error", "ok")
    [alone] = check_device(device, ranked_job(tmp_path, ranks={"count": 4, "per_host": 2}), 1, 1)
    assert alone.level == "ok"


def test_a_folder_that_a_rank_holds_is_named(tmp_path: Path) -> None:
    job = ranked_job(tmp_path)
    with RunDirectory(pair_folder(job.run_dir, 2, 4), "trainer"):
        held = next(check_run_directory(job, lambda: None))
    assert held.level == "error"
    assert "rank-002 is held by a trainer" in held.sentence


def test_capacity_is_that_of_the_rank_that_owns_most_and_memory_that_of_all_pairs(tmp_path: Path) -> None:
    job = ranked_job(tmp_path)
    seen = Seen(groups=group_specs(job), count=4)
    found = list(check_job(job, whole=False, ask=lambda job, num_dense: Device(name="cpu")))
    assert not [finding for finding in found if finding.level == "error"]
    [capacity] = [finding for finding in found if finding.subject == "capacity"]
    assert "rows of the shard of one of 4 ranks" in capacity.sentence
    assert any("4 pairs of prefetcher and trainer" in own.sentence for own in found if own.subject == "memory")
    list(check_opens(job, seen))
    list(check_samples(job, seen, ALL))
    ranks = [measure(seen.groups, seen.measured, Rank(number=n, count=4, parts=8)) for n in range(4)]
    assert seen.touched.largest_batch_rows == tuple(np.max([own.largest_batch_rows for own in ranks], axis=0))
    every = zip(seen.largest_batch_rows, seen.touched.largest_batch_rows, strict=True)  # all batches, the first of them
    assert all(of_all >= of_first for of_all, of_first in every)
    assert seen.touched.distinct_rows == tuple(np.max([own.distinct_rows for own in ranks], axis=0))


def batch(lengths: list[int], times: list[int]) -> Batch:
    """Histories of `lengths`; a positive each."""
    bags = [*lengths, *[1] * len(lengths), *[0] * len(lengths)]
    return Batch(
        dense=np.zeros((len(lengths), 0), np.float32),
        labels=np.zeros(len(lengths), np.float32),
        ids=np.zeros(sum(bags), np.int64),
        offsets=np.append(0, np.cumsum(bags)),
        inputs={"time": np.array(times, np.int64)},
    )


def said(*batches: Batch) -> list[str]:
    seen, job = SeenHistories(), job_of("hstu")
    job = msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, of={"time": "history"}))
    for own in batches:
        seen.add(own, job)
    return [f"{own.level}: {own.sentence}" for own in check_histories(job, seen)]


def test_histories_that_rise_and_fit_are_not_mentioned() -> None:
    """A time may be less than the last of the sample before."""
    assert said(batch([LENGTH, 0, 2], [*range(LENGTH), 0, 0])) == []


def test_cut_histories_and_times_that_fall_are_counted_over_all_batches() -> None:
    cut, falling = said(
        batch([LENGTH + 1, 0, 2], [*range(LENGTH + 1), 9, 4]), batch([LENGTH + 2], [3, 2, 1, *range(LENGTH - 1)])
    )
    assert re.match(facts("ok", "2 of 4 histories", f"model.history = {LENGTH}"), cut)
    assert re.match(facts("warning", "2 of 4 histories", "from 9 to 4", "sort"), falling)
