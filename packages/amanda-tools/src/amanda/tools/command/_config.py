"""Configuration files, TOML or YAML, with the vocabulary of the command line.

output = "results"

[tools.flops]
module = ["layer4.*"]

[tools.nan]
stop = true
start = 100
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amanda.errors import AmandaError, did_you_mean
from amanda.tools.command._spec import SpecError, ToolSpec, combined
from amanda.tools.results import parsing, read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEYS = ("output", "tools")


@dataclass
class Config:
    """The content of a configuration file: tools, and the folder for results."""

    tools: list[ToolSpec] = field(default_factory=list)
    output: Path | None = None


def configured(path: Path | None, tools: Sequence[str], such_as: str) -> Config:
    """Return a file's content with the tools of the command line; raise SpecError if there is no tool."""
    config = Config() if path is None else read_config(path)
    config.tools = combined(config.tools, [ToolSpec.parse(text) for text in tools])
    if not config.tools:
        raise SpecError(f"no tool is given: {such_as}, or --config FILE; `amanda tools` lists them")
    return config


def read_config(path: Path) -> Config:
    """Return the content of a configuration file; raise SpecError if it is not valid."""
    content = _parsed(path)
    if not isinstance(content, Mapping):
        raise SpecError(f"{path} has no keys; it has {' and '.join(_KEYS)}")
    for key in content:
        if key not in _KEYS:
            raise SpecError(f"{path} has {key!r}; {did_you_mean(str(key), _KEYS)}")
    output = content.get("output")
    if output is not None and not isinstance(output, str):
        raise SpecError(f"{path}: output is {output!r}; give the path of a folder")
    return Config(_tool_specs(path, content.get("tools", {})), None if output is None else Path(output))


def _parsed(path: Path) -> Any:
    try:
        with parsing(path, "configuration"):
            text = read_text(path).decode()
    except AmandaError as error:
        raise SpecError(str(error)) from error
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in (".yaml", ".yml"):
            import yaml

            return yaml.safe_load(text) or {}
    except Exception as error:  # the parser's own error, with line and column
        raise SpecError(f"{path} is no {path.suffix[1:].upper()}: {error}") from None
    raise SpecError(f"{path} is neither .toml nor .yaml")


def _tool_specs(path: Path, tools: Any) -> list[ToolSpec]:
    """Return the specs in a table of tools by name, or in a list of names and of tables with a `name`."""
    if isinstance(tools, Mapping):
        tables = {name: table or {} for name, table in tools.items()}
        tools = [
            {**table, "name": name} if isinstance(table, Mapping) else table for name, table in tables.items()
        ]
    if not isinstance(tools, list):
        raise SpecError(f"{path}: tools is {tools!r}; give a table of tools by name, or a list")
    specs = []
    for tool in tools:
        if isinstance(tool, str):
            specs.append(ToolSpec.parse(tool))
        elif isinstance(tool, Mapping) and isinstance(tool.get("name"), str):
            options = {str(key): value for key, value in tool.items() if key != "name"}
            specs.append(ToolSpec(tool["name"], options))
        else:
            raise SpecError(f"{path}: {tool!r} among the tools is neither a name nor a table with a name")
    return specs
