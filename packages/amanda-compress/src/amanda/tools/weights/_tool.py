"""WeightTool: base class of tools that change the weights that ops read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any, ClassVar, Generic, cast

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.options import deprecated
from amanda.tools.axes import canonical, restored
from amanda.tools.kit import tensors_of
from amanda.tools.mapping import StandardMapping, weight_gradient
from amanda.tools.select import Globs
from amanda.tools.weights._parameters import ParameterError
from amanda.tools.weights._views import FindView, IndexedRows
from amanda.tools.weights._weight import Present, Weight, WeightError, WeightResult, WeightView
from amanda.tools.weights._weight_input import ParameterSlice, WeightInput, WeightReads, weight_input
from amanda.tools.weights._weights import W, Weights, WeightSelection

_instance_numbers = count()


class WeightTool(amanda.Tool, Generic[W]):
    """Base class of tools that change the weights that ops read.

    A subclass defines `transform`, and `on_weight` and `update` if `transform` needs state:

    >>> class Rounded(WeightTool):
    ...     def on_weight(self, weight):
    ...         weight.keep("step", [1.0])
    ...     def update(self, weight, value):
    ...         weight["step"] = abs(value).max() / 127
    ...     @amanda.traceable
    ...     def transform(self, value, step):
    ...         return (value / step).round() * step

    Weights of convolutions and products are parameters, parts of parameters (q, k and v of
    `MultiheadAttention`), rows that data select (experts of a mixture), variables of TensorFlow, and
    initializers of ONNX files.  A parameter that several ops read is one weight.  `left` has the reason for
    each selected weight that stays unchanged.  State is saved by the path of the parameter in the model.

    Args:
        type: Globs of op types; None for every convolution and product.
        module: Globs of module paths to change, and to leave unchanged.
        exclude: See `module`.
    """

    elementwise: ClassVar[bool] = False
    """True if `transform` computes each element from that element and its state alone.

    `transform` of an elementwise tool receives values in the shape that the op reads, also parts of a
    parameter; `transform` of another tool receives whole weights with axes (outputs, inputs, window).
    """

    error: ClassVar[type[AmandaError]] = WeightError
    """Class of errors for models and weights that the tool cannot change."""

    weight_type: type[W] = Weight  # type: ignore[assignment]
    """The class of `weights`."""

    framework: ClassVar[str] = ""
    """Name of the only framework that the tool supports, such as "PyTorch"; "" for all."""

    leaves_samples: str = ""
    """Reason to skip weights of which each sample of a vmap has its own; "" to change these too."""

    leaves_rows: str = ""
    """Reason to skip weights whose rows data select, such as experts; "" to change these too."""

    def __init__(self, type: Globs = None, module: Globs = None, exclude: Globs = None) -> None:
        super().__init__()
        self.selection = WeightSelection(type, module, exclude, self.error)
        self.weights: Weights[W] = Weights(self)
        # Two tools of one class may be in one scope; a key of the class alone would mix their weights in a
        # context.
        number = next(_instance_numbers)
        # Of contexts and executions: the view of the weight that an op reads, and its constant state.
        self._view_key, self._state_key = f"weight of {number}", f"state of {number}"
        # WeightReads runs first: behind a tool that has changed a weight its parameter cannot be told.
        self.depends_on(StandardMapping(), WeightReads())
        if not callable(getattr(self, "transform", None)):
            raise ToolError(f"{self.__class__.__name__} has no method transform(self, value, ...)")
        self.add_inst_for_op(self._analyse_forward)
        # Other tools leave the backward pass without routines, which costs nothing then.
        if self.transforms_gradients or self.wants_gradients:
            self.add_inst_for_op(self._analyse_backward, backward=True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Describe the tool for pickle and copy; raise ToolError once it has met weights of a model."""
        if next(iter(self.weights), None) is not None:
            name = self.__class__.__name__
            raise ToolError(
                f"a {name} that has met the weights of a model cannot be pickled or copied: make another "
                f"{name}, and other.load_state_dict(tool.state_dict())"
            )
        return super().__reduce_ex__(protocol)

    def on_weight(self, weight: W) -> str | None:
        """Create the state of a new weight, by `weight.keep(name, start)`; called once for each weight.

        Return a reason to skip the weight; None to change it.
        """
        return None

    def on_read(self, weight: W, present: Present) -> None:
        """Update the state before an op reads a weight; by default call `update` at the first read.

        Args:
            weight: The weight, with its state.
            present: Returns the value that the op reads.
        """
        # Loaded state is ready, and is not computed anew.
        if not weight.is_ready:
            value = weight.plain(present())
            self.update(weight, value if self.elementwise else weight.canonical(value))
            weight.updated = 0  # a step: the weight is ready from here on

    def update(self, weight: W, value: Any) -> None:
        """Compute the state of a weight from its value.

        Called at the first read of a weight, and again after `clear`; does nothing unless overridden.

        Args:
            weight: The weight; `weight[name] = ...` sets its state.
            value: An array of NumPy or a tensor of PyTorch, in float32 or wider, with its axes in the order
                of outputs, inputs, window; of an elementwise tool as ops read it.
        """

    transform: Callable[..., Any]
    """`transform(value, ...)`: return the value that ops read instead; None for no change.

    Further parameters are names of state, which is passed in the type of the value.
    Decorate it with `@amanda.traceable` for compiled graphs and files.
    """

    transform_gradient: Callable[..., Any] | None = None
    """`transform_gradient(gradient, ...)`: return a weight's gradient from the transformed value's.

    None: the gradient passes unchanged (straight-through).
    """

    @property
    def transforms_gradients(self) -> bool:
        """True if the backward pass goes through `transform`; False if it is straight-through."""
        return self.transform_gradient is not None

    @property
    def is_settled(self) -> bool:
        """True if computed state does not change any more, so that a compiler may inline it."""
        return True

    def on_file(self, weight: W, present: Present) -> None:
        """Update the state of a weight of a file that is instrumented; called instead of `on_read`.

        Args:
            weight: The weight, with its state.
            present: Returns the value in the file.
        """
        self.on_read(weight, present)

    def on_gradient(self, weight: W, gradient: Any) -> None:
        """Read a gradient of a weight; called in each backward pass if `wants_gradients`.

        Does nothing unless a tool overrides it.

        Args:
            weight: The weight, with its state.
            gradient: In the form of `value` of `update`.
        """

    wants_gradients: bool = False

    @property
    def left(self) -> Mapping[str, str]:
        """Reasons why selected weights stay unchanged; the keys name type and module of the op."""
        return self.weights.reasons

    @property
    def result(self) -> WeightResult:
        """The changed weights, and reasons for skipped weights."""
        return WeightResult(self)

    def clear(self) -> None:
        """Forget all weights and their state."""
        self.load_state_dict({})

    @deprecated(use="clear", since="amanda-compress 0.2", gone="0.4")
    def renew(self) -> None:
        """Call `update` again for each weight when it is read next.  Deprecated: use `clear`."""
        self._expire()

    def _expire(self) -> None:
        """Mark the state of all weights as outdated: the next read of each calls `update`."""
        for weight in self.weights:
            weight.expire()

    def unmatched(self) -> list[str]:
        """Return sentences on options that matched no op.

        Raises ToolError if the constructor of a subclass does not call the one of this class.
        """
        if "selection" not in vars(self):
            raise ToolError(f"{type(self).__name__}.__init__ does not call super().__init__()")
        return [*super().unmatched(), *self.selection.unmatched()]

    def finalize(self, model: Any) -> Any:
        """Write changed weights into a model, which then computes the same without the tool.

        An exception restores the model: a copy of the old values is kept until all weights are written.

        Args:
            model: A module of PyTorch, a model of Keras, a tf.Module, or a list of parameters or variables;
                those of a session's graph within `with session.as_default()`; in JAX a module of Flax or
                Equinox, or a pytree of parameters.

        Returns:
            `result` with the model as `result.model`: in JAX a new pytree, unless it is a module of Flax NNX
            or of Keras.

        Raises:
            AmandaError: Of the tool's own kind, for a computed weight, which no parameter holds, and for a
                model without a weight that the tool has changed.
        """
        weights = [weight for weight in self.weights if weight.is_ready]
        computed = [weight.module or weight.source for weight in weights if weight.holder is None]
        if computed:
            raise self.error(
                f"the weights of {', '.join(computed)} are computed at each call: make them parameters first "
                "(torch.nn.utils.parametrize.remove_parametrizations) and let their state go with them, by "
                "tool.load_state_dict(tool.state_dict()) and tool.prepare(model, example); or exclude them"
            )
        try:
            # Reading and writing parameters executes ops, which no tool is to see.
            with amanda.disabled():
                model, written = self._write_weights(model, weights)
        except ParameterError as error:
            raise self.error(str(error)) from error
        if not written:
            raise self._nothing_to_finalize(model, len(weights))
        for weight in written:
            self.on_finalized(weight)
        result = self.result
        result.model = model
        return result

    def _nothing_to_finalize(self, model: Any, changed_count: int) -> AmandaError:
        """Return, not raise, the error for a model without any of the weights that the tool has changed."""
        name = type(self).__name__
        if changed_count:
            text = f"none of the {changed_count} weights that {name} has changed is"
        else:
            text = f"{name} has changed no weight"
        remark = f"; {self.weights.empty_reason}" if self.weights.empty_reason and not changed_count else ""
        return self.error(
            f"Nothing to finalize: {text} of this {type(model).__name__}{remark}; run the model in `with "
            "amanda.apply(tool):` first, or call tool.prepare(model, example)"
        )

    def on_finalized(self, weight: W) -> None:
        """React to `finalize`; called for each written weight, after all are written.

        Does nothing unless a tool overrides it.
        """

    def _write_weights(self, model: Any, weights: Sequence[W]) -> tuple[Any, list[W]]:
        """Write finalized weights into a model, in JAX into a new one; return it and the written weights."""
        written: list[W] = []

        def finalize_weight(weight: W, value: Any) -> Any:  # called for weights that the model has
            written.append(weight)
            return self.finalized(weight, value)

        for store in {weight.store for weight in weights}:
            # One call for each store, which walks the parameters of the model once however many weights there
            # are.
            changes = [
                (weight.holder, weight.part, partial(finalize_weight, weight))
                for weight in weights
                if weight.store is store
            ]
            model, _ = store.write_all(model, changes)
        return model, written

    def finalized(self, weight: W, value: Any) -> Any:
        """Return the value that `finalize` writes for a weight.

        Args:
            weight: The weight, with its state.
            value: The value that the parameter has.
        """
        result = weight.transformed(self, value)
        return value if result is None else result

    def state_dict(self) -> dict[str, Any]:
        """Return the state by "path of the parameter/name"."""
        # State of retracted weights stays registered with the core; saved, it would be loaded for weights
        # that nothing changes.
        retracted = {id(array) for weight in self.weights.retracted for array in weight.state}
        return {name: value for name, value in super().state_dict().items() if id(value) not in retracted}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load state that `state_dict` returned, also in another process; weights met so far are forgotten.

        Args:
            state: A result of `state_dict`.
            strict: As in `amanda.Tool.load_state_dict`.
        """
        super().load_state_dict(state, strict)
        self.weights.clear()

    @property
    def state_names(self) -> Sequence[str]:
        """Names of the state that `transform` receives."""
        # Cached, since this is read at each execution and `signature` builds objects for each parameter.
        names = self.__dict__.get("_state_names")
        if names is None:
            names = self._state_names = tuple(inspect.signature(self.transform).parameters)[1:]
        return names

    def _analyse_forward(self, context: amanda.OpContext) -> None:
        """Insert the routine that reads and changes the weight of a forward op; record an op without one.

        Ops that changed a weight which this op reads unchanged are analysed again.  Raises an error for an op
        of another framework than `framework`.
        """
        # A weight that also an embedding or an einsum reads stays unchanged, whichever op was analysed first.
        outdated_ops = self.weights.skip_unsupported_readers(context)
        if outdated_ops:
            self.analyse_again(outdated_ops)
        read = weight_input(context) if context["phase"] == "forward" else None
        if read is None:
            self.weights.record_unweighted(context)
            return
        view, find_view = self.weights.view_of_read(context, read)
        if view is None and find_view is None:  # skipped
            return
        # Only here, where a weight is selected: NumPy or ONNX Runtime beside the model are not a mistake.
        if self.framework and not context.namespace.matches(self.framework.lower()):
            raise self.error(
                f"{type(self).__name__} is for {self.framework}; {context.get_forward_op_type()} is of "
                f"{context.namespace[0]}"
            )
        if context.is_static():
            self._inline_in_file(context, read, view)
            return
        self._insert_read(context, read, view, find_view)

    def _insert_read(
        self, context: amanda.OpContext, read: WeightInput, view: WeightView | None,
        find_view: FindView | None,
    ) -> None:  # fmt: skip
        """Insert the routine by which an op reads its weight; leave view and constant state to its backward.

        view, find_view: see `Weights.view_of_read`.
        """
        # Indexed rows hold tensors of one execution, which a context would keep alive.
        context[self._view_key] = None if isinstance(view, IndexedRows) else view
        state = context[self._state_key] = self._constant_state(context, read, view)
        # Eager PyTorch differentiates `transform` by autograd; elsewhere `_analyse_backward` does so.
        in_autograd = self.transforms_gradients and context.namespace.matches("pytorch/*/eager")
        # Settled state is a constant of the compiled graph: the compiler fuses the product with it into the
        # op.
        if state is not None:
            apply = self._adapt_to_read_value(self.transform, view)
            context.insert_before_op(_apply_transform, inputs=[read.index], apply=apply, **state)
        elif find_view is not None:
            find_and_read = self._find_and_read_in_autograd if in_autograd else self._find_and_read
            context.insert_before_op(find_and_read, inputs=[read.index], find_view=find_view)
        else:
            read_view = self._read_in_autograd if in_autograd else self._read
            context.insert_before_op(read_view, inputs=[read.index], view=view)

    def _inline_in_file(self, context: amanda.OpContext, read: WeightInput, view: WeightView | None) -> None:
        """Insert `transform` with constant state into the file of a model; nothing for a skipped weight.

        First calls `on_file` for a weight that the op reads in its own form.
        """
        if isinstance(view, Weight):
            self.on_file(cast(W, view), partial(context.get_value, read.index))
        if view is None or not view.is_ready:
            return
        if not self.elementwise and not isinstance(view, Weight):
            self.weights.skip(context, "it reads another form of a weight than other ops of the file")
            return
        # NumPy arrays become initializers of the file.
        arrays = view.numbers(self.state_names)
        apply = self._adapt_to_read_value(self.transform, view)
        context.insert_before_op(_apply_transform_in_file, inputs=[read.index], apply=apply, **arrays)

    def _constant_state(self, context: amanda.OpContext, read: WeightInput, view: WeightView | None) -> Any:
        """Return settled state as tensors that a compiler of PyTorch may inline; None elsewhere.

        Calls `on_read` for weights whose state is not computed yet, or was loaded.
        """
        is_inlinable = self.elementwise or isinstance(view, Weight)
        if view is None or not is_inlinable or not context.namespace.matches("pytorch/*/graph"):
            return None
        try:
            value = context.get_value(read.index)
        except AmandaError:  # it is computed
            return None
        if not self.is_settled:
            return None
        for weight, present in view.whole_weights(value):
            if not weight.is_ready or weight.is_loaded:
                self.on_read(cast(W, weight), present)
        return view.tensors_like(value, self.state_names) if view.is_ready else None

    def _adapt_to_read_value(
        self, function: Callable[..., Any], view: WeightView | None
    ) -> Callable[..., Any]:
        """Return `transform` or `transform_gradient` as a function of the value that an op reads."""
        # A view of other forms brings its pieces into canonical order itself.
        if self.elementwise or not isinstance(view, Weight):
            return function
        return partial(_apply_to_canonical, function, view.layout, view.shape)

    def _analyse_backward(self, context: amanda.OpContext) -> None:
        """Insert the routine that reads or changes the weight gradient of a backward op, if any is wanted."""
        index = context["weight_grad_index"]
        if self._view_key not in context or index is None:
            return
        view, state = context[self._view_key], context[self._state_key]
        # In eager PyTorch autograd has differentiated `transform`, and a second change of the gradient would
        # apply masks twice.
        in_autograd = context.namespace.matches("pytorch/*/eager")
        if state is not None and self.transform_gradient is not None and self.transforms_gradients:
            apply = self._adapt_to_read_value(self.transform_gradient, view)
            context.insert_after_backward_op(_apply_transform, grad_inputs=[index], apply=apply, **state)
        elif state is None and (self.wants_gradients or (self.transforms_gradients and not in_autograd)):
            context.insert_after_backward_op(
                self._read_gradient, grad_inputs=[index], view=view,
                is_weight_gradient=partial(weight_gradient(context), index),
                transforms_gradient=self.transforms_gradients and not in_autograd,
            )  # fmt: skip

    def _read(self, value: Any, view: WeightView) -> Any:
        return view.read_by(self, value)

    @amanda.differentiable
    def _read_in_autograd(self, value: Any, view: WeightView) -> Any:
        return self._read(value, view)

    def _find_and_read(self, value: Any, find_view: FindView, run: dict[str, Any]) -> Any:
        view = run[self._view_key] = find_view(value, ParameterSlice.of_execution(run))
        return None if view is None else self._read(value, view)

    @amanda.differentiable
    def _find_and_read_in_autograd(self, value: Any, find_view: FindView, run: dict[str, Any]) -> Any:
        return self._find_and_read(value, find_view, run)

    def _read_gradient(
        self,
        gradient: Any,
        view: WeightView | None,
        is_weight_gradient: Callable[[Any], bool],
        transforms_gradient: bool,
        run: dict[str, Any],
    ) -> Any:
        """Pass the gradient of each weight to `on_gradient`; return the transformed gradient or None."""
        # Where executions read different weights, `_find_and_read` has left the view of this one in `run`.
        view = run.get(self._view_key, view)
        # The analysis of one backward pass serves all: another pass may have no gradient of the weight there,
        # or one of another shape.
        if view is None or not is_weight_gradient(gradient):
            return None
        if self.wants_gradients:
            samples = tensors_of(gradient).samples(gradient)
            with nullcontext() if samples is None else samples.outside():
                # One weight of all samples has the sum of their gradients: that of the sum of their losses.
                whole = gradient if samples is None else samples.total
                for weight, part_gradient in view.gradients(whole):
                    self.on_gradient(weight, part_gradient)
        return view.transformed_gradient(self, gradient) if transforms_gradient and view.is_ready else None


@amanda.traceable
def _apply_transform(value: Any, apply: Callable[..., Any], **state: Any) -> Any:
    return None if value is None else apply(value, **state)


@amanda.traceable
def _apply_transform_in_file(value: Any, apply: Callable[..., Any], **arrays: Any) -> Any:
    tensors = tensors_of(value)
    return apply(value, **{name: tensors.cast(array, value) for name, array in arrays.items()})


def _apply_to_canonical(
    function: Callable[..., Any], layout: str | None, extents: Sequence[int], value: Any, **state: Any
) -> Any:
    """Apply a function to a weight with axes (outputs, inputs, window); return the result in `layout`."""
    return restored(function(canonical(value, layout), **state), layout, extents)
