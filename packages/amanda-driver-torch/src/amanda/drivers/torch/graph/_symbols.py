"""The values of a graph before it runs: tensors without data, and what some of them stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from amanda import interceptor
from amanda.errors import AmandaError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from ._record import called, uninstrumented

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from ._record import Ran


class Symbols:
    """The inputs of a graph without data.

    given: what the graph is called with: tensors with data, or without, or numbers; None where unknown.
    symbols: the same as dynamo, or export, has them; made of `given` where None.
    weights: which of the inputs keep their value from one execution to the next.
    """

    def __init__(
        self,
        module: GraphModule,
        given: Sequence[Any],
        symbols: Sequence[Any] | None = None,
        weights: Sequence[bool] | None = None,
    ) -> None:
        self.module = module
        found = [one.fake_mode for one in (symbols or ()) if isinstance(one, FakeTensor)]
        self.fakes: FakeTensorMode = found[0] if found else FakeTensorMode(shape_env=ShapeEnv())
        self._real: dict[int, torch.Tensor] = {}
        self._made: dict[int, Node] = {}
        self._kept: list[Any] = []
        self._leaves: set[int] = set()
        self._ran: Mapping[Node, Ran] = {}
        self._attributes: dict[str, Any] = {}
        is_weight = weights or [isinstance(one, torch.nn.Parameter) for one in given]
        with uninstrumented(), self.mode():
            self.inputs = [
                self._symbol(one, like, weight)
                for one, like, weight in zip(given, symbols or given, is_weight, strict=True)
            ]

    @contextmanager
    def mode(self) -> Iterator[FakeTensorMode]:
        """Compute without data, also with tensors that have some."""
        unnamed = self.fakes.shape_env.ignore_fresh_unbacked_symbols() if self.fakes.shape_env else None
        with patch.object(self.fakes, "allow_non_fake_inputs", True), self.fakes as mode, _unseen_by_hooks():
            if unnamed is None:
                yield mode
            else:
                with unnamed:
                    yield mode

    def _symbol(self, given: Any, like: Any, weight: bool) -> Any:
        if not isinstance(like, torch.Tensor):
            return like
        without_data = (
            like if isinstance(like, FakeTensor) else self.fakes.from_tensor(like, static_shapes=True)
        )
        symbol: Any = without_data.detach()
        if isinstance(given, torch.Tensor) and given.requires_grad:
            symbol.requires_grad_()
            if given.is_leaf:
                self._leaves.add(id(symbol))
            else:
                symbol = symbol.clone()
        if getattr(without_data, "item_memo", None) is not None:
            symbol.item_memo = without_data.item_memo  # of a number that dynamo has for a tensor
        if isinstance(given, torch.Tensor) and not isinstance(given, FakeTensor) and weight:
            self._real[id(symbol)] = given
        self._kept.append(symbol)
        return symbol

    def attribute(self, target: str) -> Any:
        """The symbol of what the graph's module holds under a name."""
        if target not in self._attributes:
            held: Any = self.module
            for part in target.split("."):
                held = getattr(held, part)
            self._attributes[target] = self._symbol(held, held, True)
        return self._attributes[target]

    def learn(self, ran: Mapping[Node, Ran]) -> None:
        """Record how the values are made."""
        self._ran = ran
        for node, one in ran.items():
            if isinstance(one.value, torch.Tensor):
                self._made.setdefault(id(one.value), node)
            for tensor in one.held.values():
                self._real[id(tensor)] = tensor

    def variable(self, value: Any) -> Any:
        """The parameter that a value is, or is a view of."""
        if not isinstance(value, torch.Tensor):
            return None
        base = value if value._base is None else value._base
        found = self._real.get(id(value), self._real.get(id(base)))
        return found if isinstance(found, torch.nn.Parameter) else None

    def is_leaf(self, value: torch.Tensor) -> bool:
        """Return True if a value is given to the graph and its gradient is stored."""
        return id(value) in self._leaves

    @staticmethod
    def ordinal(variable: Any) -> int:
        """A number for a parameter."""
        return interceptor.ordinal(variable)

    def value(self, value: Any) -> Any:
        """The present value of what depends on weights alone.

        Raises AmandaError for what is known when the graph runs.
        """
        if not isinstance(value, torch.Tensor):
            return value
        with torch.utils._python_dispatch._disable_current_modes(), uninstrumented():
            found = self._computed(value)
        return found

    def _computed(self, value: Any) -> Any:
        known = self._real.get(id(value))
        if known is not None:
            return known
        node = self._made.get(id(value))
        if node is None or node.op in ("placeholder", "get_attr"):
            raise AmandaError("this value is known when the graph runs; give a routine to insert_before_op")
        own = self._ran[node]
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: self._ran[one].value)
        args, kwargs = tree_map_only(torch.Tensor, self._computed, (args, kwargs))
        with torch.no_grad():
            return called(own.node, self.module)(*args, **kwargs)


def _unseen_by_hooks() -> AbstractContextManager[Any]:
    """Context in which hooks of the user see no tensor that is saved; torch.func.grad refuses any hooks."""
    innermost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.8
    if innermost is not None and innermost(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
