"""Joins the ranks of a run."""

from typing import Protocol

from rowcast.protocol.parts import Rank
from rowcast.trainer.models.collectives import Collectives, LocalCollectives


class Group(Protocol):
    """The ranks of a run, as one of them sees them."""

    @property
    def rank(self) -> Rank | None:
        """None if a trainer is alone and computes whole batches."""

    @property
    def collectives(self) -> Collectives: ...

    def gather(self, content: bytes) -> list[bytes]:
        """What each rank gave to the same call, by rank. All ranks make the same calls in the same order."""

    def close(self) -> None: ...


class Alone:
    """A trainer that computes all parts of every batch. Implements `Group`."""

    def __init__(self, rank: Rank | None) -> None:
        self.rank = rank
        self.collectives = LocalCollectives()

    def gather(self, content: bytes) -> list[bytes]:
        return [content]

    def close(self) -> None:
        pass
