"""The `prefetcher` command."""

from rowcast.command_line import Subcommand, command_line
from rowcast.runtime.process import run_until_stopped

CHECKPOINTS = "rowcast.prefetcher.checkpoints.commands"
ANALYSIS = "rowcast.analysis"

SUBCOMMANDS = {
    "run": Subcommand(
        "rowcast.prefetcher.run.command:run",
        "Serve one training run. Start `trainer run` with the same job file, before or after. A run that was "
        "stopped or killed continues from its newest checkpoint.",
        run_until_stopped,
    ),
    "new": Subcommand(
        f"{ANALYSIS}.new.new:new",
        "Look at a table of samples and write a job file for it to stdout: rowcast new --data clicks.csv > job.toml",
    ),
    "simulate": Subcommand(
        f"{ANALYSIS}.simulate.command:simulate",
        "Tell what a run would move, at other settings too, by planning alone: no tables, no trainer. Lists multiply.",
    ),
    "advise": Subcommand(
        f"{ANALYSIS}.advise.advise:advise",
        "Tell how much cache a job needs, from its data: a curve, the memory it takes, and the sections to paste.",
    ),
    "profile": Subcommand(
        f"{ANALYSIS}.profile.profile:profile",
        "Find the rows that are looked up most, from a sample, and what keeping them on the device would cover.",
    ),
    "check": Subcommand(
        f"{ANALYSIS}.check.check:check",
        "Check a job file against its data and this machine. Exit code 2 if a run would fail.",
    ),
    "timeline": Subcommand(
        f"{ANALYSIS}.timeline.timeline:timeline",
        "Merge what `prefetcher run --timeline` and `trainer run --timeline` recorded into one file for Perfetto "
        "or chrome://tracing.",
    ),
    "estimate": Subcommand(
        f"{ANALYSIS}.estimate.estimate:estimate",
        "Estimate how long a step takes and what bounds it: before a run, or from a recorded one.",
    ),
    "export": Subcommand(
        f"{CHECKPOINTS}:export",
        "Write a checkpoint of a run, by default the newest valid one, as one safetensors file: tables, row "
        "state, dense weights.",
    ),
    "import": Subcommand(
        f"{CHECKPOINTS}:import_",
        "Make a run directory whose run starts from another run's model and optimizer state, or from the rows and "
        "dense weights of a file.",
    ),
    "verify": Subcommand(
        f"{CHECKPOINTS}:verify",
        "Read every byte of a run's checkpoints and tell which are whole. Exit code 4 if one is damaged.",
    ),
    "publish": Subcommand(
        "rowcast.serving.command:publish",
        "Write the newest checkpoint of a run as a version for serving: what changed since the version before, or "
        "everything. With --every, follow the run.",
        run_until_stopped,
    ),
    "keys": Subcommand(
        "rowcast.prefetcher.run.make_keys:keys", "Make the keys that a run over tcp needs, or check them."
    ),
}
app = command_line(
    "prefetcher",
    "The CPU side of rowcast: reads the coming batches, plans, and streams rows to the trainer.",
    SUBCOMMANDS,
)
