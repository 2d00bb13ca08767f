"""torchrun for trainers: `python -m rowcast.deploy.torchrun --nproc-per-node 2 -m rowcast.trainer run --config JOB`

Takes torchrun's options and starts, restarts and ends trainers as torchrun does. Seven things differ:

| | torchrun | here |
|---|---|---|
| the store where trainers meet | on every interface | on `--master-addr` alone, 127.0.0.1 if not given |
| rendezvous of one host, or `c10d` | unpickles what peers have stored | unpickles nothing |
| a trainer ends and all start again | the store of before, with addresses of ended trainers | a new store |
| a host is lost (`static`) | trainers of other hosts restart at once, in vain | the other hosts wait for it |
| SIGTERM, SIGINT, SIGHUP | code 1, trainers have at most 30 s | passed on once; ends when trainers have stopped |
| a trainer is refused: code 2 or 5 | all start again, to be refused again | ends; a script is started again |
| trainers fail for good | code 1 | the code of the trainer that failed first |

With `--nnodes` above 1, each host gives its `--node-rank`; all give the same `--master-addr`, an address of host 0, and
the same `--master-port`.
"""

from rowcast.runtime.stops import PASSED_ON, hold

if __name__ == "__main__":
    hold()  # before the other imports, which take seconds

import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import ClassVar, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api

from rowcast.runtime.errors import ConfigError, Mismatch
from rowcast.runtime.process import UNTRAINED, Signals
from rowcast.runtime.stops import AT_SUDDEN_EXIT
from rowcast.runtime.telemetry.logs import get_logger, open_missing_descriptors, say, setup_logging

MEETING_S = 600  # until all hosts have arrived
LEAVE_S = 10  # for trainers to end after a failure; they have nothing to save
POLL_S = 0.05
BACKEND = "one-address"
REFUSED = (ConfigError.exit_code, Mismatch.exit_code)
MODULE, COMMAND = "rowcast.trainer", "trainer"  # either starts a trainer
LOOPBACK = "lo"
T = TypeVar("T")


class Agent(LocalElasticAgent):
    """Does not restart trainers after an error that would recur."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if any(failure.exitcode in REFUSED for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result


class OneAddress(StaticTCPRendezvous):
    """Host 0 serves the store, on one address; port 0 means any free port. Hosts keep their numbers.

    Trainers get a new store at each start: in an old one, a process group finds addresses of trainers that have ended.
    """

    signals: ClassVar[Signals] = Signals()
    has_started: ClassVar[bool] = False  # trainers, at least once
    _met: tuple[str, ...] = ()  # host 0 only: hosts at the last meeting
    _meetings = 0

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Called before trainers start or restart. Returns when all hosts have arrived. Raises SignalException after a
        stop signal."""
        refuse_after_stop()
        if self._store is None:
            self._store = self._serve(self.master_port) if self.rank == 0 else self._connect(self.master_port)
            self.master_port = self._store.port
        elif self.rank == 0:
            say("torchrun", "a trainer has ended; all of them are started again")
        hosts = PrefixStore(self.run_id, self._store)
        meeting = PrefixStore(f"meeting-{self._meet(hosts)}", hosts)
        if self.rank == 0:
            self._of_trainers = self._serve(0)
            meeting.set("port", str(self._of_trainers.port))
        port = int(self._until(lambda: value_of(meeting, "port"), "store of the trainers"))
        OneAddress.has_started = True
        return RendezvousInfo(meeting, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, port))

    def _serve(self, port: int) -> TCPStore:
        address = self._until(lambda: address_of(self.master_addr), f"address of {self.master_addr}")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family)
        return self._connect(listener.getsockname()[1], listener.detach())

    def _connect(self, port: int, listener: int | None = None) -> TCPStore:
        return TCPStore(
            self.master_addr,
            port,
            is_master=listener is not None,
            timeout=self.timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener,
        )

    def _meet(self, store: Store) -> int:
        """Returns the number of a meeting of all hosts. A host has a new name at each call, so an ended host is
        mistaken for its successor for at most one meeting."""
        name = uuid.uuid4().hex
        store.set(f"host-{self.rank}", name)
        if self.rank == 0:
            hosts = range(self.world_size)
            self._met = tuple(self._until(partial(self._newcomer, store, host), f"host {host}") for host in hosts)
            self._meetings += 1
            store.set("meeting", " ".join([str(self._meetings), *self._met]))
            return self._meetings
        return self._until(lambda: invited(store, self.rank, name), "host 0")

    def _newcomer(self, store: Store, host: int) -> str | None:
        name = value_of(store, f"host-{host}")
        return None if name is None or name in self._met else name

    def _until(self, found: Callable[[], T | None], what: str) -> T:
        deadline_s = time.monotonic() + self.timeout.total_seconds()
        while (value := found()) is None:
            refuse_after_stop()
            if time.monotonic() > deadline_s:
                raise RendezvousTimeoutError(f"no {what} within {self.timeout.total_seconds():g} s")
            time.sleep(POLL_S)
        return value


def refuse_after_stop() -> None:
    if OneAddress.signals.stop_reason is not None:
        raise SignalException("stopped while trainers were about to start", signal.SIGTERM)


def value_of(store: Store, key: str) -> str | None:
    return bytes(store.get(key)).decode() if store.check([key]) else None


def invited(store: Store, host: int, name: str) -> int | None:
    """Returns the number of the last meeting, if it lists this host under this name."""
    number, *names = (value_of(store, "meeting") or "0").split()
    return int(number) if names and names[host] == name else None


def address_of(host: str) -> str | None:
    """Resolves a name; None if it has no address (yet): a pod's may appear after the pod."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        return None


def one_address(parameters: RendezvousParameters) -> OneAddress:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
    rank = parameters.get_as_int("rank")
    assert rank is not None
    return OneAddress(host, port, rank, parameters.max_nodes, parameters.run_id, MEETING_S)


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def send(number: int, trainers: set[int]) -> None:
    for trainer in trainers:
        with suppress(ProcessLookupError):
            os.kill(trainer, number)


def pass_on(others: set[int], told: set[int]) -> None:
    """Passes a stop on to trainers that have not got it yet. A terminal's Ctrl-C does not reach their separate
    sessions.

    `others`: children that a shell made before it became this program: `> >(tee log)`."""
    if OneAddress.signals.stop_reason is not None:
        trainers = children() - others
        send(PASSED_ON, trainers - told)
        told |= trainers


def keep_passing_on(others: set[int]) -> None:
    told: set[int] = set()
    while True:
        pass_on(others, told)
        time.sleep(POLL_S)


def handle_stops(*, are_held: bool) -> None:
    """Passes a stop on to running trainers and to those about to start.

    `are_held`: they hold signals until they handle them; a training script may take long until then, and ends."""
    others = children()
    AT_SUDDEN_EXIT.append(lambda: send(signal.SIGTERM, children() - others))
    OneAddress.signals.start()
    threading.Thread(target=keep_passing_on, args=[others], daemon=True).start()
    if are_held:
        hold()  # in this thread, and so in trainers


def main(arguments: list[str]) -> int:
    open_missing_descriptors()
    args = run.parse_args(arguments)  # type: ignore[no-untyped-call]
    rendezvous_handler_registry.register(BACKEND, one_address)
    args.rdzv_backend = BACKEND
    args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or 0}"
    args.rdzv_conf, args.node_rank = f"rank={args.node_rank}", 0  # torch warns of another, which it would not read
    args.signals_to_handle = "SIGQUIT"
    if args.shutdown_timeout is None:
        args.shutdown_timeout = LEAVE_S
    args.log_dir = args.log_dir or os.devnull  # torchrun would leave an empty folder in /tmp
    if ip_address(address_of(args.master_addr) or "0.0.0.0").is_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a warning; `trainer.threads` decides
    is_trainer = args.training_script == MODULE if args.module else Path(args.training_script).name == COMMAND
    if is_trainer:
        api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    handle_stops(are_held=is_trainer)
    try:
        run.run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 + (signal.SIGTERM if code == -PASSED_ON else -code)
    except SignalException as error:
        if OneAddress.has_started:
            return 128 + error.sigval
        setup_logging("torchrun")
        get_logger().info(UNTRAINED, reason=signal.Signals(error.sigval).name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
