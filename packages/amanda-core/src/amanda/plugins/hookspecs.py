"""The hooks that a plugin may implement, with pluggy under the project name "amanda"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from amanda.plan.context import OpContext
    from amanda.scope.driver import Driver
    from amanda.scope.scope import Scope

hookspec = pluggy.HookspecMarker("amanda")
hookimpl = pluggy.HookimplMarker("amanda")
"""Marks what implements a hook."""


@hookspec
def amanda_driver_attached(driver: Driver) -> None:
    """Called when a driver has begun to intercept its framework."""


@hookspec
def amanda_driver_detached(driver: Driver) -> None:
    """Called when a driver has restored its framework."""


@hookspec
def amanda_scope_entered(scope: Scope) -> None:
    """Called when a scope has opened and its tools apply."""


@hookspec
def amanda_scope_left(scope: Scope) -> None:
    """Called when a scope has closed."""


@hookspec
def amanda_op_analysed(context: OpContext) -> None:
    """Called when the analysis routines of one instrumentation point have run on an op's context."""
