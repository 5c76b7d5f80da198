"""The public names of `amanda`."""

from amanda.action import (
    Action,
    ActionType,
    InstrumentationPoint,
    ShapeTally,
    Tally,
    differentiable,
    gathered,
    innermost,
    observer,
    traceable,
)
from amanda.context import OpContext
from amanda.errors import AmandaError
from amanda.export.inlining import Inlined, Instrumented, instrument
from amanda.namespace import Namespace
from amanda.plugins.manager import Plugin, list_drivers, list_tools, load_tool
from amanda.scope.report import Report, Uninstrumented
from amanda.scope.scope import Scope, apply
from amanda.scope.state import (
    autodiff_disabled,
    autodiff_enabled,
    cache_disabled,
    cache_enabled,
    disabled,
    enabled,
    is_cache_enabled,
    is_enabled,
)
from amanda.tool import Tool

__all__ = [
    "Action",
    "ActionType",
    "AmandaError",
    "Inlined",
    "InstrumentationPoint",
    "Instrumented",
    "Namespace",
    "OpContext",
    "Plugin",
    "Report",
    "Scope",
    "ShapeTally",
    "Tally",
    "Tool",
    "Uninstrumented",
    "apply",
    "autodiff_disabled",
    "autodiff_enabled",
    "cache_disabled",
    "cache_enabled",
    "differentiable",
    "disabled",
    "enabled",
    "gathered",
    "innermost",
    "instrument",
    "is_cache_enabled",
    "is_enabled",
    "list_drivers",
    "list_tools",
    "load_tool",
    "observer",
    "traceable",
]
