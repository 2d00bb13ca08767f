"""Computes a rank's share of each step. Ranks exchange rows, gradients and sums; collectives only copy.

    compute    send rows |      | pool, forward, backward, reduce |       | add slice | train rows | dense step
    exchange             | rows |                                 | parts |           | slices     |

Each rank issues the same collectives in the same order, a function of the plans; their sizes are in the plans too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.protocol.parts import Rank, part_seed, part_sizes
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.execute.metrics import Lap, Shown
from rowcast.trainer.execute.phases import HostClock, PhaseClock
from rowcast.trainer.execute.streams import Closure, RankWait, Streams, Work, copy
from rowcast.trainer.kernels import GroupLookup, Kernels
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.kernels.record_views import rule_at
from rowcast.trainer.models import aligned
from rowcast.trainer.models.collectives import Collectives
from rowcast.trainer.models.evaluate import NUM_BINS, EvalCounts, EvalMetrics
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.models.model_state import Tensors, model_state, optimizer_state, restore_model, restore_optimizer
from rowcast.trainer.models.ordered import PartVector, padded, sum_in_order
from rowcast.trainer.models.runner import StepInputs, step_lookups
from rowcast.trainer.models.sequences import Embedded
from rowcast.trainer.models.shared_rows import Reused, SharedRows, group_share

Start = Callable[[], Work]


class SharedStep:
    """A step of the batch that ranks share, as this rank sees it."""

    def __init__(self, step: StepInputs, layer: Sequence[SharedRows], rank: Rank) -> None:
        assert step.header.share is not None, f"step {step.step} was planned for a trainer that is alone"
        self.step = step
        self.batch_size = step.header.share.batch_size  # of all ranks
        self.part_sizes = tuple(part_sizes(self.batch_size, rank))
        self.shares = [
            group_share(step.arrays, index, header, self.part_sizes)
            for index, header in enumerate(step.header.share.groups)
        ]
        self.memory = [rows.memory(share) for rows, share in zip(layer, self.shares, strict=True)]

    def samples(self, part: int, name: str) -> Tensor:
        """Dense features or labels of an own part."""
        first = sum(self.part_sizes[:part])
        return aligned(self.step.arrays[name][first : first + self.part_sizes[part]])


@dataclass(frozen=True, kw_only=True, slots=True)
class SumMemory:
    """A vector that ranks add up: each adds a slice of all ranks' vectors."""

    own: Tensor  # [n]
    slices: Tensor  # [n] the own slice of each rank's vector
    slice: Tensor  # [n / ranks] their sum
    total: Tensor  # [n]


class SharedRunner:
    """Implements `loop.Steps` and `loop.ModelState` for one of several ranks, or for a trainer of several parts."""

    def __init__(
        self,
        job: Job,
        groups: tuple[GroupSpec, ...],
        records: list[Tensor],
        num_dense: int,
        rank: Rank,
        collectives: Collectives,
        kernels: Kernels | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """`records`: f32 [slots, record_floats] of each group. `kernels`: None chooses those for the device.

        `clock` times the stream that steps run on.
        """
        self.device = records[0].device
        self._clock: PhaseClock = clock or HostClock()
        self._step = 0  # the newest that was issued
        self._job, self._rank, self._collectives = job, rank, collectives
        self._side = JobModel(job, num_dense, self.device, parts=rank.parts)
        self.model = self._side.model
        kernels = kernels or choose_kernels(self.device, job)
        self._layer = [SharedRows(group, own, kernels) for group, own in zip(groups, records, strict=True)]
        positions = [position for group in groups for position in group.feature_positions]
        self._places = sorted(range(len(positions)), key=positions.__getitem__)  # as in `Embeddings`
        self._vector = PartVector(list(self.model.parameters()), rank.count)
        self._metrics = [EvalMetrics(self.device) for _ in rank.own_parts]
        self._sums: dict[torch.dtype, list[Reused]] = {}

    def issue_train(self, streams: Streams, step: StepInputs, loss: Tensor) -> None:
        shared, train_step = SharedStep(step, self._layer, self._rank), step.header.train_step
        self._begin(streams, step.step)
        self._issue_rows(streams, shared)
        vector = self._sum_memory(self._vector.length, torch.float32)
        streams.compute.run(lambda: copy(self._train_parts(shared), vector.own))
        gradients = [
            self._all_to_all(own.returned, own.back, share.header.send_counts, share.header.receive_counts)
            for own, share in zip(shared.memory, shared.shares, strict=True)
        ]
        self._collectives.doing = f"the gradients of step {step.step}"
        self._issue_sum(streams, vector, gradients, lambda: self._train_rows(shared, train_step))
        streams.compute.run(lambda: self._finish(vector.total, train_step, loss))

    def issue_evaluate(self, streams: Streams, step: StepInputs, shown: Shown) -> None:
        shared = SharedStep(step, self._layer, self._rank)
        self._begin(streams, step.step)
        self._issue_rows(streams, shared)

        def evaluate() -> None:
            with shown(), torch.no_grad():
                self._evaluate_parts(shared)

        streams.compute.run(evaluate)

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        self._begin(streams, self._step)
        num_counts = 2 * NUM_BINS + 2
        counts = self._sum_memory(padded(num_counts, self._rank.count), torch.int64)
        losses = self._sum_memory(self._rank.count, torch.float64)

        def pack() -> None:
            of_parts = [metrics.close() for metrics in self._metrics]
            whole = [
                torch.cat([own.histogram.view(-1), own.num_correct.view(1), own.num_samples.view(1)])
                for own in of_parts
            ]
            counts.own.zero_()[:num_counts] = sum_in_order(whole)
            losses.own.zero_()[0] = sum_in_order([own.loss_sum for own in of_parts])

        def unpack() -> None:
            histogram, (correct, samples) = (
                counts.total[: 2 * NUM_BINS].clone(),
                counts.total[2 * NUM_BINS :][:2].clone(),
            )
            closed.append(EvalCounts(histogram.view(2, NUM_BINS), correct, losses.total[0].clone(), samples))

        streams.compute.run(pack)
        self._collectives.doing = "the counts of an evaluation"
        self._issue_sum(streams, counts)
        self._issue_sum(streams, losses)
        streams.compute.run(unpack)

    def state(self) -> Tensors:
        """The state of model and optimizer, the same on every rank. Random numbers follow from the step."""
        return {**model_state(self.model), **optimizer_state(self.model, self._side.optimizer)}

    def restore(self, tensors: Tensors) -> bool:
        optimizer = self._side.optimizer
        restore_model(self.model, tensors)
        restore_optimizer(self.model, optimizer, tensors)
        return False

    # exchanges

    def _issue_rows(self, streams: Streams, shared: SharedStep) -> None:
        self._collectives.doing = f"the rows of step {shared.step.step}"
        for rows, share, memory in zip(self._layer, shared.shares, shared.memory, strict=True):
            streams.compute.gather(rows.rows.weight, share.send_slots, memory.sent)
        exchanges = [
            self._all_to_all(own.received, own.sent, share.header.receive_counts, share.header.send_counts)
            for own, share in zip(shared.memory, shared.shares, strict=True)
        ]
        self._across(streams, "rows_packed", exchanges, "rows_received")

    def _issue_sum(
        self, streams: Streams, memory: SumMemory, with_it: Sequence[Start] = (), meanwhile: Closure | None = None
    ) -> None:
        """Adds up `memory.own` of all ranks; `meanwhile` runs while the slices are under way."""
        slices = self._all_to_all(memory.slices, memory.own)
        self._across(streams, "parts_packed", [*with_it, slices], "parts_received")
        streams.compute.run(lambda: copy(sum_in_order(memory.slices.view(self._rank.count, -1).unbind()), memory.slice))
        gather = partial(self._collectives.all_gather_into_tensor, memory.total, memory.slice, async_op=True)
        self._across(streams, "slice_summed", [gather], "sum_gathered", meanwhile)

    def _across(
        self,
        streams: Streams,
        packed: RankWait,
        exchanges: Sequence[Start],
        received: RankWait,
        meanwhile: Closure | None = None,
    ) -> None:
        """What compute has issued goes to other ranks; what it issues from here on waits for what they sent."""
        self._lap(streams, "exchange")
        streams.exchange.wait(streams.compute.record(), packed)
        for start in exchanges:
            streams.exchange.communicate(start)
        if meanwhile is not None:
            self._lap(streams, "ranks")  # where collectives run on the compute stream, they are complete here
            streams.compute.run(meanwhile)
        streams.compute.wait(streams.exchange.record(), received)
        self._lap(streams, "ranks")

    def _begin(self, streams: Streams, step: int) -> None:
        self._step = step
        streams.compute.run(lambda: self._clock.begin(step))

    def _lap(self, streams: Streams, lap: Lap) -> None:
        streams.compute.run(lambda: self._clock.lap(lap))

    def _all_to_all(
        self, output: Tensor, given: Tensor, receive: Sequence[int] | None = None, send: Sequence[int] | None = None
    ) -> Start:
        splits = [None if sizes is None else list(sizes) for sizes in (receive, send)]
        return partial(self._collectives.all_to_all_single, output, given, *splits, async_op=True)

    def _sum_memory(self, length: int, dtype: torch.dtype) -> SumMemory:
        kept = self._sums.setdefault(dtype, [Reused(dtype, self.device) for _ in range(4)])
        sizes = (length, length, length // self._rank.count, length)
        own, slices, of_rank, total = (one.rows(size, 1).view(-1) for one, size in zip(kept, sizes, strict=True))
        return SumMemory(own=own, slices=slices, slice=of_rank, total=total)

    # on the compute stream

    def _train_parts(self, shared: SharedStep) -> Tensor:
        """What all own parts give besides row gradients, which go to `back`."""
        lookups, pooled = self._pool(shared)
        self._clock.lap("lookup")
        leaves = [[own.requires_grad_() for own in of_parts] for of_parts in pooled]
        vectors = []
        for part, number in enumerate(self._rank.own_parts):
            inputs = self._inputs(shared, part, leaves, lookups)
            vectors.append(self._train_part(shared, part, number, inputs))
        for rows, own, lookup, share, memory in zip(
            self._layer, leaves, lookups, shared.shares, shared.memory, strict=True
        ):
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in own]
            rows.reduce(gradients, lookup, share, memory.back)
        self._clock.lap("backward")
        return sum_in_order(vectors)

    def _train_part(self, shared: SharedStep, part: int, number: int, embeddings: list[Embedded]) -> Tensor:
        size = shared.part_sizes[part]
        if size == 0:
            return self._vector.new(self.device)
        if self._rank.parts > 1:  # with one part, random numbers go on from step to step
            torch.manual_seed(part_seed(self._job.job.seed, shared.step.header.train_step, number))
        before = versions(self.model)
        outputs = self._side.forward(shared.samples(part, "dense"), embeddings, training=True)
        loss = self._side.loss(outputs, shared.samples(part, "labels"))
        self._clock.lap("forward")
        share = torch.tensor(size / shared.batch_size, device=self.device)
        torch.autograd.backward(loss, share)
        refuse_changed_buffers(before, self.model)
        vector = self._vector.take(loss.detach() * share)
        self._clock.lap("backward")
        return vector

    def _train_rows(self, shared: SharedStep, train_step: int) -> None:
        rule = rule_at(self._job.optimizer.sparse, train_step)
        for rows, share, memory in zip(self._layer, shared.shares, shared.memory, strict=True):
            rows.train(memory.returned, share, rule)
        self._clock.lap("update")

    def _finish(self, total: Tensor, train_step: int, loss: Tensor) -> None:
        loss.copy_(self._vector.give(total), non_blocking=True)
        self._side.step(train_step)
        self._clock.lap("update")

    def _evaluate_parts(self, shared: SharedStep) -> None:
        lookups, pooled = self._pool(shared)
        for part, metrics in enumerate(self._metrics):
            if shared.part_sizes[part]:
                inputs, labels = self._inputs(shared, part, pooled, lookups), shared.samples(part, "labels")
                outputs = self._side.forward(shared.samples(part, "dense"), inputs, training=False)
                metrics.update(
                    outputs, labels, None if self._side.own_loss is None else self._side.loss(outputs, labels)
                )

    def _pool(self, shared: SharedStep) -> tuple[list[GroupLookup], list[list[Tensor]]]:
        """The look-ups of each group, and its pooled rows f32 [G, D] of each own part."""
        lookups = step_lookups(shared.step)
        each = zip(self._layer, shared.memory, lookups, shared.shares, strict=True)
        return lookups, [rows.pool(memory.received, lookup, share) for rows, memory, lookup, share in each]

    def _inputs(
        self, shared: SharedStep, part: int, pooled: list[list[Tensor]], lookups: list[GroupLookup]
    ) -> list[Embedded]:
        """The model's input for each feature of an own part, in the job's order."""
        by_group = [
            feature
            for rows, of_parts, lookup, share in zip(self._layer, pooled, lookups, shared.shares, strict=True)
            for feature in rows.by_feature(part, of_parts[part], lookup, share)
        ]
        return [by_group[place] for place in self._places]


def versions(model: nn.Module) -> dict[str, int]:
    return {name: buffer._version for name, buffer in model.named_buffers()}


def refuse_changed_buffers(before: dict[str, int], model: nn.Module) -> None:
    """A buffer that a forward pass changes, such as a running mean, would depend on the parts that a rank has."""
    changed = [name for name, version in versions(model).items() if before.get(name) != version]
    if changed:
        raise ConfigError(
            f"the model changes its buffer {changed[0]} while it trains, which has no one result where a batch is "
            "trained in parts; use a layer without running statistics, such as LayerNorm"
        )
