from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.worker import BatchSource


@pytest.fixture
def opened() -> Iterator[Callable[..., BatchSource]]:
    """Called as `BatchSource`: starts one, which is closed after the test."""
    sources: list[BatchSource] = []

    def open_source(job: Job, **options: Any) -> BatchSource:
        sources.append(BatchSource(job, **options))
        sources[-1].start()
        return sources[-1]

    yield open_source
    for source in sources:
        source.close()
