"""The plan of an op: its facts go through the tools' analysis routines into what runs there.

In: `OpFacts` of a driver, and the tools that are applied, in order.  Out: a `Plan` of actions for each layer
of tools, kept by op id as long as the op's module, parameters and tools live; and the call of one routine,
`run_routine`, with its result in the place of what it was given.
Called by `scope`, which makes layers, and by `eager`, `graph` and `export`, which carry plans out.

Beside `amanda.backend` a driver may import what is in `__all__`, to carry plans out by itself.
"""

from amanda.plan.plan import Actions, Plan
from amanda.plan.routine import run_replacement, run_routine
from amanda.plan.tensors import is_among, spread

__all__ = ["Actions", "Plan", "is_among", "run_replacement", "run_routine", "spread"]
