"""Frames that a wrong or hostile peer could send, made from real ones: fast, and a function of the seed."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

encode = msgspec.msgpack.encode
decode: Callable[[bytes], Any] = msgspec.msgpack.decode

NUMBERS = (
    0,
    -1,
    1,
    2**20,
    2**31,
    2**40,
    2**62 - 1,
    2**62,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.0,
    0.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
)
TEXTS = ("", "x", "x" * 5000, "\x1b[2J\x07", "é" * 40, "0.slots", b"", b"\0" * 63, b"\xff" * 64)
NESTED: list[Any] = [[[[[[[[]]]]]]]]
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    NESTED,
    [0] * 5000,
    [None],
    {"type": "Bye"},
    {"": 0},
    [[0, 0, {"type": "Bye"}]],
)
HEADERS = tuple(  # that claim more than is there: arrays, maps, strings, bins, and extensions
    bytes.fromhex(head)
    for head in (
        "dcffff",
        "ddffffffff",
        "deffff",
        "dfffffffff",
        "dbffffffff",
        "c6ffffffff",
        "c9ffffffff01",
        "d9ff",
        "c7ff01",
    )
)
SCALARS = (
    b"\xc0",
    b"\xc1",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\0" * 7,
    b"\xcb\x7f\xf8" + b"\0" * 6,
    b"\xca\x7f\x80\0\0",
    b"\xff",
    b"\xd6\xff\0\0\0\0",
)


class Mutator:
    def __init__(self, chance: Random, frames: Sequence[bytes]) -> None:
        """`frames`: real ones, to take parts of."""
        self._chance = chance
        self._frames = list(frames)
        self._in_bytes = (self._flip, self._cut, self._insert, self._splice, self._claim, self._nest)
        self._in_values = (
            self._replace,
            self._replace,
            self._nudge,
            self._drop,
            self._add,
            self._repeat,
            self._renumber,
            self._swap,
        )

    def mutated(self, frame: bytes) -> bytes:
        chance = self._chance
        if chance.random() < 0.4:
            return chance.choice(self._in_bytes)(frame)
        return chance.choice(self._in_values)(frame)

    # in the bytes

    def _flip(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(self._chance.randrange(1, 4)):
            changed[self._chance.randrange(len(changed))] ^= 1 << self._chance.randrange(8)
        return bytes(changed)

    def _cut(self, frame: bytes) -> bytes:
        start = self._chance.randrange(len(frame))
        return (
            frame[:start] + frame[start + self._chance.randrange(1, 20) :]
            if self._chance.random() < 0.5
            else frame[:start]
        )

    def _insert(self, frame: bytes) -> bytes:
        at = self._chance.randrange(len(frame) + 1)
        return frame[:at] + self._chance.choice(SCALARS) + frame[at + self._chance.randrange(2) :]

    def _splice(self, frame: bytes) -> bytes:
        other = self._chance.choice(self._frames)
        return frame[: self._chance.randrange(len(frame))] + other[self._chance.randrange(len(other)) :]

    def _claim(self, frame: bytes) -> bytes:
        at = self._chance.randrange(len(frame))
        return frame[:at] + self._chance.choice(HEADERS) + frame[at + 1 :]

    def _nest(self, frame: bytes) -> bytes:
        at = self._chance.randrange(len(frame))
        return (
            frame[:at]
            + self._chance.choice((b"\x91", b"\x81\xa4type")) * self._chance.choice((10, 600, 3000))
            + frame[at:]
        )

    # in the values

    def _replace(self, frame: bytes) -> bytes:
        chance = self._chance
        return self._changed(
            frame, lambda holder, key: holder.__setitem__(key, chance.choice(chance.choice((NUMBERS, TEXTS, OTHERS))))
        )

    def _nudge(self, frame: bytes) -> bytes:
        """A number off by one, or by its own size."""

        def nudge(holder: Any, key: Any) -> None:
            value = holder[key]
            if isinstance(value, int) and not isinstance(value, bool):
                holder[key] = min(2**64 - 1, self._chance.choice((value + 1, value - 1, value * 2, value + 64)))
            elif isinstance(value, list) and value:
                holder[key] = self._chance.choice((value[1:], value[::-1], [*value, value[0]]))

        return self._changed(frame, nudge)

    def _drop(self, frame: bytes) -> bytes:
        return self._changed(frame, lambda holder, key: holder.__delitem__(key))

    def _add(self, frame: bytes) -> bytes:
        def add(holder: Any, key: Any) -> None:
            if isinstance(holder, dict):
                holder["more"] = 0
            else:
                holder.append(holder[key])

        return self._changed(frame, add)

    def _repeat(self, frame: bytes) -> bytes:
        """A field of the message twice, with another value."""
        incarnation, sequence, message = decode(frame)
        name = self._chance.choice(list(message))
        body = b"".join(encode(key) + encode(value) for key, value in message.items())
        value = encode(self._chance.choice(NUMBERS))
        head = b"\x93" + encode(incarnation) + encode(sequence) + b"\xde" + (len(message) + 1).to_bytes(2, "big")
        return head + (body + encode(name) + value if self._chance.random() < 0.5 else encode(name) + value + body)

    def _renumber(self, frame: bytes) -> bytes:
        """Of another incarnation, or another place in the sequence."""
        plain = decode(frame)
        at = self._chance.randrange(2)
        plain[at] = self._chance.choice((plain[at] + 1, abs(plain[at] - 1), 0, 2**62, 2**64 - 1))
        return encode(plain)

    def _swap(self, frame: bytes) -> bytes:
        """Another message in the place of this one, or one part of it."""
        plain, other = decode(frame), decode(self._chance.choice(self._frames))[2]
        shared = [name for name in plain[2] if name in other]
        if self._chance.random() < 0.3:
            plain[2] = other
        else:
            name = self._chance.choice(shared)
            plain[2][name] = other[name]
        return encode(plain)

    def _changed(self, frame: bytes, change: Callable[[Any, Any], None]) -> bytes:
        plain = decode(frame)
        holder, key = plain, 2  # mostly inside the message
        while True:
            inside = holder[key]
            if not isinstance(inside, dict | list) or not inside or self._chance.random() < 0.1:
                break
            holder, key = (
                inside,
                self._chance.choice(list(inside)) if isinstance(inside, dict) else self._chance.randrange(len(inside)),
            )
        change(holder, key)
        return encode(plain)
