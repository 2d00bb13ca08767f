"""Names the folder of one pair of prefetcher and trainer in a run directory of several ranks."""

import re
from pathlib import Path

NAME = re.compile(r"rank-[0-9]{3,}")


def pair_folder(run_dir: Path, rank: int, count: int) -> Path:
    """Returns the folder of a rank of `count`, for its locks, socket, failure notes, log, table files and timeline."""
    assert 0 <= rank < count, f"rank {rank} of {count}"
    return run_dir if count == 1 else run_dir / f"rank-{rank:03d}"


def unused_pair_folders(run_dir: Path, count: int) -> list[Path]:
    """Lists folders there that belong to no rank of `count`, only to ranks of a different count; `run_dir` may be
    one."""
    used = {pair_folder(run_dir, rank, count) for rank in range(count)}
    ranks = (path for path in sorted(run_dir.iterdir()) if NAME.fullmatch(path.name) and not path.is_symlink())
    return [folder for folder in (run_dir, *ranks) if folder not in used]
