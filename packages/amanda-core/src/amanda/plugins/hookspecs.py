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
    """A driver has begun to intercept its framework."""


@hookspec
def amanda_driver_detached(driver: Driver) -> None:
    """A driver has left its framework as it was."""


@hookspec
def amanda_scope_entered(scope: Scope) -> None:
    """A scope is open, its tools are in force."""


@hookspec
def amanda_scope_left(scope: Scope) -> None:
    """A scope has been closed."""


@hookspec
def amanda_op_analysed(context: OpContext) -> None:
    """The analysis routines of one point have run on an op's context."""
