"""The modules of a model as a tree, with what each holds: the ops of a result, or anything with a module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from amanda.tools.results._layout import ROWS_SHOWN, ranges


@dataclass
class ModuleNode:
    """A module, with what lies directly in it, and the modules within.

    path: from the model on; of repeated layers "layers.0-15".  name: the part of the path below the parent.
    """

    path: str = ""
    name: str = ""
    ops: list[Any] = field(default_factory=list)
    children: list[ModuleNode] = field(default_factory=list)

    @classmethod
    def of(cls, ops: Iterable[Any]) -> ModuleNode:
        """Return the tree of the modules of ops; repeated layers are one node, and so are chains of modules.

        ops: objects with a path `module`, "" outside of modules.
        """
        root = cls()
        nodes = {"": root}
        for op in ops:
            parent = root
            # TensorFlow's scopes have slashes, PyTorch's paths dots.
            for name in filter(None, re.split(r"[./]", op.module)):
                path = f"{parent.path}.{name}".lstrip(".")
                if path not in nodes:
                    nodes[path] = cls(path, name)
                    parent.children.append(nodes[path])
                parent = nodes[path]
            parent.ops.append(op)
        root._combine_layers()
        for child in root.children:
            child._join_chains()
        return root

    def all_ops(self) -> Iterator[Any]:
        """Yield the ops of the module and of all modules within."""
        yield from self.ops
        for child in self.children:
            yield from child.all_ops()

    def walk(self, depth: int, level: int = 0) -> Iterator[tuple[int, ModuleNode]]:
        """Yield the node and those within it down to a depth, each with its level."""
        yield level, self
        if level < depth:
            for child in self.children:
                yield from child.walk(depth, level + 1)

    def readable_depth(self) -> int:
        """Return the largest depth at which a screen shows the tree, 1 at least."""
        depth, count = 1, sum(1 for _ in self.walk(1))
        while True:
            following = sum(1 for _ in self.walk(depth + 1))
            if following == count or following > ROWS_SHOWN:
                return depth
            depth, count = depth + 1, following

    def _structure(self) -> tuple[Any, ...]:
        """Return the names of the modules within, by which layers are compared."""
        return tuple(sorted((child.name, child._structure()) for child in self.children))

    def _combine_layers(self) -> None:
        """Make one node of numbered modules with the same modules within."""
        layers: dict[tuple[Any, ...], list[ModuleNode]] = {}
        for child in self.children:
            child._combine_layers()
            # Numbers alone do not make layers: those of a Sequential may be a convolution and a pooling.
            is_layer = child.name.isdecimal() and child.children
            layers.setdefault(child._structure() if is_layer else (child.name,), []).append(child)
        self.children = [_merged(nodes, self.path) for nodes in layers.values()]

    def _join_chains(self) -> None:
        """Join a module that holds one module alone with that module."""
        while len(self.children) == 1 and not self.ops:
            (child,) = self.children
            self.path, self.ops, self.children = child.path, child.ops, child.children
            self.name = f"{self.name}.{child.name}"
        for child in self.children:
            child._join_chains()


def _merged(nodes: list[ModuleNode], parent: str) -> ModuleNode:
    """Return nodes with equal structures as one, in a parent; names that differ are numbers of layers."""
    first, *_ = nodes
    names = {node.name for node in nodes}
    name = ranges(map(int, names)) if len(names) > 1 else first.name
    path = f"{parent}.{name}".lstrip(".")
    children = [
        _merged([child for node in nodes for child in node.children if child.name == within.name], path)
        for within in first.children
    ]
    return ModuleNode(path, name, [op for node in nodes for op in node.ops], children)
