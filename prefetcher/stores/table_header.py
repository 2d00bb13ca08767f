"""Defines the first page of a table file: what the file holds, and whether it is valid.

    magic 8 | xxh3_64 of the rest of the page, u64 | bytes of msgpack, u32 | Header as msgpack | zeros to 4096

A page with a flipped bit, cut short, or of another version is not a header.
"""

from typing import Self

import msgspec
import xxhash

from rowcast.job.schema import digest
from rowcast.job.tables import GroupSpec

HEADER_BYTES = 4096
MAGIC = b"rowcastT"
VERSION = 1
CONTENT = 20  # where the msgpack begins


class TableHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = VERSION
    layout: str  # layout_digest
    incarnation: int  # the writer of the file
    # identity of the checkpoint whose rows the file holds; None while it is open, and after a crash
    closed_at: str | None

    def encode(self) -> bytes:
        content = msgspec.msgpack.encode(self)
        assert CONTENT + len(content) <= HEADER_BYTES, (
            f"a header of {len(content)} bytes, of at most {HEADER_BYTES - CONTENT}"
        )
        rest = len(content).to_bytes(4, "little") + content.ljust(HEADER_BYTES - CONTENT, b"\0")
        return MAGIC + xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest

    @classmethod
    def decode(cls, page: bytes) -> Self | None:
        """Returns None unless `encode` of this version made the page."""
        rest = page[16:]
        if (
            len(page) != HEADER_BYTES
            or page[:8] != MAGIC
            or int.from_bytes(page[8:16], "little") != xxhash.xxh3_64_intdigest(rest)
        ):
            return None
        try:
            header = msgspec.msgpack.decode(rest[4 : 4 + int.from_bytes(rest[:4], "little")], type=cls)
        except (
            ValueError,  # includes msgspec's own errors and invalid UTF-8
            RecursionError,
        ):
            return None
        return header if header.version == VERSION else None


def layout_digest(group: GroupSpec, seed: int) -> str:
    """Digests what decides a row's position in the file, its bytes and its first values."""
    parts = [(part.name, part.dtype, part.offset, part.width, part.initial) for part in group.parts]
    tables = [(table.index, table.name, table.num_embeddings, table.init) for table in group.tables]
    return digest([group.name, group.record_bytes, parts, tables, seed])


def why_rebuilt(header: TableHeader | None, layout: str, checkpoint: str | None) -> str | None:
    """Says why a file with this header does not hold the rows of `checkpoint`; None: it does."""
    if header is None:
        return "its header is damaged or of another version"
    if header.layout != layout:
        return "its tables have another layout"
    if header.closed_at is None:
        return f"incarnation {header.incarnation} did not close it"
    if checkpoint is None:
        return "no checkpoint is restored"
    if header.closed_at != checkpoint:
        return f"it holds the rows of checkpoint {header.closed_at}"
    return None
