"""The `rowcast` command: from a file of samples to a trained model and its predictions, on one host."""

from rowcast.command_line import Subcommand, command_line
from rowcast.runtime.process import run_until_stopped

CHECKPOINTS = "rowcast.prefetcher.run.commands"
ANALYSIS = "rowcast.analysis"

SUBCOMMANDS = {
    "new": Subcommand(
        f"{ANALYSIS}.new.new:new",
        "Look at a table of samples and write a job file for it to stdout: rowcast new --data clicks.csv > job.toml",
    ),
    "check": Subcommand(
        f"{ANALYSIS}.check.check:check",
        "Check a job file against its data and this machine. Exit code 2 if a run would fail.",
    ),
    "train": Subcommand(
        "rowcast.deploy.local:train",
        "Train: runs the prefetcher and the trainer of a job on this host. A run that was stopped or killed continues "
        "from its newest checkpoint.",
        run_until_stopped,
    ),
    "prepare": Subcommand(
        "rowcast.deploy.prepare:prepare",
        "Compile every loop that a job can need, so that no start on this kind of processor has to.",
    ),
    "score": Subcommand(
        "rowcast.deploy.score:score",
        "Write a trained model's logit, or with --probability its probability, for each row of a file, in the file's "
        "order: --run runs/clicks --data rows.csv --out scores.parquet",
        run_until_stopped,
    ),
    "export": Subcommand(
        f"{CHECKPOINTS}:export",
        "Write a checkpoint of a run, by default the newest valid one, as one safetensors file: tables, row "
        "state, dense weights.",
    ),
    "overlay": Subcommand(
        f"{CHECKPOINTS}:overlay",
        "Write the rows that a script has changed in tables of a released model, or apply such a file to the model: "
        "overlay OVERLAY --apply FOLDER --out NEW",
    ),
    "import": Subcommand(
        f"{CHECKPOINTS}:import_",
        "Make a run directory whose run starts from another run's model and optimizer state, or from the rows and "
        "dense weights of a file.",
    ),
    "forget": Subcommand(
        f"{CHECKPOINTS}:forget",
        "Give rows that a stopped run has not trained for long their first values, so that they take no room: "
        "--run runs/clicks --untrained-for 100000",
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
    "advise": Subcommand(
        f"{ANALYSIS}.advise.advise:advise",
        "Tell how much cache a job needs, from its data: a curve, the memory it takes, and the sections to paste.",
    ),
    "simulate": Subcommand(
        f"{ANALYSIS}.simulate.command:simulate",
        "Tell what a run would move, at other settings too, by planning alone: no tables, no trainer. Lists multiply.",
    ),
    "estimate": Subcommand(
        f"{ANALYSIS}.estimate.estimate:estimate",
        "Estimate how long a step takes and what bounds it: before a run, or from a recorded one.",
    ),
    "timeline": Subcommand(
        f"{ANALYSIS}.timeline:timeline",
        "Merge what `rowcast train --timeline` recorded into one file for Perfetto or chrome://tracing.",
    ),
}
app = command_line(
    "", "Train recommendation models whose embedding tables do not fit on the device.", SUBCOMMANDS, SUBCOMMANDS
)
