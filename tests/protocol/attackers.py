"""Callers who are no trainers: what they send to an open tcp port, byte by byte."""

import socket
from collections.abc import Callable
from contextlib import suppress
from random import Random

from rowcast.protocol.transport.zmq_ends import MAX_MESSAGE_BYTES

# flags of a ZMTP frame; a part has more behind it
COMMAND, LONG_COMMAND, LONG_MESSAGE, LONG_PART = 0x04, 0x06, 0x02, 0x03


def greeting(mechanism: bytes = b"CURVE", version: bytes = b"\x03\x01") -> bytes:
    """The 64 bytes that a ZMTP 3 connection begins with."""
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


def long_frame(flags: int, nbytes: int) -> bytes:
    """The head of a frame that says it has `nbytes`."""
    return bytes([flags]) + nbytes.to_bytes(8, "big")


def ready(socket_type: bytes) -> bytes:
    """What a handshake without keys ends with."""
    command = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return bytes([COMMAND, len(command)]) + command


def hello(chance: Random) -> bytes:
    """A CURVE HELLO of the right form, and of a key that nobody has."""
    return bytes([COMMAND, 200]) + b"\x05HELLO\x01\x00" + bytes(72) + chance.randbytes(120)


def garbage(chance: Random) -> bytes:
    return chance.randbytes(chance.randint(1, 5000))


def half_greeting(chance: Random) -> bytes:
    return greeting()[: chance.randint(1, 63)]


def greeting_alone(chance: Random) -> bytes:
    return greeting()


def half_handshake(chance: Random) -> bytes:
    return greeting() + hello(chance)[: chance.randint(1, 201)]


def forged_hello(chance: Random) -> bytes:
    return greeting() + hello(chance)


def no_mechanism(chance: Random) -> bytes:
    """As a trainer of a time before there were keys: a whole handshake, and a message."""
    return greeting(b"NULL") + ready(b"DEALER") + b"\x00\x05hello"


def old_version(chance: Random) -> bytes:
    return b"\x01\x00\x00\x05hello" if chance.random() < 0.5 else greeting(version=b"\x01\x00")


def message_first(chance: Random) -> bytes:
    return greeting() + b"\x00\x05hello" * 100


def far_too_long(chance: Random) -> bytes:
    nbytes = chance.choice([MAX_MESSAGE_BYTES + 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1])
    return greeting() + long_frame(chance.choice([LONG_COMMAND, LONG_MESSAGE]), nbytes) + bytes(2**16)


def as_long_as_may_be(chance: Random) -> bytes:
    """Never sends the end of it."""
    return greeting() + long_frame(LONG_COMMAND, MAX_MESSAGE_BYTES) + bytes(2**19)


def web_browser(chance: Random) -> bytes:
    return b"GET / HTTP/1.1\r\nHost: rowcast\r\n\r\n"


def nothing(chance: Random) -> bytes:
    return b""


KINDS: list[Callable[[Random], bytes]] = [
    garbage,
    half_greeting,
    greeting_alone,
    half_handshake,
    forged_hello,
    no_mechanism,
    old_version,
    message_first,
    far_too_long,
    as_long_as_may_be,
    web_browser,
    nothing,
]


class Attacker:
    """One connection. Sends at once, or a few bytes at each `send_more`; then it leaves, or stays and says no more."""

    def __init__(self, port: int, kind: int, chance: Random) -> None:
        self._bytes = KINDS[kind % len(KINDS)](chance)
        self._step = chance.choice([1, 7, 100]) if chance.random() < 0.3 else max(1, len(self._bytes))
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)

    def send_more(self) -> None:
        self._socket.setblocking(False)
        with suppress(OSError):  # cut off, or nobody reads
            self._bytes = self._bytes[self._socket.send(self._bytes[: self._step]) :]

    def wait_cut_off(self) -> None:
        """Reads whatever the other side says until it ends the connection."""
        self._socket.settimeout(20)
        with suppress(ConnectionError):
            while self._socket.recv(65536):
                pass

    def leave(self) -> None:
        self._socket.close()
