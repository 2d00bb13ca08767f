"""Runs an adopted script: opens its folder, a prefetcher, the connection to it, and the engine in this process.

    open     locks the run folder, starts the prefetcher and connects
    start    makes the engine for the steps of `ScriptSession`
    end      says good-bye, after the last step
    leave    the script left before the end

An error within `in_engine` closes everything. The threads of mail, sender and watch stop with the run.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from rowcast.job.file import with_ports_of_pair, with_tables_of_pair
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.messages import Welcome
from rowcast.protocol.peer_watch import ProcessProgress
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.children import Child
from rowcast.runtime.crew import Crew
from rowcast.runtime.errors import ConfigError, PeerLost, RowcastError, peer_failure
from rowcast.runtime.machine import Machine
from rowcast.runtime.process import NAMES, TOGETHER_S
from rowcast.runtime.run_directory import RunDirectory, note_start, pair_folder
from rowcast.runtime.stages import Doorbell
from rowcast.runtime.stops import PASSED_ON
from rowcast.runtime.telemetry.format_numbers import LOST
from rowcast.runtime.telemetry.logs import print_line
from rowcast.runtime.telemetry.metrics import Health
from rowcast.trainer.adopt.connect import run_folder
from rowcast.trainer.adopt.connect.script_state import ScriptObjects, ScriptResults, ScriptState
from rowcast.trainer.device.cuda import adopted_streams, release_memory
from rowcast.trainer.device.streams import ignore, on_device
from rowcast.trainer.run.connection import Connection
from rowcast.trainer.run.launch import Launch
from rowcast.trainer.run.machine import prepared, settle
from rowcast.trainer.run.rank_group import Group, await_complete, meet_together, party_of
from rowcast.trainer.step.engine import TrainerEngine
from rowcast.trainer.step.metrics import new_counters

CHILD_END_S = 15.0  # the longest time of a prefetcher to end after a stop signal
CONTINUED = "start the script again to continue from there"
ONLY_TABLES = "without connect(..., dense=(model, optimizer)) it holds only the tables, and the run cannot be continued"
LOST_CHILD_S = 3.0  # the longest time until a prefetcher that seems lost is seen to have ended
DEFAULTS: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, PASSED_ON), signal.SIG_DFL)
DEFAULTS[signal.SIGINT] = signal.default_int_handler
STOPPING = "rowcast: {} came: the run stops after {}, with a checkpoint; a second one ends the script at once\n"


@dataclass(frozen=True, kw_only=True)
class SessionParts:
    job: Job
    device: torch.device
    launch: Launch  # of this process among the script's ranks
    start_child: Callable[[], Child] | None  # None: another rank of the host starts the prefetcher
    dense: ScriptObjects | None
    dense_optimizer: bool  # a dense optimizer must step once for each train batch
    evaluate: bool = False  # evaluation batches are yielded too
    begins_with_tables: bool = False  # the run begins with tables that the script has loaded, not with a checkpoint
    said_steps: int = 0  # train steps after which connect said that the run continues; 0: it said none
    finished: Manifest | None = None  # the last checkpoint of a complete run, with no train steps left


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP if Python's default handlers are installed; a script's own handlers stay.

    The first stops the run in order, a later one raises KeyboardInterrupt."""

    def __init__(self, stop: Callable[[str], None], after: str) -> None:
        """The handler calls `stop`, between any two instructions of the main thread. `after`: which step it ends
        the run."""
        self._stop, self._after = stop, after
        self._handled: list[int] = []
        self._stopped_s: float | None = None

    def open(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) == default:
                signal.signal(number, self._handle)
                self._handled.append(number)

    def close(self) -> None:
        """Restores the default handlers, once later signals no longer count as part of the first. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._handled and self._stopped_s is not None:
            time.sleep(max(0.0, self._stopped_s + TOGETHER_S - time.monotonic()))
        handled, self._handled = self._handled, []
        for number in handled:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, DEFAULTS[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stopped_s is not None:
            if time.monotonic() < self._stopped_s + TOGETHER_S:
                return
            self.close()
            raise KeyboardInterrupt
        self._stopped_s = time.monotonic()
        name = NAMES[number]
        try:
            # sys.stderr may be in the middle of writing a line
            os.write(2, STOPPING.format(name, self._after).encode())
        except OSError:
            LOST.lines += 1
        self._stop(name)


class ScriptRun:
    def __init__(self, parts: SessionParts) -> None:
        self.ended = False  # all rows are home and on disk, and both processes have said good-bye
        self.closed = False
        self.resumes = False  # the run continues from a checkpoint, so the script may count epochs that are complete
        self.stop_reason: str | None = None  # why the run ends or ended before its data
        # a stop ends the run at the script's current step; several ranks first agree on a later one (`rank_session.py`)
        self.stops_at_once = parts.launch.world_size == 1
        self.asked: str | None = None  # the reason, once this process was asked to stop
        self.on_stop: Callable[[str], None] = ignore  # called with it, also by signal handlers
        self.stack = ExitStack()  # closed with the run
        self.groups = group_specs(parts.job)
        self._bell = Doorbell()
        self.crew = Crew("trainer", self._bell, owns_process=False)
        rank = parts.launch.rank
        self.own_job = parts.job if rank == 0 else with_tables_of_pair(parts.job, rank)  # with a folder for its results
        self.results = ScriptResults(self.own_job.run_dir)
        self.train_steps = 0  # finished train steps of the run
        self._parts, self._job, self._device = parts, with_ports_of_pair(parts.job, rank), parts.device
        self.party = party_of(self._job, parts.launch, "train")
        self._folder = pair_folder(self._job.run_dir, rank, parts.launch.world_size)
        self._group: Group | None = None
        self.connection = Connection(
            self._job,
            self._job.transport,
            self.crew,
            Health(dead_stage=self.crew.dead_stage),
            new_counters(self.groups, rank),
            self._device,
            self.party.rank,
        )
        self.connection.adjust_progress = self._adjust_progress
        self._child: Child | None = None
        after = "the current step" if self.stops_at_once else "a step that all ranks agree on"
        self._signals = StopSignals(self.ask_to_stop, after)
        self._directory: RunDirectory | None = None  # while this process holds its lock
        self._script_ran_s = time.monotonic()  # when the script was last known to run
        self._script_runs = False  # False: the session works, and the script waits for it
        self._pid = os.getpid()

    def open(self) -> Welcome:
        began_s: float | None = time.monotonic()
        self._directory = self.stack.enter_context(RunDirectory(self._folder, "trainer"))
        self._directory.clear_failure()
        self.stack.callback(self._signals.close)
        self._signals.open()
        note_start(self._folder, "trainer", os.getpid())
        if self._parts.start_child is not None:
            self._child, began_s = self._parts.start_child(), None  # its exit tells more than its failure note
            note_start(self._folder, "prefetcher", self._child.process.pid)
            self.stack.callback(self._end, self._child)
        cores = torch.get_num_threads()
        self.kernels, own = prepared(self._job, self._device, cores)
        self._group = self.party.join(self._given_up)
        self.stack.enter_context(self.connection)

        def meet() -> tuple[Welcome | None, Machine]:
            welcome = self.connection.meet(own, "train", self._given_up, began_s, self._child_ended)
            if welcome is None:
                return None, own
            self._check_fits_script(welcome)
            return welcome, settle(self._job, "train", own, cores, welcome.machine)

        welcome = None
        if self._group is not None:
            welcome = meet_together(self._group, meet, self._job, self._given_up, self.connection.attend)
        if welcome is None and self._given_up():
            raise KeyboardInterrupt
        if welcome is None:
            raise PeerLost(f"{'the' if self.stops_at_once else 'a'} prefetcher was stopped before the run had begun")
        self.resumes = welcome.first_train_step > 0
        if self._parts.said_steps not in (0, welcome.first_train_step):
            self.say(
                f"continues the run in {self._job.run_dir} after {welcome.first_train_step} train steps, not "
                f"{self._parts.said_steps}: the newer checkpoint is damaged (prefetcher.log says how)"
            )
        if welcome.pairing:
            self.say(f"ids come by position: {welcome.pairing}")
        return welcome

    def _end(self, child: Child) -> None:
        if not self.ended and self.party.rank.count > 1:
            child.signal(signal.SIGTERM)  # they would wait for trainers that are started again
        child.terminate(CHILD_END_S)

    def say(self, line: str) -> None:
        """Prints a line, which all ranks would print."""
        if self.party.rank.number == 0:
            print_line(line)

    def _given_up(self) -> bool:
        return self.asked is not None

    def _child_ended(self) -> bool:
        return self._child is not None and self._child.code is not None

    def _check_fits_script(self, welcome: Welcome) -> None:
        """Raises ConfigError."""
        if welcome.first_train_step:
            run_folder.refuse_to_resume(
                self._job.run_dir,
                welcome.first_train_step,
                has_dense=self._parts.dense is not None,
                has_tables=self._parts.begins_with_tables,
            )
        if self._parts.evaluate and welcome.epoch_batches[1] == 0:
            raise ConfigError(
                "connect: evaluate=True, but the data set has no evaluation batches; let the factory return a function "
                'of (split, epoch) that knows the split "eval"'
            )

    def start(self, welcome: Welcome, state: ScriptState) -> TrainerEngine:
        self.train_steps = welcome.first_train_step
        return self.connection.start(adopted_streams, lambda records, clock: (state, None), self.results)

    @property
    def engine(self) -> TrainerEngine:
        assert self.connection.engine is not None, "start has made an engine"
        return self.connection.engine

    @property
    def group(self) -> Group:
        assert self._group is not None, "open has joined it"
        return self._group

    @property
    def run_id(self) -> str | None:
        known = self._parts.finished or self.connection.welcome
        return None if known is None else known.run_id

    def _adjust_progress(self, progress: ProcessProgress) -> ProcessProgress:
        """Counts the script's time as progress: it may take any time for a step."""
        if self._script_runs:
            self._script_ran_s = time.monotonic()
        waiting_for = "the training script" if self._script_runs else progress.waiting_for
        return replace(progress, work=progress.work + int(self._script_ran_s), waiting_for=waiting_for)

    def ask_to_stop(self, reason: str) -> None:
        """Ends the run at the loader's next batch, of several ranks soon. Signal handlers call this too."""
        self.asked = self.asked or reason
        if self.stops_at_once:
            self.stop_reason = self.stop_reason or reason
        self.on_stop(reason)
        self._bell.ring()

    # the end

    def end(self, epoch: int) -> None:
        """Call after the engine's last step, in `epoch`. Raises RowcastError if the prefetcher was stopped."""
        barrier, steps = self.engine.barrier, self.train_steps
        assert barrier.end is not None, "the loop ends with EndOfData"
        self.group.gather(b"")  # no rank leaves while another one needs it
        if barrier.end.finished and self.party.rank.number > 0:
            await_complete(self._job, self.crew.check)
        self.connection.say_bye()
        self.ended = True
        self.close()
        where = f"checkpoint is in {self._job.run_dir}: {ONLY_TABLES if self._parts.dense is None else CONTINUED}"
        if not self.stops_at_once:
            self.stop_reason = f"a stop of all ranks ({barrier.stop_reason})"
        if barrier.end.finished:
            self.stop_reason = None
        elif self.stop_reason is None:
            raise RowcastError(
                f"the prefetcher was stopped ({barrier.stop_reason}) after {steps} train steps; its {where}"
            )
        elif steps:
            self.say(f"stopped by {self.stop_reason} after {steps} train steps, in epoch {epoch}; the {where}")
        else:
            self.say(f"stopped by {self.stop_reason} before the first train step")

    @property
    def is_left(self) -> bool:
        """Whether there is no run to end: it is closed, or this process was forked from the one that opened it."""
        return self.closed or self._pid != os.getpid()

    def leave(self) -> None:
        self._report_failure(RowcastError(f"the training script left its loop after {self.train_steps} train steps"))
        self.close()
        release_memory(self._device)

    @contextmanager
    def in_engine(self) -> Iterator[None]:
        """Runs the engine outside the script's inference mode and on the job's device. An error closes everything."""
        self._script_runs = False
        try:
            with torch.inference_mode(False), on_device(self._device):
                yield
        except BaseException as error:  # noqa: BLE001 - any error ends the run
            raise self._failed(error) from None
        self._script_ran_s, self._script_runs = time.monotonic(), True
        if self.closed:
            release_memory(self._device)  # here, where no call holds the engine

    def _failed(self, error: BaseException) -> BaseException:
        """Closes everything; returns the error to raise in the script."""
        found = error
        if isinstance(error, PeerLost) and self._group is not None:
            self._group.abandon(self._device)
        if not self.closed:
            self._report_failure(error)
            if isinstance(error, PeerLost) and self._child is not None and self._child.ended_within(LOST_CHILD_S):
                found = peer_failure(self._child.code or 1, self._child.describe_exit())
            self.close()
        release_memory(self._device)
        return found

    def _report_failure(self, error: BaseException) -> None:
        if self._directory is not None:
            self._directory.note_failure(error)
        self.connection.send_failure(error)

    def close(self) -> None:
        self.closed = True
        with on_device(self._device):
            self.stack.close()
