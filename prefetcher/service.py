"""`prefetcher run`: everything around the engine. Opens in one order, closes in the reverse, whatever happens in between."""

import statistics
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from prefetcher.checkpoint import RunCheckpointer
from prefetcher.engine import EngineParts, PrefetcherEngine
from prefetcher.metrics import PrefetcherCollector, PrefetcherGauges, Queue, SlotStates
from prefetcher.planner.capacity import divide_capacity, measure
from prefetcher.readers.worker import DecodingWorker
from prefetcher.stores.memory import MemoryStore
from protocol.batch import ScheduledBatch
from protocol.conversation import Conversation
from protocol.errors import ConfigError
from protocol.job import MIN_RING_BYTES, Job, parse_bytes
from protocol.messages import PROTOCOL_VERSION, Bye, RingSpec, Welcome
from protocol.process import Crew, Signals, tell_peer
from protocol.rundir import RunDirectory
from protocol.session import Session
from protocol.stages import Doorbell
from protocol.tables import GroupSpec, group_specs
from protocol.telemetry.build import build_info
from protocol.telemetry.counters import new_registry
from protocol.telemetry.logs import get_logger
from protocol.telemetry.server import Health, TelemetryServer
from protocol.transport.ring import RingFile, RingReader, RingWriter, free_shared_memory, remove_leftovers
from protocol.transport.zmq_link import ZmqLink
from protocol.watch import PeerWatch, Progress

MEASURED_BATCHES = 32  # read before the first plan, to divide the capacity between groups
AUTO_RING_BYTES = 64 * 2**20


class PrefetcherRun:
    """One run, from the lock on its directory to the last good-bye."""

    def __init__(self, job: Job, max_steps: int | None) -> None:
        self._job = job
        self._groups = group_specs(job)
        self._log = get_logger()
        self._bell = Doorbell()
        self._crew = Crew(self._bell)
        self._health = Health(dead_stage=self._crew.dead_stage)
        self._source = DecodingWorker(job, max_steps, on_batch=self._bell.ring)

    def run(self, *, fresh: bool) -> None:
        """Returns when the run is finished or was stopped in order. Raises the first error of any stage."""
        with ExitStack() as stack:
            directory = stack.enter_context(RunDirectory(self._job.run_dir, "prefetcher"))
            if fresh:
                directory.remove(["checkpoints"])
            directory.refuse_used()
            signals = stack.enter_context(Signals(self._bell))
            remove_leftovers()
            stack.callback(self._source.close)
            self._source.start()
            measured = self._measure(signals)
            if signals.stop_reason is not None:
                return
            self._serve(stack, signals, measured)

    def _measure(self, signals: Signals) -> list[ScheduledBatch]:
        """The first batches, as they come from the worker."""
        measured: list[ScheduledBatch] = []
        while len(measured) < MEASURED_BATCHES and not self._source.ended and signals.stop_reason is None:
            seen = self._bell.rings
            batch = self._source.poll()
            if batch is None:
                self._bell.wait(seen)
            else:
                measured.append(batch)
        return measured

    def _serve(self, stack: ExitStack, signals: Signals, measured: list[ScheduledBatch]) -> None:
        needs = measure(self._groups, measured)
        slots = divide_capacity(self._groups, self._job.cache.capacity, needs)
        stores = tuple(MemoryStore(group, self._job.job.seed) for group in self._groups)
        for store in stores:
            stack.callback(store.close)
        ring_bytes = self._job.transport.ring_bytes or automatic_ring_bytes(self._groups, measured, self._job.lookahead.depth)
        rings = [stack.enter_context(RingFile.create(ring_bytes, name)) for name in ("fetch", "back")]
        link = ZmqLink.prefetcher(self._job.run_dir, on_receive=self._bell.ring)
        stack.callback(link.close)
        link.start()
        info = self._source.info
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            run_id=uuid.uuid4().hex[:12],
            incarnation=1,
            pid=self._source.parent_pid,
            slots=slots,
            num_dense=info.num_dense,
            depth=self._job.lookahead.depth,
            horizon=self._job.lookahead.horizon_batches,
            fetch_ring=RingSpec(path=rings[0].path, nbytes=ring_bytes),
            back_ring=RingSpec(path=rings[1].path, nbytes=ring_bytes),
            train_steps=info.train_steps,
        )
        engine = PrefetcherEngine(
            EngineParts(
                job=self._job,
                groups=self._groups,
                source=self._source,
                measured=measured,
                stores=stores,
                conversation=Conversation(Session("prefetcher", welcome.incarnation), link),
                fetch_ring=RingWriter(rings[0].buffer),
                back_ring=RingReader(rings[1].buffer),
                checkpointer=RunCheckpointer(self._job, self._groups, stores, welcome.run_id, self._training_digest()),
                welcome=welcome,
            )
        )
        self._log_start(welcome, ring_bytes)
        self._converse(stack, signals, engine, link)
"""Rest below."""
