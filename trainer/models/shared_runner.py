"""Computes a rank's parts of each step. Ranks exchange rows, gradients and sums; collectives only copy.

    compute    send rows |      | pool, forward, backward, reduce |       | add slice | train rows | dense step
    exchange             | rows |                                 | parts |           | slices     |

Plans decide the order of collectives, the same on all ranks, and their sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, unpooled_places
from rowcast.protocol.messages import BATCHES_BITS, StopRequest
from rowcast.protocol.parts import Belonging, Rank, belonging, part_seed, part_sizes
from rowcast.runtime.errors import ConfigError, Mismatch
from rowcast.trainer.device.streams import PhaseClock, Shown, Streams, copy
from rowcast.trainer.kernels import GroupLookup, Kernels
from rowcast.trainer.models.embedding import aligned, places_of
from rowcast.trainer.models.evaluate import EvalCounts, EvalMetrics, to_host
from rowcast.trainer.models.exchanges import Collectives, Exchanges, Start
from rowcast.trainer.models.job_model import named_inputs
from rowcast.trainer.models.ordered import PartVector, padded, sum_in_order
from rowcast.trainer.models.runner import Runner, StepInputs, step_lookups
from rowcast.trainer.models.sequences import Embedded
from rowcast.trainer.models.shared_rows import SharedRows, group_share

HALF = 1 << BATCHES_BITS // 2  # whole numbers below it are exact in f32


class AgreedStop:
    """Agrees on the last step of several ranks, which must all have their last barrier after the same step.

    step p       each rank tells the others, with what they exchange anyway, whether it was asked to stop
    complete     all see the same flags of step p; from the first step with one, all name the same last step
    p + 2 depth + 3   no prefetcher can have planned it: plans go to 2 depth + 2 steps beyond the last StepDone that it
                 has, and the StopRequest of step p is sent before the StepDone of step p

    The main thread calls `seen`, any thread `ask`, and the compute stream reads `asked`."""

    def __init__(self, rank: Rank, depth: int, send: Callable[[StopRequest], None]) -> None:
        """`depth`: of the look-ahead. `send`: to this rank's prefetcher."""
        self._is_only_rank = rank.count == 1
        self._ahead = 2 * depth + 3
        self._send = send
        self._reason: str | None = None
        self._is_agreed = False

    @property
    def asked(self) -> bool:
        return self._reason is not None

    def ask(self, reason: str) -> None:
        """Stops a single rank at once, several ranks soon. Only the first call counts."""
        if self._reason is not None:
            return
        self._reason = reason
        if self._is_only_rank:
            self._send(StopRequest(reason=reason))

    def seen(self, step: int, asked: Sequence[bool]) -> None:
        """`asked`: for each rank, whether it had a stop request when it sent its values of `step`. The same on all
        ranks."""
        if self._is_only_rank or self._is_agreed or True not in asked:
            return
        self._is_agreed = True
        reason = self._reason or f"rank {asked.index(True)} was asked to stop"
        self._send(StopRequest(reason=reason, after_step=step + self._ahead))


LOSSES = {"loss_sum", "task_loss_sum"}  # f64 [parts, ...]; all other counts are integers


class SharedEvaluation(EvalMetrics):
    """Counts the predictions of a rank's parts in consecutive evaluations, and adds up the counts of all ranks.

    Counts are integers, so the order of their sum is irrelevant. Losses are summed per part; when the evaluation ends,
    these sums are gathered and added once, in the tree. So the result is the same for any number of ranks, even if it
    changes in the middle of an evaluation. Collectives are at the same steps on all ranks."""

    def __init__(self, rank: Rank, exchanges: Exchanges, device: torch.device, num_labels: int) -> None:
        super().__init__(device, rank.parts_per_rank, num_labels)
        self._rank = rank
        self._exchanges = exchanges
        self._losses_per_part = 1 + num_labels
        self.in_progress = False  # on all ranks, also if this one has had no sample
        self._of_all: EvalCounts | None = None  # of an evaluation in progress, for a checkpoint

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        """Appends the counts of all ranks, on the host, and starts the next evaluation."""
        self.in_progress = False
        self._issue_gather(streams, closed.append)
        streams.compute.run(self.clear)

    def issue_state(self, streams: Streams) -> None:
        """Gathers the counts for `state`, if an evaluation is in progress."""
        self._of_all = None
        if self.in_progress:
            self._issue_gather(streams, lambda counts: setattr(self, "_of_all", counts))

    def state(self) -> dict[str, Tensor]:
        """The counts of an evaluation in progress, the same on all ranks; empty otherwise."""
        if not self.in_progress:
            return {}
        assert self._of_all is not None, "the counts of all ranks were gathered"
        return self._of_all.state()

    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Continues from a `state`, of any number of ranks. Returns whether an evaluation is in progress."""
        saved = EvalCounts.saved(tensors)
        if saved:
            own = self._rank.own_parts
            counts = {name: counts if self._rank.number == 0 else counts * 0 for name, counts in saved.items()}
            for name in LOSSES & saved.keys():
                counts[name] = saved[name][own.start : own.stop]
            self.continue_from(counts)
        self.in_progress = bool(saved)
        return self.in_progress

    def _issue_gather(self, streams: Streams, take: Callable[[EvalCounts], None]) -> None:
        own = self.counts.named()
        integers = {name: tensor for name, tensor in own.items() if name not in LOSSES}
        sizes = [tensor.numel() for tensor in integers.values()]
        counts = self._exchanges.sum_memory("counts", padded(sum(sizes), self._rank.count), torch.int64)
        losses = self._exchanges.gather_memory(
            "loss sums", self._rank.parts_per_rank * self._losses_per_part, torch.float64
        )

        def pack() -> None:
            counts.own.zero_()
            counts.own[: sum(sizes)] = torch.cat([tensor.view(-1) for tensor in integers.values()])
            losses.own.copy_(torch.cat([own["loss_sum"][:, None], own["task_loss_sum"]], dim=1).view(-1))

        def unpack() -> None:
            totals = torch.split(to_host(counts.total[: sum(sizes)]), sizes)
            found = {name: total.view(own[name].shape) for name, total in zip(integers, totals, strict=True)}
            of_parts = losses.all.view(-1, self._losses_per_part)
            loss_sum, task_loss_sum = of_parts[:, 0].contiguous(), of_parts[:, 1:].contiguous()
            take(EvalCounts(**found, loss_sum=to_host(loss_sum), task_loss_sum=to_host(task_loss_sum)))

        streams.compute.run(pack)
        self._exchanges.name("the counts of an evaluation")
        self._exchanges.sum(streams, counts, [self._exchanges.gather(losses)])
        streams.compute.run(unpack)


class SharedStep:
    """This rank's view of a step with a divided batch."""

    def __init__(
        self,
        step: StepInputs,
        layer: Sequence[SharedRows],
        rank: Rank,
        of: Belonging,
        places: Mapping[str, tuple[int, int]],
    ) -> None:
        """`places`: as `unpooled_places`."""
        assert step.header.share is not None, f"step {step.step} was planned as a whole batch"
        self.step = step
        self.batch_size = step.header.share.batch_size  # of all ranks
        self.batches = step.header.share.batches
        self.part_sizes = tuple(part_sizes(self.batch_size, rank))
        self.shares = [
            group_share(step.arrays, index, header, self.part_sizes)
            for index, header in enumerate(step.header.share.groups)
        ]
        self.memory = [rows.memory(share) for rows, share in zip(layer, self.shares, strict=True)]
        self._of, self._places = of, places
        self._named = named_inputs(step.arrays)

    def samples(self, part: int, name: str) -> Tensor:
        """Returns dense features or labels of one of this rank's parts."""
        return aligned(self.step.arrays[name][slice_of(self.part_sizes, part)])

    def inputs(self, part: int) -> dict[str, Tensor]:
        """Returns the batch's other arrays, of one of this rank's parts."""
        cut = self._of.cut(slice_of(self.part_sizes, part), partial(self._lookups, part))
        return {name: aligned(array) for name, array in cut.of(self._named).items()}

    def _lookups(self, part: int, feature: str) -> slice:
        group, number = self._places[feature]
        return slice_of([own[number] for own in self.shares[group].header.sequence_lookups], part)


def slice_of(sizes: Sequence[int], part: int) -> slice:
    first = sum(sizes[:part])
    return slice(first, first + sizes[part])


class SharedRunner(Runner):
    """Implements `loop.Steps` for the parts of one of several ranks, or of a trainer of several parts."""

    keeps_random_state = False  # random numbers follow from the step
    _metrics: SharedEvaluation

    def __init__(
        self,
        job: Job,
        groups: tuple[GroupSpec, ...],
        records: list[Tensor],
        num_dense: int,
        rank: Rank,
        collectives: Collectives,
        stop: AgreedStop,
        kernels: Kernels | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """`records`: f32 [slots, record_floats] of each group."""
        super().__init__(job, records[0].device, num_dense, clock, kernels, rank.parts)
        # called for each train step with the rows that a rank owns, maximum over mean
        self.balanced: Callable[[float], None] = lambda imbalance: None
        self._step = 0  # the newest issued
        self._rank, self._stop = rank, stop
        self._layer = [SharedRows(group, own, self._kernels) for group, own in zip(groups, records, strict=True)]
        self._places = places_of(groups)
        self._vector = PartVector(list(self.model.parameters()), rank.count, scalars=4 * rank.count)
        self._exchanges = Exchanges(rank, collectives, self.device, self._clock.lap)
        self._metrics = SharedEvaluation(rank, self._exchanges, self.device, len(job.data.columns.labels))
        self._belonging = belonging(job), unpooled_places(groups)
        # for each step, f32 [3 or 4, ranks] on the host: nonzero if a rank has a stop request; both halves of its
        # batches' checksum; for a train step also the rows that it owns
        self._told: dict[int, Tensor] = {}

    def issue_train(self, streams: Streams, step: StepInputs, loss: Tensor) -> None:
        shared, train_step = SharedStep(step, self._layer, self._rank, *self._belonging), step.header.train_step
        self._begin(streams, step.step)
        self._issue_rows(streams, shared)
        vector = self._exchanges.sum_memory("vector", self._vector.length, torch.float32)
        streams.compute.run(lambda: copy(self._train_parts(shared), vector.own))
        gradients = [
            self._exchanges.all_to_all(own.returned, own.back, share.header.send_counts, share.header.receive_counts)
            for own, share in zip(shared.memory, shared.shares, strict=True)
        ]
        self._exchanges.name(f"the gradients of step {step.step}")
        self._exchanges.sum(streams, vector, gradients, lambda: self._train_rows(shared, train_step))
        streams.compute.run(lambda: self._finish(shared, vector.total, loss))

    def issue_evaluate(self, streams: Streams, step: StepInputs, shown: Shown) -> None:
        shared = SharedStep(step, self._layer, self._rank, *self._belonging)
        told = self._exchanges.gather_memory("told", 3, torch.float32)
        self._begin(streams, step.step)
        streams.compute.run(lambda: self._tell(shared, told.own))
        self._issue_rows(streams, shared, [self._exchanges.gather(told)])

        def evaluate() -> None:
            self._told[step.step] = to_host(told.all.view(self._rank.count, 3).T)
            with shown(), torch.no_grad():
                self._evaluate_parts(shared)

        self._metrics.in_progress = True
        streams.compute.run(evaluate)

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        self._begin(streams, self._step)
        self._metrics.issue_close(streams, closed)

    def completed(self, step: int) -> None:
        asked, low, high, *owned = self._told.pop(step)
        check_same_batches(step, low, high)
        self._stop.seen(step, asked.bool().tolist())
        if owned:
            self.balanced(imbalance(owned[0]))

    def issue_state(self, streams: Streams) -> None:
        self._begin(streams, self._step)
        self._metrics.issue_state(streams)

    def _issue_rows(self, streams: Streams, shared: SharedStep, with_them: Sequence[Start] = ()) -> None:
        for rows, share, memory in zip(self._layer, shared.shares, shared.memory, strict=True):
            streams.compute.gather(rows.rows.weight, share.send_slots, memory.sent)
        exchanges = [
            self._exchanges.all_to_all(own.received, own.sent, share.header.receive_counts, share.header.send_counts)
            for own, share in zip(shared.memory, shared.shares, strict=True)
        ]
        self._exchanges.name(f"the rows of step {shared.step.step}")
        self._exchanges.across(streams, "rows_packed", [*exchanges, *with_them], "rows_received")

    def _begin(self, streams: Streams, step: int) -> None:
        self._step = step
        streams.compute.run(lambda: self._clock.begin(step))

    # on the compute stream

    def _train_parts(self, shared: SharedStep) -> Tensor:
        """Returns the results of this rank's parts except row gradients, which it writes to `back`."""
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
        vector = sum_in_order(vectors)
        told = self._vector.scalars(vector).view(4, self._rank.count)[:, self._rank.number]
        self._tell(shared, told)
        told[3] = float(sum(share.header.num_own for share in shared.shares))
        return vector

    def _tell(self, shared: SharedStep, out: Tensor) -> None:
        """Writes to `out`, f32 [3], whether this rank has a stop request, and both halves of its batches' checksum. One
        number at a time: a copy of three would wait for the device."""
        for place, value in enumerate((self._stop.asked, *halves(shared.batches))):
            out[place] = float(value)

    def _train_part(self, shared: SharedStep, part: int, number: int, embeddings: list[Embedded]) -> Tensor:
        size = shared.part_sizes[part]
        if size == 0:
            return self._vector.new(self.device)
        if self._rank.parts > 1:  # with one part, random numbers continue from step to step
            torch.manual_seed(part_seed(self._job.job.seed, shared.step.header.train_step, number))
        before = versions(self.model)
        outputs = self._side.forward(shared.samples(part, "dense"), embeddings, shared.inputs(part), training=True)
        loss = self._side.loss(outputs, shared.samples(part, "labels"))
        self._clock.lap("forward")
        # a gradient given to backward() has the same bits, but torch imports sympy to compare its shape
        own = loss * torch.tensor(size / shared.batch_size, device=self.device)
        torch.autograd.backward(own)
        refuse_changed_buffers(before, self.model)
        vector = self._vector.take(own.detach())
        self._clock.lap("backward")
        return vector

    def _train_rows(self, shared: SharedStep, train_step: int) -> None:
        for rows, share, memory in zip(self._layer, shared.shares, shared.memory, strict=True):
            rows.train(memory.returned, share, train_step)
        self._clock.lap("update")

    def _finish(self, shared: SharedStep, total: Tensor, loss: Tensor) -> None:
        loss.copy_(self._vector.give(total), non_blocking=True)
        self._told[shared.step.step] = to_host(self._vector.scalars(total).view(4, self._rank.count))
        self._side.step(shared.step.header.train_step)
        self._clock.lap("update")

    def _evaluate_parts(self, shared: SharedStep) -> None:
        lookups, pooled = self._pool(shared)
        for part in range(self._rank.parts_per_rank):
            if shared.part_sizes[part]:
                rows, dense = self._inputs(shared, part, pooled, lookups), shared.samples(part, "dense")
                outputs = self._side.forward(dense, rows, shared.inputs(part), training=False)
                self.count(shared.step.step, outputs, shared.samples(part, "labels"), part)

    def _pool(self, shared: SharedStep) -> tuple[list[GroupLookup], list[list[Tensor]]]:
        """Returns the look-ups of each group, and its pooled rows f32 [G, D] of each part of this rank."""
        lookups = step_lookups(shared.step)
        each = zip(self._layer, shared.memory, lookups, shared.shares, strict=True)
        return lookups, [rows.pool(memory.received, lookup, share) for rows, memory, lookup, share in each]

    def _inputs(
        self, shared: SharedStep, part: int, pooled: list[list[Tensor]], lookups: list[GroupLookup]
    ) -> list[Embedded]:
        """Returns the model's input for each feature of one of this rank's parts, in the job's order."""
        by_group = [
            feature
            for rows, of_parts, lookup, share in zip(self._layer, pooled, lookups, shared.shares, strict=True)
            for feature in rows.features_of(part, of_parts[part], lookup, share)
        ]
        return [by_group[place] for place in self._places]


class SharedEvaluationRunner(SharedRunner):
    """The runner of `trainer eval`."""

    trains = False


def imbalance(owned: Tensor) -> float:
    """Returns the maximum over the mean; 1 if there are no rows."""
    return float(owned.max() / owned.mean()) if owned.any() else 1.0


def halves(checksum: int) -> tuple[int, int]:
    return checksum % HALF, checksum // HALF


def check_same_batches(step: int, low: Tensor, high: Tensor) -> None:
    """Raises Mismatch, the same on all ranks, if their prefetchers have read different batches. f32 [ranks] each."""
    differing = ((low != low[0]) | (high != high[0])).nonzero()
    if len(differing):
        raise Mismatch(
            f"rank {int(differing[0])} reads other batches than rank 0 soon after step {step}: look for a fault of "
            "the data in their logs, give every host the same files, and a data set of your own the same order on "
            "every rank"
        )


def versions(model: nn.Module) -> dict[str, int]:
    return {name: buffer._version for name, buffer in model.named_buffers()}


def refuse_changed_buffers(before: dict[str, int], model: nn.Module) -> None:
    """Raises if a forward pass changed a buffer, such as a running mean: it would depend on the rank's parts."""
    changed = [name for name, version in versions(model).items() if before.get(name) != version]
    if changed:
        raise ConfigError(
            f"the model changes its buffer {changed[0]} while it trains, which has no one result where a batch is "
            "trained in parts; use a layer without running statistics, such as LayerNorm"
        )
