"""Manifests that earlier versions wrote for the job files here: a later version must find nothing that differs.

`python -m tests.checkpoints.golden` writes the manifest of this version; a release that changes what is in one adds it.
Those of version 3 were written by commit 6aa9055.
"""

from pathlib import Path

from rowcast.runtime.checkpoint_manifest import DataFile, TrainingData

FOLDER = Path(__file__).parent
ALL_KEYS = "all_keys"
# what was read; those of version 3 have its sizes in their digests
DATA = {
    "demo": TrainingData(files=()),
    "din": TrainingData(files=(DataFile(path="data/sequences.parquet", nbytes=70_000, checksum="a" * 16),)),
    ALL_KEYS: TrainingData(
        files=tuple(
            DataFile(path=f"data/day_0_{part}.npy", nbytes=nbytes, checksum=f"{nbytes:016x}")
            for part, nbytes in (("dense", 40_128), ("sparse", 104_128), ("labels", 8_128))
        ),
    ),
}
