"""The program that `amanda run` starts for a model: it makes the model and runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

import click

import amanda
from amanda.errors import AmandaError
from amanda.tools.command import Session, exit_status
from amanda.tools.models import made


@click.command()
@click.argument("model")
@click.option("--input-shape", "shapes", multiple=True, metavar="[NAME=]N,N,...",
              help="The shape of an input.")  # fmt: skip
@click.option("--backward", is_flag=True, help="Also run the backward pass, from gradients of 1.")
@click.option("--device", default="cpu", help="cpu, cuda, or meta: shapes without values, for large models.")
@click.option("--steps", default=1, type=click.IntRange(min=1), help="Number of runs.")
def command(model: str, shapes: Sequence[str], backward: bool, device: str, steps: int) -> int:
    """Run a model, with random weights unless a file or a checkpoint has them, on random inputs."""
    import_module("amanda.tools.models._loaders")  # at which the scope opens, ahead of `disabled`
    session = Session.present()
    try:
        # What is executed to make the model and its inputs is no part of its run.
        with nullcontext() if session is not None and session.sees_construction else amanda.disabled():
            subject = made(model, shapes, backward, device)
        sys.stderr.write(f"amanda: {subject}\n")
        for _ in range(steps):
            subject.run()
    except AmandaError:
        # Results of a part of the run would follow the error.
        if session is not None:
            session.silence()
        raise
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(command, "amanda run", sys.argv[1:], failure=2))
