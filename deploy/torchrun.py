"""torchrun for trainers: `python -m rowcast.deploy.torchrun --nproc-per-node 2 -m rowcast.trainer run --config JOB`

Takes torchrun's options and starts, restarts and ends trainers as torchrun does. Four things differ:

| | torchrun | here |
|---|---|---|
| the store where trainers meet | on every interface | on `--master-addr` alone, 127.0.0.1 if not given |
| rendezvous of one host, or `c10d` | unpickles what peers have stored | unpickles nothing |
| SIGTERM, SIGINT | code 1, trainers have at most 30 s | passed on once; ends when trainers have stopped in order |
| trainers fail for good | code 1 | the code of the trainer that failed first |

With `--nnodes` above 1, each host gives its `--node-rank`; all give the same `--master-addr`, an address of host 0, and
the same `--master-port`.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from torch.distributed import TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

STOPS = (signal.SIGINT, signal.SIGTERM)
MEETING_S = 600  # for the hosts to find host 0's store
BACKEND = "one-address"
LOOPBACK = "lo"


class OneAddress(StaticTCPRendezvous):
    """Host 0 serves the store, on one address; with port 0, on a port that is free."""

    stop: signal.Signals | None = None  # once one was received

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Called before trainers start and before they start again."""
        if OneAddress.stop is not None:
            raise SignalException("stopped while trainers were about to start", OneAddress.stop)
        if self._store is None and self.rank == 0:
            listener = socket.create_server((self.master_addr, self.master_port), family=family_of(self.master_addr))
            self.master_port = listener.getsockname()[1]
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        return super().next_rendezvous()


def family_of(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def one_address(parameters: RendezvousParameters) -> OneAddress:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
    rank = parameters.get_as_int("rank")
    assert rank is not None
    return OneAddress(host, port, rank, parameters.max_nodes, parameters.run_id, MEETING_S)


def pass_on(number: int, frame: object) -> None:
    """Signals to the trainers, which have sessions of their own, so that a terminal's Ctrl-C does not reach them."""
    OneAddress.stop = signal.Signals(number)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(int(child), number)


def main(arguments: list[str]) -> int:
    args = run.parse_args(arguments)  # type: ignore[no-untyped-call]
    rendezvous_handler_registry.register(BACKEND, one_address)
    args.rdzv_backend = BACKEND
    args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or 0}"
    args.rdzv_conf = f"rank={args.node_rank}"
    args.signals_to_handle = "SIGHUP,SIGQUIT"
    args.log_dir = args.log_dir or os.devnull  # torchrun would leave an empty folder in /tmp
    if socket.gethostbyname(args.master_addr).startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a warning; `trainer.threads` decides
    for number in STOPS:
        signal.signal(number, pass_on)
    try:
        run.run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
