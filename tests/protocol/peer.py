"""The other process of a link's test: `python -m tests.protocol.peer ROLE RUN_DIR SOCKETS WHAT`."""

import sys
import threading
import time
from pathlib import Path
from typing import cast

from rowcast.protocol.messages import Envelope
from rowcast.protocol.session import decode, encode
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import Role
from tests.support.sample_messages import hello

NUM_FRAMES = 10_000
# a trainer's first frame: without one, none is heard
GREETING = encode(Envelope(incarnation=0, sequence=0, message=hello(mode="train")))


def numbered(number: int) -> bytes:
    """Frames of many lengths, each of which names its place."""
    return b"%08d" % number + b"x" * (number * 37 % 2000)


class Bell:
    """A doorbell that can be waited for."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(30), "the link rings when something has arrived"
        self._event.clear()


def receive(link: ZmqLink, bell: Bell) -> bytes:
    while True:
        arrived = link.receive()
        if arrived is not None:
            frame, payload = arrived
            assert not payload
            return frame
        assert not link.peer_gone, "the frame comes before the peer leaves"
        bell.wait()


def received_until_error(link: ZmqLink, frames: list[bytes]) -> None:
    """Adds all frames that arrive to `frames`, until the link raises what ended its thread."""
    while True:
        if (arrived := link.receive()) is not None:
            frames.append(arrived[0])
        else:
            time.sleep(0.001)


def wait_gone(link: ZmqLink, bell: Bell) -> None:
    while not link.peer_gone:
        bell.wait()


def send_numbered(link: ZmqLink) -> None:
    for number in range(NUM_FRAMES):
        link.send(numbered(number))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(role: Role, run_dir: Path, sockets: Path, what: str) -> None:
    bell = Bell()
    link = ZmqLink.of(role, run_dir, bell.ring, sockets)
    try:
        link.start()
    except ConfigError as error:
        say(str(error))
        return
    say("started")
    link.send(GREETING)
    if what == "send":
        if role == "prefetcher":
            receive(link, bell)  # it knows its trainer by that
        send_numbered(link)
    elif what == "echo":
        receive(link, bell)
        for _ in range(NUM_FRAMES):
            link.send(receive(link, bell))
    elif what == "refused":
        say(str(decode(receive(link, bell)).message))
    elif what == "stay":
        sys.stdin.read()
    link.close()
    say("closed")


if __name__ == "__main__":
    main(cast(Role, sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
