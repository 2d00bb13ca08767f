"""Lets the collections of a script share one look-up: the first that is called looks up for all, in any order.

bags(sparse)         looks up the batch's rows        open
sequences(sparse)    takes its features of it         take
loss.backward()      updates the rows of both, once
"""

from collections.abc import Sequence

from rowcast.trainer.models.sequences import Embedded


class SharedLookup:
    def __init__(self, collections: Sequence[str]) -> None:
        """`collections`: a name of each."""
        self._names = list(collections)
        self.waiting: list[str] = []  # the collections that have not taken their features
        self._found: Sequence[Embedded] = ()
        self._mode = False

    def open(self, collection: str, mode: bool, found: Sequence[Embedded]) -> None:
        """Keeps what `collection` has looked up for the others. `mode`: whether torch is in inference mode."""
        self.waiting = [name for name in self._names if name != collection]
        self._found, self._mode = found if self.waiting else (), mode

    def take(self, collection: str, mode: bool) -> Sequence[Embedded] | None:
        """None: the collection has to look up."""
        if collection not in self.waiting or mode != self._mode:
            return None
        found = self._found
        self.waiting.remove(collection)
        if not self.waiting:
            self.close()
        return found

    def close(self) -> None:
        self.waiting, self._found = [], ()
