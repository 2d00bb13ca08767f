"""Starts the prefetcher of an adopted script, connects to it, and drives the engine in the script's thread."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
import torch

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.messages import StopRequest
from rowcast.runtime.errors import PeerLost, RowcastError, peer_failure
from rowcast.runtime.machine import Machine
from rowcast.runtime.process import Child, start_child
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.stages import Crew, Doorbell
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.runtime.telemetry.metrics import Health
from rowcast.trainer.adopt.script_engine import ScriptEngine
from rowcast.trainer.device.cuda import adopted_streams
from rowcast.trainer.device.streams import Streams, on_device
from rowcast.trainer.models.model_state import Tensors
from rowcast.trainer.report.results import EvaluationOnly
from rowcast.trainer.run.connection import PrefetcherConnection
from rowcast.trainer.step.engine import TrainerEngine
from rowcast.trainer.step.metrics import new_counters

MODULE, LOG = "rowcast.prefetcher.run.script", "prefetcher.log"
CHILD_END_S, LOST_CHILD_S = 5.0, 3.0


class NoModel:
    """Implements `barrier.ModelState`: the script keeps its model."""

    trained = ()

    def issue_state(self, streams: Streams) -> None: ...

    def state(self) -> Tensors:
        return {}

    def restore(self, tensors: Tensors) -> bool:
        return False


class ScriptProcess:
    """The script's thread calls it."""

    def __init__(self, job: Job, job_file: Path, device: torch.device) -> None:
        """Starts the prefetcher, and waits for it. Raises RowcastError after closing everything."""
        if not structlog.is_configured():
            setup_logging("trainer", "warning")  # otherwise structlog writes to the script's standard output
        self._device, self._folder = device, job.run_dir
        self._failure = ""  # what has ended the engine
        self._crew = Crew("trainer", Doorbell(), owns_process=False)
        self._stack = ExitStack()
        try:
            self._stack.enter_context(RunDirectory(job.run_dir, "trainer"))
            self._child = start_child("prefetcher", MODULE, [str(job_file)], job.run_dir / LOG)
        except BaseException:
            self._stack.close()
            raise
        self._stack.callback(self._child.terminate, CHILD_END_S)
        health = Health(dead_stage=self._crew.dead_stage)
        counters = new_counters(group_specs(job))
        self._connection = PrefetcherConnection(job, job.transport, self._crew, health, counters, device)
        # the script may take any time for a step, so the prefetcher takes time for progress
        self._connection.adjust_progress = lambda own: replace(own, work=own.work + int(time.monotonic()))
        try:
            self._stack.enter_context(self._connection)
            engine = self._meet(self._child)
        except BaseException as error:  # noqa: BLE001 - any error ends the engine
            raise self._failed(error) from None
        self.engine = ScriptEngine(
            engine, device, job.lookahead.horizon_batches, self.drive, partial(self._crew.wake, "sender")
        )

    def _meet(self, child: Child) -> TrainerEngine:
        machine = Machine(threads=torch.get_num_threads(), facts=())
        welcome = self._connection.meet(machine, "train", lambda: False, None, lambda: child.code is not None)
        if welcome is None:
            raise PeerLost("the prefetcher has ended")
        return self._connection.start(
            adopted_streams, lambda records, clock: (NoModel(), None), EvaluationOnly(self._folder)
        )

    def drive(self, until: Callable[[], bool]) -> None:
        """An interrupt (Ctrl-C) ends it early and is then raised, so that the script may save its tables."""
        if self._failure:
            raise RowcastError(self._failure)
        try:
            with torch.inference_mode(False), torch.no_grad(), on_device(self._device), noted_interrupts() as noted:
                self._connection.drive(self.engine.advance, lambda: bool(noted) or until())
        except BaseException as error:  # noqa: BLE001 - any error ends the engine
            raise self._failed(error) from None
        if noted:
            raise KeyboardInterrupt

    def _failed(self, error: BaseException) -> BaseException:
        """Closes everything; returns the error to raise in the script."""
        if isinstance(error, PeerLost) and self._child.ended_within(LOST_CHILD_S):
            error = peer_failure(self._child.code or 1, self._child.describe_exit())
        self._stack.close()
        self._failure = str(error) or repr(error)
        self._crew.error = None  # its frames hold the script's model
        return error

    def close(self) -> None:
        """Ends the prefetcher. Rows that were not read are lost."""
        conversation = self._connection.conversation
        if conversation is not None:
            with suppress(RowcastError):
                conversation.send(StopRequest(reason="the script has ended"))
        self._stack.close()


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Within this context an interrupt is only noted, because it could stop the engine in the middle of a move."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
