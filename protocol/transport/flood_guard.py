"""Detects a tcp caller that sends an endless message, which libzmq would store without a limit.

    received by the kernel | ....... delivered to us ....... | backlog |

Our messages never need a backlog beyond the limit.
"""

import socket
import struct
from dataclasses import dataclass

PART_OVERHEAD_BYTES = 128  # upper limit for framing, encryption and a frame's fraction of the handshake
SLACK_BYTES = 16 * 2**20  # the kernel's buffer, and what libzmq is processing
BYTES_RECEIVED_AT = 128  # tcpi_bytes_received, u64, in Linux's struct tcp_info


@dataclass(slots=True, eq=False)
class CallerConnection:
    num_messages: int = 0
    delivered_bytes: int = 0

    def deliver(self, num_parts: int, nbytes: int) -> None:
        self.num_messages += 1
        self.delivered_bytes += nbytes + num_parts * PART_OVERHEAD_BYTES

    def has_backlog(self, descriptor: int, limit_bytes: int) -> bool:
        """Returns whether more than `limit_bytes` are outstanding. Raises OSError if the descriptor is not a
        connection."""
        return bytes_received(descriptor) - self.delivered_bytes > limit_bytes + SLACK_BYTES


def bytes_received(descriptor: int) -> int:
    connection = socket.socket(fileno=descriptor)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED_AT + 8)
    finally:
        connection.detach()
    return int(struct.unpack_from("Q", info, BYTES_RECEIVED_AT)[0])
