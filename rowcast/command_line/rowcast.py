"""The `rowcast` command: from a file of samples to a trained model and its predictions, on one host."""

from rowcast.command_line import Subcommand, command_line
from rowcast.command_line.prefetcher import SUBCOMMANDS as PREFETCHER
from rowcast.runtime.process import run_until_stopped

SUBCOMMANDS = {
    "new": PREFETCHER["new"],
    "check": PREFETCHER["check"],
    "train": Subcommand(
        "rowcast.deploy.local:train",
        "Train: runs the prefetcher and the trainer of a job on this host. A run that was stopped or killed continues "
        "from its newest checkpoint.",
        run_until_stopped,
    ),
    "score": Subcommand(
        "rowcast.deploy.score:score",
        "Write a trained model's logit, or with --probability its probability, for each row of a file, in the file's "
        "order: --run runs/clicks --data rows.csv --out scores.parquet",
        run_until_stopped,
    ),
}
app = command_line("", "Train recommendation models whose embedding tables do not fit on the device.", SUBCOMMANDS)
