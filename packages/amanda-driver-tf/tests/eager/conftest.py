"""Tools that the tests of eager mode apply."""

from collections.abc import Callable
from typing import Any

import pytest

import amanda


class Ops(amanda.Tool):
    """Types of the forward ops that execute, and of the backward ops with their forward op's."""

    def __init__(self) -> None:
        self.forward: list[str] = []
        self.backward: list[tuple[str, str]] = []
        self.add_inst_for_op(self._see)
        self.add_inst_for_op(self._see_backward, backward=True)

    def _see(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._note, inputs=[], type=context.get_op().type)

    def _note(self, type: str) -> None:
        self.forward.append(type)

    def _see_backward(self, context: amanda.OpContext) -> None:
        pair = context.get_op().type, context.get_backward_op().type
        context.insert_before_backward_op(self._note_backward, pair=pair)

    def _note_backward(self, *_: Any, pair: tuple[str, str]) -> None:
        self.backward.append(pair)


class Acting(amanda.Tool):
    """One action at every op of one type, forward or backward."""

    def __init__(self, action: str, type: str, routine: Callable[..., Any], **options: Any) -> None:
        self.type, self.action, self.routine, self.options = type, action, routine, options
        self.backward = "backward" in action
        self.add_inst_for_op(self._record, backward=self.backward)

    def _record(self, context: amanda.OpContext) -> None:
        op = context.get_backward_op() if self.backward else context.get_op()
        if op.type == self.type:
            getattr(context, self.action)(self.routine, **self.options)


class Contexts(amanda.Tool):
    """What analyses see: by type of op, what a question to the context gives."""

    def __init__(self, ask: Callable[[amanda.OpContext], Any]) -> None:
        self.ask = ask
        self.answers: dict[str, list[Any]] = {}
        self.add_inst_for_op(self._see, require_outputs=True)

    def _see(self, context: amanda.OpContext) -> None:
        self.answers.setdefault(context.get_op().type, []).append(self.ask(context))


@pytest.fixture
def ops() -> Ops:
    """A tool that notes the ops that execute."""
    return Ops()


@pytest.fixture
def acting() -> type[Acting]:
    """`acting("insert_before_op", "Relu", routine, inputs=[0])`: a tool with that action."""
    return Acting


@pytest.fixture
def contexts() -> type[Contexts]:
    """`contexts(lambda context: ...)`: a tool that asks each context."""
    return Contexts
