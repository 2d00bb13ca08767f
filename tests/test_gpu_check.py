"""`make gpu-check`: what a part does to itself stays its own affair, and its figures are computed rightly."""

import json
import re
import subprocess
import sys
import time
import tomllib
import warnings
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_check import __main__ as check
from benchmarks.gpu_check import part, tools
from benchmarks.gpu_check.differences import loss_difference, state_difference
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.host_tables import HostTables
from benchmarks.gpu_check.in_process import Comparison, Way, place_of
from benchmarks.gpu_check.jobs import Size, batches_of, make_job, with_touched_rows
from benchmarks.gpu_check.steady import calls_that_wait
from benchmarks.gpu_check.supervise import END_S, GRACE_S, run_part
from benchmarks.gpu_check.trace import told, trace_of
from benchmarks.training.resident import ResidentRun
from rowcast.runtime.errors import RowcastError
from tests.support.facts import facts

CPU, ROOT = torch.device("cpu"), Path(__file__).parents[1]
TINY = Size(batch_size=32, steps=6, dim=4, scale=1e-5, bottom_mlp=(8, 4), top_mlp=(8, 1))
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu_check.findings import Findings, NotHere
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
    found = run(tmp_path, "findings.item('second', lambda: {'passed': False}); findings.end()")
    assert found["status"] == "failed"


def test_a_part_that_ends_by_an_error_has_crashed_and_tells_its_last_lines(tmp_path: Path) -> None:
    found = run(tmp_path, "raise RuntimeError('no kernel image')")
    assert (found["status"], found["exit_code"]) == ("crashed", 1)
    assert found["last_lines"][-1] == "RuntimeError: no kernel image"


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


# all parts


def test_every_part_has_a_limit_and_a_command_ends_within_nine_minutes() -> None:
    assert [*check.LIMITS_S, tools.FEW_KERNELS, tools.ONCE] == list(part.PARTS)
    assert [sum(limits.values()) for limits in check.COMMANDS.values()] == [pytest.approx(check.BUDGET_S)] * 3
    assert check.BUDGET_S + GRACE_S + 2 * END_S < 540


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


def test_parts_need_only_what_a_run_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.split(r"[^\w.-]", need)[0].lower() for needs in extras.values() for need in needs} - {"triton"}
    hidden = sorted(module for module, owners in packages_distributions().items() if {*map(str.lower, owners)} & names)
    assert {"redis", "pytest", "tensorboard"} <= {*hidden}
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden})); import benchmarks.gpu_check.part"
    subprocess.run([sys.executable, "-c", hide], check=True, cwd=ROOT)


def test_a_missing_package_is_named_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "packages", lambda: {"missing": ["msgspec", "structlog"]})
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit):
        check.main()
    assert "msgspec, structlog" in capsys.readouterr().err


def test_a_later_command_adds_to_the_file_and_repeats_only_what_did_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    ends: dict[str, dict[str, Any]] = {
        "kernels": {"left_out": {"seed 3": "no time was left"}},
        "steady": {"status": "failed"},
    }

    def run_one(command: list[str], findings: Path, limit_s: float) -> dict[str, Any]:
        ran.append(findings.stem)
        return {"status": "passed", "items": {}, "left_out": {}, **ends.pop(findings.stem, {})}

    monkeypatch.setattr(check, "run_part", run_one)
    names = ["environment", "kernels", "steady"]
    assert not check.run_parts(names, "cpu", 400.0, tmp_path / "check.json")["passed"]
    found = check.run_parts([*names, "rates"], "cpu", 400.0, tmp_path / "check.json")
    assert ran == [*names, "kernels", "steady", "rates"]
    assert (found["passed"], list(found["parts"])) == (True, [*names, "rates"])
    with pytest.raises(ValueError, match=facts("check.json", "cpu", "cuda")):
        check.run_parts(names, "cuda", 400.0, tmp_path / "check.json")


# what differs


def test_the_first_step_whose_loss_differs_is_named_with_both_losses() -> None:
    expected = np.array([0.5, 0.25, 0.0], np.float32)
    assert loss_difference(expected.copy(), expected) == {}
    found = loss_difference(np.array([0.5, 0.75, -0.0], np.float32), expected)
    assert found == {"step": 1, "loss": 0.75, "expected": 0.25, "steps_differ": 2}
    assert loss_difference(expected[:2], expected) == {"steps": 2, "steps_expected": 3}


def test_the_first_row_that_differs_is_named_with_both_values_and_its_slot() -> None:
    comparison = Comparison(CPU, Way())
    run, state = comparison.expected, comparison.expected.state()
    harmed = {name: tensor.clone() for name, tensor in state.items()}
    name = "embedding_bags.narrow_b.weight"
    row = int(run.plans[0].groups[0].fetch_keys[-1] % 2**48)
    harmed[name][row, 3] = 7.0
    found = state_difference(harmed, state)
    assert (found["name"], found["row"], found["column"], found["value"]) == (name, row, 3, 7.0)
    assert found["expected"] == state[name][row, 3].item()
    place = place_of(run, found)
    assert place["group"] == run.groups[0].name
    assert torch.equal(run.records[0].view(-1, run.groups[0].record_floats)[place["slot"], :5], state[name][row])


def test_a_run_that_leaves_out_a_wait_is_found() -> None:
    comparison = Comparison(CPU, Way())
    for seed in range(20):
        try:
            if not comparison.compare(seed, without="fill_after")["passed"]:
                return
        except (AssertionError, IndexError, RuntimeError, RowcastError):
            return
    pytest.fail("20 orders without a wait that is needed have the right bits")


# the trace


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


def test_calls_that_wait_are_counted_by_line_and_other_warnings_are_not() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn_explicit("Synchronization debug mode is a prototype feature", UserWarning, "cuda.py", 9)
        for line in (3, 5, 3):
            warnings.warn_explicit("called a synchronizing CUDA operation (...)", UserWarning, "loop.py", line)
    assert calls_that_wait(seen) == {"loop.py:3": 2, "loop.py:5": 1}


# speed


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
