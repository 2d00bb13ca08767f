"""Writes and reads small JSON files with a checksum inside, which detects a change of any bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from rowcast.runtime.errors import DataError
from rowcast.runtime.own_files import open_regular


class Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    checksum: str = ""  # xxh3_64 of the file with "" here, 16 hex digits; `seal` fills it in


class Versioned(msgspec.Struct):
    version: int


AnySealed = TypeVar("AnySealed", bound=Sealed)


def render(content: Sealed) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1)


def seal(content: AnySealed) -> AnySealed:
    checksum = xxhash.xxh3_64_hexdigest(render(msgspec.structs.replace(content, checksum="")))
    return msgspec.structs.replace(content, checksum=checksum)


def read_sealed(path: Path, kinds: Mapping[int, type[AnySealed]], name: str) -> AnySealed:
    """`kinds`: the type of each version. `name`: the file's name in errors. Raises DataError if it has a different
    version or changed since it was written, and OSError."""
    with open_regular(path) as file:
        content = file.read()
    try:
        found = msgspec.json.decode(content, type=Versioned).version
        if found not in kinds:
            known = " and ".join(map(str, kinds))
            raise DataError(f"{path}: {name} version {found}, but this version reads {known}")
        sealed = msgspec.json.decode(content, type=kinds[found])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not a {name} that this version can read ({error})") from None
    checksum = xxhash.xxh3_64_hexdigest(content.replace(sealed.checksum.encode(), b"", 1))
    if checksum != sealed.checksum:
        raise DataError(
            f"{path}: the {name} has checksum {checksum}, but says {sealed.checksum!r}: "
            "it was changed after it was written"
        )
    return sealed
