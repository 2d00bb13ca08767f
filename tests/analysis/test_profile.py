"""Hot rows and what they cover: counted by hand on small data, and judged by samples that did not choose them."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rowcast.analysis.profile import hot_rows
from rowcast.analysis.profile.hot_rows import Coverage, HotSet, Popularity, hot_set
from rowcast.analysis.profile.profile import HALF, Profile, ProfileOptions, parts, profile_job, run_profile
from rowcast.analysis.progress import AnalysisProgress
from rowcast.analysis.show import tell
from rowcast.command_line.prefetcher import app
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, GroupSpec, group_specs
from rowcast.prefetcher.readers.pin_files import load_pins
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import ConfigError
from tests.support import jobs
from tests.support.facts import facts
from tests.support.jobs import job_content, write_job
from tests.support.planner_runs import distinct_keys, group, lookups_of, one_group, random_batch, table, two_groups


def counted(groups: tuple[GroupSpec, ...], batches: list[Batch]) -> Popularity:
    popularity = Popularity(groups, float("inf"))
    for batch in batches:
        popularity.add(batch)
    return popularity


def random_batches(groups: tuple[GroupSpec, ...], num_batches: int, *, jagged: bool, seed: int = 3) -> list[Batch]:
    random = np.random.default_rng(seed)
    return [random_batch(random, groups, 5, jagged=jagged, weighted=False) for _ in range(num_batches)]


# counting


@pytest.mark.parametrize("jagged", [True, False])
@pytest.mark.parametrize("merged_rows", [0, 3, 2**18])
def test_look_ups_are_counted_row_by_row(jagged: bool, merged_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_rows, "LEAST_PENDING_ROWS", merged_rows)
    groups = two_groups()
    batches = random_batches(groups, 9, jagged=jagged)
    popularity = counted(groups, batches)
    for spec, counts in zip(groups, popularity.counts, strict=True):
        expected = Counter(key for batch in batches for key, _, _ in lookups_of(spec, batch))
        keys, lookups = counts.totals()
        assert dict(zip(keys.tolist(), lookups.tolist(), strict=True)) == expected
        assert keys.tolist() == sorted(expected)
        assert counts.largest_batch_rows == max(len(distinct_keys(spec, batch)) for batch in batches)
    assert (popularity.num_batches, popularity.num_samples) == (9, 45)


def test_counting_is_refused_where_it_would_take_more_memory_than_it_may() -> None:
    groups = one_group(10_000)
    popularity = Popularity(groups, 150 * hot_rows.BYTES_PER_ROW)
    popularity.add(single_hot(range(100)))
    with pytest.raises(
        ConfigError,
        match=facts("200 samples", "200 distinct rows", 25600, 19200, "--sample"),
    ):
        popularity.add(single_hot(range(100, 200)))


def single_hot(*columns: Any) -> Batch:
    """One list of ids a feature."""
    ids = np.array(columns, np.int64)
    return Batch(
        dense=np.zeros((ids.shape[1], 1), np.float32), labels=np.zeros(ids.shape[1], np.float32), ids=ids.ravel()
    )


# hot rows


def test_hot_rows_are_the_most_looked_up_ones_and_equal_ones_go_by_key() -> None:
    groups = one_group(100)  # 16 bytes a row
    popularity = counted(groups, [single_hot([7, 7, 7, 3, 3, 9, 9, 50, 1])])
    assert [hot_set(popularity, 16 * n).keys[0].tolist() for n in range(6)] == [
        [],
        [7],
        [3, 7],
        [3, 7, 9],
        [1, 3, 7, 9],
        [1, 3, 7, 9, 50],
    ]
    assert [hot_set(popularity, 16 * n).threshold for n in (0, 1, 3, 5)] == [(None,), (3,), (2,), (1,)]
    assert hot_set(popularity, 47).nbytes == 32
    assert hot_set(popularity, 10**9).keys[0].tolist() == [1, 3, 7, 9, 50]


def test_a_wide_row_must_be_looked_up_more_often_than_a_narrow_one() -> None:
    narrow, wide = group(0, (table(0, 10, 4, "a"),), (0,)), group(1, (table(1, 10, 8, "b"),), (1,))  # 16 and 32 bytes
    popularity = counted((narrow, wide), [single_hot([0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1, 1, 2])])
    # look-ups per byte: narrow 0 and wide 0 both 1/8, wide 1 3/32, the other narrow ones 1/16, wide 2 1/32
    found = [tuple(len(keys) for keys in hot_set(popularity, budget).keys) for budget in (16, 48, 79, 80, 96, 176, 208)]
    assert found == [(1, 0), (1, 1), (1, 1), (1, 2), (2, 2), (7, 2), (7, 3)]


def test_no_group_gives_more_rows_than_its_room() -> None:
    groups = two_groups()
    popularity = counted(groups, random_batches(groups, 20, jagged=True))
    everything = hot_set(popularity, 10**9)
    limited = hot_set(popularity, 10**9, room=(3, 0))
    assert [len(keys) for keys in limited.keys] == [3, 0]
    assert set(limited.keys[0].tolist()) < set(everything.keys[0].tolist())
    assert limited.threshold[1] is None
    assert limited.nbytes == 3 * 16


# coverage


def hot(*keys: list[int]) -> HotSet:
    return HotSet(keys=tuple(np.array(own, np.int64) for own in keys), threshold=(1,) * len(keys), nbytes=0)


@pytest.mark.parametrize("jagged", [True, False])
def test_coverage_is_that_of_counting_by_hand(jagged: bool) -> None:
    groups = two_groups()
    batches = random_batches(groups, 30, jagged=jagged, seed=8)
    keys = [sorted({key for batch in batches[:2] for key in distinct_keys(spec, batch)})[::2] for spec in groups]
    coverage = Coverage(groups, hot(*keys))
    for batch in batches:
        coverage.add(batch)
    hits, lookups, covered = Counter[int](), Counter[int](), Counter[int]()
    for batch in batches:
        cold = {t: set[int]() for t in range(4)}
        for spec, own in zip(groups, keys, strict=True):
            for key, bag, _ in lookups_of(spec, batch):
                lookups[key >> KEY_SHIFT] += 1
                hits[key >> KEY_SHIFT] += key in own
                if key not in own:
                    cold[key >> KEY_SHIFT].add(bag % batch.size)
        covered[-1] += batch.size - len(set.union(*cold.values()))
    shares = coverage.shares()
    num_samples = sum(batch.size for batch in batches)
    assert shares.accesses == pytest.approx(hits.total() / lookups.total())
    assert shares.inputs == pytest.approx(covered[-1] / num_samples)
    assert [found.table for found in shares.tables] == ["t0", "t1", "t2", "t3"]
    for t, found in enumerate(shares.tables):
        assert found.accesses == pytest.approx(hits[t] / lookups[t])
        assert found.hot_rows == sum(key >> KEY_SHIFT == t for keys_ in keys for key in keys_)
    assert coverage.largest_batch_rows == [max(len(distinct_keys(spec, batch)) for batch in batches) for spec in groups]
    assert 0 < covered[-1] < num_samples, "the hot rows must be neither all nor none for this to show anything"


def test_a_sample_that_looks_nothing_up_in_a_table_is_covered_there() -> None:
    """Two samples: the first has an empty bag."""
    batch = Batch(
        dense=np.zeros((2, 1), np.float32),
        labels=np.zeros(2, np.float32),
        ids=np.array([1, 0], np.int64),
        offsets=np.array([0, 0, 2], np.int64),
    )
    coverage = Coverage(one_group(3), hot([]))
    coverage.add(batch)
    shares = coverage.shares()
    assert (shares.accesses, shares.inputs) == (0, 0.5)


def test_a_table_that_nothing_looks_up_has_no_share() -> None:
    batch = Batch(
        dense=np.zeros((1, 1), np.float32),
        labels=np.zeros(1, np.float32),
        ids=np.zeros(0, np.int64),
        offsets=np.zeros(2, np.int64),
    )
    coverage = Coverage(one_group(3), hot([0]))
    coverage.add(batch)
    assert coverage.shares().tables[0].accesses is coverage.shares().accesses is None


# whole profiles


def job_of(**sections: Any) -> Job:
    content = {
        "data": {"batch_size": 100, "synthetic": {"samples": 20_000, "zipf": 1.0}},
        "tables": [jobs.table("large", 5000, 4, "cat_0", "cat_1"), jobs.table("small", 50, 4, "cat_2")],
        "model": {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1]},
        "cache": {"capacity": "1000 rows"},
    }
    return jobs.job(**jobs.laid_over(content, sections))


def profiled(job: Job, *budgets: str, share: float = 0.2) -> tuple[Profile, dict[str, Any]]:
    return profile_job(job, ProfileOptions(sample=share, budgets=budgets), AnalysisProgress())


def test_a_profile_says_what_was_read() -> None:
    profile, _ = profiled(job_of(), "200 rows", "50 rows")
    assert (profile.epoch_samples, profile.picked_samples, profile.judged_samples) == (20_000, 2000, 2000)
    assert (profile.picked_batches, profile.judged_batches) == (20, 20)
    few, many = profile.budgets
    assert (few.budget, few.hot_rows, few.hot_bytes, few.budget_bytes) == ("50 rows", 50, 800, 800)
    assert (many.budget, many.hot_rows) == ("200 rows", 200)
    assert 0.2 < (few.shares.accesses or 0) < (many.shares.accesses or 0) < 0.95
    assert few.shares.inputs < many.shares.inputs < (many.shares.accesses or 0)
    assert (few.threshold["fp32_d4_sgd"] or 0) > (many.threshold["fp32_d4_sgd"] or 0) >= 1


def test_a_profile_is_the_same_for_the_same_job() -> None:
    first, rows = profiled(job_of(), "100 rows")
    again, same_rows = profiled(job_of(), "100 rows")
    assert first == again
    assert {name: own.tolist() for name, own in rows.items()} == {name: own.tolist() for name, own in same_rows.items()}


def test_rows_that_were_picked_are_judged_by_other_samples() -> None:
    """Ids that never come twice: what was picked is never seen again, and only a judge who did not pick knows it."""
    job = job_of(data={"format": "tests.analysis.test_profile:ids_that_never_come_twice"})
    profile, rows = profiled(job, "300 rows", share=0.5)
    assert profile.budgets[0].hot_rows == sum(map(len, rows.values())) == 3 * profile.picked_batches >= 36
    assert profile.budgets[0].shares.accesses == profile.budgets[0].shares.inputs == 0


def ids_that_never_come_twice(job: Job) -> Iterator[Batch]:
    """As an iterator, which can be gone through once."""
    return (single_hot([i], [1000 + i], [i]) for i in range(50))


def test_the_default_budget_is_half_the_cache_and_leaves_room_for_the_largest_batch() -> None:
    roomy, _ = profiled(job_of(cache={"capacity": "1000 rows"}))
    assert (roomy.budgets[0].budget, roomy.budgets[0].budget_bytes, roomy.budgets[0].hot_rows) == (HALF, 8000, 500)
    largest = roomy.groups[0].largest_batch_rows
    assert 100 < largest < 250
    tight, _ = profiled(job_of(cache={"capacity": f"{largest + 60} rows"}))
    assert 20 < tight.budgets[0].hot_rows < 60, "a tenth of the largest batch stays free too"
    assert tight.budgets[0].too_large is None
    none, _ = profiled(job_of(cache={"capacity": f"{largest} rows"}))
    assert (none.budgets[0].hot_rows, none.budgets[0].shares.accesses) == (0, 0)


def test_a_budget_without_room_for_a_batch_is_measured_and_says_what_to_change() -> None:
    profile, _ = profiled(job_of(), "950 rows")
    needed = 950 + profile.groups[0].largest_batch_rows
    assert profile.budgets[0].hot_rows == 950
    assert profile.budgets[0].too_large is not None
    assert (
        f'do not fit in the 1000 slots of group fp32_d4_sgd: to pin them set cache.capacity to "{needed} rows"'
        in profile.budgets[0].too_large
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budgets": ["lots"]}, "--budget 'lots' is not a size; write bytes with a unit"),
        ({"budgets": ["0B"]}, "--budget '0B' must be more than 0"),
        ({"sample": 0.0}, "--sample 0.0: give a share above 0"),
        ({"data": {"synthetic": {"samples": 100}}}, "0 batches to pick hot rows and 0 to judge them are too few"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_profile(job_of(data=options.pop("data", {})), ProfileOptions(**options))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_budgets_in_rows_need_records_of_one_size() -> None:
    tables = [
        {"name": "a", "num_embeddings": 50, "embedding_dim": 4, "features": ["cat_0"]},
        {"name": "b", "num_embeddings": 50, "embedding_dim": 8, "features": ["cat_1"]},
    ]
    job = job_of(tables=tables, model={"kind": "some.module:factory"}, cache={"capacity": "64KiB"})
    with pytest.raises(ConfigError, match=facts('--budget "20 rows"', "2 sizes", "bytes")):
        profiled(job, "20 rows")
    profile, rows = profiled(job, "1KiB")
    assert profile.budgets[0].hot_bytes <= 1024
    assert 16 * len(rows["a"]) + 32 * len(rows["b"]) == profile.budgets[0].hot_bytes > 900


# what comes out


def test_the_pin_file_holds_the_hot_rows_of_the_largest_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of()
    run_profile(job, ProfileOptions(budgets=["100 rows", "300 rows", "200 rows"], sample=0.2, out=tmp_path / "pins"))
    _, rows = profiled(job, "300 rows")
    (keys,) = load_pins(tmp_path / "pins", group_specs(job))
    assert len(keys) == 300
    assert keys.tolist() == [*rows["large"].tolist(), *(2**48 + row for row in rows["small"].tolist())]
    assert f'300 rows; set cache.pin = "{tmp_path / "pins"}"' in capsys.readouterr().out


def test_json_holds_the_whole_profile_and_nothing_else_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    run_profile(job_of(), ProfileOptions(budgets=["100 rows"], json=True))
    out = capfd.readouterr().out
    content = json.loads(out)
    (budget,) = content["budgets"]
    assert content["picked_batches"] == content["judged_batches"] == 32
    assert budget["shares"]["tables"][1]["table"] == "small"
    assert 0 < budget["shares"]["accesses"] < 1


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_terminal_and_no_budget_is_missing(width: int) -> None:
    profile, _ = profiled(job_of(), *(f"{n}00 rows" for n in range(1, 7)))
    console = Console(width=width, force_terminal=True, color_system=None, highlight=False)
    with console.capture() as captured:
        tell(parts(profile), console)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    for budget in profile.budgets:
        assert budget.budget in " ".join(" ".join(lines).split())


def test_the_command_prints_a_profile_or_one_sentence(tmp_path: Path) -> None:
    config = write_job(tmp_path / "job.toml", job_content(tmp_path / "run", data={"synthetic": {"samples": 10_000}}))
    good = CliRunner().invoke(
        app, ["profile", "--config", str(config), "--budget", "100 rows", "--out", str(tmp_path / "pins")]
    )
    assert good.exit_code == 0
    assert "2,048 samples chose the hot rows, 2,000 others judged them (an epoch: 10,000)" in good.stdout
    assert (tmp_path / "pins").exists()
    bad = CliRunner().invoke(app, ["profile", "--config", str(config), "--budget", "lots"])
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert bad.stderr.count("\n") == 1
