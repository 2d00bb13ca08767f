"""The command's own half of `prefetcher advise`: what was typed becomes a request, what was found becomes output."""

import sys
from dataclasses import dataclass

import msgspec

from rowcast.analysis.advise.advise import Request, advise_job
from rowcast.analysis.advise.output import print_advice
from rowcast.analysis.advise.reading import Sample
from rowcast.analysis.machine_facts import free_memory
from rowcast.analysis.progress import ProgressBar
from rowcast.job.schema import Job
from rowcast.runtime.telemetry.format_numbers import stdout_console

USUAL_SHARE = 0.05
MEMORY_SHARE = 0.5  # of the free memory, for the followed rows


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviseOptions:
    """As typed."""

    sample: float | None = None
    samples: int | None = None
    max_steps: int | None = None
    step_ms: float | None = None
    link_gbs: float | None = None
    gather_gbs: float | None = None
    json: bool = False


def run_advise(job: Job, options: AdviseOptions) -> None:
    """Raises ConfigError and DataError."""
    share = options.sample
    if share is None:
        share = USUAL_SHARE if options.samples is None else 1.0
    with ProgressBar() as progress:
        request = Request(
            sample=Sample(share=share, samples=options.samples),
            max_steps=options.max_steps,
            step_ms=options.step_ms,
            link_gbs=options.link_gbs,
            gather_gbs=options.gather_gbs,
            memory_bytes=MEMORY_SHARE * free_memory(),
            progress=progress,
        )
        advice = advise_job(job, request)
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(advice) + b"\n")
        sys.stdout.buffer.flush()
    else:
        print_advice(advice, stdout_console())
