"""Joins torch.distributed's group so that no rank hangs.

The join runs in a thread, because torch waits in it without looking at signals. Meanwhile this thread looks at errors,
stop requests, the clock, and the key in which a rank that ends leaves its sentence. A process that gives up must leave
at once: the thread still waits (`is_joining`).
"""

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import PeerLost, RowcastError
from rowcast.trainer.models.torch_collectives import first_sentence
from rowcast.trainer.run.meeting import POLL_S, GivenUp, decoded, encoded

GLOO_NETWORK, NCCL_NETWORK = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
ADVICE = f"look for one that has ended, or name the network in {GLOO_NETWORK} or {NCCL_NETWORK}"
JOINING = "join ranks"  # the name of the thread
ENDED = "ended"  # the key
SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
LOOPBACK = "lo"


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Why the first rank that ended did so."""

    sentence: str = ""  # of its error; "" if it was stopped


def choose_network(address: str, port: int, *, is_only_host: bool) -> None:
    """Makes gloo use the network that reaches the meeting point, unless the user names one. By default gloo uses the
    address of the host's name, which many systems set to loopback."""
    name = interface_toward(address, port)
    if name is not None and (is_only_host or name != LOOPBACK):
        os.environ.setdefault(GLOO_NETWORK, name)


def interface_toward(address: str, port: int) -> str | None:
    """Returns the interface of the IPv4 route to an address, None if there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        return next((name for _, name in socket.if_nameindex() if address_of(probe, name) == own), None)


def address_of(probe: socket.socket, interface: str) -> bytes | None:
    try:
        found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:  # it has no IPv4 address
        return None
    return found[20:24]


def join_group(
    backend: str, store: Store, rank: Rank, timeout_s: float, check: Callable[[], object], given_up: GivenUp
) -> bool:
    """Returns once all ranks have joined, or False if one was stopped before.

    `store`: only this attempt's. Raises the errors of `check`, and PeerLost, with the sentence of the first rank that
    ended."""
    failed: list[RuntimeError] = []
    # while one call waits for a key, all others of its client wait for the call
    own = store.clone()  # type: ignore[attr-defined]

    def join() -> None:
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore("group", own),
                rank=rank.number,
                world_size=rank.count,
                timeout=timedelta(seconds=2 * timeout_s),  # later than our time-out, which reports more
            )
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=join, name=JOINING, daemon=True)
    thread.start()
    deadline_s, first = time.monotonic() + timeout_s, None
    try:
        while thread.is_alive() and first is None:
            thread.join(POLL_S)
            check()
            if given_up():
                first = tell(store, Ended())
            elif store.check([ENDED]):
                first = decoded(store.get(ENDED), Ended)
            elif time.monotonic() > deadline_s:
                raise PeerLost(
                    f"rank {rank.number} of {rank.count} waited {timeout_s:g} s for the other ranks to connect; "
                    f"{ADVICE}"
                )
        if failed and first is None:
            raise PeerLost(
                f"rank {rank.number} of {rank.count} found no way to the other ranks ({first_sentence(failed[0])}); "
                f"{ADVICE}"
            )
    except RowcastError as error:
        with suppress(RuntimeError):  # of a store that is gone
            tell(store, Ended(sentence=str(error)))
        raise
    if first is not None and first.sentence:
        raise PeerLost(first.sentence)
    return first is None


def tell(store: Store, own: Ended) -> Ended:
    """Returns what the first rank that ended has told."""
    return decoded(store.compare_set(ENDED, "", encoded(own)), Ended)


def is_joining() -> bool:
    return any(thread.name == JOINING for thread in threading.enumerate())
