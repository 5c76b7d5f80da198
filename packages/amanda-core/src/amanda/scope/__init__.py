"""Extents in which tools are in force: scopes, the state of each thread, attached drivers, the report.

In: tools, and the drivers of installed distributions.  Out: the `State` that an execution finds, which names
the stack of tools and the switches; `Report`; everything left as it was once the last scope closes.
Called by users through `amanda`, and by `eager`, `graph` and `export`, which ask for the state.

Beside `amanda.backend` a driver may import what is in `__all__`, to put an activation of its own in force.
"""

from amanda.scope.state import in_force

__all__ = ["in_force"]
