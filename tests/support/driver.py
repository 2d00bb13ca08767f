"""Both processes' real stages in one thread, advanced in an order that a seed decides: every failing seed replays.

Nothing here is a stand-in but the link (two queues), checkpoints where a test gives no folder for them and, where a
test asks for it, the late store and the seeded streams, which are production code.
"""

import random
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import rowcast.prefetcher.pipeline.engine
import rowcast.trainer.step.engine
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, TableSpec, group_specs, make_keys, points_in
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import OwnShard, dense_content, restore_rows
from rowcast.prefetcher.checkpoints.writer import BarrierCheckpointer, CheckpointWriter
from rowcast.prefetcher.pipeline.fetcher import PlannedBarrier
from rowcast.prefetcher.pipeline.key_exchange import KeyLinks, NoLinks
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.prefetcher.readers.source import Source, SourceCounters
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.records import first_records
from rowcast.prefetcher.stores.store import RowStore, finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.batch import Lookups, Samples, Scheduled, ScheduledBatch, after
from rowcast.protocol.conversation import Conversation, Link
from rowcast.protocol.messages import PROTOCOL_VERSION, Replica, RingSpec, Saved, StopRequest, Welcome
from rowcast.protocol.parts import UNDIVIDED, Rank, batch_specs, belonging
from rowcast.protocol.plan import PlannedSteps, StepPlan
from rowcast.protocol.session import Session
from rowcast.protocol.transport.ring import RingReader, RingWriter, largest_payload
from rowcast.protocol.transport.ring_file import in_memory_buffer
from rowcast.runtime.checkpoint_manifest import Manifest, Position, TrainingData
from rowcast.runtime.machine import Machine
from rowcast.trainer.device.cuda import Bounced, RingEnds
from rowcast.trainer.device.streams import PhaseClock, PlainStreams, Streams, Wait
from rowcast.trainer.kernels import part_of, torch_ops
from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.models.exchanges import Collectives
from rowcast.trainer.models.model_state import Tensors
from rowcast.trainer.models.runner import StepRunner
from rowcast.trainer.models.shared_runner import AgreedStop, SharedRunner
from rowcast.trainer.run.connection import hello
from rowcast.trainer.step.metrics import new_counters
from tests.support.cold_dict import ColdDict
from tests.support.inproc_link import inproc_pair
from tests.support.late_store import LateStore
from tests.support.planner_integrity import check_planner
from tests.support.seeded_streams import SeededStreams
from tests.support.tiers import tiered

# advances without progress after which a run is stuck: the late store's dice and skewed choices stay far below
QUIET_LIMIT = 20_000
EMPTY = Samples(dense=np.zeros((0, 13), np.float32), labels=np.zeros(0, np.float32))
HEAD_START = 100  # advances of the prefetcher before the trainer begins


class StuckError(AssertionError):
    """No stage could advance any more."""


class ListSource(Source):
    """Batches that are already here; what is not their ids comes when the dice say so, where there are dice."""

    def __init__(
        self, batches: Sequence[ScheduledBatch], chance: random.Random | None = None, start: Position | None = None
    ) -> None:
        self._batches, self._chance = deque(batches), chance
        self._evaluated = (start or Position()).eval_batch or 0  # batches of the evaluation in progress
        self._rests: deque[Samples] = deque()
        self.counters = SourceCounters()

    @property
    def ended(self) -> bool:
        return not self._batches

    def poll_ids(self) -> Scheduled[Lookups] | None:
        if not self._batches:
            return None
        own = self._batches.popleft()
        at = Position(step=own.step, train_step=own.train_step, epoch=own.epoch)
        if own.kind == "eval":
            at = msgspec.structs.replace(at, eval_batch=self._evaluated)
        following = after(own.kind, at)
        self._evaluated = following.eval_batch or 0
        self._rests.append(own.batch.samples)
        return Scheduled(kind=own.kind, position=at, following=following, batch=own.batch.lookups)

    def poll_dense(self) -> Samples | None:
        is_late = self._chance is not None and self._chance.random() < 0.3
        return None if is_late else self._rests.popleft()


class MemoryCheckpointer:
    """Implements the barrier's `Checkpointer` without files: what a barrier brings is only looked at."""

    def __init__(self) -> None:
        self.begun: list[PlannedBarrier] = []
        self.busy = False

    def begin(self, barrier: PlannedBarrier) -> bool:
        self.begun.append(barrier)
        return True

    def take_dense(self, message: Saved | Replica, content: bytes) -> bool:
        return True


@dataclass(slots=True)
class RecordedResults:
    losses: list[np.float32] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def loss(self, train_step: int, loss: np.float32) -> None:
        assert train_step == len(self.losses), (
            f"the loss of train step {train_step} came after {len(self.losses)} losses"
        )
        self.losses.append(loss)

    def evaluation(self, result: Evaluation) -> None:
        self.evaluations.append(result)

    def state(self) -> Tensors:
        evaluations = msgspec.json.encode(self.evaluations)
        return {
            "losses": torch.tensor(np.array(self.losses, np.float32)),
            "evaluation": torch.tensor(list(evaluations), dtype=torch.uint8),
        }

    def restore(self, tensors: Tensors) -> None:
        self.losses = list(tensors["losses"].numpy())
        self.evaluations = msgspec.json.decode(tensors["evaluation"].numpy().tobytes(), type=list[Evaluation])


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to run: none of it may change a bit of the result."""

    slots: tuple[int, ...]
    tier_slots: tuple[int, ...] | None = None  # rows that the planner keeps in the stores' memory; None: all
    tier_reserve: int = 0  # rows of each store that may wait to leave
    ring_bytes: int = 2**20
    staging_bytes: int | None = None  # None: half a ring's
    seed: int = 0
    late_store: bool = False  # and late dense features and labels
    seeded_streams: bool = True
    without: Wait | None = None  # a wait to leave out, to show that it is needed
    # what stands in front of each store, to show that harm is noticed
    harm: Callable[[RowStore], RowStore] | None = None
    incarnation: int = 1
    bounced: bool = False  # copies go through buffers, as if the rings could not be page-locked
    mirrored: bool = False  # payloads travel over the link, as they do over TCP
    links: Callable[[], tuple[Link, Link]] = inproc_pair  # the prefetcher's end, the trainer's end


class Rings:
    """Both rings as both ends see them: in one memory, or each end in its own."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        mirrored = settings.mirrored
        near = [in_memory_buffer(settings.ring_bytes) for _ in range(2)]  # the prefetcher's: fetch, back
        far = [in_memory_buffer(settings.ring_bytes) for _ in range(2)] if mirrored else near
        self.fetch_writer = RingWriter(near[0], always_checksum=mirrored)
        self.back_reader = RingReader(near[1], mirror=mirrored)
        self.of_trainer = RingEnds(far[0], far[1], device, page_locked=not settings.bounced, mirrored=mirrored)
        self.buffers = far  # the trainer's
        if settings.bounced and device.type == "cpu":
            memories = [Bounced(buffer, torch.zeros(len(buffer), dtype=torch.uint8)) for buffer in far]
            self.of_trainer.fetch_memory, self.of_trainer.back_memory = memories


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """A pair's place among several that share batches."""

    rank: Rank
    collectives: Collectives
    links: KeyLinks = field(default_factory=NoLinks)


@dataclass(frozen=True, kw_only=True)
class Past:
    """What an incarnation goes on from: checkpoints on a disk, and the newest of them."""

    checkpoints: Checkpoints
    newest: Manifest | None
    # of an earlier incarnation in the same process, with the rows of `newest`; empty: none survived
    stores: tuple[TrackedStore, ...] = ()


class InProcessRun:
    """One whole run. `run()` to the end, or `advance_until` a condition."""

    def __init__(
        self,
        job: Job,
        batches: Sequence[ScheduledBatch],
        settings: Settings,
        past: Past | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """`batches` are of the whole run; with a `past` it goes on where that ends, writing checkpoints there."""
        rank = UNDIVIDED if sharing is None else sharing.rank
        shard = OwnShard(number=rank.number, count=rank.count, points=points_in(group_specs(job)))
        start = Position() if past is None or past.newest is None else past.newest.position
        first = batches[0].batch.samples if batches else EMPTY
        batches = batches[start.step :]
        restore = (
            b"" if past is None or past.newest is None else b"".join(dense_content(past.checkpoints.root, past.newest))
        )
        self.job, self.settings = job, settings
        self.groups = group_specs(job)
        self.plans: list[StepPlan] = []  # the first step of each plan has its move
        self.after_plans: list[int | None] = []
        self.max_in_flight = 0
        self.results = RecordedResults()
        self.chance = random.Random(settings.seed)
        stores = tuple(TrackedStore(new_store(settings, group), group, job.job.seed) for group in self.groups)
        if past is not None and past.stores:
            stores = past.stores
        elif past is not None and past.newest is not None:
            restore_rows(past.checkpoints.root, past.newest, self.groups, stores, shard)
        self.plain_stores = tuple(map(plain_store, stores))
        self.streams = self.make_streams(settings)
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            run_id="test",
            incarnation=settings.incarnation,
            pid=1,
            slots=settings.slots,
            inputs=batch_specs(first, belonging(job).arrays),
            depth=job.lookahead.depth,
            fetch_ring=RingSpec(path="", nbytes=settings.ring_bytes),
            back_ring=RingSpec(path="", nbytes=settings.ring_bytes),
            staging_bytes=settings.staging_bytes or largest_payload(settings.ring_bytes),
            train_steps=None,
            first_train_step=start.train_step,
            restore_bytes=len(restore),
            start=start,
            rank=rank.number,
        )
        self.writer = None
        if past is not None:
            data = TrainingData(files=(), num_dense=first.dense.shape[1])
            self.writer = CheckpointWriter(
                job, self.groups, "test", data, past.checkpoints, past.newest, keep=job.checkpoint.keep, shard=shard
            )
        self.rings = rings = Rings(settings, self.streams.device)
        links = settings.links()
        conversation = Conversation(Session("prefetcher", settings.incarnation), links[0])
        if settings.mirrored:
            conversation.carry(rings.fetch_writer, rings.back_reader)
        for index, (store, plain) in enumerate(zip(stores, self.plain_stores, strict=True)):
            store.store = LateStore(plain, settings.seed + index) if settings.late_store else plain
            if settings.harm is not None:
                store.store = settings.harm(store.store)
        seen = rowcast.prefetcher.pipeline.metrics.new_counters(self.groups, rank.number)
        self.prefetcher = rowcast.prefetcher.pipeline.engine.PrefetcherEngine(
            job=job,
            welcome=welcome,
            source=ListSource(batches, self.chance if settings.late_store else None, start),
            planner=job_planner(
                job,
                self.groups,
                [settings.slots] if settings.tier_slots is None else [settings.slots, settings.tier_slots],
                batches[:MEASURED_BATCHES],
                rank=rank,
            ),
            stores=stores,
            conversation=conversation,
            rings=(rings.fetch_writer, rings.back_reader),
            checkpointer=MemoryCheckpointer()
            if self.writer is None
            else BarrierCheckpointer(self.groups, stores, self.writer, parse_bytes(job.checkpoint.memory)),
            counters=seen,
        )
        if sharing is not None:
            self.prefetcher.planning.keys.links = sharing.links
        if past is not None and past.newest is not None:
            self.prefetcher.planning.checksums.expect(past.newest.known_ahead(rank.parts))
        if restore:
            self.prefetcher.barrier.restore(restore)
        self.prefetcher.planning.on_plan = self._planned
        trainer_conversation = Conversation(Session("trainer"), links[1])
        self._greet(trainer_conversation, rank)
        self.trainer = self.make_trainer(welcome, trainer_conversation, sharing, rank, first.dense.shape[1])
        self.records = self.trainer.slots.records
        self.saved: list[bytes] = []  # model states that the trainer has packed for checkpoints
        send_state = self.trainer.sender.send_state

        def kept(barrier: int, content: bytes, *, whole: bool, is_best: bool) -> None:
            self.saved.append(content)
            send_state(barrier, content, whole=whole, is_best=is_best)

        self.trainer.sender.send_state = kept  # type: ignore[method-assign]
        self.advances = [
            *self.prefetcher.stages.values(),
            *self.trainer.stages.values(),
            self.streams.advance,
            *([] if self.writer is None else [self.writer.advance]),
        ]
        self._until = list(accumulate(self.chance.choice((0.05, 0.3, 1.0)) for _ in self.advances))

    def _planned(self, plan: PlannedSteps) -> None:
        self.plans.extend(plan.steps)
        self.after_plans.append(plan.after_plan)

    def make_trainer(
        self, welcome: Welcome, conversation: Conversation, sharing: Sharing | None, rank: Rank, num_dense: int
    ) -> rowcast.trainer.step.engine.TrainerEngine:
        self.stop = AgreedStop(rank, self.job, conversation.send)
        conversation.listen({StopRequest: lambda message: self.stop.ask(message.reason)})
        # without a wait they may be given nonsense, and must check it
        kernels = None if self.settings.without is None else torch_ops
        counters = new_counters(self.groups, rank.number)

        def make_model(records: list[torch.Tensor], clock: PhaseClock) -> tuple[Any, Any]:
            """A StepRunner, or a SharedRunner where ranks share batches."""
            own = self.job, records, num_dense
            runner: Any
            if sharing is None or not rank.is_divided:
                runner = StepRunner(*own, clock, kernels)
            else:
                runner = SharedRunner(*own, sharing.collectives, self.stop, kernels, clock)
                runner.balanced = counters.balanced
                counters.pools(self.groups, rank)
            self.runner = runner
            return runner, runner

        return rowcast.trainer.step.engine.TrainerEngine(
            self.job,
            welcome,
            conversation,
            self.rings.of_trainer,
            self.streams,
            make_model,
            self.results,
            counters,
            rank,
        )

    def make_streams(self, settings: Settings) -> Streams:
        return SeededStreams(settings.seed, settings.without) if settings.seeded_streams else PlainStreams()

    def _greet(self, conversation: Conversation, rank: Rank) -> None:
        """The handshake, which the real trainer completes before it has an engine."""
        conversation.send(hello(self.job, rank, "train", Machine(threads=1), self.streams.device))
        assert self.prefetcher.conversation.advance(), "Hello arrives"
        assert conversation.advance(), "Welcome arrives"

    def run(self) -> "InProcessRun":
        for _ in range(HEAD_START):  # so that plans are in flight together, whatever the seed's weights
            self.chance.choice(list(self.prefetcher.stages.values()))()
        self.advance_until(lambda: self.trainer.loop.finished)
        self.trainer.say_bye()
        self.advance_until(lambda: self.prefetcher.finished)
        check_planner(self.prefetcher.planner)
        return self

    def advance_until(self, condition: Callable[[], bool]) -> None:
        quiet = 0
        while not condition():
            progress = self.advances[bisect(self._until, self.chance.random() * self._until[-1])]()
            quiet = 0 if progress else quiet + 1
            sent, done = self.prefetcher.fetcher.sent_through, self.prefetcher.fetcher.done_through
            if sent is not None:
                self.max_in_flight = max(self.max_in_flight, sent - (-1 if done is None else done))
            if quiet > QUIET_LIMIT:
                raise StuckError(
                    f"prefetcher waits for {self.prefetcher.waiting_for}, trainer for {self.trainer.loop.waiting_for}; "
                    f"planned {self.prefetcher.planning.due.planned_through}, sent {sent}, done {done}"
                )

    @property
    def tables(self) -> tuple[TrackedStore, ...]:
        """Every row as the stores have it, at once."""
        pairs = zip(self.plain_stores, self.groups, strict=True)
        return tuple(TrackedStore(store, group, self.job.job.seed) for store, group in pairs)

    def losses(self) -> list[np.float32]:
        return self.results.losses

    def state(self) -> dict[str, Tensor]:
        """Tables, row state and dense weights after the run, under the names of an export."""
        rows = [
            table_state(group, store, self.job.job.seed) for group, store in zip(self.groups, self.tables, strict=True)
        ]
        merged = {name: tensor for part in rows for name, tensor in part.items()}
        return merged | {name: tensor.detach().clone() for name, tensor in self.runner.model.state_dict().items()}


def new_store(settings: Settings, group: GroupSpec) -> RowStore:
    if settings.tier_slots is None:
        return MemoryStore(group)
    return tiered(group, settings.tier_slots[group.index] + settings.tier_reserve, ColdDict(seed=settings.seed))


def plain_store(store: TrackedStore) -> RowStore:
    """Without what delays it, in a run that went on from another."""
    return store.store.delayed if isinstance(store.store, LateStore) else store.store


def table_state(group: GroupSpec, store: TrackedStore | None, seed: int) -> dict[str, Tensor]:
    """Every row of a group's tables; with `store` None those before training."""
    state = {}
    for table in group.tables:
        keys = make_keys(table.index, np.arange(table.num_embeddings, dtype=np.int64))
        records: npt.NDArray[np.uint8] = first_records(group, seed, keys)
        if store is not None:
            finish(store.read(keys, records))
        for part in group.parts:
            values = part_of(torch.from_numpy(records), part).clone()
            name = (
                f"embedding_bags.{table.name}.weight"
                if part.name == "weight"
                else f"optimizer.{table.name}.{part.name}"
            )
            state[name + columns_of(table)] = values
    return state


def columns_of(table: TableSpec) -> str:
    """What follows a name in the state of a rank, if it has other pieces of a table than the first."""
    return f"@{table.first_column:04d}" if table.first_column else ""


def start_state(job: Job, num_dense: int) -> dict[str, Tensor]:
    """What an export of `--max-steps 0` holds."""
    from rowcast.trainer.models import build_model

    tables = [table_state(group, None, job.job.seed) for group in group_specs(job)]
    merged = {name: tensor for part in tables for name, tensor in part.items()}
    return merged | {name: tensor.detach().clone() for name, tensor in build_model(job, num_dense).state_dict().items()}
