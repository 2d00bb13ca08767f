"""The commands. They stand above all rooms, and import that of a subcommand when it is called."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rowcast.job.section import removed_option
from rowcast.runtime.errors import closest
from rowcast.runtime.process import run_command

COMMANDS = ("trainer", "prefetcher", "rowcast")  # each has a module here, with its SUBCOMMANDS; the last is advised
SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


@dataclass(frozen=True, slots=True)
class Subcommand:
    function: str  # "module:function", which has the options
    help: str
    # calls what the function returns with the process's signals, and returns the exit code; None: the function itself
    # is all, and a signal interrupts it
    until_stopped: Callable[[str, Callable[..., int | None]], int] | None = None


def command_line(process: str, help: str, subcommands: Mapping[str, Subcommand], shown: Collection[str]) -> typer.Typer:
    """`process`: named in messages; "" for the subcommand's own name. `shown`: in the help."""

    class Group(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if sentence := removed_option(args[0], args[1:]):
                ctx.fail(sentence)
            if args[0] not in subcommands:
                ctx.fail(f"no command {args[0]!r}{nearest_command(args[0], subcommands)}")
            name, known, rest = super().resolve_command(ctx, args)
            return name, known if name is None else imported(process or name, name, subcommands[name]), rest

    app = typer.Typer(cls=Group, no_args_is_help=True, **SETTINGS)
    app.callback(help=help)(root)
    for name, subcommand in subcommands.items():
        app.command(name, help=subcommand.help, hidden=name not in shown)(lambda: None)
    return app


def show_version(wanted: bool) -> None:
    if wanted:
        from rowcast.runtime.telemetry.metrics import rowcast_version  # no other start of a command needs it

        typer.echo(f"rowcast {rowcast_version()}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def nearest_command(name: str, own: Mapping[str, Subcommand]) -> str:
    """Names the command that was probably meant: one of these subcommands, or one of another command."""
    others = {
        other: f"{command} {other}"
        for command in COMMANDS
        for other in import_module(f"{__name__}.{command}").SUBCOMMANDS
    }
    found = closest(name, own) or others.get(closest(name, others) or "")
    return "" if found is None else f", the nearest is {found}"


def imported(process: str, name: str, subcommand: Subcommand) -> Any:
    module, _, function = subcommand.function.partition(":")
    real = getattr(import_module(module), function)

    @wraps(real)
    def call(**arguments: Any) -> None:
        if subcommand.until_stopped is not None:
            raise typer.Exit(subcommand.until_stopped(process, real(**arguments)))
        raise typer.Exit(run_command(process, partial(real, **arguments)))

    app = typer.Typer(**SETTINGS)
    app.command(name, help=subcommand.help)(call)
    return typer.main.get_command(app)
