"""What importing a tool loads."""

from __future__ import annotations

import sys

import children
import pytest


def loaded(statement: str) -> list[str]:
    """Return the modules of tools that a statement loads in a fresh interpreter."""
    show = "print(*sorted(name for name in sys.modules if name.startswith('amanda.tools.')))"
    done = children.run([sys.executable, "-c", f"import sys\n{statement}\n{show}"], check=True)
    return done.stdout.split()


def test_prune_tool_is_loaded_without_the_removal_of_channels() -> None:
    modules = loaded("from amanda.tools.prune import PruneTool; PruneTool()")
    assert [name for name in modules if "channels" in name] == []


def test_channel_prune_tool_is_a_name_of_the_package_still() -> None:
    modules = loaded("from amanda.tools.prune import ChannelPruneResult, ChannelPruneTool")
    assert "amanda.tools.prune.channels._tool" in modules


def test_flops_are_counted_without_tools_that_change_weights() -> None:
    modules = loaded("from amanda.tools.flops import FlopsTool; FlopsTool()")
    tools = {name.split(".")[2] for name in modules}
    assert tools.isdisjoint({"weights", "prune", "quantize", "sweep", "effective_flops"})


def test_effective_is_a_name_of_flops_still() -> None:
    from amanda.tools import effective_flops, flops

    assert flops.effective is effective_flops.effective
    with pytest.raises(AttributeError, match="has no attribute 'effectve'"):
        flops.effectve  # noqa: B018
