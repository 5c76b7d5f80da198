"""The values of a graph before it runs: symbols, which are tensors without data, and weights behind some."""

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

from ._node_runs import callee, uninstrumented

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from ._node_runs import NodeRun


class GraphSymbols:
    """The values of a graph without data: a symbol for each input, and for each attribute of the module.

    inputs: arguments of the graph: tensors with data or without, or numbers; None if unknown.
    symbols: these arguments as dynamo or export has them; made from `inputs` if None.
    weights: for each input, whether it is the same tensor in each execution.
    """

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        symbols: Sequence[Any] | None = None,
        weights: Sequence[bool] | None = None,
    ) -> None:
        """Make a symbol for each input, in the fake mode that the symbols come from, else in a new one."""
        self.module = module
        fake_modes = [value.fake_mode for value in (symbols or ()) if isinstance(value, FakeTensor)]
        self.fake_mode: FakeTensorMode = fake_modes[0] if fake_modes else FakeTensorMode(shape_env=ShapeEnv())
        self._data_by_symbol_id: dict[int, torch.Tensor] = {}
        self._node_by_symbol_id: dict[int, Node] = {}
        self._held_symbols: list[Any] = []
        self._leaf_symbol_ids: set[int] = set()
        self._node_runs: Mapping[Node, NodeRun] = {}
        self._symbol_by_attribute: dict[str, Any] = {}
        is_weight = weights or [isinstance(value, torch.nn.Parameter) for value in inputs]
        with uninstrumented(), self.without_data():
            self.inputs = [
                self._make_symbol(value, example, holds_weight)
                for value, example, holds_weight in zip(inputs, symbols or inputs, is_weight, strict=True)
            ]

    @contextmanager
    def without_data(self) -> Iterator[FakeTensorMode]:
        """Enter a context in which all tensors, also those with data, are computed without data."""
        shape_env = self.fake_mode.shape_env
        with (
            patch.object(self.fake_mode, "allow_non_fake_inputs", True),
            self.fake_mode as mode,
            _without_saved_tensor_hooks(),
            # Tells torch that sizes which depend on data are made here only to be discarded.
            shape_env.ignore_fresh_unbacked_symbols() if shape_env else nullcontext(),
        ):
            yield mode

    def _make_symbol(self, value: Any, example: Any, is_weight: bool) -> Any:
        """Return a tensor without data for a value, a leaf or a result as the value is; a number as it is.

        example: the value as dynamo or export has it.  is_weight: whether the value is the symbol's data.
        """
        if not isinstance(example, torch.Tensor):
            return example
        is_fake = isinstance(example, FakeTensor)
        fake: Any = example if is_fake else self.fake_mode.from_tensor(example, static_shapes=True)
        symbol: Any = fake.detach()
        if isinstance(value, torch.Tensor) and value.requires_grad:
            symbol.requires_grad_()
            if value.is_leaf:
                self._leaf_symbol_ids.add(id(symbol))
            else:
                symbol = symbol.clone()  # so that it has a node, as the value has
        if getattr(fake, "item_memo", None) is not None:
            symbol.item_memo = fake.item_memo  # of a number that dynamo has for a tensor
        has_data = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        if has_data and is_weight:
            self._data_by_symbol_id[id(symbol)] = value
        self._held_symbols.append(symbol)  # so that no other object gets its `id`
        return symbol

    def attribute_symbol(self, target: str) -> Any:
        """Return the symbol of an attribute of the graph's module, which is made the first time."""
        if target not in self._symbol_by_attribute:
            value: Any = self.module
            for part in target.split("."):
                value = getattr(value, part)
            self._symbol_by_attribute[target] = self._make_symbol(value, example=value, is_weight=True)
        return self._symbol_by_attribute[target]

    def record_runs(self, node_runs: Mapping[Node, NodeRun]) -> None:
        """Record the nodes' runs, so that `read_value` can compute values that depend on weights alone."""
        self._node_runs = node_runs
        for node, node_run in node_runs.items():
            if isinstance(node_run.value, torch.Tensor):
                self._node_by_symbol_id.setdefault(id(node_run.value), node)
            for tensor in node_run.module_tensors.values():
                self._data_by_symbol_id[id(tensor)] = tensor

    def parameter_of(self, value: Any) -> Any:
        """Return the parameter that a symbol stands for, or is a view of; None for any other value."""
        if not isinstance(value, torch.Tensor):
            return None
        base = value if value._base is None else value._base
        data = self._data_by_symbol_id.get(id(value), self._data_by_symbol_id.get(id(base)))
        return data if isinstance(data, torch.nn.Parameter) else None

    def is_leaf(self, value: torch.Tensor) -> bool:
        """Return True for an input of the graph whose gradient is stored."""
        return id(value) in self._leaf_symbol_ids

    @staticmethod
    def ordinal(variable: Any) -> int:
        """Return the ordinal of a parameter."""
        return interceptor.ordinal(variable)

    def read_value(self, value: Any) -> Any:
        """Return the present value of a tensor that depends on weights alone; any other value as it is.

        Runs the nodes that lead from the weights to the tensor.
        Raises AmandaError for a tensor that is computed when the graph runs.
        """
        if not isinstance(value, torch.Tensor):
            return value
        with torch.utils._python_dispatch._disable_current_modes(), uninstrumented():
            present_value = self._compute_value(value)
        return present_value

    def _compute_value(self, value: Any) -> Any:
        """Compute a tensor from weights, by the nodes that lead to it.

        Raises AmandaError for a tensor that depends on an input of the graph.
        """
        data = self._data_by_symbol_id.get(id(value))
        if data is not None:
            return data
        node = self._node_by_symbol_id.get(id(value))
        if node is None or node.op in ("placeholder", "get_attr"):
            raise AmandaError("this value is known when the graph runs; give a routine to insert_before_op")
        node_run = self._node_runs[node]
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda input_node: self._node_runs[input_node].value
        )
        args, kwargs = tree_map_only(torch.Tensor, self._compute_value, (args, kwargs))
        with torch.no_grad():
            return callee(node_run.node, self.module)(*args, **kwargs)


def _without_saved_tensor_hooks() -> AbstractContextManager[Any]:
    """Return a context in which hooks of the user see no tensor that autograd saves.

    No hooks are pushed if there are none to hide, since torch.func.grad refuses any.
    """
    innermost_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.8
    ignore_is_tracing = True
    if innermost_hooks is not None and innermost_hooks(ignore_is_tracing) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _identity)


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
