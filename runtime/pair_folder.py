"""Names the folder of one pair of prefetcher and trainer in a run directory that several ranks share."""

from pathlib import Path


def pair_folder(run_dir: Path, rank: int, count: int) -> Path:
    """Where a rank of `count` keeps what is its own: locks, socket, failure notes, log, files of tables, timeline."""
    assert 0 <= rank < count, f"rank {rank} of {count}"
    return run_dir if count == 1 else run_dir / f"rank-{rank:03d}"
