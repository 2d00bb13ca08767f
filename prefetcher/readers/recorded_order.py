"""Reads the files of a run in the order in which it has begun, which its checkpoint has recorded.

Older versions read files in the order of their names: day_0, day_1, day_10, day_2.
"""

from contextlib import suppress
from itertools import pairwise
from pathlib import PurePath

from msgspec.structs import replace

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.data_files import KEYS, files_of
from rowcast.runtime.checkpoint_manifest import Manifest, ManifestOfVersion3
from rowcast.runtime.errors import ConfigError


def in_recorded_order(job: Job, checkpoint: Manifest) -> Job:
    """Returns the job with the `data.by_name` of the checkpoint's run. Only two files of which numbers and names give
    different orders can tell it; without such files the job stays as it is."""
    if isinstance(checkpoint, ManifestOfVersion3) and not checkpoint.is_import:
        return ordered(job, by_name=True)
    recorded = [] if checkpoint.trained_on is None else [own.path for own in checkpoint.trained_on.files]
    places = {PurePath(path).name: place for place, path in reversed([*enumerate(recorded)])}  # files may have moved
    places |= {path: place for place, path in reversed([*enumerate(recorded)])}
    with suppress(ConfigError):  # the reader raises it too
        for first, second in (pair for key in KEYS for pair in pairwise(files_of(ordered(job, by_name=False), key))):
            here = [places.get(str(own), places.get(own.name)) for own in (first, second)]
            if first > second and here[0] is not None and here[1] is not None:
                return ordered(job, by_name=here[1] < here[0])
    return job


def ordered(job: Job, *, by_name: bool) -> Job:
    return replace(job, data=replace(job.data, by_name=by_name))
