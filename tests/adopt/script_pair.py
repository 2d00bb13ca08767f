"""The engine of an adopted script and its prefetcher in one thread, in an order that a seed decides."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from rowcast.job.models import NO_MODEL
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs, table_specs
from rowcast.prefetcher.checkpoints.writer import NoCheckpoints
from rowcast.prefetcher.pipeline.engine import PrefetcherEngine
from rowcast.prefetcher.pipeline.metrics import new_counters
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.prefetcher.readers.source import NO_SAMPLES, ScriptIds, Source
from rowcast.prefetcher.run.script import ScriptStore
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import RowStore
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import PROTOCOL_VERSION, Ids, RingSpec, ScriptTable, Welcome
from rowcast.protocol.parts import UNDIVIDED, batch_specs, belonging
from rowcast.protocol.session import Session
from rowcast.runtime.first_values import FirstValues
from rowcast.runtime.machine import Machine
from rowcast.trainer.adopt.records import Place, Records
from rowcast.trainer.adopt.script_engine import ScriptEngine
from rowcast.trainer.adopt.script_process import NoModel
from rowcast.trainer.device.streams import PlainStreams
from rowcast.trainer.report.results import EvaluationOnly
from rowcast.trainer.run.connection import hello
from rowcast.trainer.step.engine import TrainerEngine
from rowcast.trainer.step.metrics import new_counters as new_trainer_counters
from tests.support.driver import QUIET_LIMIT, Rings, Settings, StuckError
from tests.support.inproc_link import inproc_pair
from tests.support.jobs import job, table
from tests.support.late_store import LateStore

STATES = ("exp_avg", "exp_avg_sq")
FIRST = 0.5  # of every weight


class ScriptPair:
    """`drive` advances both sides, `stir` those that have threads of their own."""

    def __init__(
        self, seed: int, tables: Sequence[tuple[int, int, int]], slots: Sequence[int], ring_bytes: int, *, late: bool
    ) -> None:
        """`tables`: of each its rows, columns and states. `slots`: most rows of a group."""
        self.chance = random.Random(seed)
        widths = [dim * (1 + num_states) + 1 for _, dim, num_states in tables]
        self.job = own_job(tables, widths, depth=self.chance.choice((1, 2, 3)), horizon=self.chance.choice((1, 3)))
        groups = group_specs(self.job)
        self.slots = tuple(min(most, group.num_rows) for most, group in zip(slots, groups, strict=False))
        self.places = places(groups, tables)
        setup = [ScriptTable(columns=first_columns(own), largest_rows=1, distinct_rows=1) for own in tables]
        settings = Settings(slots=self.slots, ring_bytes=ring_bytes)
        rings, ids = Rings(settings, torch.device("cpu")), ScriptIds(table_specs(self.job))
        links = inproc_pair()
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            run_id="",
            incarnation=1,
            pid=1,
            slots=self.slots,
            inputs=batch_specs(NO_SAMPLES, belonging(self.job).arrays),
            depth=self.job.lookahead.depth,
            fetch_ring=RingSpec(path="", nbytes=ring_bytes),
            back_ring=RingSpec(path="", nbytes=ring_bytes),
            staging_bytes=max(64, ring_bytes // 4 // 64 * 64),
            train_steps=None,
            first_train_step=0,
            restore_bytes=0,
        )
        self.prefetcher = PrefetcherEngine(
            job=self.job,
            welcome=welcome,
            source=Source(ids, None),
            planner=job_planner(self.job, groups, (self.slots,), ()),
            stores=tuple(ScriptStore(own_store(group, seed, late=late), group, setup) for group in groups),
            conversation=Conversation(Session("prefetcher", 1), links[0]),
            rings=(rings.fetch_writer, rings.back_reader),
            checkpointer=NoCheckpoints(),
            counters=new_counters(groups, 0),
        )
        self.prefetcher.conversation.listen({Ids: ids.accept})
        conversation = Conversation(Session("trainer"), links[1])
        conversation.send(hello(self.job, UNDIVIDED, "train", Machine(threads=1), torch.device("cpu")))
        assert self.prefetcher.conversation.advance(), "Hello arrives"
        assert conversation.advance(), "Welcome arrives"
        self.trainer = TrainerEngine(
            self.job,
            welcome,
            conversation,
            rings.of_trainer,
            PlainStreams(),
            lambda records, clock: (NoModel(), None),
            EvaluationOnly(Path(self.job.job.run_dir)),
            new_trainer_counters(groups),
        )
        self.engine = ScriptEngine(
            self.trainer, torch.device("cpu"), self.job.lookahead.horizon_batches, self.drive, lambda: None
        )
        self._threads = [
            *self.prefetcher.stages.values(),
            *(stage for name, stage in self.trainer.stages.items() if name != "loop"),
        ]
        self._weights = [self.chance.choice((0.2, 1.0)) for _ in range(len(self._threads) + 1)]

    def stir(self, times: int) -> None:
        for stage in self.chance.choices(self._threads, self._weights[:-1], k=times):
            stage()

    def drive(self, until: Callable[[], bool]) -> None:
        quiet = 0
        while not until():
            advanced = self.chance.choices([*self._threads, self.engine.advance], self._weights)[0]()
            quiet = 0 if advanced else quiet + 1
            if quiet > QUIET_LIMIT:
                raise StuckError(f"the prefetcher waits for {self.prefetcher.waiting_for}")


def own_job(tables: Sequence[tuple[int, int, int]], widths: Sequence[int], depth: int, horizon: int) -> Job:
    return job(
        tables=[table(f"t{i}", tables[i][0], width, f"rows{i}") for i, width in enumerate(widths)],
        model={"kind": NO_MODEL},
        optimizer={"sparse": {"kind": "sgd", "lr": 0.0}, "dense": {"kind": "sgd", "lr": 0.0}},
        lookahead={"depth": depth, "horizon": horizon},
    )


def own_store(group: GroupSpec, seed: int, *, late: bool) -> RowStore:
    store = MemoryStore(group)
    return LateStore(store, seed) if late else store


def first_columns(table: tuple[int, int, int]) -> tuple[FirstValues, ...]:
    _, dim, num_states = table
    return (
        FirstValues(width=dim, value=FIRST),
        *(FirstValues(width=dim) for _ in range(num_states)),
        FirstValues(width=1),
    )


def places(groups: Sequence[GroupSpec], tables: Sequence[tuple[int, int, int]]) -> list[Place]:
    found = {}
    for group in groups:
        base = 0
        for own in group.tables:
            rows, dim, num_states = tables[own.index]
            found[own.index] = Place(own.name, own.index, group.index, base, rows, dim, STATES[:num_states])
            base += rows
    return [found[index] for index in range(len(tables))]


class PlainRows:
    """What a script would see if all rows were here: each table's records, f32 [rows, columns]."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.tables = [np.zeros((place.num_rows, place.last + 1), np.float32) for place in places]
        for place, own in zip(places, self.tables, strict=True):
            own[:, : place.dim] = FIRST

    def write(self, place: Place, ids: torch.Tensor, rows: Records) -> None:
        self.tables[place.index][ids.numpy()] = place.packed(rows, place.last + 1).numpy()

    def check(self, place: Place, ids: torch.Tensor, found: Records) -> None:
        expected = self.tables[place.index][ids.numpy()]
        got = place.packed(found, place.last + 1).numpy()
        bad = (got.view(np.int32) != expected.view(np.int32)).any(1)
        assert not bad.any(), f"rows {ids.numpy()[bad]} of table {place.index}: {got[bad]}, not {expected[bad]}"
