"""Results with a row for each value of some keys, or for each module of a tree, and the tree of modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from amanda.errors import AmandaError
from amanda.tools.results._files import check_schema, field_values, made_of
from amanda.tools.results._layout import ROWS_SHOWN, View, position_of, ranges, sort_key
from amanda.tools.results._result import Column, Result


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
        node_by_path = {"": root}
        for op in ops:
            node = root
            # TensorFlow's scopes have slashes, PyTorch's paths dots.
            for name in filter(None, re.split(r"[./]", op.module)):
                path = f"{node.path}.{name}".lstrip(".")
                if path not in node_by_path:
                    node_by_path[path] = cls(path, name)
                    node.children.append(node_by_path[path])
                node = node_by_path[path]
            node.ops.append(op)
        root._combine_layers()
        for child in root.children:
            child._join_chains()
        return root

    def all_ops(self) -> Iterator[Any]:
        """Yield the ops of the module and of all modules within."""
        yield from self.ops
        for child in self.children:
            yield from child.all_ops()

    def walk(self, depth: float = inf, level: int = 0) -> Iterator[tuple[int, ModuleNode]]:
        """Yield the node and those within it down to a depth, each with its level."""
        yield level, self
        if level < depth:
            for child in self.children:
                yield from child.walk(depth, level + 1)

    def readable_depth(self) -> int:
        """Return the largest depth at which a screen shows the tree, 1 at least."""
        depth, row_count = 1, sum(1 for _ in self.walk(1))
        while True:
            deeper_row_count = sum(1 for _ in self.walk(depth + 1))
            if deeper_row_count == row_count or deeper_row_count > ROWS_SHOWN:
                return depth
            depth, row_count = depth + 1, deeper_row_count

    def _structure(self) -> tuple[Any, ...]:
        """Return the names of the modules within, by which layers are compared."""
        return tuple(sorted((child.name, child._structure()) for child in self.children))

    def _combine_layers(self) -> None:
        """Combine numbered modules that have the same modules within into one node, at all levels."""
        nodes_by_structure: dict[tuple[Any, ...], list[ModuleNode]] = {}
        for child in self.children:
            child._combine_layers()
            # Numbers alone do not make layers: those of a Sequential may be a convolution and a pooling.
            is_layer = child.name.isdecimal() and child.children
            key = child._structure() if is_layer else (child.name,)
            nodes_by_structure.setdefault(key, []).append(child)
        self.children = [_merge_nodes(nodes, self.path) for nodes in nodes_by_structure.values()]

    def _join_chains(self) -> None:
        """Join each module that holds one module, and no ops, with that module; the name is of both."""
        while len(self.children) == 1 and not self.ops:
            (child,) = self.children
            self.path, self.ops, self.children = child.path, child.ops, child.children
            self.name = f"{self.name}.{child.name}"
        for child in self.children:
            child._join_chains()


def _merge_nodes(nodes: list[ModuleNode], parent_path: str) -> ModuleNode:
    """Return one node for nodes of equal structure, with all their ops; layers 0 to 15 are named "0-15"."""
    names = {node.name for node in nodes}
    name = ranges(map(int, names)) if len(names) > 1 else nodes[0].name
    path = f"{parent_path}.{name}".lstrip(".")
    children_by_name: dict[str, list[ModuleNode]] = {}
    for child in (child for node in nodes for child in node.children):
        children_by_name.setdefault(child.name, []).append(child)
    children = [_merge_nodes(same_children, path) for same_children in children_by_name.values()]
    return ModuleNode(path, name, [op for node in nodes for op in node.ops], children)


_Numbers: TypeAlias = Callable[[ModuleNode], Sequence[Any]]


class TreeResult(Result):
    """A row for each module, with the sums of the modules within, and the notes of the result of all ops.

    `print` shows a tree, in which repeated layers are one row.  depth: None for as deep as a screen shows.
    """

    _combines = False

    def __init__(
        self, result: Any, depth: int | None, columns: Sequence[Column], numbers_of_node: _Numbers
    ) -> None:
        root = ModuleNode.of(result.ops)
        nodes = list(root.walk()) if result.ops else []
        labels = {node.path: f"{'  ' * level}{node.name or 'total'}" for level, node in nodes}
        self._depth = root.readable_depth() if depth is None else depth
        # Those of all depths, of which a table may show more or fewer.
        self._levels = [level for level, _ in nodes]
        self._all_rows = [(node.path, *numbers_of_node(node)) for _, node in nodes]
        # Level of the outermost module with ops beside its children; inf without such a module.
        self._own_ops_level = min((level for level, node in nodes if node.ops and node.children), default=inf)
        self._result = result
        self.name, self.lead, self.remarks = f"{result.name}.tree", result.lead, result.remarks  # type: ignore[misc]
        self.title = f"{result._subject} by module"
        self.columns = (Column("module", show=labels.__getitem__), *columns)  # type: ignore[misc]

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each module, a module before those within; "" is all that was executed."""
        return [row for level, row in zip(self._levels, self._all_rows, strict=True) if level <= self._depth]

    def _printed(self, view: View) -> Result:
        """Return the tree down to the depth of a view, with the modules of each module sorted."""
        position = position_of(self.columns, view.sort) if view.sort else None
        if position is None and view.depth in (None, self._depth):
            return self
        printed = copy(self)
        printed._depth = view.depth or self._depth
        if position is not None:
            keys: list[tuple[Any, ...]] = []
            key_path: list[Any] = []  # of the module at hand: the keys of all modules around it, then its own
            for level, row in zip(self._levels, self._all_rows, strict=True):
                path, key = row[0], sort_key(self.columns[position], [row[position]])
                key_path = [*key_path[:level], (key, path)]
                keys.append(tuple(key_path))  # so that a module stays above those within
            order = sorted(range(len(keys)), key=keys.__getitem__)
            printed._levels = [self._levels[i] for i in order]
            printed._all_rows = [self._all_rows[i] for i in order]
        return printed

    @property
    def _leading(self) -> int:
        return int(self._result._leading)

    def notes(self) -> Sequence[str]:
        """Return the notes of the result of all ops, and a sentence on ops that have no row of their own."""
        own_ops = "The row of a module has its own ops too, beside those of the modules in it."
        return [*self._result.notes(), *[own_ops] * (self._own_ops_level <= self._depth)]


KeyedT = TypeVar("KeyedT", bound="KeyedResult")
PlaceT = TypeVar("PlaceT")


class KeyedResult(Result):
    """A result with a row for each value of some keys.

    keys: all keys.  _counted: the columns after those of the keys.
    """

    keys: ClassVar[Sequence[str]]
    _counted: ClassVar[Sequence[Column]]

    def _set_keys(self, by: Sequence[str], subject: str) -> None:
        self._by, self._subject = tuple(by), subject
        self.columns = (*map(Column, self._by), *self._counted)  # type: ignore[misc]
        self.title = subject if self._by == tuple(self.keys) else f"{subject} by {', '.join(self._by)}"

    def by(self: KeyedT, *keys: str) -> KeyedT:
        """Return the same result with a row for each value of keys; raise AmandaError for another key."""
        unknown = [key for key in keys if key not in self.keys]
        if unknown or not keys:
            unknown_key = unknown[0] if unknown else "nothing"
            raise AmandaError(f"rows of {self.name} have the keys {', '.join(self.keys)}, not {unknown_key}")
        # Shallow: places are shared, keys and columns are the copy's own.
        result = copy(self)
        result._set_keys(keys, self._subject)
        return result

    def _tree(self: Any, depth: int | None, columns: Sequence[Column], numbers: _Numbers) -> TreeResult:
        """Return a row for each module: its path, and numbers of a node for the columns."""
        return TreeResult(self, depth, columns, numbers)

    def _grouped(self, places: Iterable[PlaceT]) -> dict[tuple[Any, ...], list[PlaceT]]:
        """Return places grouped by their values of the keys."""
        groups: dict[tuple[Any, ...], list[PlaceT]] = {}
        for place in places:
            groups.setdefault(tuple(getattr(place, key) for key in self._by), []).append(place)
        return groups


class PlacesResult(KeyedResult, Generic[PlaceT]):
    """A result with a row for the places of a program that agree in some keys, and a file with all places.

    _op_class: a dataclass.  _summed: fields that are added for ops that agree in all other fields.  The
    constructor of a subclass takes ops and keys.
    """

    _op_class: ClassVar[type]
    _summed: ClassVar[Sequence[str]]
    ops: list[PlaceT]

    def merged(self: PlacesT, *results: PlacesT) -> PlacesT:
        """Return this and other runs or ranks as one result: the sums of equal places are added."""
        zeros = dict.fromkeys(self._summed, 0)
        total_by_key: dict[tuple[Any, ...], Any] = {}
        for place in (place for result in (self, *results) for place in result.ops):
            # A copy with zeros, so that merging changes none of the results; its other fields are the key.
            zero_place = replace(place, **zeros)
            total = total_by_key.setdefault(tuple(field_values(zero_place).values()), zero_place)
            for name in self._summed:
                setattr(total, name, getattr(total, name) + getattr(place, name))
        merged = copy(self)
        merged.ops = list(total_by_key.values())
        return merged

    @classmethod
    def from_dict(cls: type[PlacesT], content: Mapping[str, Any]) -> PlacesT:
        """Return the result that `to_dict` described; raise ValueError for other schemas, newer versions."""
        check_schema(content, cls.name, cls.version)
        places: list[Any] = [made_of(cls._op_class, place) for place in content["places"]]
        result_class: Any = cls
        result: PlacesT = result_class(places, content.get("by", cls.keys))
        return result

    def _facts(self) -> Mapping[str, Any]:
        return {"by": self._by, "places": [field_values(place) for place in self.ops]}


PlacesT = TypeVar("PlacesT", bound="PlacesResult[Any]")
