"""A stop that reaches every process at once, by `timeout`, a service manager or a terminal, is one stop in order."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import Launch, Name, Process, Session, launch
from tests.support.repeats import count
from tests.support.supervisors import CTRL_C, Terminal, signal_all, under_timeout

STOP_LIMIT_S = 90.0
STEPS = 20
CASES = [  # the first ones have each kind of run and each way once
    ("pair", "timeout"),
    ("local", "service"),
    ("ranks", "Ctrl-C"),
    ("local", "closed terminal"),
    ("ranks", "service"),
    ("local", "timeout"),
    ("ranks", "timeout"),
    ("pair", "service"),
    ("pair", "Ctrl-C"),
    ("local", "Ctrl-C"),
    ("pair", "closed terminal"),
    ("ranks", "closed terminal"),
]


class Supervised:
    """The processes of a run, and how they are stopped."""

    def __init__(self, stack: ExitStack, folder: Path, run: str, way: str) -> None:
        self._names: tuple[Name, ...] = ("prefetcher", "trainer") if run == "pair" else ("local",)
        self._way = way
        self._terminal = stack.enter_context(Terminal())
        launched: Launch = under_timeout if way == "timeout" else launch
        if way in ("Ctrl-C", "closed terminal"):
            launched = self._terminal.launch
            if run == "pair":
                self._names, launched = ("trainer",), self._terminal.launch_pair
        self.session = stack.enter_context(Session(folder, launched))
        if run == "ranks":
            self.session.write_job(ranks={"count": 2})
        self.started: list[Process] = []

    def start(self) -> None:
        self.started = [self.session.start(name) for name in self._names]

    def stop(self) -> None:
        if self._way == "timeout":
            for process in self.started:
                process.signal(signal.SIGTERM)
        elif self._way == "service":
            signal_all(self.session, signal.SIGTERM)
        elif self._way == "Ctrl-C":
            self._terminal.press(CTRL_C)
        else:
            self._terminal.close()

    def ended_in_order(self) -> None:
        for process in self.started:
            process.ended(STOP_LIMIT_S).quiet()
        self.session.until_alone(STOP_LIMIT_S)
        assert self.session.remains() == []


Supervise = Callable[[str, str], Supervised]


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervise]:
    with ExitStack() as stack:
        yield lambda run, way: Supervised(stack, tmp_path, run, way)


@pytest.mark.parametrize(("run", "way"), CASES[: count(4, len(CASES))])
def test_a_stop_of_all_processes_leaves_a_checkpoint_of_the_last_step(
    run: str, way: str, supervised: Supervise
) -> None:
    all_of_them = supervised(run, way)
    session = all_of_them.session
    all_of_them.start()
    all_of_them.started[-1].until_counted("rowcast_train_steps_total", STEPS)
    all_of_them.stop()
    all_of_them.ended_in_order()
    manifest = session.manifest()
    assert not manifest.finished
    assert manifest.train_steps >= STEPS
    assert len(np.fromfile(session.run_dir / "losses.f32", np.float32)) == manifest.train_steps


@pytest.mark.parametrize("seed", range(count(1, 12)))
def test_a_stop_at_any_instant_is_one_in_order(seed: int, supervised: Supervise) -> None:
    """Also while its processes are being started; some stops come twice."""
    chance = random.Random(seed)
    all_of_them = supervised(chance.choice(["local", "ranks"]), "service")
    all_of_them.start()
    all_of_them.started[0].until_it_holds_signals()
    time.sleep(chance.uniform(0.0, 8.0))
    all_of_them.stop()
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0.0, 0.05))
        all_of_them.stop()
    all_of_them.ended_in_order()
    losses = all_of_them.session.run_dir / "losses.f32"
    if losses.exists() and losses.stat().st_size:
        assert all_of_them.session.manifest().train_steps == losses.stat().st_size // 4
