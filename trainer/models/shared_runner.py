"""Computes a rank's parts of each step. Ranks exchange rows, gradients and sums; collectives only copy.

    compute    send rows |      | pool, forward, backward, reduce |       | add slice | train rows | dense step
    exchange             | rows |                                 | parts |           | slices     |

Plans decide the order of collectives, the same on all ranks, and their sizes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.messages import StopRequest
from rowcast.protocol.parts import Rank, belonging, part_seed
from rowcast.runtime.arrays import F32
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.device.streams import PhaseClock, Shown, Streams
from rowcast.trainer.kernels import Kernels
from rowcast.trainer.models.evaluate import EvalCounts, EvalMetrics, to_host
from rowcast.trainer.models.exchanges import Collectives, Exchanges, GatherMemory, PartVector, SumMemory, padded
from rowcast.trainer.models.row_exchange import RowExchange, SharedStep
from rowcast.trainer.models.runner import Runner, StepInputs


class AgreedStop:
    """Agrees on the last step of several ranks, which must all have their last barrier after the same step.

    step p       each rank tells the others, with what they exchange anyway, whether it was asked to stop
    complete     all see the same flags of step p; from the first step with one, all name the same last step
    p + (2 depth + 3) * bundle   no prefetcher can have planned it: it makes 2 depth + 2 plans, of up to `bundle` steps,
                 beyond the last PlanDone that it has, and the StopRequest of step p is sent before that of p's plan

    The main thread calls `seen`, any thread `ask`, and the compute stream reads `asked`."""

    def __init__(self, rank: Rank, job: Job, send: Callable[[StopRequest], None]) -> None:
        """`send`: to this rank's prefetcher."""
        self.rank = rank
        self._ahead = (2 * job.lookahead.depth + 3) * job.bundle
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
        if self.rank.count == 1:
            self._send(StopRequest(reason=reason))

    def settle(self) -> None:
        """Called when ranks have agreed on a last step in another way: a later request would plan steps beyond it."""
        self._is_agreed = True

    def seen(self, step: int, asked: Sequence[bool]) -> None:
        """`asked`: for each rank, whether it had a stop request when it sent its values of `step`. The same on all
        ranks."""
        if self.rank.count == 1 or self._is_agreed or True not in asked:
            return
        self._is_agreed = True
        reason = self._reason or f"a request to rank {asked.index(True)}"
        self._send(StopRequest(reason=reason, after_step=step + self._ahead))


class SharedEvaluation(EvalMetrics):
    """Counts the predictions of a rank's parts in consecutive evaluations, and adds up the counts of all ranks.

    Counts are integers, so the order of their sum does not matter. Sums in f64, as of losses, are per part; when the
    evaluation ends, they are gathered and added once, in the tree. So the result is the same for any number of ranks,
    even if it changes in the middle of an evaluation. Collectives are at the same steps on all ranks."""

    def __init__(
        self, rank: Rank, exchanges: Exchanges, device: torch.device, num_labels: int, names: Iterable[str]
    ) -> None:
        super().__init__(device, rank.parts_per_rank, num_labels, names)
        self._rank = rank
        self._exchanges = exchanges
        integers, sums = by_kind(self.counts.named())
        num_counts, num_sums = (sum(counts.numel() for counts in kind.values()) for kind in (integers, sums))
        counts = torch.zeros(padded(num_counts, rank.count), dtype=torch.int64, device=device)
        self._count_memory = SumMemory.of(counts, rank.count)
        self._sum_memory = GatherMemory.of(torch.zeros(num_sums, dtype=torch.float64, device=device), rank.count)
        self.in_progress = False  # on all ranks, even if this one has had no sample
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
            parts = self._rank.own_parts
            counts = {name: counts if self._rank.number == 0 else counts * 0 for name, counts in saved.items()}
            counts |= {name: sums[parts.start : parts.stop] for name, sums in by_kind(saved)[1].items()}
            self.continue_from(counts)
        self.in_progress = bool(saved)
        return self.in_progress

    def _issue_gather(self, streams: Streams, take: Callable[[EvalCounts], None]) -> None:
        integers, of_parts = by_kind(self.counts.named())
        sizes = [tensor.numel() for tensor in integers.values()]
        widths = [math.prod(sums.shape[1:]) for sums in of_parts.values()]
        counts, sums = self._count_memory, self._sum_memory

        def pack() -> None:
            torch.cat([tensor.view(-1) for tensor in integers.values()], out=counts.own[: sum(sizes)])
            pairs = zip(of_parts.values(), widths, strict=True)
            torch.cat(
                [part_sums.view(-1, width) for part_sums, width in pairs if width],
                dim=1,
                out=sums.own.view(-1, sum(widths)),
            )

        def unpack() -> None:
            totals = torch.split(to_host(counts.total[: sum(sizes)]), sizes)
            named = {name: total.view(integers[name].shape) for name, total in zip(integers, totals, strict=True)}
            pieces = torch.split(sums.all.view(-1, sum(widths)), widths, dim=1)
            for (name, part_sums), piece in zip(of_parts.items(), pieces, strict=True):
                named[name] = to_host(piece.reshape(len(piece), *part_sums.shape[1:]))
            take(EvalCounts.of(named))

        streams.compute.run(pack)
        self._exchanges.name("the counts of an evaluation")
        self._exchanges.sum(streams, counts, [self._exchanges.gather(sums)])
        streams.compute.run(unpack)


def by_kind(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the integers among counts, and those in f64, which are [parts, ...]."""
    integers = {name: counts for name, counts in named.items() if not counts.is_floating_point()}
    return integers, {name: counts for name, counts in named.items() if counts.is_floating_point()}


class SharedRunner(Runner):
    """Implements `loop.Steps` for the parts of one of several ranks, or of a trainer of several parts."""

    keeps_random_state = False  # random numbers follow from the step
    _metrics: SharedEvaluation

    def __init__(
        self,
        job: Job,
        records: list[Tensor],
        num_dense: int,
        collectives: Collectives,
        stop: AgreedStop,
        kernels: Kernels | None = None,
        clock: PhaseClock | None = None,
        *,
        trains: bool = True,
        take_scores: Callable[[F32], None] | None = None,
    ) -> None:
        """`records`: f32 [slots, record_floats] of each group. `stop`: of the same rank."""
        device, rank = records[0].device, stop.rank
        super().__init__(job, device, num_dense, clock, kernels, rank.parts, trains=trains, take_scores=take_scores)
        # called for each train step with the rows that a rank owns, maximum over mean
        self.balanced: Callable[[float], None] = lambda imbalance: None
        self._step = 0  # the newest issued
        self._rank, self._stop = rank, stop
        weights = dict(self.model.named_parameters())
        self._vector = PartVector(weights, rank.parts_per_rank, rank.count, self.device, scalars=2 * rank.count)
        self._sum = SumMemory.of(self._vector.own, rank.count)
        self._eval_told = GatherMemory.of(torch.zeros(1, dtype=torch.float32, device=self.device), rank.count)
        self._share = cache(lambda size, whole: torch.full((), size / whole, dtype=torch.float32, device=device))
        self._exchanges = Exchanges(collectives, self._clock.lap)
        num_labels, names = len(job.data.columns.labels), self._side.eval_names
        self._metrics = SharedEvaluation(rank, self._exchanges, self.device, num_labels, names)
        self._rows = RowExchange(group_specs(job), records, self._kernels, rank, belonging(job), self._exchanges)
        # for each step, on its way to the host: f32 [ranks], whether a rank has a stop request; for a train step what
        # PartVector.read takes, with these and the rows that each rank owns
        self._told: dict[int, Tensor] = {}
        self._losses: dict[int, tuple[int, Tensor]] = {}  # the train step, and where its loss is written to

    def issue_train(self, streams: Streams, step: StepInputs, loss: Tensor) -> None:
        shared, train_step = self._rows.begin(step, streams.compute), step.header.train_step
        self._begin(streams, step.step)
        self._rows.issue_lookup(streams, shared)
        streams.compute.run(lambda: self._train_parts(shared))
        self._rows.issue_reduce(streams, shared)
        streams.compute.run(lambda: self._add_up(shared))
        self._exchanges.name(f"the gradients of step {step.step}")
        gradients = self._rows.gradients(shared)
        self._exchanges.sum(streams, self._sum, gradients, lambda: self._rows.train(shared, train_step))
        self._losses[step.step] = train_step, loss
        streams.compute.run(lambda: self._finish(shared))

    def issue_evaluate(self, streams: Streams, step: StepInputs, shown: Shown) -> None:
        shared, told = self._rows.begin(step, streams.compute), self._eval_told
        self._begin(streams, step.step)
        streams.compute.run(lambda: self._tell(told.own))
        self._rows.issue_lookup(streams, shared, [self._exchanges.gather(told)])

        def evaluate() -> None:
            self._told[step.step] = to_host(told.all)
            with shown(), torch.no_grad():
                for part in range(self._rank.parts_per_rank):
                    if shared.part_sizes[part]:
                        outputs = self._outputs(shared, part, training=False)
                        self.count(step.step, outputs, shared.samples(part, "labels"), part)

        self._metrics.in_progress = True
        streams.compute.run(evaluate)

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        self._begin(streams, self._step)
        self._metrics.issue_close(streams, closed)

    def completed(self, step: int) -> None:
        super().completed(step)
        self._rows.completed(step)
        told, ranks, is_train = self._told.pop(step), self._rank.count, step in self._losses
        if is_train:
            train_step, out = self._losses.pop(step)
            loss, numbers = self._vector.read(told, train_step)
            out.fill_(loss)
            self.balanced(imbalance(numbers[ranks:]))
        else:
            numbers = told.tolist()
        self._stop.seen(step, [asked != 0 for asked in numbers[:ranks]])

    def issue_state(self, streams: Streams) -> None:
        self._begin(streams, self._step)
        self._metrics.issue_state(streams)

    def _begin(self, streams: Streams, step: int) -> None:
        self._step = step
        streams.compute.run(lambda: self._clock.begin(step))

    # on the compute stream

    def _train_parts(self, shared: SharedStep) -> None:
        """Writes the results of this rank's parts to the vector, and gradients of pooled rows to `shared`."""
        for leaf in chain(*shared.pooled):
            leaf.requires_grad_()
        for part in range(self._rank.parts_per_rank):
            self._vector.take(part, self._train_part(shared, part))
            self._clock.lap("backward")
        shared.gradients = [list(map(gradient_of, pieces)) for pieces in shared.pooled]

    def _add_up(self, shared: SharedStep) -> None:
        self._vector.add_up()
        asked, owned = self._vector.scalars.view(2, self._rank.count)[:, self._rank.number :]
        self._tell(asked)
        owned[:1].fill_(sum(share.header.num_own for share in shared.shares))

    def _tell(self, out: Tensor) -> None:
        """Writes to `out`, f32 [1 or more], whether this rank has a stop request."""
        out[:1].fill_(self._stop.asked)

    def _train_part(self, shared: SharedStep, part: int) -> Tensor | None:
        """Returns the weighted loss; None without samples."""
        size = shared.part_sizes[part]
        if size == 0:
            return None
        before = versions(self.model)
        outputs = self._outputs(shared, part, training=True)
        loss = self._side.loss(outputs, shared.samples(part, "labels"))
        self._clock.lap("forward")
        # a gradient given to backward() has the same bits, but torch imports sympy to compare its shape
        share_of_loss = loss * self._share(size, shared.batch_size)
        torch.autograd.backward(share_of_loss)
        refuse_changed_buffers(before, self.model)
        return share_of_loss.detach()

    def _finish(self, shared: SharedStep) -> None:
        self._told[shared.step.step] = to_host(self._vector.told(self._sum.total))
        self._vector.give(self._sum.total)
        self._side.step(shared.step.header.train_step)
        self._clock.lap("update")

    def _outputs(self, shared: SharedStep, part: int, *, training: bool) -> Any:
        if self._rank.parts > 1:  # with one part, random numbers continue from step to step
            number = self._rank.own_parts[part]
            torch.manual_seed(part_seed(self._job.job.seed, shared.step.header.train_step, number))
        rows, dense = self._rows.embeddings(shared, part), shared.samples(part, "dense")
        return self._side.forward(dense, rows, shared.inputs(part), training=training)


def gradient_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def imbalance(owned: Sequence[float]) -> float:
    """Returns the maximum over the mean; 1 if there are no rows."""
    return max(owned) * len(owned) / total if (total := sum(owned)) else 1.0


def versions(model: nn.Module) -> dict[str, int]:
    return {name: buffer._version for name, buffer in model.named_buffers()}


def refuse_changed_buffers(before: dict[str, int], model: nn.Module) -> None:
    """Raises if a forward pass changed a buffer, such as a running mean, which would depend on the rank's parts."""
    changed = [name for name, version in versions(model).items() if before.get(name) != version]
    if changed:
        raise ConfigError(
            f"the model changes its buffer {changed[0]} while it trains, which has no one result where a batch is "
            "trained in parts; use a layer without running statistics, such as LayerNorm"
        )
