"""The hooks that a plugin may implement, and what distributions register by name.

A plugin is a module or an object. Its functions that are marked `hookimpl` have the name of a hook, and of
its arguments those that they want. A distribution registers a plugin by an entry point in the group
`amanda.plugins`, a running program by `plugin_manager().register`.

class Scopes:
    @hookimpl
    def amanda_scope_entered(self, scope):
        self.opened = scope
"""

from amanda.plugins.drivers import how_to_install
from amanda.plugins.entries import import_from
from amanda.plugins.hookspecs import (
    amanda_driver_attached,
    amanda_driver_detached,
    amanda_op_analysed,
    amanda_scope_entered,
    amanda_scope_left,
    hookimpl,
)
from amanda.plugins.manager import driven_frameworks, plugin_manager, tool_class

__all__ = [
    "amanda_driver_attached",
    "amanda_driver_detached",
    "amanda_op_analysed",
    "amanda_scope_entered",
    "amanda_scope_left",
    "driven_frameworks",
    "hookimpl",
    "how_to_install",
    "import_from",
    "plugin_manager",
    "tool_class",
]
