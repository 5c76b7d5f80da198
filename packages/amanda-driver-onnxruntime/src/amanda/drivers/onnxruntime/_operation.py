"""The result of `get_op`: a node of an ONNX graph by type, name and domain."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import onnx

from amanda import backend

OWN_DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Domains whose op types have no prefix."""


class Operation(backend.Operation):
    """A node; equal to each other object for the same node.

    type: ONNX' name for the computation ("Conv"), or "domain::type" for a custom op.
    name: the node's name, or a generated one.  domain: "" for ONNX' own ops.  __name__: the type.
    node: the NodeProto, without the values of large constants.
    """

    __slots__ = ("domain", "name", "node", "type")

    def __init__(self, node: onnx.NodeProto, name: str, key: Hashable = None) -> None:
        self.domain = node.domain
        is_plain_name = node.domain in OWN_DOMAINS
        self.type = node.op_type if is_plain_name else f"{node.domain}::{node.op_type}"
        self.name = name
        self.node = node
        super().__init__(self.type, name, key)

    def get_attr(self, name: str) -> Any:
        """Return an attribute of the node.

        Raises ValueError if the node has none of that name.
        """
        for attribute in self.node.attribute:
            if attribute.name == name:
                return onnx.helper.get_attribute_value(attribute)
        raise ValueError(f"{self!r} has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{self.type} {self.name!r}>"
