"""Joins torch.distributed's group so that no rank hangs.

The join runs in a thread, because torch waits in it without looking at signals. Meanwhile this thread looks at errors,
stop requests, the clock, and what the first rank that ended has published. A process that gives up must leave
at once: the thread still waits (`is_joining`).
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import PeerLost, RowcastError
from rowcast.runtime.network import interface_toward
from rowcast.trainer.models.torch_collectives import first_sentence
from rowcast.trainer.run.meeting import GivenUp, Room, Word, look_until, told

GLOO_NETWORK, NCCL_NETWORK = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
ADVICE = f"look for one that has ended, or name the network in {GLOO_NETWORK} or {NCCL_NETWORK}"
JOINING = "join ranks"  # the name of the thread
LOOPBACK = "lo"


def choose_network(address: str, port: int, *, is_only_host: bool) -> None:
    """Makes gloo use the network that reaches the meeting point, unless the user names one. By default gloo uses the
    address of the host's name, which many systems set to loopback."""
    name = interface_toward(address, port)
    if name is not None and (is_only_host or name != LOOPBACK):
        os.environ.setdefault(GLOO_NETWORK, name)


def join_group(
    device: torch.device, store: Store, rank: Rank, timeout_s: float, check: Callable[[], object], given_up: GivenUp
) -> bool:
    """Returns once all ranks have joined, with NCCL on a GPU and else with gloo, or False if one was stopped before.

    `store`: only this attempt's. Raises the errors of `check`, and PeerLost, with the sentence of the first rank that
    ended."""
    failed: list[RuntimeError] = []
    is_cuda = device.type == "cuda"
    # while one call waits for a key, all others of its client wait for the call
    own = store.clone()  # type: ignore[attr-defined]

    def join() -> None:
        try:
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=PrefixStore("group", own),
                rank=rank.number,
                world_size=rank.count,
                timeout=timedelta(seconds=2 * timeout_s),  # later than our time-out, which reports more
                # then NCCL connects here and not in its first exchange
                device_id=torch.device("cuda", device.index or 0) if is_cuda else None,
            )
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=join, name=JOINING, daemon=True)
    thread.start()
    room = Room(store, "joining", rank.count)

    def look() -> bytes | None:
        check()
        if given_up():
            room.publish(Word())
        otherwise = None if thread.is_alive() else b""  # asked first: whoever ends the join has published why
        return room.published() or otherwise

    try:
        first = look_until(look, timeout_s)
        if first is None:
            raise PeerLost(
                f"rank {rank.number} of {rank.count} waited {timeout_s:g} s for the other ranks to connect; {ADVICE}"
            )
        if failed and not first:
            raise PeerLost(
                f"rank {rank.number} of {rank.count} found no way to the other ranks ({first_sentence(failed[0])}); "
                f"{ADVICE}"
            )
    except RowcastError as error:
        with suppress(RuntimeError):  # of a store that is gone
            room.publish(Word(lost=str(error)))
        raise
    return not first or told(first) is not None


def is_joining() -> bool:
    return any(thread.name == JOINING for thread in threading.enumerate())
