"""Implements `rowcast prepare`: compiles every loop of both processes and keeps it for later starts."""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import typer

from rowcast.prefetcher.run.warm_up import every_loop
from rowcast.runtime.compiled import LOOPS, LoopCache, note_prepared
from rowcast.runtime.errors import ConfigError, advice
from rowcast.trainer.adopt.catch_up import try_loops
from rowcast.trainer.adopt.records import FEW, distinct_rows, positions
from rowcast.trainer.adopt.script_engine import try_slots
from rowcast.trainer.kernels.choose import compile_for_cpu

COUNTS = "cache_misses", "cache_hits"


def prepare() -> None:
    """Compile every loop that a job can need, and keep it for later starts on this kind of processor."""
    began = time.perf_counter()
    folder = os.environ.get("NUMBA_CACHE_DIR", "")
    folders = sorted({loop._cache.cache_path or "" for loop in LOOPS})
    if any(not own.startswith(folder or os.sep) for own in folders):
        raise unwritable(folder, "nothing can be written there")
    with TemporaryDirectory() as scratch:
        every_loop(Path(scratch))
    compile_for_cpu()
    try_loops()
    try_slots()
    distinct_rows(1, np.zeros(1, np.int64))
    positions(*(torch.zeros(size, dtype=torch.int64, device="cpu") for size in (1, 1 + FEW)))
    try:
        if LoopCache.lost is not None:
            raise LoopCache.lost
        for own in folders:
            note_prepared(own)
    except OSError as error:
        raise unwritable(folder, advice(error.errno, str(error))) from None
    compiled, there = (sum(sum(getattr(loop.stats, name).values()) for loop in LOOPS) for name in COUNTS)
    typer.echo(
        f"compiled {compiled} loops in {time.perf_counter() - began:.0f} s, {there} were there; "
        f"they are in {os.path.commonpath(folders)}, for this kind of processor"
    )


def unwritable(folder: str, cause: str) -> ConfigError:
    named = f"NUMBA_CACHE_DIR = {folder!r}" if folder else "no cache folder of numba, in ours or in the user's,"
    return ConfigError(f"{named} keeps no loops: {cause}; set NUMBA_CACHE_DIR to a folder that this user may write to")
