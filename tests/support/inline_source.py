"""The batches of a run, decoded in the calling thread: what those of decoder processes are compared with."""

from collections.abc import Iterator

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import Part, Pending, Reader, open_reader, places, stream_columns
from rowcast.prefetcher.readers.source import Source, SourceCounters, SourceInfo, source_info
from rowcast.prefetcher.readers.workers import DecoderShare
from rowcast.protocol.batch import Scheduled
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.errors import RowcastError


class InlineStream:
    """A `BatchStream` that decodes in the calling thread, one batch per call."""

    def __init__(self, share: DecoderShare) -> None:
        self.counters = SourceCounters()
        self._share = share
        self._open: tuple[Reader, SourceInfo, Iterator[Scheduled[Pending]]] | None = None
        self._failure: RowcastError | None = None
        self._ended = self._closed = False

    def start(self) -> None:
        """Decoding starts with the first call."""

    def info(self) -> SourceInfo:
        return self._opened()[1]

    def take(self) -> Scheduled[Part] | None:
        if self._closed:
            return None
        if self._failure is not None:
            raise self._failure
        try:
            return self._next()
        except RowcastError as error:
            self._failure = error
            raise

    @property
    def ended(self) -> bool:
        return self._ended

    def close(self) -> None:
        self._closed, self._open = True, None

    def _next(self) -> Scheduled[Part] | None:
        reader, _, turns = self._opened()
        place = next(turns, None)
        self._ended = place is None
        if place is None:
            return None
        part = place.batch(self._share.rank_at(place.step))
        self.counters.batches += 1
        self.counters.invalid_ids = reader.invalid_ids
        return place.holding(part)

    def _opened(self) -> tuple[Reader, SourceInfo, Iterator[Scheduled[Pending]]]:
        if self._open is None:
            own = self._share
            reader = open_reader(own.job, own.columns)
            turns = places(own.job, reader, own.max_steps, own.start)
            self._open = reader, source_info(own.job, reader, own.max_steps, own.start), turns
        return self._open


class InlineSource(Source):
    """A `Source` that decodes in the calling thread when it is polled."""

    def __init__(
        self,
        job: Job,
        max_steps: int | None = None,
        start: Position | None = None,
        *,
        rank: Rank = UNDIVIDED,
        num_whole: int = 0,
    ) -> None:
        shares = (
            DecoderShare(
                job=job,
                columns=columns,
                max_steps=max_steps,
                start=start,
                rank=rank,
                num_whole=num_whole,
                index=0,
                num_decoders=1,
            )
            for columns in stream_columns(job)
        )
        first, *others = map(InlineStream, shares)
        super().__init__(first, others[0] if others else None)
