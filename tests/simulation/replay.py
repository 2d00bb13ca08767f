"""Runs one life again, and says what happens in it: python -m tests.simulation.replay SEED"""

import sys

import torch
import typer

from tests.simulation.life import LifeFailed, run_life


def main(seed: int) -> None:
    torch.set_num_threads(1)
    try:
        run_life(seed, typer.echo)
    except LifeFailed as error:
        typer.echo(f"FAILED: {error}".partition("\n")[0])
        sys.exit(1)
    typer.echo("ended with the plain loop's bits")


if __name__ == "__main__":
    typer.run(main)
