"""What a log looks up: counted by hand on the same batches, and in sum what `prefetcher simulate` counts."""

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rowcast.analysis.profile.log import LogFacts, log_facts, parts, summary
from rowcast.analysis.progress import AnalysisProgress
from rowcast.analysis.show import tell
from rowcast.analysis.simulate.grid import Grid
from rowcast.analysis.simulate.simulate import simulate
from rowcast.command_line.prefetcher import app
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, group_specs
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from tests.support import jobs
from tests.support.jobs import job_content, write_job
from tests.support.planner_runs import distinct_keys, lookups_of

STEPS = 24


def job_of(**sections: Any) -> Job:
    content = {
        "data": {"batch_size": 100, "synthetic": {"samples": 20_000, "zipf": 1.0}},
        "tables": [
            jobs.table("large", 5000, 4, "cat_0", "cat_1"),
            {**jobs.table("small", 50, 4, "cat_2"), "dtype": "fp16"},
        ],
        "optimizer": {"sparse": {"kind": "rowwise_adagrad", "lr": 0.1, "master": True}},
        "model": {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1]},
        "cache": {"capacity": "40KiB"},
    }
    return jobs.job(**jobs.laid_over(content, sections))


@pytest.fixture(scope="module")
def facts() -> LogFacts:
    return log_facts(job_of(), STEPS, 1e9, AnalysisProgress())


def test_look_ups_and_rows_are_those_of_counting_by_hand(facts: LogFacts) -> None:
    job = job_of()
    groups, lookups, unique = group_specs(job), Counter[int](), Counter[int]()
    positions: dict[int, list[int]] = defaultdict(list)
    for position, scheduled in enumerate(schedule(job, open_reader(job), STEPS)):
        for group in groups:
            lookups.update(key for key, _, _ in lookups_of(group, scheduled.batch))
            for key in distinct_keys(group, scheduled.batch):
                unique[key >> KEY_SHIFT] += 1
                positions[key].append(position)
    for index, table in enumerate(facts.tables):
        own = sorted((n for key, n in lookups.items() if key >> KEY_SHIFT == index), reverse=True)
        assert (table.rows_touched, table.lookups, table.unique_rows) == (len(own), sum(own), unique[index])
        assert (table.most_lookups, table.median_lookups) == (own[0], np.median(own))
        assert table.hottest_share == sum(own[: -(-len(own) // 100)]) / sum(own)
    descending = sorted(lookups.values(), reverse=True)
    for point in facts.hottest:
        assert point.share == pytest.approx(sum(descending[: round(point.x * len(descending))]) / sum(descending))
    apart = Counter(b - a for uses in positions.values() for a, b in pairwise(uses))
    assert [point.x for point in facts.reuse] == [1, 2, 4, 8, 16]
    for point in facts.reuse[:-1]:
        within = sum(count for steps, count in apart.items() if steps <= point.x)
        assert point.share == pytest.approx(within / sum(unique.values()))


def test_sums_are_those_that_simulate_counts(facts: LogFacts) -> None:
    job = job_of()
    (counted,) = simulate(job, Grid(), lambda own: schedule(own, open_reader(own), STEPS))
    assert (facts.lookups, facts.unique_rows) == (counted.lookups, counted.unique_rows)
    assert facts.steps == (counted.steps or 0) + (counted.eval_steps or 0)
    own = [result for result in facts.caches if result.policy == "lookahead"]
    assert {result.policy for result in facts.caches} == {"lookahead", "lru"}
    assert len(own) > 2
    (again,) = simulate(job, Grid(capacities=[own[0].capacity]), lambda own: schedule(own, open_reader(own), STEPS))
    assert again == own[0]


def test_bytes_are_of_whole_records_and_no_sentence_divides_them_by_a_memory(facts: LogFacts) -> None:
    assert [table.record_bytes for table in facts.tables] == [32, 48]
    assert facts.total_bytes == 5000 * 32 + 50 * 48
    assert not [sentence for sentence in summary(facts) if "GPU" in sentence or "without rowcast" in sentence]


def test_the_table_fits_a_terminal(facts: LogFacts) -> None:
    console = Console(width=80, force_terminal=True, color_system=None, highlight=False)
    with console.capture() as captured:
        tell(parts(facts), console)
    table = captured.get().split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table


def test_the_command_draws_and_prints_or_refuses(tmp_path: Path) -> None:
    config = write_job(tmp_path / "job.toml", job_content(tmp_path / "run", data={"synthetic": {"samples": 10_000}}))
    command, picture = ["profile", "--config", str(config), "--max-steps", "5"], tmp_path / "log.png"
    good = CliRunner().invoke(app, [*command, "--plot", str(picture), "--json"])
    assert good.exit_code == 0
    assert json.loads(good.stdout)["batch_size"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    for options in (["--plot", str(picture), "--budget", "1MiB"], [], ["--plot", "log.gif"]):
        bad = CliRunner().invoke(app, [*command, *options])
        assert (bad.exit_code, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
