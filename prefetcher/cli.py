"""The `prefetcher` command."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.job.file import load_job, load_own_job
from rowcast.job.schema import Job
from rowcast.runtime.command import run_command
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import Signals
from rowcast.runtime.telemetry.logs import get_logger, setup_logging

app = typer.Typer(
    help="The CPU side of rowcast: reads the coming batches, plans, and streams rows to the trainer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Option("--config", help="The job file.", metavar="job.toml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: section.key=value. Repeatable.")]
SaveTrace = Annotated[
    Path | None, typer.Option("--save-trace", help="Save ids and plans for `simulate --trace`.", metavar="FILE")
]
RunFolder = Annotated[Path, typer.Option("--run", help="The run directory.", metavar="DIR")]
CheckpointName = Annotated[
    str | None, typer.Option("--checkpoint", help="Which, such as step-000000000100.", show_default=False)
]
DEFAULT_VERIFY_SHARE = 0.05
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")]


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=0, help="End the run after this number of train steps.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin a new run; its first checkpoint replaces those of an earlier one.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Begin a new run with the model of another run, or of an exported file.", metavar="RUN|FILE"
        ),
    ] = None,
    save_trace: SaveTrace = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Record a timeline for `prefetcher timeline`.")] = False,
    evaluate: Annotated[
        bool, typer.Option("--eval", help="Evaluate a checkpoint, with `trainer eval`; train nothing.")
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="With --eval: which, such as step-000000000100.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Follow rows by checksum: end the run if one is stale, torn or lost.")
    ] = False,
    verify_share: Annotated[
        float | None,
        typer.Option(
            "--verify-share",
            min=0,
            max=1,
            help="The share of rows to --verify; 1: all.",
            show_default=str(DEFAULT_VERIFY_SHARE),
        ),
    ] = None,
    unfinished_code: Annotated[
        int,
        typer.Option(
            "--unfinished-code", min=0, max=125, help="Exit with this code if the run was stopped before its end."
        ),
    ] = 0,
    rates: Annotated[
        Path | None,
        typer.Option("--rates", help="Foretell the pace first, with a file of `trainer rates`.", metavar="FILE"),
    ] = None,
    host: Annotated[
        int, typer.Option("--host", min=0, help="Several ranks on several hosts: which host this is, from 0.")
    ] = 0,
    rank: Annotated[int | None, typer.Option("--rank", min=0, hidden=True)] = None,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    """Serve one training run. Start `trainer run` with the same job file, before or after. A run that was stopped or
    killed continues from its newest checkpoint."""

    def main() -> int:
        setup_logging("prefetcher", log_level, log_json or None, rank=rank)
        job = load_own_job("prefetcher", config, tuple(overrides or ()))
        prediction = None
        if rates is not None and not evaluate and host == 0 and rank is None:  # once for a run
            from rowcast.analysis.predict.before_run import foretell_run

            prediction = foretell_run(job, rates, max_steps=max_steps, fresh=fresh)
        with Signals() as signals:
            from rowcast.prefetcher.run.options import RunOptions
            from rowcast.prefetcher.run.prefetcher_run import run_prefetcher

            options = RunOptions(
                max_steps=max_steps,
                fresh=fresh,
                source=source,
                save_trace=save_trace,
                timeline=timeline,
                mode="eval" if evaluate else "train",
                checkpoint=checkpoint,
                verify=verify_share if verify_share is not None else DEFAULT_VERIFY_SHARE if verify else 0.0,
                prediction=prediction,
                host=host,
                rank=rank,
            )
            finished = run_prefetcher(job, options, signals, sys.argv[1:])
        return 0 if evaluate or finished else unfinished_code

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def new(
    data: Annotated[
        str, typer.Option("--data", help="A file, folder or glob of CSV with a header, or Parquet.", metavar="PATH")
    ],
    label: Annotated[
        str | None,
        typer.Option("--label", help="The column of the label.", show_default="by name, or the only 0/1 column"),
    ] = None,
    dense: Annotated[
        str | None, typer.Option("--dense", help="Columns that are dense features.", metavar="A,B,...")
    ] = None,
    ids: Annotated[str | None, typer.Option("--ids", help="Columns that are ids.", metavar="A,B,...")] = None,
) -> None:
    """Look at a table of samples and write a job file for it to stdout: prefetcher new --data clicks.csv > job.toml"""

    def main() -> None:
        from rowcast.analysis.new.new import NewOptions, run_new

        run_new(NewOptions(data=data, label=label, dense=dense, ids=ids))

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def simulate(
    config: Config,
    overrides: Overrides = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=0, help="End the run after this number of train steps.")
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", help=f"{', '.join(EVICTION_POLICIES)}, window, ttl or belady. Repeatable."),
    ] = None,
    capacity_rows: Annotated[
        list[int] | None, typer.Option("--capacity-rows", min=1, help="Slots. Repeatable.")
    ] = None,
    capacities: Annotated[
        list[str] | None, typer.Option("--capacity", help="As cache.capacity, such as 64MiB. Repeatable.")
    ] = None,
    memories: Annotated[
        list[str] | None,
        typer.Option("--store-memory", help="As store.memory of a store with a memory tier, such as 8GiB. Repeatable."),
    ] = None,
    horizons: Annotated[
        list[str] | None, typer.Option("--horizon", help="Batches known ahead, or auto. Repeatable.")
    ] = None,
    batch_sizes: Annotated[list[int] | None, typer.Option("--batch-size", min=1, help="Repeatable.")] = None,
    shuffles: Annotated[
        list[str] | None,
        typer.Option(
            "--shuffle", help="none, window:ROWS or full; or with data.hot, such as full+hot-blocks:20. Repeatable."
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option("--ranks", min=1, help="Trainers that share each batch; other tables are printed. Repeatable."),
    ] = None,
    samples_per_rank: Annotated[
        list[int] | None,
        typer.Option("--samples-per-rank", min=1, help="With --ranks: instead of --batch-size. Repeatable."),
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option("--rates", help="With --ranks: rates to model a step with (docs/simulate.md).", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    per_step: Annotated[bool, typer.Option("--per-step", help="With --json: what moved at each step too.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw miss-ratio curves.", metavar="PNG|SVG")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Batches of a saved trace instead of the data's.", metavar="FILE")
    ] = None,
    save_trace: SaveTrace = None,
) -> None:
    """Tell what a run would move, at other settings too, by planning alone: no tables, no trainer. Lists multiply."""

    def main() -> None:
        from rowcast.analysis.simulate.ranks.command import run_simulate_ranks
        from rowcast.analysis.simulate.simulate import SimulateOptions, run_simulate

        options = SimulateOptions(
            max_steps=max_steps,
            policies=policies or (),
            capacity_rows=capacity_rows or (),
            capacities=capacities or (),
            memories=memories or (),
            horizons=horizons or (),
            batch_sizes=batch_sizes or (),
            shuffles=shuffles or (),
            ranks=ranks or (),
            samples_per_rank=samples_per_rank or (),
            rates=rates,
            json=as_json,
            per_step=per_step,
            plot=plot,
            trace=trace,
            save_trace=save_trace,
        )
        command = run_simulate_ranks if options.ranks else run_simulate
        command(load_job(config, tuple(overrides or ())), options)

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def advise(
    config: Config,
    overrides: Overrides = None,
    sample: Annotated[
        float | None,
        typer.Option(
            "--sample", help="Share of the rows to follow through every batch.", show_default="0.05; all with --samples"
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", help="Samples to read, from the middle of an epoch.", show_default="the whole run"),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=0, help="End the run after this number of train steps.")
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option("--step-ms", help="What a step takes to compute.", show_default="10")
    ] = None,
    link_gbs: Annotated[
        float | None, typer.Option("--link-gbs", help="10^9 bytes/s to the device, and back.", show_default="12")
    ] = None,
    gather_gbs: Annotated[
        float | None,
        typer.Option("--gather-gbs", help="10^9 bytes/s of rows from and to the tables.", show_default="measured"),
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            "--rates",
            help="A device, from `trainer rates`: foretell a step with what is recommended.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Tell how much cache a job needs, from its data: a curve, the memory it takes, and the sections to paste."""

    def main() -> None:
        from rowcast.analysis.advise.advise import AdviseOptions, run_advise

        options = AdviseOptions(
            sample=sample,
            samples=samples,
            max_steps=max_steps,
            step_ms=step_ms,
            link_gbs=link_gbs,
            gather_gbs=gather_gbs,
            rates=rates,
            json=as_json,
        )
        run_advise(load_job(config, tuple(overrides or ())), options)

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def profile(
    config: Config,
    overrides: Overrides = None,
    sample: Annotated[
        float | None,
        typer.Option("--sample", help="Share of an epoch to read.", show_default="0.05, and at least 64 batches"),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Samples to read instead.", show_default=False)
    ] = None,
    budgets: Annotated[
        list[str] | None,
        typer.Option("--budget", help="Bytes for hot rows, such as 16MiB. Repeatable.", show_default="half the cache"),
    ] = None,
    confidence: Annotated[float, typer.Option("--confidence", help="How often an interval must hold.")] = 0.99,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the largest budget's rows, for cache.pin.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Find the rows that are looked up most, from a sample, and what keeping them on the device would cover."""

    def main() -> None:
        from rowcast.analysis.profile.profile import ProfileOptions, run_profile

        options = ProfileOptions(
            sample=sample, samples=samples, budgets=budgets or (), confidence=confidence, out=out, json=as_json
        )
        run_profile(load_job(config, tuple(overrides or ())), options)

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    whole: Annotated[bool, typer.Option("--all", help="Read every sample, not a twentieth of them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Check a job file against its data and this machine. Exit code 2 if a run would fail."""

    def main() -> int:
        from rowcast.analysis.check.check import run_check

        return run_check(config, tuple(overrides or ()), whole=whole, json=as_json)

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def timeline(
    run_dir: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The file to write, as JSON.",
            metavar="FILE",
            show_default="timeline.json in the run directory",
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", help="Only these, such as 100:110.", metavar="FIRST:END")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw --steps too, or eight in the middle.", metavar="PNG|SVG")
    ] = None,
) -> None:
    """Merge what `prefetcher run --timeline` and `trainer run --timeline` recorded into one file for Perfetto or
    chrome://tracing."""

    def main() -> None:
        from rowcast.analysis.timeline.timeline import TimelineOptions, run_timeline

        run_timeline(run_dir, TimelineOptions(out=out, steps=steps, plot=plot))

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def predict(
    config: Config,
    rates: Annotated[
        list[Path] | None,
        typer.Option("--rates", help="A device, from `trainer rates`. Repeatable.", metavar="FILE", show_default=False),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", help="A setting to try, as KEY=VALUE. Repeatable; all combinations are tried."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run", help="Instead of --rates: a run with --timeline.", metavar="DIR", show_default=False),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            help="With --rates: a run of this job with --timeline, told task by task.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--change", help="With --run: how long a task would take, such as step=0.1. Repeatable."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw eight steps and the critical path.", metavar="FILE", show_default=False),
    ] = None,
    overrides: Overrides = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=0, help="Train steps; as the run had it.", show_default=False)
    ] = None,
) -> None:
    """How long a step will take and what bounds it: before a run, or walking a recorded one again."""

    def main() -> None:
        if (run_dir is None) == (not rates):
            raise ConfigError("give either --rates FILE, from `trainer rates`, or --run DIR, a run with --timeline")
        if run_dir is not None and (vary or compare is not None):
            raise ConfigError("--vary and --compare need --rates; with --run, --change says what would be different")
        if compare is not None and (vary or len(rates or ()) > 1):
            raise ConfigError("--compare takes the job as it ran, and one --rates; remove --vary and other devices")
        if rates and changes:
            raise ConfigError("--change needs --run; with --rates, --vary says what would be different")
        if plot is not None and (vary or compare is not None or len(rates or ()) > 1):
            raise ConfigError("--plot draws one walk; give one --rates or --run, without --vary and --compare")
        if run_dir is not None:
            from rowcast.analysis.predict.predict import walk_recorded

            walk_recorded(
                load_job(config, tuple(overrides or ())), run_dir, changes or (), max_steps=max_steps, plot=plot
            )
            return
        from rowcast.analysis.predict import job

        if compare is not None and rates:
            own = load_job(config, tuple(overrides or ()))
            job.print_compared(job.compare(own, rates[0], compare, max_steps=max_steps))
            return

        def load(settings: Sequence[str]) -> Job:
            return load_job(config, (*(overrides or ()), *settings))

        job.print_predictions(job.predict_jobs(load, rates or (), vary or (), max_steps=max_steps, plot=plot))

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def export(
    out: Annotated[Path, typer.Option("--out", help="The safetensors file to write.", metavar="FILE")],
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="The run directory.", metavar="DIR", show_default=False)
    ] = None,
    checkpoint: CheckpointName = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Instead of --run: the tables that a run of this job begins with.",
            metavar="job.toml",
            show_default=False,
        ),
    ] = None,
    trained_rows: Annotated[
        bool, typer.Option("--trained-rows", help="Only the rows that were trained, with their ids.")
    ] = False,
) -> None:
    """Write a checkpoint of a run, by default the newest valid one, as one safetensors file: tables, row state, dense
    weights."""

    def main() -> None:
        from rowcast.prefetcher.checkpoints.export import export_run, export_start

        if config is not None and run_dir is None and checkpoint is None and not trained_rows:
            export_start(load_job(config), out, get_logger())
            return
        if run_dir is None or config is not None:
            raise ConfigError(
                "give either --run DIR, for a checkpoint of a run, or --config job.toml, for the tables that it starts "
                "from"
            )
        manifest = export_run(run_dir, out, get_logger(), checkpoint, trained_only=trained_rows)
        get_logger().info("exported", file=str(out), train_steps=manifest.train_steps, bytes=out.stat().st_size)

    raise typer.Exit(run_command("prefetcher", main))


@app.command("import")
def import_(
    config: Config,
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            help="A run directory, or a safetensors file as `prefetcher export` writes it.",
            metavar="RUN|FILE",
        ),
    ],
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace what an earlier run left in the run directory.")
    ] = False,
) -> None:
    """Make a run directory whose run starts from another run's model and optimizer state, or from the rows and dense
    weights of a file."""

    def main() -> None:
        from rowcast.prefetcher.checkpoints.import_checkpoint import import_run

        manifest = import_run(load_job(config, tuple(overrides or ())), source, fresh=fresh)
        get_logger().info(
            "imported", file=str(source), checkpoint=manifest.name, rows=manifest.num_rows, bytes=manifest.nbytes
        )

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def verify(run_dir: RunFolder, checkpoint: CheckpointName = None) -> None:
    """Read every byte of a run's checkpoints and tell which are whole. Exit code 4 if one is damaged."""

    def main() -> int:
        from rowcast.prefetcher.checkpoints.check_files import verify_run

        return verify_run(run_dir, checkpoint)

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def keys(
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder of keys to make, or to add clients to.", metavar="DIR")
    ] = None,
    clients: Annotated[
        list[str] | None, typer.Option("--client", help="A trainer's name. Repeatable.", show_default="trainer")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--check", help="A folder of keys to check instead.", metavar="DIR")
    ] = None,
) -> None:
    """Make the keys that a run over tcp needs, or check them."""

    def main() -> None:
        from rowcast.prefetcher.run.make_keys import keys_command

        for line in keys_command(out, clients, folder):
            typer.echo(line)

    raise typer.Exit(run_command("prefetcher", main))
