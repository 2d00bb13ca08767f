"""Runs the steps of a training script on several ranks: each computes one part of every batch.

begin       the rows that this rank looks up              <- all ranks
backward    gradients of rows                             -> the ranks that own them
finish      stop requests, and what was recorded          <-> all ranks
barrier     counts of an evaluation, random states        <-> all ranks, for one checkpoint

Collectives run on the script's own process group, from its thread or autograd's: so they have one order on all ranks,
together with those of its dense side. Ranks meet, and call `loader.stop`, over torchrun's store.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from rowcast.job.units import parse_seconds
from rowcast.protocol.parts import Rank, belonging
from rowcast.runtime.errors import ConfigError, PeerLost
from rowcast.trainer.adopt.connect.current_step import StreamOrder
from rowcast.trainer.adopt.connect.script_run import SessionParts
from rowcast.trainer.adopt.connect.script_state import ScriptState
from rowcast.trainer.adopt.connect.session import ScriptSession
from rowcast.trainer.adopt.dense_weights import DenseWeights
from rowcast.trainer.adopt.ranks import MADE, OPEN, ScriptCollectives
from rowcast.trainer.device.cuda import adopted_streams
from rowcast.trainer.device.streams import Streams
from rowcast.trainer.models.embedding import Embeddings
from rowcast.trainer.models.evaluate import EvalCounts, Evaluation, to_host
from rowcast.trainer.models.exchanges import Exchanges, GatherMemory
from rowcast.trainer.models.model_state import Tensors, random_state
from rowcast.trainer.models.row_exchange import RowExchange
from rowcast.trainer.models.shared_embeddings import SharedEmbeddings
from rowcast.trainer.models.shared_runner import AgreedStop, SharedEvaluation
from rowcast.trainer.step.cache import Step
from rowcast.trainer.step.memory import Slots

LEFT_OUT = (
    "rank {} has not trained train step {}: its loop has left out the look-up or the backward pass, and the other "
    "ranks wait for its gradients; on several ranks each trains every batch"
)
TOO_SMALL = (
    "train step {} has {} samples for {} ranks, and the mean loss of no samples is not a number; let the data set "
    "leave out a batch that small"
)
DIFFER = "of step {} rank {} has recorded other things than rank 0: call loader.record() on all ranks alike"
STOPS_TOGETHER = "loader.stop() ends a run on several ranks if all call it in the same step"
# what a rank tells of a step
TRAINED, LOGITS = 1, 2


class RankState(ScriptState):
    """What all ranks save alike: the script's objects, the counts of all in an evaluation, and random states of all,
    each as u8 [ranks, ...] under its name."""

    _metrics: SharedEvaluation

    def __init__(
        self,
        parts: SessionParts,
        rank: Rank,
        exchanges: Exchanges,
        attend: Callable[[], object],
        compare: Callable[[], object],
    ) -> None:
        """`attend`: called while it waits; its errors end the wait. `compare`: compares what ranks save."""
        super().__init__(parts.dense, parts.device, parts.job)
        self._attend, self._compare = attend, compare
        self._rank, self._exchanges, self._device = rank, exchanges, parts.device
        self._metrics = SharedEvaluation(rank, exchanges, parts.device, len(parts.job.data.columns.labels), ())
        self._random: Tensors = {}

    def begin_evaluation(self) -> None:
        """Call it on all ranks, also if the script records nothing."""
        self.evaluating = self._metrics.in_progress = True

    def close_evaluation(self, train_steps: int) -> Evaluation | None:
        self.evaluating = False
        closed = list[EvalCounts]()
        self._metrics.issue_close(adopted_streams(self._device), closed)
        self.await_device()
        return closed[0].result(train_steps, self._job.data.columns.labels, self._job.eval.ranks)

    def await_device(self) -> None:
        """Waits for the work issued, also for its exchanges between ranks."""
        streams = adopted_streams(self._device)
        done = streams.compute.record()
        while not streams.done(done, "state_gathered"):
            self._attend()
            time.sleep(0)

    def issue_state(self, streams: Streams) -> None:
        self._metrics.issue_state(streams)
        for name, own in random_state(self._device).items():
            memory = GatherMemory.of(own.to(self._device), self._rank.count)
            self._exchanges.name("random states")
            self._exchanges.across(streams, "parts_packed", [self._exchanges.gather(memory)], "parts_received")
            self._random[name] = memory.all.view(self._rank.count, -1)
        self._compare()

    def state(self) -> Tensors:
        found = super().state()
        return {**found, **self._random} if found else found

    def restore(self, tensors: Tensors) -> bool:
        own = {name: tensors[name][self._rank.number].clone() for name in tensors if name.startswith("random.")}
        return super().restore({**tensors, **own})


class RankSession(ScriptSession):
    _script_state: RankState

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self.rank = rank = self.run.party.rank
        timeout_s = parse_seconds(parts.job.ranks.timeout)
        self._collectives = ScriptCollectives(rank, timeout_s, self.run.crew.check)
        MADE.append(self._collectives)
        self.exchanges = Exchanges(self._collectives, lambda lap: None)
        self._script_state = RankState(parts, rank, self.exchanges, self._attend, self._compare)
        self._dense_weights = DenseWeights(lambda weight: self._trains(), self._script_state.await_device)
        self.run.stack.callback(self._dense_weights.close)
        self._own_told = torch.zeros(2, dtype=torch.float32, device=parts.device)  # asked to stop, what
        self._what = 0  # what the script has done with the current step
        self._num_trained = 0  # train steps of this process
        self._told: dict[int, Tensor] = {}  # of each step that is not complete: f32 [ranks, 2], on its way to the host

    def _look_ups(self, slots: Slots, stream_order: StreamOrder) -> Embeddings:
        run, rank = self.run, self.rank
        self._stop = AgreedStop(rank, self._job, run.engine.conversation.send)
        run.on_stop = self._stop.ask
        if run.asked is not None:
            self._stop.ask(run.asked)
        run.engine.loop.completed = self._completed
        self.exchanges.lap, self.streams = stream_order.lap, slots.streams
        groups, of = run.connection.groups, belonging(run.connection.job)  # as their rows are placed
        self._rows = RowExchange(groups, slots.records, run.kernels, rank, of, self.exchanges)
        self._embeddings = SharedEmbeddings(
            groups, slots.records, run.kernels, self._rows, self.exchanges, slots.streams, rank.count
        )
        OPEN.append(self)
        run.stack.callback(OPEN.remove, self)
        return self._embeddings

    def begin(self) -> None:
        step = self._next
        assert step is not None, "peek comes before begin"
        assert step.header.share is not None, "each rank has a part of the batch"
        train_step, size = step.header.train_step, step.header.share.batch_size
        self._what = TRAINED * (step.header.kind == "train")  # `finish` requires it
        with self.run.in_engine():
            if step.header.kind == "train" and size < self.rank.count:
                raise ConfigError(TOO_SMALL.format(train_step, size, self.rank.count))
        super().begin()
        with self.run.in_engine():
            if step.header.kind == "eval" and self._parts.evaluate:
                self._script_state.begin_evaluation()
            self._embeddings.begin(step)

    def record(self, logits: Tensor) -> None:
        super().record(logits)
        self._what = LOGITS

    def finish(self) -> None:
        step = self.step
        if step is not None:
            current = self.current
            is_done = current.is_trained and not current.awaits_backward
            if step.header.kind == "train" and not is_done:
                raise RuntimeError(LEFT_OUT.format(self.rank.number, step.header.train_step))
            with self.run.in_engine():
                self._tell(step)
        super().finish()
        if step is not None and step.header.kind == "train":
            self._num_trained += 1
            if self._num_trained.bit_count() == 1:  # often at first: a first step may have a learning rate of 0
                with self.run.in_engine():
                    self._compare()

    def _trains(self) -> bool:
        return self in OPEN[-1:] and self.step is not None and self.step.header.kind == "train"

    def _compare(self) -> None:
        if not self.run.ended:
            self._dense_weights.compare(self.run.group.gather, self.train_steps)

    def _tell(self, step: Step) -> None:
        """Tells the other ranks of the step."""
        own = self._own_told
        own[:1].fill_(self._stop.asked)
        own[1:].fill_(self._what)
        memory = GatherMemory.of(own, self.rank.count)
        self.exchanges.name(f"what they tell of step {step.step}")
        self.exchanges.across(self.streams, "parts_packed", [self.exchanges.gather(memory)], "parts_received")
        self._told[step.step] = to_host(memory.all).view(self.rank.count, -1)

    def _completed(self, step: int) -> None:
        self._rows.completed(step)
        asked, what = self._told.pop(step).T.tolist()
        for rank, own in enumerate(what):
            if own != what[0]:
                raise ConfigError(DIFFER.format(step, rank))
        self._stop.seen(step, [own != 0 for own in asked])

    def _await_step(self, unless: Callable[[], bool] = lambda: False) -> Step | None:
        def attend() -> bool:
            self._attend()
            reason = self.run.connection.asked_to_stop
            if reason is not None:
                self._stop.ask(reason)
            return unless()

        return super()._await_step(attend)

    def _attend(self) -> None:
        self._collectives.watch()
        self.run.crew.check()

    def stop(self, reason: str) -> None:
        """Call it on all ranks in the same step. Raises ConfigError, or PeerLost if some do not within
        ranks.timeout."""
        if self.run.ended:
            return
        step = self.step
        own = f"after {self.train_steps} train steps" if step is None else f"in step {step.step}"
        with self.run.in_engine():
            try:
                places = [place.decode() for place in self.run.group.gather(own.encode())]
            except PeerLost as error:
                raise PeerLost(f"{error}; {STOPS_TOGETHER}") from None
            for rank, place in enumerate(places):
                if place != places[0]:
                    raise ConfigError(f"rank 0 stops {places[0]} and rank {rank} {place}; {STOPS_TOGETHER}")
        self.run.stops_at_once = True
        self._stop.settle()
        super().stop(reason)

    def _stop_here(self) -> None:
        # once each rank has planned the step, all have had as many checkpoints before it
        self._next = self._next or self._await_step()
        super()._stop_here()

    def _close_evaluation(self) -> None:
        with self.run.in_engine():
            super()._close_evaluation()

    def keep_final_state(self) -> None:
        if self._parts.dense is not None:
            self._script_state.issue_state(adopted_streams(self._parts.device))
        super().keep_final_state()
