"""Options that several commands have, and how a dataclass of options becomes a command's. Each is written once."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Option

Config = Annotated[Path, Option("--config", help="The job file.", metavar="job.toml")]
Overrides = Annotated[list[str] | None, Option("--set", help="Override a key: section.key=value. Repeatable.")]
MaxSteps = Annotated[int | None, Option("--max-steps", min=0, help="End the run after this number of train steps.")]
RunFolder = Annotated[Path, Option("--run", help="The run directory.", metavar="DIR")]
GivenConfig = Annotated[
    Path | None, Option("--config", help="The run's job file: the code that it names is trusted.", metavar="job.toml")
]
Trust = Annotated[
    list[str] | None,
    Option(help="Import this code, which the run names, and run it. Repeatable.", metavar="PACKAGE.MODULE:FACTORY"),
]
CheckpointName = Annotated[str | None, Option(help="Which, such as step-000000000100.", show_default=False)]
Probability = Annotated[
    bool,
    Option("--probability", help="Write probabilities, column `probability`, in place of logits, column `logit`."),
]
Source = Annotated[
    Path | None,
    Option("--from", help="Begin a new run with the model of another run, or of an exported file.", metavar="RUN|FILE"),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]
Timeline = Annotated[bool, Option("--timeline", help="Record a timeline for `rowcast timeline`.")]
TensorBoard = Annotated[Path | None, Option(help="Write TensorBoard event files to this folder.", metavar="DIR")]
LogLevel = Annotated[str, Option(help="debug, info, warning or error.")]
LogJson = Annotated[bool, Option("--log-json", help="Log JSON lines.")]


def options_of(kind: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes each field of the dataclass `kind` an option of a command, which gets them as its argument `options`."""
    annotations = {name: repeatable(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    defaults = {field.name: None if field.default == () else field.default for field in fields(kind)}
    made = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotations[name])
        for name, default in defaults.items()
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**arguments: Any) -> Any:
            given = {name: value for name in defaults if (value := arguments.pop(name)) is not None}
            return function(**arguments, options=kind(**given))

        parameters = [parameter for name, parameter in signature(function).parameters.items() if name != "options"]
        command.__signature__ = signature(function).replace(parameters=[*parameters, *made])  # type: ignore[attr-defined]
        others = {name: hint for name, hint in function.__annotations__.items() if name != "options"}
        command.__annotations__ = others | annotations
        return command

    return decorate


def repeatable(hint: Any) -> Any:
    """Sequence[X] as typer has it."""
    if get_origin(hint) is not Annotated:
        return hint
    type, *rest = get_args(hint)
    return Annotated[list[get_args(type)[0]] | None, *rest] if get_origin(type) is Sequence else hint  # type: ignore[misc]
