"""`make gpu-check`: what a part does to itself stays its own affair, and its figures are computed rightly."""

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_check import __main__ as check
from benchmarks.gpu_check import packages, part
from benchmarks.gpu_check.findings import Findings, LeftOut
from benchmarks.gpu_check.host_tables import HostTables
from benchmarks.gpu_check.jobs import Size, batches_of, make_job, with_touched_rows
from benchmarks.gpu_check.live import pace
from benchmarks.gpu_check.steady import calls_that_wait
from benchmarks.gpu_check.summary import summary
from benchmarks.gpu_check.supervise import run_part
from benchmarks.gpu_check.trace import merged, share_under, told, trace_of
from benchmarks.training.resident import ResidentRun

CPU = torch.device("cpu")
TINY = Size(batch_size=32, steps=6, dim=4, scale=1e-5, bottom_mlp=(8, 4), top_mlp=(8, 1))
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu_check.findings import Findings, LeftOut
findings = Findings(Path(sys.argv[1]), time.monotonic() + 60)
findings.item("first", lambda: {"passed": True})
"""


def run(tmp_path: Path, rest: str, limit_s: float = 60.0) -> dict[str, Any]:
    """A part that finds one thing and then does what `rest` says."""
    file = tmp_path / "found.json"
    return run_part([sys.executable, "-c", HEAD + rest, str(file)], file, limit_s)


def fail() -> dict[str, Any]:
    raise ValueError("no such row")


# one part


def test_a_part_that_comes_to_its_end_has_passed(tmp_path: Path) -> None:
    found = run(tmp_path, "findings.end()")
    assert (found["status"], list(found["items"])) == ("passed", ["first"])


def test_a_part_with_a_failed_item_has_failed(tmp_path: Path) -> None:
    found = run(tmp_path, "findings.item('second', lambda: {'passed': False}); findings.end()")
    assert found["status"] == "failed"


def test_a_part_without_items_is_left_out_with_its_reason(tmp_path: Path) -> None:
    found = run(tmp_path, "findings._content['items'].clear(); findings.leave_out('all', 'a reason'); findings.end()")
    assert (found["status"], found["left_out"]) == ("left out", {"all": "a reason"})


def test_a_part_that_a_signal_ends_keeps_what_it_found_and_names_what_it_was_at(tmp_path: Path) -> None:
    found = run(tmp_path, "findings.item('second', lambda: os.kill(os.getpid(), signal.SIGSEGV))")
    assert (found["status"], found["signal"]) == ("crashed", "SIGSEGV")
    assert (list(found["items"]), found["running"]) == (["first"], ["second"])


def test_a_part_that_ends_by_an_error_has_crashed_and_tells_its_last_lines(tmp_path: Path) -> None:
    found = run(tmp_path, "raise RuntimeError('no kernel image')")
    assert (found["status"], found["exit_code"]) == ("crashed", 1)
    assert found["last_lines"][-1] == "RuntimeError: no kernel image"


def test_a_part_that_ends_too_early_has_crashed(tmp_path: Path) -> None:
    assert run(tmp_path, "")["status"] == "crashed"


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_check.supervise.GRACE_S", 0.0)
    monkeypatch.setattr("benchmarks.gpu_check.supervise.END_S", 0.3)
    rest = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1] + ".pid").write_text(str(child.pid))
findings.item("second", lambda: time.sleep(600))
"""
    found = run(tmp_path, rest, limit_s=8.0)
    assert (found["status"], found["limit_s"], found["running"]) == ("out of time", 8.0, ["second"])
    assert ended(int((tmp_path / "found.json.pid").read_text()))


def ended(pid: int) -> bool:
    """Whether the process ends within some seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


# items


def test_an_error_of_an_item_fails_that_item_alone(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "found.json", time.monotonic() + 60)
    findings.item("first", fail)
    findings.item("second", lambda: {"passed": True})
    first, second = findings.items.values()
    assert (first["passed"], first["error"], second["passed"]) == (False, "ValueError: no such row", True)
    assert json.loads((tmp_path / "found.json").read_text())["items"] == findings.items


def test_an_item_that_cannot_be_looked_at_is_left_out_with_its_reason(tmp_path: Path) -> None:
    def refuse() -> dict[str, Any]:
        raise LeftOut("no profiler here")

    findings = Findings(tmp_path / "found.json", time.monotonic() + 60)
    findings.item("first", refuse)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"items": {}, "left_out": {"first": "no profiler here"}, "running": [], "ended": False}


def test_the_error_of_an_item_that_took_the_device_along_ends_the_part(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "found.json", time.monotonic() + 60, is_device_alive=lambda: False)
    with pytest.raises(ValueError, match="no such row"):
        findings.item("first", fail)
    assert findings.items["first"]["passed"] is False


def test_items_for_which_no_time_is_left_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.gpu_check.findings.time.monotonic", lambda: now[0])

    def work(seconds: float) -> dict[str, Any]:
        now[0] += seconds
        return {}

    findings = Findings(tmp_path / "found.json", 10.0)
    findings.item("a", lambda: work(6.0), "long")
    findings.item("b", lambda: work(6.0), "long")  # 4 seconds are left, and "a" took 6
    findings.item("c", lambda: work(2.0), "first of its kind", 3.0)
    findings.item("d", lambda: work(0.1), "another", 3.0)  # 2 seconds are left
    assert list(findings.items) == ["a", "c"]
    assert json.loads((tmp_path / "found.json").read_text())["left_out"] == dict.fromkeys("bd", "no time was left")


def test_a_package_that_a_run_needs_and_nothing_here_has_fails_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages.packages()["passed"], packages.packages()
    needs = {"pyzmq": ["absent>=1", "extra; extra == 'x'"]}
    monkeypatch.setattr("benchmarks.gpu_check.packages.requires", lambda name: needs.get(name))
    found = packages.packages()
    assert (found["missing"], found["passed"]) == (["absent"], False)


# all parts


def test_every_part_has_a_limit_and_the_limits_have_an_order() -> None:
    assert list(check.LIMITS_S) == list(part.PARTS)


def test_the_program_that_starts_the_parts_imports_no_torch_so_it_has_no_context_on_the_device() -> None:
    looked = "import sys, benchmarks.gpu_check.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", looked], capture_output=True, check=True).stdout == b"False\n"


def test_a_crash_fails_the_check_and_what_is_left_out_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {
        "environment": {"status": "passed", "items": {"machine": {}}, "left_out": {"device": "needs a CUDA device"}},
        "kernels": {"status": "crashed", "items": {}, "left_out": {}, "running": ["adam"], "signal": "SIGSEGV"},
    }
    file, seen = tmp_path / "check.json", []

    def run_one(command: list[str], findings: Path, limit_s: float) -> dict[str, Any]:
        if file.exists():
            seen.append(json.loads(file.read_text()))
        return ends[findings.stem]

    monkeypatch.setattr(check, "run_part", run_one)
    found = check.run_parts(["environment", "kernels"], "cpu", 400.0, file)
    assert [own["passed"] for own in seen] == [True], "the file is written after each part"
    assert seen[0]["left_out"] == {"environment": {"device": "needs a CUDA device"}}
    assert found["passed"] is False
    assert found["status"] == {"environment": "passed", "kernels": "crashed"}
    assert "kernels: crashed, SIGSEGV; it was at: adam" in capsys.readouterr().err


def test_few_parts_share_the_whole_budget_among_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def run_one(command: list[str], findings: Path, limit_s: float) -> dict[str, Any]:
        limits.append(limit_s)
        return {"status": "passed", "items": {}, "left_out": {}}

    monkeypatch.setattr(check, "run_part", run_one)
    check.run_parts(["environment"], "cpu", 60.0, tmp_path / "check.json")
    assert limits[0] == pytest.approx(50.0, abs=1.0), "the budget, less what ending a part that hangs takes"


def test_a_missing_package_is_named_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "packages", lambda: {"missing": ["msgspec", "structlog"]})
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit):
        check.main()
    assert "msgspec, structlog" in capsys.readouterr().err


def test_parts_for_which_no_time_is_left_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "run_part", fail)
    found = check.run_parts(["kernels"], "cpu", 25.0, tmp_path / "check.json")
    assert (found["passed"], found["left_out"]) == (True, {"kernels": "25 s were over"})


# the trace


def test_merged_spans_have_no_overlaps_and_are_in_order() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0.0, 10.0)], 0.5),  # half of it
        ([(2.0, 4.0)], 1.0),  # inside
        ([(20.0, 30.0)], 0.0),  # after everything
        ([(-9.0, -1.0)], 0.0),  # before everything
        ([(4.0, 8.0)], 0.5),  # across a gap of 5 to 7
        ([(1.0, 2.0), (1.0, 2.0), (5.0, 7.0)], 0.5),  # two at once both count
        ([], None),
    ],
)
def test_the_share_of_copies_that_lies_under_compute(spans: list[tuple[float, float]], share: float | None) -> None:
    assert share_under(spans, [(7.0, 8.0), (1.0, 5.0), (2.0, 3.0)]) == (None if share is None else pytest.approx(share))


def test_a_trace_tells_copies_compute_and_waits_apart() -> None:
    def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    trace = trace_of(
        [
            event("kernel", "gemm", 0, 60, stream=20),
            event("kernel", "segments_kernel", 60, 20, stream=20),
            event("kernel", "index_select", 70, 20, stream=14),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 40, 20, stream=13, bytes=4_000_000),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 90, 20, stream=13, bytes=4_000_000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 70, 20, stream=15, bytes=2_000_000),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 5, stream=14, bytes=1),
            event("cuda_runtime", "cudaStreamSynchronize", 3, 1),
            event("cuda_runtime", "cudaLaunchKernel", 3, 1),
            {"ph": "M", "name": "process_name", "args": {}},
        ]
    )
    found = told(trace, steps=2)
    assert found["share_under_compute"] == {"moving": 0.5, "to_device": 0.5, "from_device": 0.5}
    assert found["busy_ms"] == {"compute": 0.04, "moving": 0.01, "to_device": 0.02, "from_device": 0.01}
    assert (found["step_ms"], found["idle_ms"]) == (pytest.approx(0.055), 0.0)
    assert found["megabytes"] == {"to_device": 4.0, "from_device": 1.0}
    assert list(found["kernels_ms"]) == ["gemm", "segments_kernel", "index_select"]
    assert found["host_waits"] == {"cudaStreamSynchronize": 1}


def test_a_trace_without_a_device_says_nothing_of_copies() -> None:
    found = told(trace_of([{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 1}]), steps=1)
    assert found["share_under_compute"] == {"moving": None, "to_device": None, "from_device": None}


def test_calls_that_wait_are_counted_by_line_and_other_warnings_are_not() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn_explicit("Synchronization debug mode is a prototype feature", UserWarning, "cuda.py", 9)
        for line in (3, 5, 3):
            warnings.warn_explicit("called a synchronizing CUDA operation (...)", UserWarning, "loop.py", line)
    assert calls_that_wait(seen) == {"loop.py:3": 2, "loop.py:5": 1}


# speed


def test_the_pace_is_that_between_the_second_epoch_and_the_end() -> None:
    readings = [(1.0, 50.0), (2.0, 110.0), (4.0, 310.0), (5.0, 400.0), (99.0, 400.0)]
    assert pace(readings, 100, 400) == pytest.approx(100.0)
    assert pace(readings, 100, 300) is None
    assert pace([], 100, 300) is None


def test_ratios_are_to_every_row_on_the_device_in_the_same_precision() -> None:
    items = {
        "batches": {"steps": 4},
        "fp32, replay 20 %": {"resident_ms": 10.0, "ms": 12.0, "to_resident": 1.25},
        "bf16, replay 20 %": {"resident_ms": 4.0, "ms": 5.0, "to_resident": 1.2},
        "bf16, live 20 %": {"ms": 6.0},
        "fp32, live 20 %": {"ms": None},
        "fp32, host tables": {"passed": False, "error": "out of memory"},
    }
    assert summary({"speed": {"items": items}, "kernels": {"items": {}}}) == {
        "summary": {
            "speed": {
                "fp32, resident": {"ms": 10.0},
                "bf16, resident": {"ms": 4.0},
                "fp32, replay 20 %": {"ms": 12.0, "over_resident": 1.25},
                "bf16, replay 20 %": {"ms": 5.0, "over_resident": 1.2},
                "bf16, live 20 %": {"ms": 6.0, "over_resident": 1.5},
            }
        }
    }


def test_tables_of_touched_rows_are_looked_up_by_the_same_samples() -> None:
    job, batches = make_job(TINY, CPU), batches_of(TINY, CPU)
    small, renumbered = with_touched_rows(job, batches)
    for feature, table in enumerate(small.tables):
        before = np.concatenate([own.batch.ids.reshape(len(job.features), -1)[feature] for own in batches])
        after = np.concatenate([own.batch.ids.reshape(len(job.features), -1)[feature] for own in renumbered])
        assert len(set(before)) == table.num_embeddings == after.max() + 1
        assert len({*zip(before.tolist(), after.tolist(), strict=True)}) == table.num_embeddings


def test_host_tables_train_what_our_kernels_train() -> None:
    """The same rows, model and row optimizer: losses agree within rounding, so the same work is compared."""
    job, batches = with_touched_rows(make_job(TINY, CPU), batches_of(TINY, CPU))
    ours = ResidentRun(job, batches, CPU)
    for _ in ours.issue():
        pass
    theirs = HostTables(job, batches, CPU)
    losses = torch.stack([theirs.step(number) for number in range(len(batches))])
    torch.testing.assert_close(losses, torch.stack(ours.losses))
    assert len(set(losses.tolist())) == len(losses)
