"""What stands in for torch's callables while a scope is open: copied and pickled as they are, and patched."""

import copy
import functools
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import children
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda.interceptor import NATIVE

X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.mark.long
def test_all_of_this_holds_for_the_pure_python_interceptor() -> None:
    if not NATIVE:
        return
    done = children.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", __file__],
        env={**os.environ, "AMANDA_NATIVE": "0"},
    )
    assert done.returncode == 0, done.stdout[-8000:]


class Holder(nn.Module):
    """Keeps callables of torch of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.builtin = torch.tanh
        self.in_module = F.linear
        self.method = torch.Tensor.add
        self.partial = functools.partial(torch.sigmoid)
        self.function = F.gelu
        self.call = nn.Module.__call__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.method(self.builtin(x), self.in_module(x, self.linear.weight))
        return self.partial(self.function(self.call(self.linear, x)))


def copies(model: nn.Module) -> Iterator[nn.Module]:
    yield copy.copy(model)
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    yield torch.load(stream, weights_only=False)


def test_a_model_that_is_built_in_a_scope_is_copied_and_saved_in_it_and_after() -> None:
    with amanda.apply(amanda.Tool()):
        model = Holder()
        expected = model(X)
        for twin in copies(model):
            assert torch.equal(twin(X), expected)
    assert torch.equal(model(X), expected)
    for twin in copies(model):
        assert torch.equal(twin(X), expected)


CALLABLES: dict[str, Callable[[], Any]] = {
    "builtin": lambda: torch.relu,
    "builtin of a module": lambda: F.linear,
    "method": lambda: torch.Tensor.add,
    "method that is Python": lambda: torch.Tensor.backward,
    "subscript": lambda: torch.Tensor.__getitem__,
    "function": lambda: torch.autograd.backward,
    "call of a module": lambda: nn.Module.__call__,
    "call of an operator": lambda: torch._ops.OpOverload.__call__,
}


def facts(value: Any) -> list[Any]:
    kinds = (types.BuiltinFunctionType, types.FunctionType, types.MethodType, types.MethodDescriptorType)
    return [
        value.__name__, value.__qualname__, getattr(value, "__module__", None), value.__doc__, hash(value),
        repr(value), [isinstance(value, kind) for kind in kinds], pickle.loads(pickle.dumps(value)) == value,
        copy.copy(value) == copy.deepcopy(value) == value,
    ]  # fmt: skip


@pytest.mark.parametrize("name", CALLABLES)
def test_a_callable_looks_compares_and_pickles_as_outside(name: str) -> None:
    get = CALLABLES[name]
    outside, expected = get(), facts(get())
    with amanda.apply(amanda.Tool()):
        inside = get()
        assert facts(inside) == expected
        assert inside == outside
        assert {outside: 1}[inside] == {inside: 1}[outside] == 1
    assert facts(inside) == expected


def test_what_is_pickled_in_a_scope_loads_without_amanda() -> None:
    with amanda.apply(amanda.Tool()):
        pickled = pickle.dumps([get() for get in CALLABLES.values()])
    program = (
        "import pickle, sys, torch\n"
        f"found = pickle.loads({pickled!r})\n"
        "assert found[0] is torch.relu and found[1] is torch.nn.functional.linear, found\n"
        "assert found[-2] is torch.nn.Module.__call__, found\n"
        "assert 'amanda' not in sys.modules\n"
    )
    done = children.run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


class Count(amanda.Tool):
    """Types and modules of executions."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, ...]] = []
        self.backward: list[str] = []
        self.add_inst_for_op(
            lambda c: c.insert_before_op(lambda *_: self.ops.append((c.get_op_type(), *c.get_scopes())))
        )
        self.add_inst_for_op(
            lambda c: c.insert_before_backward_op(lambda *_: self.backward.append(c.get_forward_op_type())),
            backward=True,
        )


Place = tuple[Any, str]
PLACES: dict[str, Place] = {
    "a function": (torch, "relu"),
    "a function of nn.functional": (F, "linear"),
    "a method": (torch.Tensor, "add"),
    "the call of modules": (nn.Module, "__call__"),
    "what starts a backward pass": (torch.autograd, "_engine_run_backward"),
    "the call of operators": (torch._ops.OpOverload, "__call__"),
}


@contextmanager
def restored_place(place: Place) -> Iterator[Any]:
    """What lies at a place, which is put back whatever the test leaves there."""
    holder, name = place
    before = vars(holder).get(name)
    try:
        yield before
    finally:
        if before is not None:
            setattr(holder, name, before)
        elif name in vars(holder):
            delattr(holder, name)


def around(place: Place, calls: list[str]) -> Callable[..., Any]:
    """A wrapper, as libraries make it, around what lies there now."""
    original = getattr(*place)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(place[1])
        return original(*args, **kwargs)

    return wrapper


def program() -> list[torch.Tensor]:
    x = X.clone().requires_grad_()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh()))
    y = torch.relu(model(x)).add(torch.ops.aten.sin.default(x))
    y.sum().backward()
    return [y, x.grad]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", PLACES)
def test_a_patch_that_the_program_makes_in_a_scope_stays(name: str) -> None:
    place, calls, expected = PLACES[name], [], program()
    with restored_place(place):
        with amanda.apply(Count()):
            program()
            mine = around(place, calls)
            setattr(*place, mine)
            result, call_count = program(), len(calls)
        assert same(result, expected)
        assert call_count
        assert vars(place[0])[place[1]] is mine
        assert same(program(), expected)
        assert len(calls) == 2 * call_count
        later = Count()
        with amanda.apply(later):
            result = program()
        assert same(result, expected)
        assert len(calls) == 3 * call_count
        assert not hasattr(place[0], mine.__name__)
        assert vars(place[0])[place[1]] is mine
        assert {"linear", "relu", "add", "sin"} <= {kind for kind, *_ in later.ops}
        assert later.backward
    count = Count()
    with amanda.apply(count):
        program()
    assert count.ops == later.ops
    assert count.backward == later.backward


@pytest.mark.parametrize("name", PLACES)
def test_a_patch_that_ends_after_the_scope_leaves_a_stand_in_that_does_nothing(name: str) -> None:
    place, calls, expected = PLACES[name], [], program()
    bare = Count()
    with amanda.apply(bare):
        program()
    with restored_place(place):
        with amanda.apply(Count()):
            patch = mock.patch.object(*place, around(place, calls))
            patch.start()
            program()
        patch.stop()
        assert same(program(), expected)
        count = Count()
        with amanda.apply(count):
            result = program()
        assert same(result, expected)
        assert count.ops == bare.ops
        assert count.backward == bare.backward
        assert same(program(), expected)


@pytest.mark.parametrize("name", PLACES)
def test_a_patch_that_ends_in_the_scope_has_ended_after_it(name: str) -> None:
    place, calls, expected = PLACES[name], [], program()
    with restored_place(place) as before:
        patch = mock.patch.object(*place, around(place, calls))
        patch.start()
        with amanda.apply(Count()), amanda.apply(Count()):
            program()
            patch.stop()
            result = program()
        assert same(result, expected)
        assert vars(place[0]).get(place[1]) is before
        count = len(calls)
        assert same(program(), expected)
        assert len(calls) == count


@pytest.mark.parametrize("name", ["a function", "what starts a backward pass"])
def test_what_the_program_deletes_in_a_scope_stays_deleted(name: str) -> None:
    holder, attribute = place = PLACES[name]
    with restored_place(place):
        with amanda.apply(Count()):
            delattr(*place)
        assert not hasattr(holder, attribute)


def test_a_stance_of_the_compiler_that_the_program_takes_in_a_scope_stays() -> None:
    before = torch._dynamo.eval_frame._stance
    try:
        with amanda.apply(Count()):
            program()
            torch.compiler.set_stance("fail_on_recompile")
        assert torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"
    finally:
        torch.compiler.set_stance(before.stance)


def test_each_function_that_equals_another_has_its_own() -> None:
    x = torch.eye(2)
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op_type()))
    assert torch.mm == torch.dsmm  # one C function
    with amanda.apply(tool):
        torch.mm(x, x)
        torch.spmm(x, x)
        torch._C._VariableFunctions.mm(x, x)
        torch._VF.mm(x, x)
    assert seen == ["mm"] * 4


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_that_is_compiled_in_a_scope_calls_no_python() -> None:
    with amanda.apply(amanda.Tool()):
        scripted = torch.jit.script(rectified)
    assert "aten::relu" in str(scripted.graph)
    assert torch.equal(scripted(X), X.relu())


def rectified(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)
