"""The ranks of a training script, for `adopt` and `sum_gradients`: their exchanges only copy.

`GroupRanks` has a process group to itself, so its exchanges have an order whatever else the script exchanges. All ranks
make the same calls. A rank that waits for more than a second writes its number of exchanges to the script's store, so a
rank that gives up can name those that are missing. Ranks of one host also tell each other rows of coming batches.
"""

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count, zip_longest
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
import zmq
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from rowcast.protocol.parts import Rank
from rowcast.protocol.transport.endpoint import Context, FileAddress
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError, PeerLost, RowcastError
from rowcast.runtime.machine import boot_id
from rowcast.runtime.stops import leave_at_once
from rowcast.trainer.device.cuda import adopted_streams
from rowcast.trainer.models.exchanges import Exchanges, TorchCollectives
from rowcast.trainer.run.meeting import decoded

WRITES_AFTER_S = 1.0
LATER = timedelta(seconds=60)  # than ours is torch's own time-out, which would end the process


class GroupCollectives(TorchCollectives):
    spin_s = 1e-4  # ranks of a script wait for each other's steps, and processors have their prefetchers' work
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

    def gather(self, given: Tensor, what: str) -> Tensor:
        """Returns what each rank passed, [ranks, ...], all of one shape."""
        self.doing = what
        self.num_exchanges += 1
        taken = given.new_empty(self._rank.count * given.numel())
        if given.numel():
            self._until(self.all_gather(taken, given.reshape(-1)))
        return taken.view(self._rank.count, *given.shape)

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
        private = dist.new_group(members, timeout + LATER, backend, use_local_synchronization=True)
        self.device, self.train_steps, self._num_begun = device, 0, 0
        self._room = 0  # bytes of an exchange beside its facts, on all ranks alike
        self.rank = Rank(number=dist.get_rank(group), count=len(members), parts=len(members))
        self.collectives = GroupCollectives(self.rank, timeout.total_seconds(), private)
        self.exchanges = Exchanges(self.collectives, lambda lap: None)
        self.streams = adopted_streams(device)
        self._added_up = WeakIdKeyDictionary()  # dense weights that must be the same on all ranks
        self._dense_weights = DenseWeights(lambda weight: weight in self._added_up)
        MADE.append(self.collectives)
        self.coming = ComingRows(self.rank, self.gather)

    def begin_step(self, dense: Iterable[Tensor]) -> None:
        """`dense`: weights whose gradients the step sums. Raises ConfigError if ranks differ in them after an earlier
        step."""
        self.train_steps = self._num_begun
        if self.train_steps.bit_count() == 1:  # often at first: a first step may have a learning rate of 0
            self._dense_weights.compare(self.gather, self.train_steps)
        for weight in dense:
            self._added_up[weight] = None
        self._num_begun += 1

    def gather(self, content: bytes) -> list[bytes]:
        """Returns what each rank passed to the same call, by rank."""
        given = torch.tensor([*content], dtype=torch.uint8, device="cpu")
        sizes, what = torch.tensor([len(content)], device=self.device), "what they tell each other"
        _, told = self.exchange(sizes, [given], lambda of_ranks: of_ranks.view(-1, 1), what)
        return [bytes(piece.tolist()) for [piece] in told]

    def exchange(
        self, facts: Tensor, given: Sequence[Tensor], sizes_of: Callable[[Tensor], Tensor], what: str
    ) -> tuple[Tensor, list[Sequence[Tensor]]]:
        """Returns each rank's facts, i64 [ranks, n] on the host, and its m tensors of bytes. `facts`: i64 [n].
        `sizes_of` computes their sizes, i64 [ranks, m], from the facts of all ranks.

        Tensors travel with the facts if there is room on every rank, and otherwise after them."""
        flat, begin = torch.cat([each.to(self.device) for each in given]), facts.nbytes
        first = padded(torch.cat([facts.view(torch.uint8), flat]), begin + self._room)
        taken = self.collectives.gather(first, f"sizes of {what}")
        of_ranks = taken[:, :begin].contiguous().view(torch.int64).cpu()
        sizes = sizes_of(of_ranks).tolist()
        most = -(-max(map(sum, sizes)) // 8) * 8  # bytes may be of i64
        if most > self._room:
            taken, begin = self.collectives.gather(padded(flat, most), what), 0
        self._room = max(most * 9 // 64 * 8, self._room * 15 // 128 * 8)
        return of_ranks, [
            piece[begin : begin + sum(size)].split(size) for piece, size in zip(taken, sizes, strict=True)
        ]


def padded(flat: Tensor, size: int) -> Tensor:
    """Returns its first `size` elements, with zeros after its last."""
    return nn.functional.pad(flat, (0, size - len(flat)))


def rank_and_count() -> tuple[int, int]:
    """Returns this rank and the number of ranks: 0 and 1 before the script has made a process group."""
    is_divided = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if is_divided else (0, 1)


MADE: list[GroupCollectives] = []
_ranks = WeakKeyDictionary[dist.ProcessGroup, GroupRanks]()


def ranks_of(group: dist.ProcessGroup, device: torch.device) -> GroupRanks:
    if group not in _ranks:
        _ranks[group] = GroupRanks(group, device)
    return _ranks[group]


@atexit.register
def leave_broken() -> None:
    """Ends the process at once if it lost a rank; otherwise it would wait until the group's own time-out."""
    if any(collectives.leaves_work for collectives in MADE):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        leave_at_once(PeerLost.exit_code)


MOST_LISTS = 64  # of a rank that wait to be taken, and that are kept
MOST_BYTES = 2**26  # of a list
WAIT_S = 0.05
_numbers = count()


class Coming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of a batch."""

    rank: int
    number: int  # batches that train and that the rank has begun before it
    rows: dict[str, bytes]  # by the table's name, i64


class ComingRows:
    """The rows of coming batches, which ranks of one host send each other before they look them up.

        announced    the rows of a rank's coming batch that trains go to each other rank, with its number: how many such
                     batches the rank has begun before it
        begun        this rank's batches that its planner is to know are announced to the engine, each with the rows of
                     the other ranks' batches of the same step that have come by then
        exchange     with the sizes of gradients, ranks tell how many batches they have begun: which of their numbers
                     are of one step

    Lists are hints: what comes late or is lost is dropped, and a wrong number is a wrong hint. Such rows are fetched
    once their gradients have come, so no bit depends on a list. A thread of zmq carries lists from rank to rank, and
    drops those for which a rank has no room. A rank waits for lists only when a loop over a loader begins, for WAIT_S.
    Call everything from one thread at a time."""

    def __init__(self, rank: Rank, gather: Callable[[bytes], list[bytes]]) -> None:
        """Call it on all ranks. `gather` returns what each rank has passed. Raises ConfigError if no socket can be
        made."""
        self.rank = rank
        self.tables = set[str]()  # names of those that these ranks add up
        self.num_begun = 0  # batches that train
        self._begun = [0] * rank.count  # at the last exchange, by rank
        self._lists = dict[tuple[int, int], Mapping[str, bytes]]()  # by rank and its number
        self._lock = threading.Lock()
        self._context: Context = zmq.Context()
        address = FileAddress(Path(f"/coming-rows/{os.getpid()}/{next(_numbers)}"))
        weakref.finalize(self, close, self._context, address, os.getpid())
        address.open()
        self._inward = self._socket(zmq.PULL)
        address.bind(self._context, self._inward)
        here = f"{boot_id()} {address.endpoint}"
        places = [told.decode().partition(" ") for told in gather(here.encode())]
        self._ways = [self._socket(zmq.PUSH) for _ in places]
        self._near = [
            number for number, (host, _, _) in enumerate(places) if host == boot_id() and number != rank.number
        ]
        for number in self._near:
            self._ways[number].connect(places[number][2])
        JOINED.add(self)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        made.setsockopt(zmq.SNDHWM, MOST_LISTS)
        made.setsockopt(zmq.RCVHWM, MOST_LISTS)
        return made

    def tell(self, ahead: int, rows: Mapping[str, I64]) -> None:
        """Tells of a batch. `ahead`: how many that train begin before it. `rows`: by the table's name."""
        told = {name: ids.tobytes() for name, ids in rows.items() if name in self.tables}
        content = msgspec.msgpack.encode(Coming(rank=self.rank.number, number=self.num_begun + ahead, rows=told))
        with self._lock:
            for way in self._ways:
                with suppress(zmq.Again):
                    way.send(content, zmq.NOBLOCK)

    def told(self, ahead: int) -> Iterator[tuple[str, I64]]:
        """What has come of the step of this rank's batch: rows by the table's name. `ahead`: as in `tell`."""
        self._receive()
        for rank in range(self.rank.count):
            for name, rows in self._lists.get(self._place(rank, ahead), {}).items():
                if name in self.tables:
                    yield name, np.frombuffer(rows, np.int64, len(rows) // 8)

    def await_lists(self, ahead: int) -> None:
        """Waits, at most WAIT_S, until the other ranks of this host have sent their lists: all have just begun to read.
        `ahead`: as in `tell`."""
        end_s = time.monotonic() + WAIT_S
        while any(self._place(rank, ahead) not in self._lists for rank in self._near):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self._inward.poll(1 + int(1000 * left_s)):
                return
            self._receive()

    def _place(self, rank: int, ahead: int) -> tuple[int, int]:
        """Returns the rank, and its number of the batch in the same step as this rank's."""
        return rank, self.num_begun + ahead + self._begun[rank] - self._begun[self.rank.number]

    def compare(self, begun: Sequence[int]) -> None:
        """Called with all ranks at one step, and the number of batches that each has begun."""
        self._begun = [*begun]
        self._lists = {key: rows for key, rows in self._lists.items() if self._is_near(*key)}

    def _receive(self) -> None:
        with self._lock, suppress(zmq.Again):
            while True:
                content = self._inward.recv(zmq.NOBLOCK)
                with suppress(msgspec.MsgspecError):
                    coming = msgspec.msgpack.decode(content, type=Coming)
                    if 0 <= coming.rank < self.rank.count and self._is_near(coming.rank, coming.number):
                        self._lists[coming.rank, coming.number] = coming.rows

    def _is_near(self, rank: int, number: int) -> bool:
        return 0 <= number - self._begun[rank] < MOST_LISTS


def close(context: Context, address: FileAddress, pid: int) -> None:
    if os.getpid() == pid:  # not forked from it
        context.destroy(linger=0)
        with suppress(OSError, RowcastError):
            address.close()


JOINED = weakref.WeakSet[ComingRows]()


REMEDY = "wrap the model in DistributedDataParallel, or call rowcast.sum_gradients(model) after backward()"
APART = (
    "after train step {} rank {} has other dense weights than rank 0 (first: {}): each rank has trained or changed "
    f"them for itself; {REMEDY}"
)
BEGAN_APART = (
    "after train step {} rank {} has other dense weights than rank 0 (first: {}), and had before the optimizer's step: "
    f"make the model from one seed on all ranks (torch.manual_seed), and {REMEDY}"
)


class DenseWeights:
    """What the torch.optim optimizers of this rank have trained since the last comparison.

    Dense weights of ranks stay equal only if all ranks begin with equal weights and sum their gradients."""

    def __init__(self, counts: Callable[[Tensor], bool]) -> None:
        """`counts`: whether a weight that an optimizer steps now must be the same on all ranks."""
        self._counts = counts
        self._optimizers = WeakSet[Optimizer]()
        self._weights = dict[Tensor, tuple[str, str]]()  # where it is, and its checksum before the step
        self.close = register_optimizer_step_pre_hook(self._steps).remove

    def _steps(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[Any, Any]) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        counted = [(number, weight) for number, weight in enumerate(weights) if self._counts(weight)]
        if optimizer in self._optimizers or not counted:
            return
        self._optimizers.add(optimizer)
        for number, weight in counted:
            place = f"weight {number} of {type(optimizer).__name__}, {list(weight.shape)}"
            self._weights.setdefault(weight, (place, checksum(weight)))

    def compare(self, gather: Callable[[bytes], list[bytes]], train_steps: int) -> None:
        """Call it on all ranks after the same train step. `gather`: of `rank_group.RankGroup`.

        Raises ConfigError, the same on each, or PeerLost."""
        weights = msgspec.json.encode([(*known, checksum(weight)) for weight, known in self._weights.items()])
        self._optimizers.clear()
        self._weights.clear()
        if len({*gather(xxhash.xxh3_64_hexdigest(weights).encode())}) == 1:
            return
        first, *others = (decoded(told, list[tuple[str, str, str]]) for told in gather(weights))
        for rank, told in enumerate(others, 1):
            for here, there in zip_longest(first, told, fillvalue=("", "", "")):
                if here != there:
                    sentence = APART if here[1] == there[1] else BEGAN_APART
                    raise ConfigError(sentence.format(train_steps - 1, rank, here[0] or there[0]))


def checksum(weight: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
