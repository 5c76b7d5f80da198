"""Tools, commands and packages of Amanda's distributions, so that an error names the one to install."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Offer(NamedTuple):
    """Names of tools, of commands, and of packages of `amanda.tools` that hold no tool of their name."""

    tools: tuple[str, ...]
    commands: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


OFFERS = {
    "tools": Offer(
        ("coverage", "dump", "flops", "inject", "mapping", "nan", "patch", "profile", "sentinel",
         "standard_mapping", "stats", "trace"),
        ("diff", "instrument", "merge", "run", "view"),
        ("kit", "libraries", "models", "notebook", "onnx_graph", "results", "select", "steps", "trials"),
    ),
    "compress": Offer(
        ("activation_prune", "attention_prune", "dynamic_channel_prune", "prune", "quantize"),
        ("sweep",),
        ("dynamic_prune", "effective_flops", "weights"),
    ),
    "labs": Offer(("effective_path", "partition", "remat", "rewrite", "search")),
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
