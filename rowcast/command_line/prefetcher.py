"""The `prefetcher` command."""

from rowcast.command_line import Subcommand, command_line
from rowcast.command_line.rowcast import SUBCOMMANDS as ROWCAST
from rowcast.runtime.process import run_until_stopped

SHOWN = {
    "run": Subcommand(
        "rowcast.prefetcher.run.commands:run",
        "Serve one training run. Start `trainer run` with the same job file, before or after. A run that was "
        "stopped or killed continues from its newest checkpoint.",
        run_until_stopped,
    ),
    "keys": Subcommand(
        "rowcast.prefetcher.run.make_keys:keys", "Make the keys that a run over tcp needs, or check them."
    ),
}
SUBCOMMANDS = SHOWN | {name: own for name, own in ROWCAST.items() if name not in ("train", "score")}  # their old names
app = command_line(
    "prefetcher",
    "The CPU side of rowcast: reads the coming batches, plans, and streams rows to the trainer.",
    SUBCOMMANDS,
    SHOWN,
)
