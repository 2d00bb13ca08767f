"""`rowcast simulate` as a command: what it prints where, what it refuses."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rowcast.analysis.simulate.command import SimulateOptions, run_simulate
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.jobs import job_content
from tests.support.processes import Process


def tiny_job(**sections: Any) -> Job:
    data = {"eval_fraction": 0.1, "synthetic": {"samples": 64 * 30}}
    return parse_job(job_content(Path("unused"), data=data, cache={"capacity": "20KiB"}, **sections))


def options(**values: Any) -> SimulateOptions:
    usual: dict[str, Any] = {"max_steps": 20, "policies": ("lookahead", "lru", "lfu", "static")}
    return SimulateOptions(**usual | values)


def test_json_is_all_that_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    run_simulate(tiny_job(), options(json=True, capacity_rows=(300, 400), capacities=("20KiB",)))
    out, err = capfd.readouterr()
    found = msgspec.json.decode(out)["results"]
    assert [(result["policy"], result["capacity"]) for result in found][:5] == [
        ("lookahead", "20KiB"),
        ("lru", "20KiB"),
        ("lfu", "20KiB"),
        ("static", "20KiB"),
        ("lookahead", "300 rows"),
    ]
    assert len(found) == 12
    assert all(result["steps"] == 20 and result["per_step"] is None for result in found)
    assert err == ""


def test_per_step_adds_what_moved_at_each_step(capfd: pytest.CaptureFixture[str]) -> None:
    run_simulate(tiny_job(), options(json=True, per_step=True))
    for result in msgspec.json.decode(capfd.readouterr().out)["results"]:
        steps = result["per_step"]
        assert steps["step"] == list(range(23))
        assert steps["kind"].count("eval") == 3
        assert sum(steps["rows_fetched"]) == result["rows_fetched"] > 0


def test_the_table_has_a_row_a_setting_and_says_what_did_not_fit(capfd: pytest.CaptureFixture[str]) -> None:
    run_simulate(tiny_job(), options(capacity_rows=(300, 3)))
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("     300")] == [
        ["300", policy] for policy in ("lookahead", "lru", "lfu", "static")
    ]
    assert any("20 train and 3 evaluation steps" in line for line in lines)
    assert lines[-1].startswith(
        "Not simulated: lookahead, lru, lfu, static at 3 rows with batches of 64: cache.capacity"
    )
    assert max(map(len, lines[:8])) <= 80
    assert err == ""


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"capacity_rows": (3,)}, facts("nothing could be simulated", 'cache.capacity = "3 rows"')),
        ({"horizons": ("far",)}, "--horizon far: give a number of batches, or auto"),
        ({"horizons": ("-1",)}, "--horizon -1"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_simulate(tiny_job(), options(**values))


def test_orders_are_a_column_of_the_table_where_there_are_several(capfd: pytest.CaptureFixture[str]) -> None:
    run_simulate(tiny_job(), options(policies=("lru",), shuffles=("none", "window:16384", "full")))
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].split()[0] == "shuffle"
    assert [line.split()[0] for line in lines[2:5]] == ["none", "window:16384", "full"]
    assert max(map(len, lines[:5])) <= 92
    assert any(line.startswith("Batches of 64, shuffle window:16384: 20 train") for line in lines)
    run_simulate(tiny_job(), options(policies=("lru",), shuffles=("full",), capacity_rows=(3, 300)))
    out = capfd.readouterr().out
    assert "shuffle" not in out.splitlines()[1]
    assert "Not simulated: lru at 3 rows with batches of 64, shuffle full: cache.capacity" in out


def test_nothing_feasible_ends_with_exit_code_2_after_the_json(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_bytes(msgspec.json.encode(tiny_job()))
    ended = Process(["-c", COMMAND.format(job=job)], tmp_path, os.environ).ended()
    assert "nothing could be simulated" in ended.refused(2)
    assert [result["skipped"] is None for result in msgspec.json.decode(ended.stdout)["results"]] == [False]


COMMAND = """
import sys, msgspec
from rowcast.runtime.process import run_command
from rowcast.job.file import parse_job
from rowcast.analysis.simulate.command import SimulateOptions, run_simulate
job = parse_job(msgspec.json.decode(open("{job}").read()))
sys.exit(run_command("prefetcher", lambda: run_simulate(job, SimulateOptions(capacity_rows=(3,), json=True))))
"""


def test_matplotlib_is_not_imported_where_nothing_is_drawn(tmp_path: Path) -> None:
    code = (
        "import sys, rowcast.command_line.prefetcher, rowcast.analysis.simulate.command; "
        "sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    )
    Process(["-c", code], tmp_path, os.environ).ended().quiet()
