"""WeightTool: a base for tools that change weights, which says when and where they are changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar, Generic, cast

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.options import deprecated
from amanda.tools.kit import canonical, restored, tensors_of
from amanda.tools.mapping import StandardMapping, weight_gradient
from amanda.tools.select import Globs
from amanda.tools.weights._parameter_slices import ParameterSlice
from amanda.tools.weights._parameters import ParameterError
from amanda.tools.weights._result import WeightResult
from amanda.tools.weights._selection import WeightSelection
from amanda.tools.weights._views import Find, IndexedRows
from amanda.tools.weights._weight import Present, Weight, WeightError, WeightView
from amanda.tools.weights._weight_input import WeightInput, WeightReads, weight_input
from amanda.tools.weights._weights import W, Weights

_numbers = count()


class WeightTool(amanda.Tool, Generic[W]):
    """Gives ops other values of the weights that they read; a subclass says which.

    A subclass has `transform`, and where that needs state `on_weight` and `update`:

    >>> class Rounded(WeightTool):
    ...     def on_weight(self, weight):
    ...         weight.keep("step", [1.0])
    ...     def update(self, weight, value):
    ...         weight["step"] = abs(value).max() / 127
    ...     @amanda.traceable
    ...     def transform(self, value, step):
    ...         return (value / step).round() * step

    It changes the weights of convolutions and products, whatever reads them: parameters, parts of them
    (q, k and v of `MultiheadAttention`), rows that data select (experts of a mixture), variables of
    TensorFlow, initializers of ONNX files.  A parameter that several ops read is one weight; what is left is
    in `left`, with the reason.  State goes by the path of the parameter in the model.

    type, module, exclude: globs of ops' words and of module paths; None for every convolution and product.
    """

    elementwise: ClassVar[bool] = False
    """True if `transform` gives each element of its own and of the state of that element alone.

    It is given values as ops read them then, also of a part of a parameter, and otherwise whole weights with
    their axes in the order of outputs, inputs, window.
    """

    error: ClassVar[type[AmandaError]] = WeightError
    """The error for a model or a weight that makes no sense."""

    weight_type: type[W] = Weight  # type: ignore[assignment]
    """The class of `weights`."""

    framework: ClassVar[str] = ""
    """The one framework whose ops the tool changes, such as "PyTorch"; "" for all."""

    leaves_rows: str = ""
    """Why weights that data select, such as experts, are left; "" to change them, too."""

    def __init__(self, type: Globs = None, module: Globs = None, exclude: Globs = None) -> None:
        super().__init__()
        self.selection = WeightSelection(type, module, exclude, self.error)
        self.weights: Weights[W] = Weights(self)
        number = next(_numbers)
        self._key, self._state_key = f"weight of {number}", f"state of {number}"
        self.depends_on(StandardMapping(), WeightReads())
        if not callable(getattr(self, "transform", None)):
            raise ToolError(f"{self.__class__.__name__} has no method transform(self, value, ...)")
        self.add_inst_for_op(self._forward)
        if self.transforms_gradients or self.wants_gradients:
            self.add_inst_for_op(self._backward, backward=True)

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
        """Called once for each weight, to make its state: `weight.keep(name, start)`.

        Returns why the weight is left as it is, if it is.
        """
        return None

    def on_read(self, weight: W, present: Present) -> None:
        """Called whenever an op is about to read a weight; by default it calls `update` the first time.

        present: returns the value that the op is given.
        """
        if not weight.is_ready:
            value = weight.plain(present())
            self.update(weight, value if self.elementwise else weight.canonical(value))
            weight.updated = 0

    def update(self, weight: W, value: Any) -> None:
        """Make the state of a weight of its present value: `weight[name] = ...`.

        It is called when a weight is read first, and again after `clear`.
        value: an array of NumPy or a tensor of PyTorch, in float32 or wider, with its axes in the order of
        outputs, inputs, window; of an elementwise tool as ops read it.
        """

    transform: Callable[..., Any]
    """`transform(value, ...)`: return what ops read instead of a value; None for no change.

    Its other parameters are names of state, which it is given in the type of the value.
    Decorate it with `@amanda.traceable` for compiled graphs and files.
    """

    transform_gradient: Callable[..., Any] | None = None
    """`transform_gradient(gradient, ...)`: the gradient of the weight, from that of what was read instead.

    Without one, gradients go straight through to the weight.
    """

    @property
    def transforms_gradients(self) -> bool:
        """True if gradients go through `transform`: by autograd in eager PyTorch, by `transform_gradient`."""
        return self.transform_gradient is not None

    @property
    def is_settled(self) -> bool:
        """True if state that is made does not change any more, so that a compiler may inline it."""
        return True

    def on_file(self, weight: W, present: Present) -> None:
        """Called for each weight of a file that is instrumented, instead of `on_read`."""
        self.on_read(weight, present)

    def on_gradient(self, weight: W, gradient: Any) -> None:
        """Called with each gradient of a weight, if `wants_gradients`."""

    wants_gradients: bool = False

    @property
    def left(self) -> Mapping[str, str]:
        """Weights that were selected and are not changed, by type and module of the op, and why."""
        return self.weights.reasons

    @property
    def result(self) -> WeightResult:
        """The weights that were met, and those that are left."""
        return WeightResult(self)

    def clear(self) -> None:
        """Forget all state: weights are met anew."""
        self.load_state_dict({})

    @deprecated(use="clear", since="amanda-compress 0.2", gone="0.4")
    def renew(self) -> None:
        """Call `update` again for each weight when it is read next.  Deprecated: use `clear`."""
        self._expire()

    def _expire(self) -> None:
        """Have `update` called again for each weight when it is read next."""
        for weight in self.weights:
            weight.updated = -1

    def unmatched(self) -> list[str]:
        """Say which options no op fitted."""
        return [*super().unmatched(), *self.selection.unmatched()]

    def finalize(self, model: Any) -> Any:
        """Write what ops read into the weights of a model, which then computes the same without the tool.

        model: a module of PyTorch, a model of Keras, a tf.Module, or a list of parameters or variables; those
        of a session's graph within `with session.as_default()`; in JAX a module of Flax or Equinox, or a
        pytree of parameters.
        Returns `result`, whose `model` is the model: in JAX, where arrays stay as they are, a new pytree,
        unless it is a module of Flax NNX or a model of Keras.  Raises the tool's error where a weight is
        computed, so that nothing holds it, and where the model has no weight that the tool has met.  After an
        exception the model is as it was: until all is written, what it had is kept beside it.
        """
        weights = [one for one in self.weights if one.is_ready]
        computed = [one.module or one.source for one in weights if one.holder is None]
        if computed:
            raise self.error(
                f"the weights of {', '.join(computed)} are computed at each call: make them parameters first "
                "(torch.nn.utils.parametrize.remove_parametrizations) and let their state go with them, by "
                "tool.load_state_dict(tool.state_dict()) and tool.prepare(model, example); or exclude them"
            )
        try:
            with amanda.disabled():
                model, written = self._write(model, weights)
        except ParameterError as error:
            raise self.error(str(error)) from error
        if not written:
            passed = f"; {self.weights.passed}" if self.weights.passed and not weights else ""
            changed = f"none of the {len(weights)} weights that {type(self).__name__} has changed is"
            raise self.error(
                f"{changed if weights else f'{type(self).__name__} has changed no weight'} of this "
                f"{type(model).__name__}{passed}; call it in a scope of the tool, or "
                "tool.prepare(model, example)"
            )
        for one in written:
            self.on_finalized(one)
        result = self.result
        result.model = model
        return result

    def on_finalized(self, weight: W) -> None:
        """Called for each weight that `finalize` has written, when all are."""

    def _write(self, model: Any, weights: Sequence[W]) -> tuple[Any, list[W]]:
        written: list[W] = []

        def changed(weight: W, value: Any) -> Any:
            written.append(weight)
            return self.finalized(weight, value)

        for store in {one.store for one in weights}:
            own = [(one.holder, one.part, partial(changed, one)) for one in weights if one.store is store]
            model, _ = store.write_all(model, own)
        return model, written

    def finalized(self, weight: W, value: Any) -> Any:
        """Return what a weight becomes for good."""
        made = weight.transformed(self, value)
        return value if made is None else made

    def state_dict(self) -> dict[str, Any]:
        """Return the state by "path of the parameter/name"."""
        retracted = {id(array) for one in self.weights.retracted for array in one.state}
        return {name: value for name, value in super().state_dict().items() if id(value) not in retracted}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take what `state_dict` gave, also in another process."""
        super().load_state_dict(state, strict)
        self.weights.clear()

    @property
    def state_names(self) -> Sequence[str]:
        """Names of the state that `transform` is given."""
        names = self.__dict__.get("_state_names")
        if names is None:
            names = self._state_names = tuple(inspect.signature(self.transform).parameters)[1:]
        return names

    def _forward(self, context: amanda.OpContext) -> None:
        again = self.weights.look_at(context)
        if again:
            self.analyse_again(again)
        read = weight_input(context) if context["phase"] == "forward" else None
        if read is None:
            self.weights.pass_by(context)
            return
        form, find = self.weights.at(context, read)
        if form is None and find is None:
            return
        if self.framework and not context.namespace.matches(self.framework.lower()):
            raise self.error(
                f"{type(self).__name__} is for {self.framework}; {context.get_op_type()} is of "
                f"{context.namespace[0]}"
            )
        if context.is_static():
            self._inline_in_file(context, read, form)
            return
        context[self._key] = None if isinstance(form, IndexedRows) else form  # which hold tensors
        state = context[self._state_key] = self._final_state(context, read, form)
        within = self.transforms_gradients and context.namespace.matches("pytorch/*/eager")
        if state is not None:
            apply = self._applied(self.transform, form)
            context.insert_before_op(_transformed, inputs=[read.index], apply=apply, **state)
        elif find is not None:
            found = self._read_found_within_autograd if within else self._read_found
            context.insert_before_op(found, inputs=[read.index], find=find)
        else:
            routine = self._read_within_autograd if within else self._read
            context.insert_before_op(routine, inputs=[read.index], form=form)

    def _inline_in_file(self, context: amanda.OpContext, read: WeightInput, form: WeightView | None) -> None:
        if isinstance(form, Weight):
            self.on_file(cast(W, form), partial(context.get_value, read.index))
        if form is None or not form.is_ready:
            return
        if not self.elementwise and not isinstance(form, Weight):
            self.weights.leave(context, "it reads another form of a weight than other ops of the file")
            return
        arrays = form.numbers(self.state_names)
        apply = self._applied(self.transform, form)
        context.insert_before_op(_transformed_in_file, inputs=[read.index], apply=apply, **arrays)

    def _final_state(self, context: amanda.OpContext, read: WeightInput, form: WeightView | None) -> Any:
        """Return the state as tensors, where a compiler inlines it: it will not change. None elsewhere."""
        is_form = self.elementwise or isinstance(form, Weight)
        if form is None or not is_form or not context.namespace.matches("pytorch/*/graph"):
            return None
        try:
            value = context.get_value(read.index)
        except AmandaError:  # it is computed
            return None
        if not self.is_settled:
            return None
        for weight, present in form.within(value):
            if not weight.is_ready or weight.is_loaded:
                self.on_read(cast(W, weight), present)
        return form.tensors_like(value, self.state_names) if form.is_ready else None

    def _applied(self, function: Callable[..., Any], form: WeightView | None) -> Callable[..., Any]:
        """Return `transform`, or `transform_gradient`, as a function of what an op reads."""
        if self.elementwise or not isinstance(form, Weight):
            return function
        return partial(_canonically, function, form.layout, form.shape)

    def _backward(self, context: amanda.OpContext) -> None:
        index = context["weight_grad_index"]
        if self._key not in context or index is None:
            return
        form, state = context[self._key], context[self._state_key]
        within = context.namespace.matches("pytorch/*/eager")
        if state is not None and self.transform_gradient is not None and self.transforms_gradients:
            apply = self._applied(self.transform_gradient, form)
            context.insert_after_backward_op(_transformed, grad_inputs=[index], apply=apply, **state)
        elif state is None and (self.wants_gradients or (self.transforms_gradients and not within)):
            context.insert_after_backward_op(
                self._read_gradient, grad_inputs=[index], form=form,
                is_weights=partial(weight_gradient(context), index),
                transforms=self.transforms_gradients and not within,
            )  # fmt: skip

    def _read(self, value: Any, form: WeightView) -> Any:
        return form.read_by(self, value)

    @amanda.differentiable
    def _read_within_autograd(self, value: Any, form: WeightView) -> Any:
        return self._read(value, form)

    def _read_found(self, value: Any, find: Find, run: dict[str, Any]) -> Any:
        form = run[self._key] = find(value, ParameterSlice.of_execution(run))
        return None if form is None else self._read(value, form)

    @amanda.differentiable
    def _read_found_within_autograd(self, value: Any, find: Find, run: dict[str, Any]) -> Any:
        return self._read_found(value, find, run)

    def _read_gradient(
        self, gradient: Any, form: WeightView | None, is_weights: Callable[[Any], bool], transforms: bool,
        run: dict[str, Any],
    ) -> Any:  # fmt: skip
        form = run.get(self._key, form)
        if form is None or not is_weights(gradient):
            return None
        if self.wants_gradients:
            for weight, own in form.gradients(gradient):
                self.on_gradient(weight, own)
        return form.transformed_gradient(self, gradient) if transforms and form.is_ready else None


@amanda.traceable
def _transformed(value: Any, apply: Callable[..., Any], **state: Any) -> Any:
    return None if value is None else apply(value, **state)


@amanda.traceable
def _transformed_in_file(value: Any, apply: Callable[..., Any], **arrays: Any) -> Any:
    tensors = tensors_of(value)
    return apply(value, **{name: tensors.cast(one, value) for name, one in arrays.items()})


def _canonically(
    function: Callable[..., Any], layout: str | None, extents: Sequence[int], value: Any, **state: Any
) -> Any:
    """Return what a function makes of a weight whose axes are turned to outputs, inputs, window."""
    return restored(function(canonical(value, layout), **state), layout, extents)
