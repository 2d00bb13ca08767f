"""`prefetcher profile`."""

from rowcast.analysis.profile.log_facts import log_facts
from rowcast.analysis.profile.log_show import plot_log, print_log
from rowcast.analysis.profile.profile import MEMORY_SHARE, ProfileOptions, run_profile
from rowcast.analysis.progress import ProgressBar
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.runtime.command_options import Config, Overrides, options_of
from rowcast.runtime.drawing import check_plot
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import free_memory
from rowcast.runtime.telemetry.format_numbers import print_json, stdout_console

STEPS = 1000


@options_of(ProfileOptions)
def profile(config: Config, overrides: Overrides = None, *, options: ProfileOptions) -> None:
    command = run_profile if options.plot is None else run_log
    check_options(options)
    command(load_job(config, tuple(overrides or ())), options)


def check_options(options: ProfileOptions) -> None:
    """Raises ConfigError for an option of the other kind of profile."""
    of_hot_rows = {
        "--sample": options.sample, "--samples": options.samples, "--budget": options.budgets, "--out": options.out,
    }  # fmt: skip
    of_log = {"--max-steps": options.max_steps}
    others, why = (of_log, "needs --plot; give both") if options.plot is None else (of_hot_rows, "is about hot rows")
    for name, value in others.items():
        if value:
            raise ConfigError(f"{name} {why}" if options.plot is None else f"{name} {why}; omit it, or --plot")


def run_log(job: Job, options: ProfileOptions) -> None:
    assert options.plot is not None
    check_plot(options.plot)
    with ProgressBar() as progress:
        facts = log_facts(job, options.max_steps or STEPS, MEMORY_SHARE * free_memory(), progress)
    plot_log(facts, options.plot)
    if options.json:
        print_json(facts)
        return
    print_log(facts, stdout_console())
