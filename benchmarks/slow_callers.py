"""What do 1,000 slow callers of each metrics port cost a run, and do they keep probes out?

One run of two processes; after a warm-up its turns of --seconds each have callers or none, alternately. In a turn with
them, each port has --callers connections, in equal parts of those that

    say nothing | send a byte every 2 s | ask and never read the answer | send half a request and close their half

One that is cut off comes again after --again seconds; one that never reads does not notice. Meanwhile /healthz of both
ports is asked twice a second. The callers run at the lowest priority, because their own processor time is not the
question, and stop by themselves.

    python -m benchmarks.slow_callers

Targets: samples/s with callers within 5 % of those without; every /healthz within 2 s; the run goes on. Where the
machine is busy with other things, the processor time of a step says more than samples/s.
"""

import errno
import json
import os
import re
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import machine

JOB = Path(__file__).parent / "jobs" / "tiny.toml"
PROCESSES = ("prefetcher", "trainer")
CALL = "--call"  # with this option the file starts itself
MOST_S = 300.0  # that callers may go on
BYTE_EVERY_S = 2.0
PROBE_EVERY_S, PROBE_TIMEOUT_S = 0.5, 30.0
START_S = 180.0  # until both train
FIRST_BYTES = {"silent": b"", "trickles": b"G", "deaf": b"GET /metrics HTTP/1.1\r\n\r\n", "half": b"GET /metr"}
TICKS = os.sysconf("SC_CLK_TCK")


# the callers, in a process of their own


class Callers:
    def __init__(self, kinds: Sequence[str], ports: Sequence[int], count: int, again_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._again_s = again_s
        self._epoll = select.epoll()
        self._open: dict[int, tuple[socket.socket, int, str]] = {}
        self._due: deque[tuple[float, int, str]] = deque(  # when to come, the port, and what for; in this order
            (0.0, port, kinds[number % len(kinds)]) for number in range(count) for port in ports
        )
        self._next_byte_s = time.monotonic() + BYTE_EVERY_S

    def go_on_until(self, end_s: float) -> None:
        while (now_s := time.monotonic()) < end_s:
            while self._due and self._due[0][0] <= now_s:
                _, port, kind = self._due.popleft()
                self._come(port, kind)
            if now_s >= self._next_byte_s:
                self._next_byte_s = now_s + BYTE_EVERY_S
                self._send_bytes()
            for descriptor, event in self._epoll.poll(0.05):
                self._ready(descriptor, event)

    def _come(self, port: int, kind: str) -> None:
        caller = socket.socket()
        caller.setblocking(False)
        code = caller.connect_ex(("127.0.0.1", port))
        if code not in (0, errno.EINPROGRESS):
            caller.close()
            self.counts[f"not connected: {errno.errorcode[code]}"] += 1
            return self._later(port, kind)
        self._open[caller.fileno()] = caller, port, kind
        self._epoll.register(caller, select.EPOLLOUT)
        return None

    def _ready(self, descriptor: int, event: int) -> None:
        caller, _, kind = self._open[descriptor]
        if event & (select.EPOLLHUP | select.EPOLLERR):
            return self._leave(descriptor)
        if event & select.EPOLLOUT:  # connected
            self.counts["connected"] += 1
            self.counts["most at once"] = max(self.counts["most at once"], len(self._open))
            with suppress(OSError):
                caller.send(FIRST_BYTES[kind])
                if kind == "half":
                    caller.shutdown(socket.SHUT_WR)
            self._epoll.modify(descriptor, 0 if kind == "deaf" else select.EPOLLIN)
            return None
        return self._leave(descriptor)  # cut off

    def _send_bytes(self) -> None:
        for descriptor, (caller, _, kind) in list(self._open.items()):
            if kind == "trickles":
                try:
                    caller.send(b"x")
                except BlockingIOError:
                    pass
                except OSError:
                    self._leave(descriptor)

    def _leave(self, descriptor: int) -> None:
        caller, port, kind = self._open.pop(descriptor)
        caller.close()
        self._later(port, kind)

    def _later(self, port: int, kind: str) -> None:
        self._due.append((time.monotonic() + self._again_s, port, kind))


def call(kinds: Sequence[str], ports: Sequence[int], count: int, again_s: float, seconds: float) -> None:
    signal.alarm(round(MOST_S) + 10)
    os.nice(19)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    callers = Callers(kinds, ports, count, again_s)
    began_s = time.monotonic()
    callers.go_on_until(began_s + min(seconds, MOST_S))
    spent = time.process_time() / (time.monotonic() - began_s)
    print(json.dumps({**callers.counts, "share of a core": round(spent, 3)}))


# the run and its turns


@dataclass(slots=True)
class Turn:
    called: bool
    samples_per_s: float = 0.0
    cpu_ms: dict[str, float] = field(default_factory=dict)  # of each process, a step
    probes_s: list[float] = field(default_factory=list)
    failed: int = 0  # probes without an answer
    callers: str = ""


class Run:
    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        sets = (
            f'job.run_dir="{folder / "run"}"',
            "data.epochs=1000",
            *(f"metrics.{it}=127.0.0.1:0" for it in PROCESSES),
            *overrides,
        )
        for name in PROCESSES:
            command = [sys.executable, "-m", name, "run", "--config", str(JOB), *(f"--set={one}" for one in sets)]
            with (folder / f"{name}.log").open("wb") as log:
                self.processes[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)

    @property
    def goes_on(self) -> bool:
        return all(process.poll() is None for process in self.processes.values())

    def ports(self) -> dict[str, int]:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.goes_on:
            found = {it: re.findall(r"serving metrics.* address=127.0.0.1:(\d+)", self._log(it)) for it in PROCESSES}
            if all(found.values()):
                ports = {name: int(numbers[-1]) for name, numbers in found.items()}
                if self.count("trainer", ports, "rowcast_train_steps_total") > 20:
                    return ports
            time.sleep(0.2)
        raise RuntimeError(f"the run did not begin: {self.last_lines()}")

    def count(self, process: str, ports: dict[str, int], name: str) -> float:
        page = ask(ports[process], f"/metrics?name[]={name}")[1]
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    def cpu_s(self, process: str) -> float:
        fields = Path(f"/proc/{self.processes[process].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def last_lines(self) -> str:
        return " | ".join(f"{it}: {self.processes[it].poll()} {self._log(it).strip()[-300:]}" for it in PROCESSES)

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(port: int, path: str) -> tuple[float, str]:
    """Seconds and the page; "" without an answer."""
    began_s = time.monotonic()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PROBE_TIMEOUT_S) as answer:
            page = answer.read().decode()
    except OSError:
        page = ""
    return time.monotonic() - began_s, page


@contextmanager
def callers_of(
    kinds: str, ports: Sequence[int], count: int, again_s: float, seconds: float, turn: Turn
) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.slow_callers", CALL, kinds]
    command += map(str, (count, again_s, seconds, *ports))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield
        turn.callers = process.communicate(timeout=seconds + 60)[0].strip()
    finally:
        process.kill()
        process.wait()


def take_turn(run: Run, ports: dict[str, int], turn: Turn, seconds: float) -> None:
    steps, samples = (run.count("trainer", ports, f"rowcast_{it}_total") for it in ("train_steps", "samples"))
    cpu_s, began_s = {it: run.cpu_s(it) for it in PROCESSES}, time.monotonic()
    while time.monotonic() < began_s + seconds and run.goes_on:
        for port in ports.values():
            took_s, page = ask(port, "/healthz")
            turn.probes_s.append(took_s)
            turn.failed += page != "ok\n"
        time.sleep(PROBE_EVERY_S)
    took_s = time.monotonic() - began_s
    more_steps = run.count("trainer", ports, "rowcast_train_steps_total") - steps
    turn.samples_per_s = (run.count("trainer", ports, "rowcast_samples_total") - samples) / took_s
    turn.cpu_ms = {it: 1e3 * (run.cpu_s(it) - cpu_s[it]) / max(more_steps, 1) for it in PROCESSES if run.goes_on}


def table(turns: Sequence[Turn]) -> list[str]:
    lines = [
        "| turn | samples/s | prefetcher ms a step | trainer ms a step | worst /healthz s | without answer |",
        "|---|---|---|---|---|---|",
    ]
    for turn in turns:
        cpu = " | ".join(f"{turn.cpu_ms.get(it, 0.0):.2f}" for it in PROCESSES)
        lines.append(
            f"| {'callers' if turn.called else 'none'} | {turn.samples_per_s:,.0f} | {cpu} | "
            f"{max(turn.probes_s):.3f} | {turn.failed} of {len(turn.probes_s)} |"
        )
    return lines


def ratio(turns: Sequence[Turn], figure: str) -> float:
    """With callers over without: the median of the pairs."""
    values = [turn.samples_per_s if figure == "samples_per_s" else turn.cpu_ms.get(figure, 0.0) for turn in turns]
    return statistics.median(called / alone for alone, called in zip(values[::2], values[1::2], strict=False) if alone)


def main(
    callers: Annotated[int, typer.Option(help="Of each port.")] = 1000,
    seconds: Annotated[float, typer.Option(max=MOST_S, help="Of each turn.")] = 60.0,
    pairs: Annotated[int, typer.Option(help="Of turns: without callers, with, without, with.")] = 3,
    warm_up: Annotated[float, typer.Option(help="Seconds of the run before the first turn.")] = 60.0,
    again: Annotated[float, typer.Option(help="Seconds until one that was cut off comes again.")] = 1.0,
    kinds: Annotated[str, typer.Option(help="Of callers.", metavar="A,B,...")] = ",".join(FIRST_BYTES),
    overrides: Annotated[list[str] | None, typer.Option("--set", help="A key of the job. Repeatable.")] = None,
) -> None:
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as folder:
        run = Run(Path(folder), overrides or ())
        try:
            ports = run.ports()
            time.sleep(warm_up)
            for called in [False, True] * pairs:
                turns.append(Turn(called))
                if called:
                    with callers_of(kinds, tuple(ports.values()), callers, again, seconds + 5, turns[-1]):
                        time.sleep(2.0)  # they are there
                        take_turn(run, ports, turns[-1], seconds)
                else:
                    take_turn(run, ports, turns[-1], seconds)
                if not run.goes_on:
                    break
            typer.echo("\n".join(table(turns)))
            typer.echo("\n".join(turn.callers for turn in turns if turn.called))
            ratios = [f"{figure} {ratio(turns, figure):.3f}" for figure in ("samples_per_s", *PROCESSES)]
            typer.echo(f"with over without: {', '.join(ratios)}")
            typer.echo("the run goes on" if run.goes_on else f"THE RUN ENDED: {run.last_lines()}")
        finally:
            run.end()
    typer.echo(" ".join(f"{name}={value}" for name, value in machine().items()))


if __name__ == "__main__":
    if sys.argv[1:2] == [CALL]:
        named, count, again_s, seconds, *ports = sys.argv[2:]
        call(named.split(","), [int(port) for port in ports], int(count), float(again_s), float(seconds))
    else:
        typer.run(main)
