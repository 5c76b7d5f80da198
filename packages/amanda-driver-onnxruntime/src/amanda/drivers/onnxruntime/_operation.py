"""The result of `get_op`: a node of an ONNX graph by type, name and domain."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import onnx

from amanda import backend

OWN_DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Domains whose types are called by their names alone."""


class Operation(backend.Operation):
    """One node: equal to another that stands for the same one.

    type: ONNX' name of what it computes ("Conv"); one of another domain is "domain::type".
    name: the node's, or a made one where it has none.  domain: "" for ONNX' own.  __name__: the type.
    node: the NodeProto, without the values of large constants.
    """

    __slots__ = ("domain", "name", "node", "type")

    def __init__(self, node: onnx.NodeProto, name: str, key: Hashable = None) -> None:
        self.domain = node.domain
        own = node.domain in OWN_DOMAINS
        self.type = node.op_type if own else f"{node.domain}::{node.op_type}"
        self.name = name
        self.node = node
        super().__init__(self.type, name, key)

    def get_attr(self, name: str) -> Any:
        """An attribute that the node has.

        Raises ValueError where it has none of that name.
        """
        for attribute in self.node.attribute:
            if attribute.name == name:
                return onnx.helper.get_attribute_value(attribute)
        raise ValueError(f"{self!r} has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{self.type} {self.name!r}>"
