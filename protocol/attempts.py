"""Runs the attempts of a run: after a lost peer, if the job allows it, the next attempt waits for a new peer. Checks
that the two processes that meet belong together."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from rowcast.job.schema import Transport
from rowcast.job.units import parse_seconds
from rowcast.protocol.messages import Hello, Mode, Welcome
from rowcast.protocol.session import PREFETCHER, TRAINER, check_version
from rowcast.runtime.errors import Mismatch, PeerLost, PeerNeverCame, RanksDiffer
from rowcast.runtime.process import Signals
from rowcast.runtime.run_directory import Role
from rowcast.runtime.stages import Crew
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.metrics import Health


class Attempt(Protocol):
    def live(self) -> None:
        """Returns when the run has finished or was stopped. Raises PeerLost if another attempt may continue."""


LEAST_REJOIN_S = 120.0  # of several ranks
TRAINERS_RESTART_S = 60.0  # once a trainer has given up waiting for the others
MOST_LOOKS = 5
AttemptT = TypeVar("AttemptT", bound=Attempt)


class Attempts(Generic[AttemptT]):
    """The attempts of one process's run. Each has a separate crew; `health` is the same for all."""

    def __init__(
        self, role: Role, peer: Role, transport: Transport, signals: Signals, patience: "Patience | None" = None
    ) -> None:
        self.current: AttemptT | None = None  # the last one once the run is over
        self.health = Health(dead_stage=lambda: self._crew.dead_stage())
        self._role = role
        self._signals = signals
        self._crew = Crew(role, signals.bell)
        self._patience = patience or Patience(peer, transport)

    def run(self, begin: Callable[[AttemptT | None, Transport, Crew], AttemptT | None]) -> AttemptT | None:
        """`begin` makes an attempt from the previous one and the transport with its time-out, or returns None after a
        stop request.

        Returns the attempt that ended the run, or None if a stop was requested after a peer was lost. Raises the first
        error of an attempt, and PeerLost if no new peer is expected."""
        while True:
            attempt = begin(self.current, self._patience.transport, self._crew)
            if attempt is None:
                return None
            self.current = attempt
            try:
                attempt.live()
                return attempt
            except PeerLost as error:
                self._patience.again(error)
            self.health.state = "connecting"
            self._crew = Crew(self._role, self._signals.bell)
            if self._signals.stop_reason is not None:
                return None


class Patience:
    """Decides how long to wait for a peer: `connect_timeout` the first time, `rejoin_timeout` after a loss."""

    def __init__(self, peer: str, transport: Transport) -> None:
        self.transport = transport  # with the present time-out
        self._peer = peer
        self._rejoin_s = parse_seconds(transport.rejoin_timeout)
        self._waits_again = False

    def again(self, error: PeerLost) -> None:
        """Prepares the next wait after a lost peer. Raises PeerLost if no new peer is expected, or none came."""
        if isinstance(error, PeerNeverCame) and self._waits_again:
            raise PeerLost(
                f"no other {self._peer} came within {self._rejoin_s:g} s after the last one was lost; "
                f"start it with the same job file, or raise transport.rejoin_timeout"
            )
        if isinstance(error, PeerNeverCame) or not self._rejoin_s:
            raise error
        self._waits_again = True
        self.transport = msgspec.structs.replace(self.transport, connect_timeout=self._rejoin_s)
        get_logger().warning(
            f"waiting for another {self._peer}; training will continue from the newest checkpoint",
            lost=str(error),
            seconds=self._rejoin_s,
        )


class RankPatience(Patience):
    """A trainer of several ranks ends when it loses a process, and torchrun restarts all trainers. Only if prefetchers
    must reread the newest checkpoint do all trainers begin a new attempt."""

    def __init__(self, peer: str, transport: Transport) -> None:
        super().__init__(peer, transport)
        self._looks = 0

    def again(self, error: PeerLost) -> None:
        self._looks += 1
        if not isinstance(error, RanksDiffer) or self._looks >= MOST_LOOKS:
            raise error
        get_logger().warning("the prefetchers look again at the newest checkpoint", because=str(error))


def transport_of_ranks(transport: Transport, ranks_timeout: str | float) -> Transport:
    """Sets the time-outs of a prefetcher of several ranks, whose trainer restarts after all trainers have ended. A
    restarted prefetcher waits as long."""
    least_s = max(LEAST_REJOIN_S, parse_seconds(ranks_timeout) + TRAINERS_RESTART_S)
    names = ("connect_timeout", "rejoin_timeout")
    longer = {name: max(least_s, parse_seconds(getattr(transport, name))) for name in names}
    return msgspec.structs.replace(transport, **longer)


VERBS: dict[Mode, str] = {"train": "train", "eval": "evaluate"}


def check_hello(hello: Hello, digest: str, mode: Mode = "train", world_size: int = 1, rank: int = 0) -> None:
    """Raises Mismatch if this trainer has a different job or shard than this prefetcher."""
    check_version(hello.protocol_version, TRAINER)
    if hello.job_digest != digest:
        raise Mismatch(
            f"the two processes were started with different job files: the trainer's has digest {hello.job_digest}, "
            f"the prefetcher's {digest}; give both the same file and the same --set overrides"
        )
    if hello.mode != mode:
        raise Mismatch(
            f"the prefetcher was started to {VERBS[mode]} and the trainer to {VERBS[hello.mode]}; "
            "`trainer run` belongs to `prefetcher run`, `trainer eval` to `prefetcher run --eval`"
        )
    if hello.world_size != world_size or hello.rank >= world_size:
        raise Mismatch(
            f"the trainer was started as rank {hello.rank} of {hello.world_size}, but the job's world size is "
            f"{world_size}; start rank 0 to {world_size - 1} of {world_size}"
        )
    if hello.rank != rank:
        raise Mismatch(
            f"this prefetcher holds the rows of rank {rank} of {world_size}, but the trainer is rank {hello.rank}; a "
            "host whose trainers are ranks 4 to 7 needs the prefetchers of ranks 4 to 7"
        )


def check_welcome(welcome: Welcome, rank: int = 0) -> None:
    """Raises Mismatch if this prefetcher has a different version or shard than this trainer."""
    check_version(welcome.protocol_version, PREFETCHER)
    if welcome.rank != rank:
        raise Mismatch(
            f"the prefetcher that answered holds the rows of rank {welcome.rank}, but this trainer is rank {rank}; "
            "start `prefetcher run` with the same job file, on each host with its own --host"
        )
