"""Keys of contexts, and what is said where they are missing."""

from __future__ import annotations

import pytest
import torch

import amanda
from amanda.context import STANDARD_KEYS
from amanda.errors import MissingKeyError
from amanda.tools.mapping import StandardMapping


class Types(amanda.Tool):
    """Reads a key of StandardMapping, on which it does not depend."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self.add_inst_for_op(lambda context: self.types.append(context["type"]))


def test_the_keys_that_are_told_are_those_that_standard_mapping_writes() -> None:
    written: set[str] = set()
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: written.update(context))
    tool.add_inst_for_op(lambda context: written.update(context), backward=True)
    with amanda.apply(tool):
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert written == STANDARD_KEYS


def test_a_tool_that_reads_a_type_without_standard_mapping_is_told() -> None:
    with (
        pytest.raises(MissingKeyError, match=r"Types reads 'type' .*self\.depends_on\(StandardMapping\(\)\)"),
        amanda.apply(Types()),
    ):
        torch.relu(torch.ones(2))
    tool = Types()
    tool.depends_on(StandardMapping())
    with amanda.apply(tool):
        torch.relu(torch.ones(2))
    assert tool.types == ["ones", "relu"]
