"""Implements `rowcast publish`."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from typer import Option

from rowcast.job.units import parse_seconds
from rowcast.runtime.command_options import LogJson, LogLevel, RunFolder
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import Signals
from rowcast.runtime.telemetry.logs import get_logger, setup_logging
from rowcast.runtime.telemetry.metrics import Health, Sample, families
from rowcast.runtime.telemetry.server import TelemetryServer
from rowcast.serving.publisher import Overtaken, Publisher
from rowcast.serving.row_layout import DTYPES
from rowcast.serving.version_file import VersionFile, version_name


class PublishCollector(Collector):
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def collect(self) -> Iterator[Family]:
        return families("publisher", self._samples())

    def _samples(self) -> Iterator[Sample]:
        own = self._publisher
        yield "rowcast_publish_lag_seconds", (), time.time() - own.behind_since if own.behind_since else 0.0
        yield "rowcast_serving_delay_seconds", (), time.time() - own.served_since if own.served_since else 0.0
        for kind, count in own.counts.items():
            yield "rowcast_publish_versions_total", (kind,), count
        yield "rowcast_publish_rows_total", (), own.rows
        yield "rowcast_publish_bytes_total", (), own.nbytes


def publish(
    run_dir: RunFolder,
    to: Annotated[Path, Option(help="The folder of the versions; made if it does not exist.", metavar="FOLDER")],
    dtype: Annotated[str, Option(help="fp32, fp16 or int8: of the rows in the versions.")] = "fp32",
    every: Annotated[
        str | None, Option(help="Go on, and look for a new checkpoint at this interval.", metavar="60s")
    ] = None,
    keep: Annotated[int, Option(min=1, help="How many whole versions stay, each with the changed ones after it.")] = 3,
    check: Annotated[
        bool, Option("--check", help="First read all versions; if the newest is damaged, write a whole one.")
    ] = False,
    fresh: Annotated[bool, Option("--fresh", help="Go on in a folder that holds versions of another run.")] = False,
    metrics: Annotated[str, Option(help="Where --every serves metrics.", metavar="HOST:PORT")] = "127.0.0.1:9399",
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> Callable[[Signals], int]:
    def main(signals: Signals) -> int:
        setup_logging("publisher", log_level, log_json or None)
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
        interval_s = None if every is None else seconds_of(every)
        publisher = Publisher(run_dir, to, dtype, keep)
        with ExitStack() as stack:
            stack.enter_context(publisher.lock())
            if check:
                publisher.check()
            if interval_s is None:
                return publish_once(publisher, run_dir, fresh=fresh)
            registry, health = CollectorRegistry(), Health(state="running")
            registry.register(PublishCollector(publisher))
            stack.enter_context(TelemetryServer("publisher", metrics, registry, health))
            follow(publisher, interval_s, signals, fresh=fresh)
        return 0

    return main


def seconds_of(every: str) -> float:
    try:
        seconds = parse_seconds(every)
    except ValueError as error:
        raise ConfigError(f"--every {error}") from None
    if seconds <= 0:
        raise ConfigError(f"--every {every} must be more than 0")
    return seconds


def publish_once(publisher: Publisher, run_dir: Path, *, fresh: bool) -> int:
    version = publisher.publish(fresh=fresh)
    if version is not None:
        tell(version)
    elif publisher.has_checkpoint:
        get_logger().info("the newest checkpoint is published already")
    else:
        change = "wait for one, or add --every 60s, which waits" if run_dir.is_dir() else "there is no such folder"
        raise ConfigError(f"--run {run_dir} holds no checkpoint yet; {change}")
    return 0


def follow(publisher: Publisher, interval_s: float, signals: Signals, *, fresh: bool) -> None:
    """Publishes until a signal arrives."""
    while signals.stop_reason is None:
        began_s = time.monotonic()
        try:
            version = publisher.publish(fresh=fresh)
            if version is not None:
                tell(version)
                fresh = False
        except Overtaken as error:
            get_logger().warning("nothing is published; it tries again at the next interval", because=str(error))
        signals.bell.wait(max(0.0, interval_s - (time.monotonic() - began_s)))
        signals.bell.hush()


def tell(version: VersionFile) -> None:
    get_logger().info(
        "published",
        version=version_name(version.number),
        kind=version.kind,
        **({"because": version.reason} if version.reason else {}),
        after_train_steps=version.position.train_step,
        rows=version.num_rows,
        bytes=version.nbytes,
    )
