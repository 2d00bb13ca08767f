"""Explains why a line is not Criteo TSV, by reading field by field after the fast parser has refused its block."""

NUM_DENSE, NUM_SPARSE = 13, 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_SPARSE
HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


def line_error(line: bytes) -> str | None:
    """Returns the sentence after the line's number, or None for a good line."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != NUM_FIELDS:
        return (
            f": {len(fields)} fields between tabs instead of {NUM_FIELDS} "
            f"(label, {NUM_DENSE} integers, {NUM_SPARSE} hashes)"
        )
    if fields[0] not in (b"0", b"1"):
        return f", column label: {shown(fields[0])} is not 0 or 1"
    for i, field in enumerate(fields[1 : 1 + NUM_DENSE]):
        if field and not is_int64(field):
            return f", column int_{i}: {shown(field)} is not an integer of 64 bits"
    for i, field in enumerate(fields[1 + NUM_DENSE :]):
        if field and (len(field) != 8 or not HEX_DIGITS.issuperset(field)):
            return f", column cat_{i}: {shown(field)} is not 8 hex digits"
    return None


def is_int64(field: bytes) -> bool:
    digits = field.removeprefix(b"-")
    return digits.isdigit() and -(2**63) <= int(field) < 2**63


def shown(field: bytes) -> str:
    return repr(field[:40].decode("utf-8", "replace"))
