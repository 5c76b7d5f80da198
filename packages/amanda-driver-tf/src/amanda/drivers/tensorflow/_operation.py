"""The result of `get_op` in every mode: TensorFlow's operation by type and name."""

import weakref
from collections.abc import Hashable, Mapping
from typing import Any

from amanda import backend


class TensorFlowOperation(backend.Operation):
    """An operation; equal to each other object for the same operation, in any mode.

    type: TensorFlow's name for the computation ("Conv2D").  name: the node's name, or the type where there is
    no node.  __name__: the type.  An operation of a graph also has the attributes of its `tf.Operation`:
    `inputs`, `outputs`, `node_def`.
    graph_op: the `tf.Operation`, held weakly.  key: distinguishes operations of one type and name.
    attributes: by name, for `get_attr`; others are read from the `tf.Operation`.
    """

    __slots__ = ("_attributes", "_graph_op", "name", "type")

    def __init__(
        self,
        type: str,
        name: str = "",
        graph_op: Any = None,
        key: Hashable = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(type, name or type, key)
        self.type = type
        self.name = name or type
        # Weak, since plans hold operations, and would keep the user's graph alive.
        self._graph_op = None if graph_op is None else weakref.ref(graph_op)
        self._attributes = attributes

    @property
    def graph_op(self) -> Any:
        """The `tf.Operation`, as long as its graph lives; None in eager mode."""
        return None if self._graph_op is None else self._graph_op()

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the `tf.Operation`; raise AttributeError if there is none."""
        if name.startswith("_"):  # `copy` asks for these before the object has attributes
            raise AttributeError(f"an operation has no {name!r}")
        graph_op = None if self._graph_op is None else self._graph_op()
        if graph_op is None:
            raise AttributeError(f"{self!r} has no {name!r}; a tf.Operation has, while its graph lives")
        return getattr(graph_op, name)

    def get_attr(self, name: str) -> Any:
        """Return an attribute of an operation of a graph, or of a backward op.

        Raises ValueError if there is no attribute of that name, or if the graph is gone.
        """
        if self._attributes is not None and name in self._attributes:
            return self._attributes[name]
        graph_op = self.graph_op
        if graph_op is None:
            raise ValueError(f"{self!r} has no attribute {name!r} here; a forward op's are in get_attrs()")
        return graph_op.get_attr(name)

    def __repr__(self) -> str:
        return f"<{self.type} {self.name!r}>" if self.name != self.type else f"<{self.type}>"
