"""What both processes do around their stages: threads, signals, the first error, and leaving in order."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Protocol, Self

import msgspec

from protocol.command import say
from protocol.errors import PeerLost, PeerNeverCame, RowcastError
from protocol.job import Transport, parse_seconds
from protocol.messages import Failure
from protocol.stages import Doorbell, Stage, StageThread
from protocol.telemetry.logs import get_logger
from protocol.transport.ring_file import unlink_created

STOPS = (signal.SIGINT, signal.SIGTERM)
STOPPING = "stopping: the plans already made are finished first; a second signal ends at once"
HANG_GRACE_S = 5.0  # after a fatal error, for the main thread to come out of what it is doing


class Sends(Protocol):
    @property
    def failure_received(self) -> bool: ...

    def send(self, message: Failure) -> None: ...


class Signals:
    """The first SIGINT or SIGTERM asks for a stop, a second one ends the process at once. Use as a context manager, in the main thread,
    around everything that takes time: the imports of a command too."""

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self.bell = Doorbell()  # rung by the first signal
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in STOPS:
            self._previous[number] = signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # a launcher may have held them back until they can be acted upon
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_reason is not None:
            leave_at_once(128 + number)
        self.stop_reason = signal.Signals(number).name
        self.bell.ring()  # its lock is re-entrant, so this is safe even where the signal interrupted a wait on it


class Crew:
    """The stage threads of a process and the first error of any of them."""

    def __init__(self, process: str, bell: Doorbell, *, owns_process: bool = True) -> None:
        """`owns_process`: the process is to end with an error of ours, also where its main thread does not come back."""
        self.error: BaseException | None = None
        self._process = process
        self._owns_process = owns_process
        self._bell = bell
        self._threads: dict[str, StageThread] = {}
        self._stopped = threading.Event()

    def start(self, stages: Mapping[str, Stage], on_idle: Mapping[str, Callable[[float], None]]) -> None:
        """May be called again, with other stages."""
        threads = {name: StageThread(name, stage, self._bell, self.fail, on_idle.get(name)) for name, stage in stages.items()}
        self._threads |= threads
        for thread in threads.values():
            thread.start()

    def stop(self) -> None:
        for thread in self._threads.values():
            thread.stop()
        self._stopped.set()

    def fail(self, error: BaseException) -> None:
        """Keeps the first error; the main thread raises it. A main thread that cannot hear of it is ended with the process."""
        if self.error is None:
            self.error = error
            if self._owns_process:
                threading.Thread(target=self._end_hung_process, args=(error,), name="last resort", daemon=True).start()
        self._bell.ring()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def dead_stage(self) -> str | None:
        """The name of a stage that an error has ended; None where that error is the loss of the peer, which is no fault of this process."""
        if self.error is None or isinstance(self.error, PeerLost):
            return None
        return next((name for name, thread in self._threads.items() if not thread.alive), None)

    def _end_hung_process(self, error: BaseException) -> None:
        if self._stopped.wait(HANG_GRACE_S):
            return
        get_logger().error("the main thread did not end; leaving at once")
        say(self._process, str(error) if isinstance(error, RowcastError) else f"unexpected error: {type(error).__name__}: {error}")
        leave_at_once(error.exit_code if isinstance(error, RowcastError) else 1)


class Patience:
    """How long a peer is awaited: `connect_timeout` the first time, `rejoin_timeout` once one was lost."""

    def __init__(self, peer: str, transport: Transport) -> None:
        self.transport = transport  # with the time-out that counts now
        self._peer = peer
        self._rejoin_s = parse_seconds(transport.rejoin_timeout)
        self._waits_again = False

    def again(self, error: PeerLost) -> None:
        """Call when the peer was lost. Raises PeerLost where no other one is to be awaited, or none has come."""
        if isinstance(error, PeerNeverCame) and self._waits_again:
            raise PeerLost(
                f"no other {self._peer} came within {self._rejoin_s:g} s after the last one was lost; start it with the same job file, "
                f"or raise transport.rejoin_timeout"
            )
        if isinstance(error, PeerNeverCame) or not self._rejoin_s:
            raise error
        self._waits_again = True
        self.transport = msgspec.structs.replace(self.transport, connect_timeout=self._rejoin_s)
        get_logger().warning(
            f"waiting for another {self._peer}; training goes on from the newest checkpoint", lost=str(error), seconds=self._rejoin_s
        )


def leave_at_once(code: int) -> None:
    """Ends the process without a further word; only what would outlive it is removed."""
    unlink_created()
    os._exit(code)


def tell_peer(conversation: Sends, error: BaseException) -> None:
    """Lets the peer end with the same sentence and code, where the error did not come from it. One that is gone costs nothing, and one
    that only stood still should know why it was left."""
    if conversation.failure_received:
        return
    code = error.exit_code if isinstance(error, RowcastError) else 1
    sentence = str(error) if isinstance(error, RowcastError) else f"{type(error).__name__}: {error}"
    try:
        conversation.send(Failure(code=code, sentence=sentence))
    except RowcastError:
        get_logger().warning("the peer could not be told", sentence=sentence)
