"""Frames of an exported graph of PyTorch: the module calls that become modules of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Frames = list[tuple[str, str]]
"""Path and key of each module call around a node, the outermost first; keys differ from call to call."""


def name_frames(nodes: Iterable[Any]) -> None:
    """Give the nodes of a stage, in their order, module calls of which PyTorch makes modules.

    A module is made of the first call at each path. The ops of its other calls, and those of a module that
    is called by another one than its parent, join the call around them: PyTorch would make modules with
    copies of the parameters of these, or refuse them.
    """
    opened, seen = Frames(), set[str]()
    for node in nodes:
        stack = dict(node.meta.get("nn_module_stack") or {})
        root = next((kind for path, kind in stack.values() if not path), "")
        calls = [(str(path), str(key)) for key, (path, _) in stack.items() if path]
        kinds = dict(stack.values())
        frames = _joined(calls, opened, seen)
        seen.update(path for path, _ in frames)
        opened = frames
        node.meta["nn_module_stack"] = {"": ("", root), **{path: (path, kinds[path]) for path, _ in frames}}


def _joined(calls: Frames, opened: Frames, seen: set[str]) -> Frames:
    """Return the calls, up to one that cannot become a module."""
    frames = Frames()
    for call in calls:
        path, depth = call[0], len(frames)
        is_open = opened[: depth + 1] == [*frames, call]
        is_child = depth == 0 or path.startswith(f"{frames[-1][0]}.")
        if not is_child or (path in seen and not is_open):
            break
        frames.append(call)
    return frames
