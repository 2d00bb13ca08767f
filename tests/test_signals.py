"""Which signals stop a process in order, which end it at once, and which change nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rowcast.runtime.process import TOGETHER_S, Child, start_child
from rowcast.runtime.stops import PASSED_ON
from tests.support.processes import ROOT, proc_text

TIMEOUT_S = 60.0
LATER_S = TOGETHER_S + 0.5
STOPPABLE = """
import ctypes, sys, time
from rowcast.runtime.process import run_until_stopped

def main(signals):
    print("ready", flush=True)
    signals.bell.wait(60)
    print(signals.stop_reason, flush=True)
    {then}

sys.exit(run_until_stopped("test", main))
"""
WAITS_FOR_A_LINE = "sys.stdin.readline()"
IN_A_LONG_CALL = "ctypes.CDLL(None).poll(None, 0, 2500)"  # no Python code runs meanwhile
LEAVES_SLOWLY = """
    class Slow:
        def __del__(self, write=sys.stderr.write, sleep=time.sleep):  # as the interpreter takes its modules apart
            write("leaving\\n")
            sleep(1)
    sys.modules["math"].slow = Slow()
"""


@contextmanager
def stoppable(then: str = WAITS_FOR_A_LINE) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", STOPPABLE.format(then=then)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def heard(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def signalled(process: "subprocess.Popen[str]", number: int) -> bool:
    """Whether it has ended. A busy machine may take one more signal for a part of the first."""
    process.send_signal(number)
    return process.poll() is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_within_a_second_are_one_and_what_a_parent_passes_on_is_never_another(number: signal.Signals) -> None:
    with stoppable() as process:
        process.send_signal(number)
        assert heard(process) == number.name
        for sent in (number, signal.SIGTERM, signal.SIGINT, PASSED_ON):
            process.send_signal(sent)
        for _ in range(2):
            time.sleep(LATER_S)
            process.send_signal(PASSED_ON)
        time.sleep(TOGETHER_S)  # one that ends the process does so now
        assert process.communicate("end\n", TIMEOUT_S)[1] == ""
        assert process.returncode == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, PASSED_ON])
def test_another_signal_more_than_a_second_later_ends_the_process_at_once(first: int) -> None:
    with stoppable() as process:
        process.send_signal(first)
        heard(process)
        time.sleep(LATER_S)
        until(lambda: signalled(process, signal.SIGTERM))
        assert process.returncode == 128 + signal.SIGTERM


def test_the_time_of_a_signal_is_when_it_came_not_when_the_main_thread_could_hear_of_it() -> None:
    with stoppable(IN_A_LONG_CALL) as process:
        process.send_signal(signal.SIGTERM)
        heard(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0


def test_a_signal_while_a_process_is_leaving_changes_nothing() -> None:
    with stoppable(LEAVES_SLOWLY) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert process.stderr.readline() == "leaving\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_a_closed_terminal_stops_no_process_that_nohup_has_started() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable() as process:
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)  # nohup has changed nothing for this one
            assert heard(process) == "SIGTERM"
            process.communicate("end\n", TIMEOUT_S)
    finally:
        signal.signal(signal.SIGHUP, before)


MODULES = ("rowcast", "rowcast.prefetcher", "rowcast.trainer", "rowcast.deploy.local", "rowcast.deploy.torchrun")
HOLDS = """
import os, runpy, signal, sys
from rowcast.runtime.stops import HELD

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("typer", "torch", "numpy", "msgspec"):
            os._exit(0 if signal.pthread_sigmask(signal.SIG_BLOCK, []) >= set(HELD) else 1)

sys.meta_path.insert(0, Watch())
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
os._exit(2)
"""
INTERRUPTED = """
import os, signal, sys, time
from rowcast.runtime.process import run_command
from rowcast.runtime.stops import hold

hold()
os.kill(os.getpid(), signal.SIGINT)
sys.exit(run_command("test", lambda: time.sleep(60)))
"""


def python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize("module", MODULES)
def test_every_command_holds_signals_before_it_imports_anything_that_takes_long(module: str) -> None:
    assert python(HOLDS, module).returncode == 0


def test_a_command_that_is_not_stopped_in_order_is_interrupted() -> None:
    done = python(INTERRUPTED)
    assert (done.returncode, done.stderr) == (130, "rowcast test: interrupted\n")


# a parent


def test_a_child_that_has_just_been_started_keeps_a_signal() -> None:
    child = start_child("child", "timeit", ["-n", "1", "pass"])
    child.process.send_signal(signal.SIGTERM)
    assert child.process.wait(TIMEOUT_S) == 0


TIED = """
import signal, sys
from rowcast.runtime.process import stop_with_parent
from rowcast.runtime.stops import PASSED_ON, hold

hold()
stop_with_parent(int(sys.argv[1]))
print(PASSED_ON in signal.sigpending())
"""
PARENT = """
import time
from rowcast.runtime.process import start_child

print(start_child("child", "child", []).process.pid, flush=True)
time.sleep(60)
"""
STOPS_SLOWLY = "open('stopping', 'w').close(); time.sleep(4); open('ended', 'w').close()"


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_child_learns_that_its_parent_was_killed_before_it_could_ask_to_be_told(is_alive: bool) -> None:
    done = python(TIED, str(os.getpid() if is_alive else 1))
    assert done.stdout == f"{not is_alive}\n", done.stderr


def test_the_kill_of_a_parent_is_not_a_second_signal_for_a_child_that_stops(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(STOPPABLE.format(then=STOPS_SLOWLY))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command, pipe = [sys.executable, "-c", PARENT], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        said = [parent.stdout.readline().strip() for _ in range(2)]
        child = int(next(line for line in said if line != "ready"))
        os.kill(child, signal.SIGTERM)
        until((tmp_path / "stopping").exists)
        time.sleep(LATER_S)
        parent.kill()
    until(lambda: not proc_text(child, "cmdline"))
    assert (tmp_path / "ended").exists()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "was killed by SIGKILL; unless you sent it, the machine ran out of memory"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (PASSED_ON, f"was killed by signal {PASSED_ON}"),
    ],
)
def test_only_a_kill_is_blamed_on_memory(number: int, said: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(number)
        process.wait()
        child = Child("child", process, None)
    assert child.describe_exit() == f"the child (process {process.pid}) {said}"


@pytest.mark.parametrize(
    ("own", "quoted"),
    [
        ("rowcast prefetcher: its error\n", "rowcast prefetcher: its error"),
        ("Usage: none\nits last line\n", 'event="no progress"'),
    ],
)
def test_the_error_of_a_child_is_its_own_in_a_log_of_several(own: str, quoted: str, tmp_path: Path) -> None:
    log = tmp_path / "prefetcher.log"
    log.write_text("rowcast prefetcher: an earlier error\n")
    with subprocess.Popen(["false"]) as process:
        process.wait()
    child = Child("prefetcher", process, log, log.stat().st_size)
    with log.open("a") as file:
        file.write(f'{own}event="no progress"\n')
    assert child.describe_exit().endswith(f" ended with code 1: {quoted} [{log}]")
