"""Where in a model a parameter lies, which names what tools keep of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amanda


class Chosen(nn.Module):
    """Products with weights of a list, whose order the data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)])
        self.last = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for i in order:
            x = F.linear(x, self.ws[i])
        return self.tied(self.last(x))


class Paths(amanda.Tool):
    """Keeps, for each product, its place and the path of its weight."""

    def __init__(self) -> None:
        self.paths: dict[str, str | None] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            weight = context.get_variable("weight")
            self.paths[self.place(context)] = context.get_variable_path(weight)
            self.keep(context, "mark", lambda: torch.zeros(1), variable=weight)


IN_MODEL = {
    "0/linear(ws.0)": "0.ws.0",
    "0/linear(ws.2)": "0.ws.2",
    "0.last/linear": "0.last.weight",
    "0.tied/linear(0.last.weight)": "0.last.weight",
}


class Outer(nn.Sequential):
    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        result: Tensor = self[0](x, order)
        return result


@pytest.mark.parametrize("mode", ["", "eager", "instrument"])
def test_places_and_state_have_the_names_of_parameters_whatever_is_read_first(mode: Any) -> None:
    for order in ((0, 2), (2, 0)):
        torch._dynamo.reset()
        model: Any = Outer(Chosen())
        tool = Paths()
        call = torch.compile(model, backend="eager") if mode else model
        with amanda.apply(tool, **({"compiled": mode} if mode else {})):
            call(torch.rand(2, 4), order)
        assert tool.paths == IN_MODEL
        assert sorted(tool.state_dict()) == ["0.last.weight/mark", "0.ws.0/mark", "0.ws.2/mark"]


def test_a_parameter_of_no_module_has_no_path() -> None:
    tool, weight = Paths(), nn.Parameter(torch.rand(4, 4))
    with amanda.apply(tool):
        F.linear(torch.rand(2, 4), weight)
        nn.Sequential()(F.linear(torch.rand(2, 4), weight))
    assert set(tool.paths.values()) == {None}


def test_parameters_of_two_models_are_told_apart() -> None:
    tool = Paths()
    with amanda.apply(tool):
        for model in (first := nn.Linear(4, 4), nn.Linear(4, 4), first):
            model(torch.rand(2, 4))
    assert sorted(tool.state_dict()) == ["weight.1/mark", "weight/mark"]


def test_a_parameter_that_took_anothers_place_has_its_path() -> None:
    tool, model = Paths(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with amanda.apply(tool):
        model(torch.rand(2, 4))
        model[0], model[1] = model[1], model[0]
        model(torch.rand(2, 4))
    assert set(tool.paths.values()) == {"0.weight", "1.weight"}


def test_state_that_was_kept_by_the_op_is_found() -> None:
    tool, model = Paths(), nn.Sequential(nn.Linear(4, 4))
    tool.load_state_dict({"0/linear/mark": torch.ones(1)})
    with amanda.apply(tool):
        model(torch.rand(2, 4))
    assert tool.state_dict() == {"0.weight/mark": torch.ones(1)}
    assert not tool.waiting_state()


def test_paths_keep_no_model_alive() -> None:
    tool, model = Paths(), nn.Sequential(nn.Linear(4, 4))
    with amanda.apply(tool):
        model(torch.rand(2, 4)).sum().backward()
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None


class Masks(amanda.Tool):
    """Masks the smaller half of each weight, once."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            weight = context.get_value("weight")
            variable = context.get_variable("weight")
            mask = self.keep(context, "mask", lambda: weight.abs() > weight.abs().median(), variable=variable)
            context.insert_before_op(lambda weight, mask: weight * mask, inputs=["weight"], mask=mask)


def test_parts_of_a_parameter_have_state_of_their_own() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    query, key = torch.randn(1, 3, 8), torch.randn(1, 4, 8)
    tool = Masks()
    with amanda.apply(tool):
        attention(query, key, key)
    names = [name for name in tool.state_dict() if name.startswith("in_proj_weight")]
    assert len(names) == 2  # of q, and of k and v, which are projected together
    masks = {name: mask for name, mask in tool.state_dict().items() if name in names}
    shapes = {tuple(mask.shape) for mask in masks.values()}
    assert shapes == {(8, 8), (16, 8)}
    again = Masks()
    again.load_state_dict(tool.state_dict())
    with amanda.apply(again):
        attention(query, key, key)
    assert again.state_dict().keys() == tool.state_dict().keys()


class Held(amanda.Tool):
    """Keeps the module path of each op that is analysed."""

    def __init__(self) -> None:
        self.scopes: list[str] = []
        self.add_inst_for_op(lambda context: self.scopes.append(context.get_scope()))


def test_a_module_that_moves_has_the_path_of_where_it_lies() -> None:
    inner, x = nn.Sequential(nn.ReLU()), torch.randn(2)
    model = nn.Sequential(inner, nn.Tanh())

    def scopes() -> list[str]:
        tool = Held()
        with amanda.apply(tool):
            model(x)
        return tool.scopes

    assert scopes() == ["0.0", "1"]
    inner[0], model[1] = model[1], inner[0]
    assert scopes() == ["0.0", "1"]
    model.append(inner[0])
    del model[0]
    assert scopes() == ["0", "1"]


def test_a_module_made_for_each_call_is_named_by_its_type() -> None:
    class Making(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = nn.ReLU()(x)
            return y

    tool, model, x = Held(), Making(), torch.randn(2)
    with amanda.apply(tool):
        for _ in range(3):
            model(x)
    assert set(tool.scopes) == {"(ReLU)"}


def test_paths_of_modules_keep_no_module_alive() -> None:
    inner = nn.Sequential(nn.ReLU())
    model = nn.Sequential(inner)
    with amanda.apply(Held()):
        model(torch.randn(2))
    gone = weakref.ref(inner[0])
    inner[0] = nn.Tanh()
    gc.collect()
    assert gone() is None


class Renaming(nn.Sequential):
    """A module whose `named_modules` has names of its own."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        for path, module in super().named_modules(*args, **kwargs):
            yield (f"renamed.{path}" if path else ""), module


class Calls(nn.Module):
    """Calls modules that it holds at several places, some of them through another module."""

    def __init__(self, own: type[nn.Sequential]) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.ModuleDict({"a": shared}), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.register_module("absent", None)
        self.shared = shared
        self.again = self.block[1]
        self.wrapped = nn.parallel.DataParallel(nn.Linear(4, 4), device_ids=[])
        self.own = own(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(self.wrapped(self.again(self.shared(x))))
        return self.own[0](self.again[0](x))


@pytest.mark.parametrize(("own", "in_own"), [(nn.Sequential, "own.0"), (Renaming, "renamed.own.renamed.0")])
def test_a_module_has_its_first_path_as_named_modules_spells_it(
    own: type[nn.Sequential], in_own: str
) -> None:
    scopes: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: scopes.append(context.get_scope()))
    model, x = Calls(own), torch.rand(2, 4)
    with amanda.apply(tool):
        model(x)
    first_paths = {id(module): path for path, module in reversed([*model.named_modules()])}
    assert first_paths[id(model.shared)] == "block.0.a"
    assert first_paths[id(model.again[0])] == "block.1.0"
    assert scopes == [
        "block.0.a", "block.1.0", "block.1.1", "wrapped", in_own, "block.1.0",
        first_paths[id(model.own[0])],
    ]  # fmt: skip


def test_a_module_that_has_moved_is_found_at_its_new_path() -> None:
    scopes: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: scopes.append(context.get_scope()))
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model, x = nn.Sequential(first, second), torch.rand(2, 4)
    with amanda.apply(tool), amanda.cache_disabled():
        model(x)
        model[0], model[1] = second, first
        model(x)
    assert scopes == ["0", "1", "0", "1"]
