"""The place in the user's program that a node of an FX graph comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from amanda.drivers.torch._modules import stack_without_wrappers

if TYPE_CHECKING:
    from torch.fx import Node

_FRAMEWORK = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_ROOT = re.compile(r"^[LG]\[[^\]]*\]\.?")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
# Since torch 2.14 a module that compiles itself is found by `__self__` of its call.
_CONTAINERS = {"_modules", "__self__", ""}


def source_of(node: Node) -> str:
    """Return the "file:line" of the user's code that leads to a node; "" if it is unknown."""
    # dynamo stores the stack as text; the last frame that is not torch's or Amanda's is the user's.
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    user_frames = [f"{file}:{line}" for file, line in frames if not file.startswith(_FRAMEWORK)]
    return user_frames[-1] if user_frames else ""


def scope_of(node: Node, prefix: str = "") -> str:
    """Return the path, from the outermost module, of the module whose call made a node: "layer1.0.conv1"."""
    calls = [(_dotted_path(path), kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values()]
    # The stack lists the enclosing modules from the outermost on, with full paths.
    path = stack_without_wrappers(calls[-1][0], calls) if calls else ""
    return ".".join(part for part in (prefix, path) if part)


def _dotted_path(path: str) -> str:
    """Return a path of dynamo's as `named_modules` spells it: "layers.0" for "L['self'].layers['0']"."""
    dotted = _ITEM.sub(r".\1", _ROOT.sub("", path))
    return ".".join(part for part in dotted.split(".") if part not in _CONTAINERS)
