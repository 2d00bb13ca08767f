"""The `trainer` command."""

from rowcast.command_line import Subcommand, command_line
from rowcast.trainer.run.command import run_until_left

SUBCOMMANDS = {
    "run": Subcommand(
        "rowcast.trainer.run.command:run",
        "Train. Start `prefetcher run` with the same job file, before or after; it decides how long the run is.",
        run_until_left,
    ),
    "rates": Subcommand(
        "rowcast.analysis.estimate.measure:rates",
        "Measure this device for `rowcast estimate --rates`: kernels, copies, and the host's share of a step.",
    ),
    "eval": Subcommand(
        "rowcast.trainer.run.command:evaluate",
        "Evaluate a checkpoint of a run on its evaluation batches.\n\n"
        "Start `prefetcher run --eval` before or after; it chooses the checkpoint.",
        run_until_left,
    ),
}
app = command_line(
    "trainer",
    "The device side of rowcast: trains the model on the steps that the prefetcher sends.",
    SUBCOMMANDS,
    SUBCOMMANDS,
)
