"""Tools, commands and packages of Amanda's distributions, so that an error names the one to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, NamedTuple


class Offer(NamedTuple):
    """Names of tools, of commands, and of packages of `amanda.tools` that hold no tool of their name."""

    tools: tuple[str, ...]
    commands: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


OFFERS = {
    "tools": Offer(
        ("coverage", "dump", "flops", "inject", "mapping", "nan", "patch", "profile",
         "standard_mapping", "stats", "trace"),
        ("diff", "instrument", "merge", "run", "view"),
        ("kit", "libraries", "models", "notebook", "onnx_graph", "results", "select", "steps", "trials"),
    ),
    "compress": Offer(
        ("activation_prune", "attention_prune", "dynamic_channel_prune", "prune", "quantize"),
        ("sweep",),
        ("dynamic_prune", "effective_flops", "weights"),
    ),
    "labs": Offer(("effective_path", "partition", "remat", "rewrite", "search", "sentinel")),
}  # fmt: skip
"""By the extra of amanda-core that brings them."""


def installation(name: str, kind: Literal["tools", "commands", "packages"]) -> str | None:
    """Return the command that installs a tool, command or package of ours; None for a name of others."""
    for extra, offer in OFFERS.items():
        names = (
            {*offer.tools, *offer.commands, *offer.packages} if kind == "packages" else getattr(offer, kind)
        )
        if name in names:
            return f'pip install "amanda-core[{extra}]"'
    return None


def import_from(package: str, name: str) -> Any:
    """Return a name of a package that another of Amanda's distributions may hold.

    package: import path below `amanda.tools`.
    Raises ImportError, with the command that installs the package, where it is not installed.
    """
    try:
        return getattr(import_module(package), name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        command = installation(package.rpartition(".")[2], "packages")
        raise ImportError(f"{name} is in {package}, which is not installed: {command}") from None
