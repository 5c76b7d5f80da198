"""Base of dynamic pruning tools: predictors, their state per thread, results, patterns in the dataflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.options import Seed, checked
from amanda.tools.dataflow import Dataflow, DataflowNode
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import get_dtype_name
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import MATRIX_PRODUCTS, StandardMapping
from amanda.tools.results import Column, Result, amount, shortened

KEYS = ("phase", "type", "module", "source")


@dataclass(eq=False)
class PrunedOp:
    """Sums over the executions of one op, which stay on the device of the tensors.

    unit: "channels", "positions" or "tokens".  share: sum of the pruned shares of the units.
    macs: multiply-accumulates of the dense op.  saved: those that pruned units would not need.
    """

    type: str
    module: str
    source: str
    unit: str
    executions: int = 0
    share: Any = 0.0
    macs: int = 0
    saved: Any = 0.0

    def add(self, share: Any, macs: int, saved: Any) -> None:
        """Add an execution: the pruned share of the units, the dense MACs, and the saved share of these.

        share, saved: tensors without gradient, or numbers.
        """
        self.executions += 1
        self.share = self.share + share
        self.macs += macs
        self.saved = self.saved + saved * macs

    def clear(self) -> None:
        """Forget the executions."""
        self.executions, self.share, self.macs, self.saved = 0, 0.0, 0, 0.0


class DynamicPruneResult(Result):
    """A row for each op: the pruned share, and the multiply-accumulates that pruning would save."""

    name: ClassVar[str] = "dynamic_prune"
    title = "Dynamic pruning"
    columns = (
        *(Column(key, show=partial(shortened, width=24)) for key in KEYS),
        Column("unit"),
        Column("executions", show="{:,}".format, number=True),
        Column("pruned", show="{:.1%}".format, number=True, unit="share"),
        Column("MACs", show=amount, total=True),
        Column("saved MACs", show=amount, total=True),
    )

    def __init__(self, pruned: Iterable[PrunedOp], notes: Sequence[str] = ()) -> None:
        self._rows = [
            ("forward", row.type, row.module, row.source, row.unit, row.executions,
             float(row.share) / row.executions, row.macs, round(float(row.saved)))
            for row in pruned
            if row.executions
        ]  # fmt: skip
        self._notes = (
            "MACs are of the dense ops; saved MACs are those that an implementation which skips pruned "
            "parts need not compute.",
            *notes,
        )

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op that was executed."""
        return self._rows

    def notes(self) -> Sequence[str]:
        """Return sentences on the numbers, and on ops that were not pruned."""
        return self._notes

    @property
    def saved(self) -> float:
        """Return the saved share of the multiply-accumulates of all ops."""
        macs = sum(row[-2] for row in self._rows)
        return sum(row[-1] for row in self._rows) / macs if macs else 0.0


T = TypeVar("T")


class PerThreadState(Generic[T]):
    """State of a tool's ops, separate for each thread that executes the program.

    A routine that a graph calls on a framework's own thread gets the state of the thread that runs the graph.
    A state lives as long as its thread and its key.  make: function that returns a new state.
    """

    def __init__(self, tool: amanda.Tool, make: Callable[[], T]) -> None:
        # Weak: the tool holds this object, and a cycle would keep states until a garbage collection.
        self._tool, self._make = ref(tool), make
        # Threads of servers come and go; their states, which hold tensors, go with them.
        self._states: WeakKeyDictionary[Any, WeakKeyDictionary[Any, T]] = WeakKeyDictionary()
        self._last: WeakKeyDictionary[Any, T] = WeakKeyDictionary()  # of the last execution of any thread

    def __getstate__(self) -> tuple[amanda.Tool | None, Callable[[], T]]:
        """Return the arguments of a copy; states belong to threads of this process."""
        return self._tool(), self._make

    def __setstate__(self, state: tuple[amanda.Tool, Callable[[], T]]) -> None:
        """Begin without states."""
        self.__init__(*state)  # type: ignore[misc]

    def state_of(self, key: Any) -> T:
        """Return the state of a key, an object with weak references, in this execution; create it at first.

        Raises ToolError on a framework's own thread, where several threads execute the program.
        """
        states = self._last = self._states_of_caller()
        state = states.get(key)
        if state is None:
            state = states[key] = self._make()
        return state

    def last_state_of(self, key: Any) -> T | None:
        """Return the state of a key in this thread's last execution; None if that execution had no such key.

        Where this thread has executed nothing, the last execution of any thread counts.
        """
        # None on a thread of a framework's own pool, as where autograd recomputes a checkpoint.
        caller = amanda.Tool.caller()
        states = None if caller is None else self._states.get(caller)
        return (self._last if states is None else states).get(key)

    def _states_of_caller(self) -> WeakKeyDictionary[Any, T]:
        """Return the states of the calling thread, or of the only thread where a framework's thread calls.

        Raises ToolError if a framework's thread calls for one of several threads.
        """
        caller = amanda.Tool.caller()
        if caller is not None:
            states = self._states.get(caller)
            if states is None:
                states = self._states[caller] = WeakKeyDictionary()
            return states
        # With one program thread there is no doubt for whom the framework computes; with more, a guess would
        # mix examples.
        if len(self._states) > 1:
            raise ToolError(
                f"{type(self._tool()).__name__}: a thread of the framework recomputes ops for one of "
                f"{len(self._states)} threads that execute the program, and cannot tell which; give "
                "each thread a tool of its own"
            )
        return next(iter(self._states.values()), self._last)

    def clear(self) -> None:
        """Forget all states."""
        self._states.clear()
        self._last = WeakKeyDictionary()


Run = dict[Any, Any] | None
"""The dict of an execution; None where nothing runs again, as in a graph."""
_NOISE = "amanda.tools.dynamic_prune: noise"


class DynamicPruneTool(amanda.Tool):
    """Base of tools that prune parts of ops, chosen for each input by predictors.

    Predictors are made as their ops are analysed; `prepare(model, *example)` analyses beforehand, so that
    `parameters()` returns them for an optimizer.  Add `loss()` to the loss of the model.  `result` has the
    shares that were pruned since `clear()`.

    `training` is True if methods with noise add it; `train` sets it, as for a module.

    Args:
        seed: Of the predictors' initial values, and of the noise in training.
        state: Function that returns the state of an execution.
    """

    purpose = "compress"
    is_copied_when_used = False

    training = False

    @checked
    def __init__(self, seed: Seed = 0, state: Callable[[], Any] = dict) -> None:
        super().__init__()
        # Two streams: predictors are the same whether noise was drawn between their creations or not.
        self._initial_random, self._noise_random = (
            np.random.default_rng(seed),
            np.random.default_rng([seed, 1]),
        )
        self._flow, self._states = Dataflow(), PerThreadState[Any](self, state)
        self._ops: dict[str, Any] = {}
        self._rows: dict[str, PrunedOp] = {}
        self._transformed_ops: dict[str, None] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._add_node)
        # Two routines for each op: a node of the dataflow is needed before the op, its outputs are there
        # after it.
        self.add_inst_for_op(self._record_outputs, require_outputs=True)

    @checked
    def train(self, mode: bool = True) -> None:
        """Switch training on or off."""
        self.training = mode

    @property
    def result(self) -> DynamicPruneResult:
        """Return the mean pruned share of each op, over all executions so far."""
        return DynamicPruneResult(self._rows.values(), self._notes())

    def _notes(self) -> list[str]:
        """Return a sentence for each op that was not pruned within a function transform."""
        reason = "a transform such as vmap has wrapped its input"
        return [f"{name} is left as it is within transforms: {reason}." for name in self._transformed_ops]

    def _is_transformed(self, value: Any, pruned: PrunedOp) -> bool:
        """Return True, and note the op for the result, if a function transform has wrapped its input."""
        # Predictions are kept for the ops behind, and for `loss`, where a value of a transform is no longer
        # one.
        if tensors_of(value).samples(value) is None:
            return False
        self._transformed_ops[f"{pruned.type} of {pruned.module or pruned.source}"] = None
        return True

    def clear(self) -> None:
        """Forget the pruned shares, and the last predictions; analysed ops stay analysed."""
        self._states.clear()
        self._transformed_ops.clear()
        for row in self._rows.values():
            row.clear()

    def loss(self) -> Any:
        """Return a term for the training loss, of this thread's last execution; 0.0 without one."""
        return 0.0

    def _predictions(self) -> list[Any]:
        """Return the predictions at each op in this thread's last execution."""
        return [state for state in map(self._states.last_state_of, self._ops.values()) if state is not None]

    def _op_record(self, context: amanda.OpContext, make: Callable[[], T]) -> T:
        """Return the tool's record of an op; the first analysis of the op creates it by `make`."""
        op_key = self.place(context)
        if op_key not in self._ops:
            self._ops[op_key] = make()
        record: T = self._ops[op_key]
        return record

    def _add_row(self, context: amanda.OpContext, unit: str) -> PrunedOp:
        """Return a new row of the result, for an op; unit: the name of the parts that are pruned."""
        row = PrunedOp(context["type"], context.get_scope(), context.get_source(), unit)
        self._rows[self.place(context)] = row
        return row

    def _add_node(self, context: amanda.OpContext) -> None:
        """Add a forward op to the dataflow, and analyse it."""
        if context["phase"] == "forward":
            node = context["node"] = self._flow.node(context)
            self._analyse(context, node)

    def _record_outputs(self, context: amanda.OpContext) -> None:
        """Record the outputs of a forward op in the dataflow."""
        if context["phase"] == "forward":
            self._flow.made(context["node"], context.get_outputs() or [])

    def _analyse(self, context: amanda.OpContext, node: DataflowNode) -> None:
        """Instrument a forward op; does nothing unless a tool overrides it."""

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load predictors that `state_dict` returned; existing parameters take the loaded values.

        Unless the state has the names and shapes of the parameters that exist, and the framework writes into
        these in place, ops are analysed anew, with new parameters.

        Args:
            state: A result of `state_dict`.
            strict: As in `amanda.Tool.load_state_dict`.
        """
        parameters = self.state_dict()
        has_same_parameters = not self.waiting_state() and _shapes(parameters) == _shapes(state)
        # Parameters that an optimizer holds have to stay the same objects, so that they are filled in place.
        if has_same_parameters and all(
            _update_in_place(value, state[name]) for name, value in parameters.items()
        ):
            return
        self._ops.clear()
        self._rows.clear()
        super().load_state_dict(state, strict)

    def _keep_parameter(
        self, context: amanda.OpContext, like: Any, name: str, make: Callable[[], Any]
    ) -> Any:
        """Return a predictor's parameter at an op, on the device of `like`; `make` gives its initial value.

        Raises AmandaError if the loaded value has another shape.
        """
        start, tensors = np.asarray(make(), np.float32), tensors_of(like)
        # Half precision is too coarse to train.
        dtype = "float64" if get_dtype_name(like) == "float64" else "float32"

        def make_parameter(value: Any) -> Any:
            return tensors.state(value, like, True, dtype)

        def load(loaded: Any) -> Any:
            """Return the parameter with a loaded value; raise AmandaError for another shape."""
            if tuple(loaded.shape) != start.shape:
                raise AmandaError(
                    f"{name} that was loaded for {self.place(context)} is of shape {tuple(loaded.shape)}, "
                    f"not {start.shape}: it belongs to another model"
                )
            return make_parameter(loaded)

        return self.keep(context, name, lambda: make_parameter(start), load=load, renew=tensors.update)

    def _draw_noise(self, like: Any, run: Run, recomputed: bool) -> Any:
        """Return logistic noise for the logits of a gate; None outside of training.

        run, recomputed: of the routine; a recomputation has the noise of its first execution, whose state of
        the generator is in `run`.
        """
        if not self.training:
            return None
        generator = self._noise_random
        if recomputed and run is not None and _NOISE in run:
            # A recomputation draws with the generator's state of the first execution, and leaves the tool's
            # generator where it is.
            generator = np.random.default_rng()
            generator.bit_generator.state = run[_NOISE]
        elif run is not None:
            run[_NOISE] = generator.bit_generator.state
        # Away from 0 and 1, whose logit is infinite.
        uniform = generator.uniform(1e-8, 1 - 1e-8, tuple(like.shape))
        return tensors_of(like).cast(np.log(uniform) - np.log1p(-uniform), like)


def without_run(context: amanda.OpContext) -> dict[str, Any]:
    """Return keyword arguments that keep `run` from a routine where nothing runs again."""
    # Graphs call each routine once for each execution, so that nothing tells executions apart or runs again.
    return {} if context.is_eager() else {"run": None}


def _update_in_place(value: Any, loaded: Any) -> bool:
    """Write a loaded value into a parameter; return False where the framework cannot write in place."""
    tensors = tensors_of(value)
    return tensors.update(value, tensors.state(loaded, value, True, get_dtype_name(value))) is value


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays by name."""
    return {name: tuple(value.shape) for name, value in state.items()}


# The other products have a weight, as `linear` and in compiled graphs `addmm`, or no batch of matrices.
SCORES = frozenset({"matmul", "einsum", "baddbmm"})
"""Types of products of queries and keys."""
LAYERS = frozenset({*MATRIX_PRODUCTS, "einsum"})
"""Types of products by which layers make queries, keys and values."""
_BETWEEN = frozenset(
    {"add", "sub", "mul", "div", "masked_fill", "where", "to", "clamp", "maximum", "reshape", "Identity",
     "clone", "contiguous", "dropout"}
)  # fmt: skip
"""Types of ops between the product of queries and keys and the softmax."""

_LONGEST_CHAIN = 12  # the most ops between scores and softmax: a longer chain is another program
_PARTS = 50  # the most parts of a concatenated tensor that are followed


@dataclass(frozen=True)
class Residual:
    """A residual connection: a sum of the output of a branch and the branch's input, or a projection of that.

    branch: position of the branch's output in the sum.  ops: of the branch, the last first.
    shortcut: number of the other tensor of the sum.
    """

    branch: int
    ops: tuple[DataflowNode, ...]
    shortcut: int


def residual_at(flow: Dataflow, node: DataflowNode) -> Residual | None:
    """Return the residual connection that an addition ends; the branch is the input with more ops.

    None for other ops, for a sum with a vector, and where the inputs have no common origin.
    """
    if node.type != "add" or len(node.inputs) < 2 or None in node.inputs[:2]:
        return None
    # A sum with a vector is a bias, and of matrices seldom a branch.
    if node.shapes[0] != node.shapes[1] or len(node.shapes[0] or ()) < 3:
        return None
    # Both inputs are followed back until they meet, which is where the branch began.
    paths = [list(flow.back(number)) for number in node.inputs[:2]]  # numbers of tensors, and their ops
    numbers_on_paths = [[number for number, _ in path] for path in paths]
    numbers_on_first = set(numbers_on_paths[0])
    origin = next((number for number in numbers_on_paths[1] if number in numbers_on_first), None)
    if origin is None:
        return None
    op_counts = [numbers.index(origin) for numbers in numbers_on_paths]  # from the origin to the sum
    if op_counts == [0, 0]:  # a sum of a tensor with itself
        return None
    # The longer path computes; the other is the identity or a projection.
    branch = 0 if op_counts[0] > op_counts[1] else 1
    ops = [op for _, op in paths[branch][: op_counts[branch]] if op is not None]
    shortcut = numbers_on_paths[1 - branch][0]
    return Residual(branch, tuple(ops), shortcut)


def is_of_one_sequence(flow: Dataflow, product: DataflowNode) -> bool:
    """Return True unless the layers show that queries and keys come from different tensors."""
    # No keys where the product reads a single tensor.
    queries, *keys = (_inputs_of_layers(flow, number) for number in product.reads[:2])
    # In doubt True: a missing layer, as of compiled code, must not stop the pruning.
    return not (keys and queries and keys[0]) or not queries.isdisjoint(keys[0])


def _inputs_of_layers(flow: Dataflow, number: int) -> set[int | None]:
    """Return the inputs of the layers that made a tensor or its parts, since caches concatenate keys."""
    parts, layer_inputs, followed_count = [number], set[int | None](), 0
    while parts and followed_count < _PARTS:
        followed_count += 1
        makers = (node for _, node in flow.back(parts.pop()) if node is not None)
        # The nearest layer made the part, or a concatenation has made it of further parts.
        maker = next((node for node in makers if node.type in LAYERS or node.type == "cat"), None)
        if maker is not None and maker.type == "cat":
            parts.extend(maker.reads)
        elif maker is not None:
            layer_inputs.add(maker.data)
    return layer_inputs


def find_scores(flow: Dataflow, node: DataflowNode) -> DataflowNode | None:
    """Return the product of queries and keys that a softmax reads, through scaling, masks and casts.

    None if another op lies between, if the chain of ops is too long or its maker unknown, and if the input of
    the softmax has not 3 or 4 axes.
    """
    scores_shape = node.shapes[0]
    if scores_shape is None or len(scores_shape) not in (3, 4):
        return None
    number = node.inputs[0]
    for _ in range(_LONGEST_CHAIN):
        maker = flow.maker(number)
        if maker is None or maker.type in SCORES:
            return maker
        if maker.type not in _BETWEEN:
            return None
        # The scores, and not a mask or a scale that the op combines them with, have their shape.
        same_shape_inputs = [
            tensor
            for tensor, shape in zip(maker.inputs, maker.shapes, strict=True)
            if shape == scores_shape and tensor is not None
        ]
        number = same_shape_inputs[0] if same_shape_inputs else maker.data
    return None


def head_count(flow: Dataflow, product: DataflowNode, scores_shape: tuple[int | None, ...]) -> int | None:
    """Return the number of heads that share an axis with the batch, from the shape in the queries' layer.

    None where no layer is found, or where the axis is not a multiple of the batch.
    """
    for _, node in flow.back(product.data):
        if node is not None and node.type in LAYERS and node.shapes[0]:
            # All axes of the layer's input but the features are those of the batch and the tokens.
            batch = prod(extent or 1 for extent in node.shapes[0][:-1]) // (scores_shape[1] or 1)
            batch_and_heads = scores_shape[0] or 0
            if not batch or batch_and_heads % batch:
                return None
            return batch_and_heads // batch
    return None
