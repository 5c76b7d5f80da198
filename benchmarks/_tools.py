"""The tools whose cost is measured: none of them changes a value, unless it says so."""

from typing import Any

import torch

import amanda


class Empty(amanda.Tool):
    """Looks at every op and inserts nothing; also at every backward op, if told to."""

    def __init__(self, backward: bool = False) -> None:
        self.add_inst_for_op(lambda context: None)
        if backward:
            self.add_inst_for_op(lambda context: None, backward=True)


class Routines(amanda.Tool):
    """A Python routine before and one after every op, each of which returns None."""

    before = after = True

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if self.before:
            context.insert_before_op(self.routine)
        if self.after:
            context.insert_after_op(self.routine)

    def routine(self, *values: Any) -> None:
        return None


class Before(Routines):
    """Only the routine before."""

    after = False


class After(Routines):
    """Only the routine after."""

    before = False


class Handing(amanda.Tool):
    """Routines before and after that hand back the first value as it is."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.routine, inputs=[0])
        context.insert_after_op(self.routine, outputs=[0])

    def routine(self, value: Any) -> Any:
        return value


class Changing(amanda.Tool):
    """A routine before that puts a tensor at hand in the place of a first input of its shape."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if getattr(context.get_inputs()[0], "shape", None) == self.value.shape:
            context.insert_before_op(self.routine, inputs=[0])

    def routine(self, value: Any) -> torch.Tensor:
        return self.value


class BackwardRoutines(amanda.Tool):
    """A routine before and one after every backward op, each of which returns None.

    limit: on so many backward ops only.  leaves: also where a gradient is accumulated; for those torch
    copies each gradient that a hook may have looked at, instead of keeping it.
    """

    before = after = True

    def __init__(self, limit: int | None = None, leaves: bool = True) -> None:
        self.limit = limit
        self.leaves = leaves
        self.add_inst_for_op(lambda context: None)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        if self.limit == 0 or not (self.leaves or "Accumulate" not in str(context.get_backward_op())):
            return
        if self.limit:
            self.limit -= 1
        if self.before:
            context.insert_before_backward_op(self.routine)
        if self.after:
            context.insert_after_backward_op(self.routine)

    def routine(self, *values: Any) -> None:
        return None


class BeforeBackward(BackwardRoutines):
    """Only the routine before."""

    after = False


class AfterBackward(BackwardRoutines):
    """Only the routine after."""

    before = False


class AllPoints(BackwardRoutines):
    """Routines at all four points of every op."""

    def __init__(self, leaves: bool = True) -> None:
        super().__init__(leaves=leaves)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)


class Counting(amanda.Tool):
    """Counts the executions of ops, and of backward ops."""

    def __init__(self, backward: bool = True) -> None:
        self.forward = self.backward = 0
        self.add_inst_for_op(lambda context: context.insert_before_op(self.one_forward, inputs=[]))
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.one_backward, grad_outputs=[])

    def one_forward(self) -> None:
        self.forward += 1

    def one_backward(self) -> None:
        self.backward += 1
