"""Looks up rows of several ranks for a training script, and trains them in its backward pass. Each rank has one part.

begin       rows of all ranks -> pooled rows of this rank's part
call        these pooled rows, any number of times
backward    gradients of all ranks -> their mean -> rows of this shard, once
"""

from collections.abc import Sequence

from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.trainer.device.streams import Streams
from rowcast.trainer.kernels import Group, GroupLookup, Kernels, Rule
from rowcast.trainer.models.embedding import Embedded, Embeddings, PendingUpdate, update_in_backward
from rowcast.trainer.models.exchanges import Exchanges
from rowcast.trainer.models.row_exchange import RowExchange, SharedStep
from rowcast.trainer.models.runner import StepInputs


class SharedEmbeddings(Embeddings):
    """Implements `kernels.AllGroups` for itself: by exchanges.

    A row's gradient is the mean over ranks, as DistributedDataParallel's of a dense weight."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        records: Sequence[Tensor],
        kernels: Kernels,
        rows: RowExchange,
        exchanges: Exchanges,
        streams: Streams,
        ranks: int,
    ) -> None:
        """`records`: as in `Embeddings`, and those of `rows`."""
        super().__init__(groups, records, kernels, exchanges.lap)
        self._kernels = self
        self._rows, self._exchanges, self._streams, self._weight = rows, exchanges, streams, 1 / ranks
        self._shared: SharedStep | None = None

    def begin(self, step: StepInputs) -> None:
        """All ranks call it, for every step."""
        self._shared = self._rows.begin(step, self._streams.compute)
        self._rows.issue_lookup(self._streams, self._shared)

    @property
    def _step(self) -> SharedStep:
        assert self._shared is not None, "begin comes first"
        return self._shared

    def lookup_all(self, groups: Sequence[Group]) -> list[Tensor]:
        """Raises RuntimeError once the rows are trained: those received are of before."""
        if not self._step.pooled:
            raise RuntimeError(
                f"the rows of step {self._step.step.step} are trained, and on several ranks they are exchanged once; "
                "look up a batch before its backward pass"
            )
        return [pooled.clone() for pooled in self._step.pooled[0]]  # the script may change what it gets

    def update_all(self, groups: Sequence[Group], pooled_grads: Sequence[Tensor], rule: Rule) -> None:
        shared = self._step
        shared.gradients = [[own * self._weight for own in pooled_grads]]
        self._rows.issue_reduce(self._streams, shared)
        self._exchanges.name(f"the gradients of step {shared.step.step}")
        self._exchanges.across(self._streams, "parts_packed", self._rows.gradients(shared), "parts_received")
        self._streams.compute.run(lambda: self._rows.train(shared, rule.step - 1))

    def by_feature(
        self, pooled: Sequence[Tensor], lookups: Sequence[GroupLookup], pending: PendingUpdate | None
    ) -> list[Embedded]:
        bags = self._rows.bags(self._step, 0)
        return self._rows.arranged(self._step, 0, update_in_backward(self.trigger, pooled, bags, pending))

    def _of_step(self, lookups: Sequence[GroupLookup]) -> list[Group]:
        """None: `RowExchange` has them."""
        return []

    def close(self) -> None:
        super().close()
        self._shared = None
