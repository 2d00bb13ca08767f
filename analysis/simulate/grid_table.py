"""The results of a simulation for a person."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rowcast.analysis.simulate.results import Simulation

MIB = 2**20
FILE_WIDTH = 120  # where no terminal says how wide it is
HEADINGS = [
    "capacity\nin rows",
    "policy",
    "horizon",
    "rows\nfetched",
    "written\nback",
    "MiB\nin",
    "MiB\nout",
    "hit\nratio",
    "to the\nbound",
]


def print_results(results: Sequence[Simulation], console: Console | None = None) -> None:
    """One table, on stdout unless `console` is given; what could not run is said below it."""
    target = console or Console(force_terminal=None if sys.stdout.isatty() else False)
    if not target.is_terminal:
        target.width = FILE_WIDTH
    simulated = [result for result in results if result.skipped is None]
    with target.capture() as text:
        if simulated:
            target.print(results_table(simulated))
            target.print()
        for sentence in facts(results):
            target.print(sentence, soft_wrap=True, markup=False, highlight=False)
    target.file.write("\n".join([*(line.rstrip() for line in text.get().splitlines()), ""]))


def results_table(results: Sequence[Simulation]) -> Table:
    """Rows and MiB are those of a step. Batch size and order are shown where there are several."""
    sizes, orders = (len({getattr(result, name) for result in results}) > 1 for name in ("batch_size", "shuffle"))
    # 80 columns hold it, 92 both
    table = Table(box=None, padding=(0, 1 if sizes or orders else 2, 0, 0), header_style="bold")
    for name in [*(["batch\nsize"] if sizes else []), *(["shuffle"] if orders else []), *HEADINGS]:
        table.add_column(name, justify="left" if name in ("policy", "shuffle") else "right", no_wrap=True)
    for result in results:
        varied = [*([f"{result.batch_size:,}"] if sizes else []), *([result.shuffle or ""] if orders else [])]
        table.add_row(*varied, *cells(result))
    return table


def cells(result: Simulation) -> list[str]:
    num_steps = max(1, (result.steps or 0) + (result.eval_steps or 0))
    return [
        f"{result.capacity_rows or 0:,}",
        result.policy,
        "" if result.horizon is None else str(result.horizon),
        f"{(result.rows_fetched or 0) / num_steps:,.0f}",
        f"{(result.rows_written_back or 0) / num_steps:,.0f}",
        mib((result.bytes_fetched or 0) / num_steps),
        mib((result.bytes_written_back or 0) / num_steps),
        "" if result.hit_ratio is None else f"{100 * result.hit_ratio:.1f} %",
        "" if result.ratio_to_bound is None else f"{result.ratio_to_bound:.3f}",
    ]


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}" if nbytes > MIB / 10 else f"{nbytes / MIB:.2g}"


def facts(results: Sequence[Simulation]) -> list[str]:
    """What the data is, and why some settings did not run; each sentence once."""
    read = {
        f"Batches of {batches_of(result)}: {result.steps:,} train and {result.eval_steps:,} evaluation steps, "
        f"{result.lookups:,} look-ups of {result.unique_rows:,} rows.": None
        for result in results
        if result.steps is not None
    }
    return [*(["Rows and MiB are those of a step."] if read else []), *read, *refusals(results)]


def batches_of(result: Simulation) -> str:
    return f"{result.batch_size:,}" + ("" if result.shuffle in (None, "none") else f", shuffle {result.shuffle}")


def refusals(results: Sequence[Simulation]) -> list[str]:
    policies: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.skipped is not None:
            where = f"{result.capacity} with batches of {batches_of(result)}"
            policies.setdefault((where, result.skipped), []).append(result.policy)
    return [
        f"Not simulated: {', '.join(dict.fromkeys(own))} at {where}: {why}." for (where, why), own in policies.items()
    ]
