"""Notices a caller over tcp that sends one message without end: libzmq keeps the parts of a message until the last has come, with no limit.

received by the kernel | ....... delivered to us ....... | backlog |        a backlog beyond the limit is no message of ours
"""

import socket
import struct
from dataclasses import dataclass

PART_OVERHEAD_BYTES = 128  # at most what framing, encryption and the handshake's share add to a part
SLACK_BYTES = 16 * 2**20  # the kernel's buffer, and what libzmq is working on
BYTES_RECEIVED_AT = 128  # tcpi_bytes_received, u64, in Linux's struct tcp_info


@dataclass(slots=True, eq=False)
class CallerConnection:
    """What has come through one connection."""

    num_messages: int = 0
    delivered_bytes: int = 0

    def deliver(self, num_parts: int, nbytes: int) -> None:
        self.num_messages += 1
        self.delivered_bytes += nbytes + num_parts * PART_OVERHEAD_BYTES

    def has_backlog(self, descriptor: int, limit_bytes: int) -> bool:
        """`limit_bytes`: what may be outstanding. Raises OSError where the descriptor is closed or no tcp connection."""
        return bytes_received(descriptor) - self.delivered_bytes > limit_bytes + SLACK_BYTES


def bytes_received(descriptor: int) -> int:
    connection = socket.socket(fileno=descriptor)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED_AT + 8)
    finally:
        connection.detach()
    return int(struct.unpack_from("Q", info, BYTES_RECEIVED_AT)[0])
