"""Samples the contents of data files, so that a restart detects different data in files of the same sizes.

Checkpoints keep the checksums, so this rule must never change. It depends only on the files' number and sizes:

    blocks of a file     1024 // number of files, but from 2 to 16
    bytes of a block     64 KiB, or as many as keep all blocks within 64 MiB
    where they begin     the first at the start of the file, the last where it ends with the file, the others evenly
                         between; a file no longer than its blocks together is read whole
    checksum             xxh3_64 of the blocks, in order
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from rowcast.runtime.checkpoint_manifest import DataFile
from rowcast.runtime.errors import ConfigError

MOST_BLOCKS = 1024  # of all files
BLOCKS_OF_A_FILE = (2, 16)
BLOCK_BYTES = 64 * 2**10
MOST_BYTES = 64 * 2**20  # of all files


def sampled(paths: Sequence[Path]) -> tuple[DataFile, ...]:
    """Reads at most MOST_BYTES. Raises ConfigError if a file cannot be read."""
    if not paths:
        return ()
    least, most = BLOCKS_OF_A_FILE
    num_blocks = min(max(MOST_BLOCKS // len(paths), least), most)
    block_bytes = min(BLOCK_BYTES, max(MOST_BYTES // (len(paths) * num_blocks), 1))
    return tuple(sample(path, num_blocks, block_bytes) for path in paths)


def sample(path: Path, num_blocks: int, block_bytes: int) -> DataFile:
    hasher = xxhash.xxh3_64()
    try:
        with path.open("rb", buffering=0) as file:
            nbytes = os.fstat(file.fileno()).st_size
            for start, stop in blocks(nbytes, num_blocks, block_bytes):
                hasher.update(os.pread(file.fileno(), stop - start, start))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return DataFile(path=os.fsencode(path).decode("utf-8", "replace"), nbytes=nbytes, checksum=hasher.hexdigest())


def blocks(nbytes: int, num_blocks: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each, in bytes."""
    if nbytes <= num_blocks * block_bytes:
        yield 0, nbytes
        return
    for index in range(num_blocks):
        start = (nbytes - block_bytes) * index // (num_blocks - 1)
        yield start, start + block_bytes
