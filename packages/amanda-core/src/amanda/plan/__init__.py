"""The plan of an op: the actions that the tools' analysis routines record for the op's facts.

In: `OpFacts` of a driver, and the tools that are applied, in order.  Out: a `Plan` of actions for each stack
of tools, stored by op id as long as the op's module, parameters and tools live; and the call of a routine,
`run_routine`, which puts the results in the place of the routine's arguments.
Called by `scope`, which creates stacks, and by `eager`, `graph` and `export`, which execute plans.

Beside `amanda.backend` a driver may import the names in `__all__`, to execute plans by itself.
"""

from amanda.plan.plan import Actions, Plan
from amanda.plan.routine import run_replacement, run_routine
from amanda.plan.tensors import BatchedShape, is_among, spread

__all__ = ["Actions", "BatchedShape", "Plan", "is_among", "run_replacement", "run_routine", "spread"]
