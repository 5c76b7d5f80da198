"""What a tool raises reaches the user as itself, also where torch takes it for something else."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import amanda
from amanda import interceptor


class Overriding(torch.Tensor):
    """Its operators run ops of their own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("__add__", "add"):
            torch.sigmoid(torch.ones(2))
        return super().__torch_function__(func, types, args, kwargs or {})


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.sigmoid(torch.ones(2))
        return func(*args, **(kwargs or {}))


def within(mode: Callable[[], Any], program: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with mode():
            return program()

    return run


X = torch.ones(3)
OWN = X.as_subclass(Overriding)
PROGRAMS = {
    "power": ("pow", lambda: X**2),
    "reflected power": ("pow", lambda: 2**X),
    "reflected difference": ("rsub", lambda: 2 - X),
    "reflected quotient": ("reciprocal", lambda: 2 / X),
    "floor": ("floor_divide", lambda: X // 2),
    "sum": ("__add__", lambda: X + 1),
    "power in a mode": ("pow", within(Functions, lambda: X**2)),
    "difference in a mode": ("rsub", within(Functions, lambda: 2 - X)),
    "within a subclass's sum": ("sigmoid", lambda: OWN + 1),
    "within a subclass's reflected sum": ("sigmoid", lambda: 1 + OWN),
    "within a dispatched sum": ("sigmoid", within(Dispatch, lambda: X + 1)),
    "within a dispatched comparison": ("sigmoid", within(Dispatch, lambda: X < 1)),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("executions", [1, 2])
def test_a_type_error_of_a_routine_is_not_taken_for_a_wrong_operand(
    name: str, executions: int, acting: Any
) -> None:
    op, program = PROGRAMS[name]
    error, remaining = TypeError("on purpose"), executions

    def fail() -> None:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            raise error

    @amanda.apply(acting("insert_before_op", op, fail, inputs=[]))
    def run() -> None:
        for _ in range(executions):
            program()

    with pytest.raises(TypeError) as raised:
        run()
    assert raised.value is error
    assert interceptor.failure() is None


def test_a_wrong_operand_is_told_as_ever_after_a_type_error_of_a_routine(acting: Any) -> None:
    def fail() -> None:
        raise TypeError("on purpose")

    codes = {
        id(member): member.__code__ for member in vars(torch.Tensor).values() if hasattr(member, "__code__")
    }
    with amanda.apply(acting("insert_before_op", "relu", fail, inputs=[])):
        with pytest.raises(TypeError, match="on purpose"):
            torch.relu(X)
        for wrong in (lambda: X + "a", lambda: "a" - X, lambda: X ** "a", lambda: X // "a"):
            with pytest.raises(TypeError, match="unsupported operand"):
                wrong()
        assert X.__pow__("a") is NotImplemented
    assert codes == {
        id(member): member.__code__ for member in vars(torch.Tensor).values() if hasattr(member, "__code__")
    }


def test_an_override_is_given_the_operators_that_torch_has(acting: Any) -> None:
    class Asked(torch.Tensor):
        is_operator = False

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.is_operator |= func is torch.Tensor.__pow__ is power
            return super().__torch_function__(func, types, args, kwargs or {})

    power = torch.Tensor.__pow__
    with amanda.apply(acting("insert_before_op", "pow", lambda: None, inputs=[])):
        assert torch.equal(X.as_subclass(Asked) ** 2, X)
    assert Asked.is_operator


def test_a_type_error_of_a_routine_dies_with_its_thread_or_with_the_scope(acting: Any) -> None:
    class Held:
        pass

    references: list[weakref.ref[Held]] = []
    ends = threading.Event()

    def fail() -> None:
        raise TypeError("on purpose")

    def run() -> None:
        mine = Held()
        references.append(weakref.ref(mine))
        with suppress(TypeError):
            torch.relu(X)

    def work(wait: bool) -> None:
        run()
        if wait:
            failed.set()
            ends.wait(60)

    failed = threading.Event()
    with amanda.apply(acting("insert_before_op", "relu", fail, inputs=[])):
        ended = threading.Thread(target=work, args=(False,))
        ended.start()
        ended.join()
        del ended
        gc.collect()
        assert references[0]() is None
        waiting = threading.Thread(target=work, args=(True,))
        waiting.start()
        failed.wait(60)
    gc.collect()
    assert references[1]() is None
    ends.set()
    waiting.join()
