"""Decodes batches in prefetcher.workers processes, with the order and the bits of a single process.

    decoder 0: steps 0, 3, 6, ...  --> queue --+
    decoder 1: steps 1, 4, 7, ...  --> queue --+--> take: step 0 of the first, step 1 of the second, ...
    decoder 2: steps 2, 5, 8, ...  --> queue --+

Every decoder iterates the whole schedule and skips the others' batches. So an error appears in its batch's turn, and
the end in the turn of the missing batch.
"""

import atexit
import time
from collections.abc import Callable

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.batch_parts import Columns
from rowcast.prefetcher.readers.decoder import Decoder, DecoderShare, Delivery, EndOfBatches
from rowcast.prefetcher.readers.reader import can_share, stream_columns
from rowcast.prefetcher.readers.source import Arrival, Source, SourceCounters, SourceInfo
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.timeline import Timeline

NUM_AHEAD = 8  # batches of a stream that all decoders together decode ahead
LEAST_AHEAD = 2  # per decoder, so that it decodes one batch while another waits


class DecodedStream:
    """A `BatchStream` of `num_decoders` processes."""

    def __init__(
        self,
        job: Job,
        columns: Columns,
        max_steps: int | None,
        start: Position | None,
        *,
        num_decoders: int,
        num_ahead: int,
        on_arrival: Callable[[], None],
        timeline: Timeline | None,
    ) -> None:
        self.counters = SourceCounters()
        self._timeline, self._columns = timeline, columns
        self._decoded_s: list[float | None] = [None] * num_decoders  # when each decoder had its last batch
        ahead = max(-(-num_ahead // num_decoders), min(LEAST_AHEAD, num_ahead))
        shares = [
            DecoderShare(
                job=job, columns=columns, max_steps=max_steps, start=start, index=index, num_decoders=num_decoders
            )
            for index in range(num_decoders)
        ]
        self._decoders = [Decoder(share, ahead, on_arrival) for share in shares]
        self._next_step = (start or Position()).step
        self._invalid_ids, self._blocked_s = [0] * num_decoders, [0.0] * num_decoders  # of each decoder
        self._ended = False
        self._starved_since: float | None = None

    def start(self) -> None:
        atexit.register(self.close)  # before multiprocessing's, which would wait for children that ignore SIGTERM
        for decoder in self._decoders:
            decoder.start()

    @property
    def pids(self) -> list[int]:
        return [decoder.pid for decoder in self._decoders if decoder.pid is not None]

    def info(self) -> SourceInfo:
        return self._decoders[0].info()

    def take(self) -> Arrival | None:
        index = self._next_step % len(self._decoders)
        delivery = self._decoders[index].take()
        self.counters.queue_depth = sum(decoder.num_waiting for decoder in self._decoders)
        if delivery is None:
            self._starved_since = self._starved_since or time.monotonic()
            return None
        self._end_starvation()
        if isinstance(delivery, EndOfBatches):
            self._ended = True
            return None
        point = delivery.point
        assert point.step == self._next_step, (
            f"decoder {index} gave step {point.step}, but step {self._next_step} follows"
        )
        self._next_step += 1
        self._show(index, delivery)
        self._invalid_ids[index], self._blocked_s[index] = delivery.invalid_ids, delivery.blocked_s
        self.counters.batches += 1
        self.counters.invalid_ids, self.counters.decoder_blocked_s = sum(self._invalid_ids), sum(self._blocked_s)
        return point, delivery.part

    @property
    def ended(self) -> bool:
        return self._ended

    def close(self) -> None:
        atexit.unregister(self.close)
        for decoder in self._decoders:
            decoder.stop()
        for decoder in self._decoders:
            decoder.close()

    def _show(self, index: int, delivery: Delivery) -> None:
        """Records a batch's decoding on the timeline, and before it the child's wait to send the previous one."""
        if self._timeline is None:
            return
        track, before_s = f"decoder {index}" + (" (dense)" if self._columns == "dense" else ""), self._decoded_s[index]
        if before_s is not None:
            blocked_s = delivery.blocked_s - self._blocked_s[index]
            self._timeline.add("wait", "queue", blocked_s, ended_s=before_s + blocked_s, track=track)
        self._timeline.add(
            "work", "decode", delivery.decode_s, delivery.point.step, ended_s=delivery.decoded_s, track=track
        )
        self._decoded_s[index] = delivery.decoded_s

    def _end_starvation(self) -> None:
        if self._starved_since is not None:
            self.counters.planner_blocked_s += time.monotonic() - self._starved_since
            self._starved_since = None


class WorkerSource(Source):
    """A `Source` that decodes in child processes, at most about `num_ahead` batches ahead of the polls."""

    def __init__(
        self,
        job: Job,
        max_steps: int | None = None,
        start: Position | None = None,
        *,
        num_ahead: int = NUM_AHEAD,
        on_arrival: Callable[[], None] = lambda: None,
        timeline: Timeline | None = None,
    ) -> None:
        """The receivers' threads call `on_arrival` whenever a poll may return something new: a batch, the end, an
        error."""
        self._job = job
        num_decoders = job.prefetcher.workers if can_share(job) else 1
        self._decoded: list[DecodedStream] = []
        for columns in stream_columns(job):
            stream = DecodedStream(
                job,
                columns,
                max_steps,
                start,
                num_decoders=1 if columns == "dense" else num_decoders,  # dense features are little work, not far ahead
                num_ahead=num_ahead,
                on_arrival=on_arrival,
                timeline=timeline,
            )
            self._decoded.append(stream)
        super().__init__(self._decoded[0], self._decoded[1] if len(self._decoded) > 1 else None)

    def start(self) -> None:
        if self._job.prefetcher.workers > 1 and not can_share(self._job):
            get_logger().warning(
                "one worker decodes: batches of a data set of your own are made one after another",
                workers=self._job.prefetcher.workers,
                format=self._job.data.format,
            )
        super().start()

    @property
    def pids(self) -> list[int]:
        return [pid for stream in self._decoded for pid in stream.pids]
