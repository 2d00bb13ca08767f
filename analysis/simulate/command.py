"""`prefetcher simulate`."""

from rowcast.analysis.simulate.ranks.command import run_simulate_ranks
from rowcast.analysis.simulate.simulate import SimulateOptions, run_simulate
from rowcast.job.file import load_job
from rowcast.runtime.command_options import Config, Overrides, options_of


@options_of(SimulateOptions)
def simulate(config: Config, overrides: Overrides = None, *, options: SimulateOptions) -> None:
    command = run_simulate_ranks if options.ranks else run_simulate
    command(load_job(config, tuple(overrides or ())), options)
