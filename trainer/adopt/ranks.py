"""The ranks of a training script, for `adopt` and `sum_gradients`: their exchanges only copy.

`GroupRanks` has a process group to itself, so its exchanges have an order whatever else the script exchanges. All ranks
make the same calls. A rank that waits for more than a second writes its number of exchanges to the script's store, so a
rank that gives up can name those that are missing.
"""

import atexit
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import PeerLost
from rowcast.runtime.stops import leave_at_once
from rowcast.trainer.adopt.coming_rows import ComingRows
from rowcast.trainer.adopt.dense_weights import DenseWeights
from rowcast.trainer.device.cuda import adopted_streams
from rowcast.trainer.models.exchanges import Exchanges, TorchCollectives

WRITES_AFTER_S = 1.0
LATER = timedelta(seconds=60)  # than ours is torch's own time-out, which would end the process


class GroupCollectives(TorchCollectives):
    advice = "look for one with a batch fewer, without backward() or sum_gradients(), or that was stopped or is slow"
    _is_broken = False

    def __init__(self, rank: Rank, timeout_s: float, group: dist.ProcessGroup) -> None:
        super().__init__(rank, timeout_s)
        self.group, self._store = group, group.get_group_store()
        self._num_written = self.num_exchanges = 0

    @property
    def leaves_work(self) -> bool:
        """Whether a collective has not ended, or has failed: torch may wait for its other ranks when Python ends."""
        if not self._is_broken:
            self._forget_complete()
        return self._is_broken or bool(self._begun)

    def _broken(self, error: RuntimeError) -> PeerLost:
        self._is_broken = True
        return super()._broken(error)

    def gather(self, own: Tensor, what: str) -> Tensor:
        """Returns what each rank gives, [ranks, ...], of one shape."""
        self.doing = what
        self.num_exchanges += 1
        taken = own.new_empty(self._rank.count * own.numel())
        if own.numel():
            self._until(self.all_gather(taken, own.reshape(-1)))
        return taken.view(self._rank.count, *own.shape)

    def _refuse_late(self) -> float:
        waited_s = super()._refuse_late()
        if waited_s > WRITES_AFTER_S and self._num_written != self.num_exchanges:
            self._num_written = self.num_exchanges
            self._store.set(f"{self._rank.number} waits", str(self.num_exchanges))
        return waited_s

    def _awaited(self) -> str:
        def waits(rank: int) -> bool:
            key = f"{rank} waits"
            return self._store.check([key]) and int(self._store.get(key)) == self.num_exchanges

        missing = [str(rank) for rank in range(self._rank.count) if not waits(rank)]
        return f"rank {', '.join(missing)}" if missing else super()._awaited()


class GroupRanks:
    """The ranks of a process group of the script. Call everything on all of them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        members, backend = dist.get_process_group_ranks(group), dist.get_backend_config(group)
        timeout: timedelta = group._get_backend(device).options._timeout
        own = dist.new_group(members, timeout + LATER, backend, use_local_synchronization=True)
        self.device, self.train_steps, self._num_begun = device, 0, 0
        self.rank = Rank(number=dist.get_rank(group), count=len(members), parts=len(members))
        self.collectives = GroupCollectives(self.rank, timeout.total_seconds(), own)
        self.exchanges = Exchanges(self.collectives, lambda lap: None)
        self.streams = adopted_streams(device)
        self._added_up = WeakIdKeyDictionary()  # dense weights that are to be the same on all ranks
        self._dense_weights = DenseWeights(lambda weight: weight in self._added_up, lambda: None)
        MADE.append(self.collectives)
        self.coming = ComingRows(self.rank, self.gather)

    def begin_step(self, dense: Iterable[Tensor]) -> None:
        """`dense`: weights that the step adds up. Raises ConfigError if they have come apart in an earlier one."""
        self.train_steps = self._num_begun
        if self.train_steps.bit_count() == 1:  # often at first: a first step may have a learning rate of 0
            self._dense_weights.compare(self.gather, self.train_steps)
        for weight in dense:
            self._added_up[weight] = None
        self._num_begun += 1

    def gather(self, content: bytes) -> list[bytes]:
        """Returns what each rank passed to the same call, by rank."""
        what = "what they tell each other"
        sizes = self.collectives.gather(torch.tensor([[len(content)]], device=self.device), f"sizes of {what}")
        own = torch.tensor([*content], dtype=torch.uint8, device="cpu")
        return [bytes(piece.tolist()) for [piece] in self.pieces([own], sizes.view(-1, 1).tolist(), what)]

    def pieces(self, own: Sequence[Tensor], sizes: Sequence[list[int]], what: str) -> list[Sequence[Tensor]]:
        """Returns the tensors of each rank, [n] of one dtype. `sizes`: n of those of all ranks."""
        flat = torch.cat([each.to(self.device) for each in own])
        padded = nn.functional.pad(flat, (0, -(-max(map(sum, sizes)) // 8) * 8 - len(flat)))  # bytes may be of i64
        taken = self.collectives.gather(padded, what)
        return [piece[: sum(size)].split(size) for piece, size in zip(taken, sizes, strict=True)]


MADE: list[GroupCollectives] = []
_ranks = WeakKeyDictionary[dist.ProcessGroup, GroupRanks]()


def ranks_of(group: dist.ProcessGroup, device: torch.device) -> GroupRanks:
    if group not in _ranks:
        _ranks[group] = GroupRanks(group, device)
    return _ranks[group]


@atexit.register
def leave_broken() -> None:
    """Ends the process at once if it lost a rank: else it would wait for that one until the group's own time-out."""
    if any(own.leaves_work for own in MADE):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        leave_at_once(PeerLost.exit_code)
