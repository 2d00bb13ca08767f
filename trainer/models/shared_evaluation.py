"""Counts the predictions of a rank's parts in an evaluation, and adds up the counts of all ranks.

Counts are integers, so the order of their sum is irrelevant. Losses are summed per part; when the evaluation ends,
these sums are gathered and added once, in the tree. So the result is the same for any number of ranks, even if it
changes in the middle of an evaluation.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rowcast.protocol.parts import Rank
from rowcast.trainer.device.streams import Streams
from rowcast.trainer.models.evaluate import EvalCounts, EvalMetrics, to_host
from rowcast.trainer.models.exchanges import Exchanges
from rowcast.trainer.models.ordered import padded

LOSSES = {"loss_sum", "task_loss_sum"}  # f64 [parts, ...]; all other counts are integers


class SharedEvaluation:
    """Counts consecutive evaluations. Its collectives are at the same steps on all ranks."""

    def __init__(self, rank: Rank, exchanges: Exchanges, device: torch.device, num_labels: int) -> None:
        self._rank = rank
        self._exchanges = exchanges
        self._metrics = EvalMetrics(device, parts=rank.parts_per_rank, num_labels=num_labels)
        self._losses_per_part = 1 + num_labels
        self._in_progress = False  # on all ranks, also if this one has had no sample
        self._of_all: EvalCounts | None = None  # of an evaluation in progress, for a checkpoint

    def begin(self) -> None:
        """Called when an evaluation step is issued."""
        self._in_progress = True

    def update(self, part: int, outputs: Any, labels: Tensor, own_loss: Tensor | None) -> None:
        """Counts the samples of one of this rank's parts, like `EvalMetrics.update`."""
        self._metrics.update(outputs, labels, own_loss, part)

    def update_ranks(self, ranks: Tensor) -> None:
        """Counts the ranks of a part's positives, like `EvalMetrics.update_ranks`."""
        self._metrics.update_ranks(ranks)

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        """Appends the counts of all ranks, on the host, and starts the next evaluation."""
        self._in_progress = False
        self._issue_gather(streams, closed.append)
        streams.compute.run(self._metrics.clear)

    def issue_state(self, streams: Streams) -> None:
        """Gathers the counts for `state`, if an evaluation is in progress."""
        self._of_all = None
        if self._in_progress:
            self._issue_gather(streams, lambda counts: setattr(self, "_of_all", counts))

    def state(self) -> dict[str, Tensor]:
        """The counts of an evaluation in progress, the same on all ranks; empty otherwise."""
        if not self._in_progress:
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
            self._metrics.continue_from(counts)
        self._in_progress = bool(saved)
        return self._in_progress

    def _issue_gather(self, streams: Streams, take: Callable[[EvalCounts], None]) -> None:
        own = self._metrics.counts.named()
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
