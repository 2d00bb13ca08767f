from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.workers import WorkerSource


@pytest.fixture
def opened() -> Iterator[Callable[..., WorkerSource]]:
    """Called as `WorkerSource`: starts one, which is closed after the test."""
    sources: list[WorkerSource] = []

    def open_source(job: Job, **options: Any) -> WorkerSource:
        sources.append(WorkerSource(job, **options))
        sources[-1].start()
        return sources[-1]

    yield open_source
    for source in sources:
        source.close()
