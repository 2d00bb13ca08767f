"""Implements `prefetcher estimate`: chooses its mode by the options."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from rowcast.analysis.estimate.advised import estimate_advised
from rowcast.analysis.estimate.estimate import compare, estimate_jobs, print_compared, print_estimates
from rowcast.analysis.estimate.walk import walk_recorded
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.runtime.command_options import Config, Overrides, options_of
from rowcast.runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateOptions:
    rates: Annotated[
        Sequence[Path], Option(help="A device, from `trainer rates`. Repeatable.", metavar="FILE", show_default=False)
    ] = ()
    vary: Annotated[
        Sequence[str], Option(help="A setting to try, as KEY=VALUE. Repeatable; all combinations are tried.")
    ] = ()
    advised: Annotated[
        bool, Option("--advised", help="Also estimate the sections that `advise` recommends for that device.")
    ] = False
    run_dir: Annotated[
        Path | None,
        Option("--run", help="Instead of --rates: a run with --timeline.", metavar="DIR", show_default=False),
    ] = None
    compare: Annotated[
        Path | None,
        Option(
            help="With --rates: a run of this job with --timeline, compared task by task.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None
    changes: Annotated[
        Sequence[str], Option("--change", help="With --run: how long a task would take, such as step=0.1. Repeatable.")
    ] = ()
    max_steps: Annotated[int | None, Option(min=0, help="Train steps; as the run had it.", show_default=False)] = None

    def __post_init__(self) -> None:
        several = self.vary or len(self.rates) > 1
        if (self.run_dir is None) == (not self.rates):
            raise ConfigError("give either --rates FILE, from `trainer rates`, or --run DIR, a run with --timeline")
        if self.run_dir is not None and (self.vary or self.advised or self.compare is not None):
            raise ConfigError("--vary, --advised and --compare need --rates; with --run, --change says what differs")
        if (several and (self.advised or self.compare is not None)) or (self.advised and self.compare is not None):
            raise ConfigError("--compare and --advised take the job as it is, one --rates, and not each other")
        if self.rates and self.changes:
            raise ConfigError("--change needs --run; with --rates, --vary says what would be different")


@options_of(EstimateOptions)
def estimate(config: Config, overrides: Overrides = None, *, options: EstimateOptions) -> None:
    """Raises ConfigError and DataError."""

    def load(settings: Sequence[str]) -> Job:
        return load_job(config, (*(overrides or ()), *settings))

    max_steps = options.max_steps
    if options.run_dir is not None:
        walk_recorded(load(()), options.run_dir, options.changes, max_steps=max_steps)
    elif options.compare is not None:
        print_compared(compare(load(()), options.rates[0], options.compare, max_steps=max_steps))
    else:
        found = estimate_jobs(load, options.rates, options.vary, max_steps=max_steps)
        if options.advised:
            found.append(estimate_advised(load(()), options.rates[0], 1e3 * found[0].compute_s, max_steps=max_steps))
        print_estimates(found)
