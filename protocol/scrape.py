"""Reads the counters of a process for a scrape, and serves them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rowcast.job.schema import Metrics
from rowcast.protocol.counters import Counters, Queue
from rowcast.runtime.telemetry.format_numbers import LOST
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.metrics import RANK, Health, Process, Sample, State, families, samples_of
from rowcast.runtime.telemetry.server import TelemetryServer


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges(Generic[Queue]):
    """Values at one moment. The defaults hold while there is no engine."""

    queue_depths: Mapping[Queue, int] = field(default_factory=dict)  # empty: each is 0
    ring_used_bytes: int = 0  # of the ring that this process writes
    ring_size_bytes: int = 0
    frames_refused: int = 0


AnyCounters = TypeVar("AnyCounters", bound=Counters[Any, Any, Any])
AnyGauges = TypeVar("AnyGauges", bound=Gauges[Any])


class CountersCollector(Collector, Generic[AnyCounters, AnyGauges]):
    """Base of both processes' collectors: reads counters and gauges at scrape time, on the scrape's thread."""

    process: Process
    ring_direction: str

    def __init__(
        self, counters: AnyCounters, gauges: Callable[[], AnyGauges], build: Mapping[str, str], health: Health
    ) -> None:
        """The scrape's thread calls `gauges`, which must return at once and take no lock that a working stage holds.
        `build` comes from `build_info`."""
        self.health = health
        self.rank = counters.rank
        self._counters, self._gauges = counters, gauges
        self._build = ("rowcast_build_info", tuple(build.values()), 1.0)

    def samples(self) -> Iterable[Sample]:
        counters, gauges = self._counters, self._gauges()
        yield from samples_of(counters)
        yield from samples_of(gauges)
        yield "rowcast_plan_bytes_total", ("to_device",), counters.plan_bytes_to_device
        yield "rowcast_plan_bytes_total", ("from_device",), 0  # only the prefetcher makes plans
        for name, group in counters.groups.items():
            yield from samples_of(group, name)
            for direction in ("to_device", "from_device"):
                yield "rowcast_row_bytes_total", (name, direction), getattr(group, f"row_bytes_{direction}")
            for direction in ("sent", "received"):
                yield "rowcast_exchange_rows_total", (name, direction), getattr(group, f"rows_{direction}")
                yield "rowcast_exchange_bytes_total", (name, direction), getattr(group, f"bytes_{direction}")
        for reason, seconds in counters.stalls.items():
            yield "rowcast_stall_seconds_total", (reason,), seconds
        for phase, seconds in counters.phases.items():
            yield "rowcast_phase_seconds_total", (phase,), seconds
        for name, queue in counters.queues.items():
            yield "rowcast_queue_depth", (name,), gauges.queue_depths.get(name, 0)
            for side, seconds in queue.items():
                yield "rowcast_queue_blocked_seconds_total", (name, side), seconds
        yield "rowcast_ring_used_bytes", (self.ring_direction,), gauges.ring_used_bytes
        yield "rowcast_ring_size_bytes", (self.ring_direction,), gauges.ring_size_bytes
        yield from self.own_samples(counters, gauges)

    def own_samples(self, counters: AnyCounters, gauges: AnyGauges) -> Iterator[Sample]:
        """What this process alone has and keeps in no field of its name."""
        raise NotImplementedError

    def describe(self) -> Iterator[Family]:
        """Returns the families without samples, so that registering reads no counter."""
        return families(self.process, (), self.rank)

    def collect(self) -> Iterator[Family]:
        return families(self.process, (self._build, *self._state(), *self.samples()), self.rank)

    def _state(self) -> Iterator[Sample]:
        now = self.health.state
        for state in get_args(State):
            yield "rowcast_state", (state,), state == now
        yield "rowcast_lines_lost_total", (), LOST.lines


class OfRank(Collector):
    """Adds the rank label to the `process_` metrics (memory, processor time, open files)."""

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Family]:
        for family in self._process.collect():
            family.samples = [sample._replace(labels={RANK: self._rank, **sample.labels}) for sample in family.samples]
            yield family


def new_registry(collector: CountersCollector[Any, Any]) -> CollectorRegistry:
    """Returns the process's only registry."""
    registry = CollectorRegistry()
    registry.register(OfRank(collector.rank))
    registry.register(collector)
    return registry


def serve_metrics(stack: ExitStack, collector: CountersCollector[Any, Any], settings: Metrics) -> str:
    """Serves the process's metrics and health until `stack` is closed; returns the bound "host:port".

    Raises ConfigError if the address cannot be bound."""
    configured, certificate = getattr(settings, collector.process), (settings.certfile, settings.keyfile)
    server = TelemetryServer(collector.process, configured, new_registry(collector), collector.health, certificate)
    stack.enter_context(server)
    get_logger().info("serving metrics", address=server.address)
    _, _, port = configured.removesuffix("+").rpartition(":")
    if int(port) and not server.address.endswith(f":{port}"):
        get_logger().warning(f"port {port} is in use; metrics and health have a free one", address=server.address)
    return server.address
