"""The command's own half of `prefetcher profile`: what was typed becomes a request, what was found becomes output and a pin file."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from rowcast.analysis.machine_facts import free_memory
from rowcast.analysis.profile.output import print_profile
from rowcast.analysis.profile.popularity import I64
from rowcast.analysis.profile.profile import DEFAULT_AMOUNT, Profile, Request, profile_job
from rowcast.analysis.sample import Amount
from rowcast.job.schema import Job
from rowcast.prefetcher.planner.pin_files import save_pins
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import stdout_console

MEMORY_SHARE = 0.5  # of the free memory, for counting


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """As typed."""

    sample: float | None = None
    samples: int | None = None
    budgets: Sequence[str] = ()
    confidence: float = 0.99
    out: Path | None = None
    json: bool = False


def run_profile(job: Job, options: ProfileOptions) -> None:
    """Raises ConfigError and DataError."""
    with Console(stderr=True).status("reading") as status:
        request = Request(
            amount=amount_of(options),
            budgets=tuple(options.budgets),
            confidence=options.confidence,
            memory_bytes=MEMORY_SHARE * free_memory(),
            progress=status.update,
        )
        profile, rows = profile_job(job, request)
    if options.out is not None:
        write_pins(options.out, job, profile, rows)
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(profile) + b"\n")
        sys.stdout.buffer.flush()
        return
    console = stdout_console()
    print_profile(profile, console)
    if options.out is not None:
        console.print(
            f'{options.out}: {profile.budgets[-1].hot_rows:,} rows; set cache.pin = "{options.out}"',
            markup=False,
            soft_wrap=True,
        )


def amount_of(options: ProfileOptions) -> Amount:
    if options.sample is not None and options.samples is not None:
        raise ConfigError("--sample and --samples are both given; remove one: either says how much to read")
    if options.sample is None and options.samples is None:
        return DEFAULT_AMOUNT
    return Amount(share=options.sample, samples=options.samples)


def write_pins(path: Path, job: Job, profile: Profile, rows: Mapping[str, I64]) -> None:
    budget = profile.budgets[-1]
    facts = {
        "made_by": "prefetcher profile",
        "job": job.job.name,
        "budget": budget.budget,
        "picked_samples": str(profile.picked_samples),
        "judged_samples": str(profile.judged_samples),
        "confidence": str(profile.confidence),
        "accesses": msgspec.json.encode(budget.shares.accesses).decode(),
        "inputs": msgspec.json.encode(budget.shares.inputs).decode(),
    }
    save_pins(path, rows, facts)
