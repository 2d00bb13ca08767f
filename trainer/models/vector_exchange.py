"""Exchanges pooled vectors of tables that one rank owns whole: their owner looks them up for the parts of all.

    compute    send rows |      | pool |         | parts; pack |           | reduce |           | train |
    exchange             | rows |      | vectors |             | gradients |        | gradients |
                                                                 of vectors          of rows

`protocol/pooled.py` says which rank pools what, and how many vectors travel.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import torch

from rowcast.trainer.device.streams import Stream, Streams, Work
from rowcast.trainer.models.exchanges import Exchanges
from rowcast.trainer.models.shared_rows import SharedRows

if TYPE_CHECKING:  # which uses this
    from rowcast.trainer.models.row_exchange import SharedStep


class NoVectors:
    """What `RowExchange` calls if every table is divided by rows: nothing travels."""

    def __init__(self, layer: Sequence[SharedRows], exchanges: Exchanges) -> None:
        self.pieces: list[tuple[int, int]] = []  # whose vectors arrive, in the order of `bags`

    def begin(self, shared: "SharedStep", compute: Stream) -> None:
        """Sets `shared.vectors`: memory, as `SharedStep.memory`."""

    def issue_forward(self, streams: Streams, shared: "SharedStep") -> None:
        """Sends the vectors of other ranks' parts; those that arrive follow in `shared.pooled`."""

    def bags(self, size: int) -> list[list[int]]:
        """The bags of each feature in each piece that follows so. `size`: samples of the part."""
        return []

    def issue_backward(self, streams: Streams, shared: "SharedStep") -> None:
        """Sends the gradients of these pieces back; those that arrive are further gradients of the group."""


class VectorExchange(NoVectors):
    """A part has one piece for each group and other owner, in this order."""

    def __init__(self, layer: Sequence[SharedRows], exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self._layer = layer
        self._pooling = [rows for rows in layer if rows.has_owner]
        self._taking = [rows for rows in self._pooling if rows.arriving]
        self.pieces = [rows.pieces[feature] for rows in self._taking for feature in chain(*rows.arriving)]

    def begin(self, shared: "SharedStep", compute: Stream) -> None:
        shared.vectors = [rows.vectors(shared.batch_size, compute) for rows in self._layer]

    def issue_forward(self, streams: Streams, shared: "SharedStep") -> None:
        self._exchanges.name(f"the pooled vectors of step {shared.step.step}")
        exchanges = [partial(self._send, shared, rows.index) for rows in self._pooling]
        self._exchanges.across(streams, "vectors_packed", exchanges, "vectors_received")
        streams.compute.run(lambda: self._take(shared))

    def _send(self, shared: "SharedStep", group: int) -> Work:
        own = shared.vectors[group]
        return self._exchanges.all_to_all(own.received, shared.for_others[group], own.to_receive, own.to_send)()

    def _take(self, shared: "SharedStep") -> None:
        for rows in self._taking:
            sizes = [len(features) * size for features in rows.arriving for size in shared.part_sizes]
            pieces = shared.vectors[rows.index].received.float().split_with_sizes(sizes)
            for part, pooled in enumerate(shared.pooled):
                pooled += pieces[part :: len(shared.pooled)]

    def bags(self, size: int) -> list[list[int]]:
        return [[size] * len(features) for rows in self._taking for features in rows.arriving]

    def issue_backward(self, streams: Streams, shared: "SharedStep") -> None:
        streams.compute.run(lambda: self._pack(shared))
        self._exchanges.name(f"the gradients of pooled vectors of step {shared.step.step}")
        own = [shared.vectors[rows.index] for rows in self._pooling]
        exchanges = [self._exchanges.all_to_all(one.returned, one.back, one.to_send, one.to_receive) for one in own]
        self._exchanges.across(streams, "vector_gradients_packed", exchanges, "vector_gradients_received")

    def _pack(self, shared: "SharedStep") -> None:
        num_groups = len(self._layer)
        taken = chain(*zip(*(gradients[num_groups:] for gradients in shared.gradients), strict=True))
        for rows in self._taking:
            pieces = list(islice(taken, len(rows.arriving) * len(shared.part_sizes)))
            torch.cat(pieces, out=shared.vectors[rows.index].back)
        # what comes back is reduced after the gradients of own parts, as if it were those of one more
        returned = [vectors.returned for vectors in shared.vectors]
        shared.gradients = [*(gradients[:num_groups] for gradients in shared.gradients), returned]
