"""Tensors of PyTorch that stand for outputs of ops that were put off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.tools.kit._requirements import check

if TYPE_CHECKING:
    import torch

    from amanda.tools.rewrite._pytorch import Delay


class Form(NamedTuple):
    """Facts of an op's output that can be told without its elements.

    is_own: whether its memory is not that of an input.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_own: bool


def form_of(value: Any, inputs: Sequence[Any] = ()) -> Form | None:
    """The form of an output; None of what cannot be put off: several tensors, subclasses, sparse ones."""
    import torch

    if type(value) not in (torch.Tensor, _classes()[0]) or value.layout is not torch.strided:
        return None
    is_own = delay_of(value) is not None or not memory([value]) & memory([*map(value_of, inputs)])
    return Form(value.shape, value.stride(), value.dtype, value.device, value.requires_grad, is_own)


def delayed(delay: Delay, form: Form) -> torch.Tensor:
    """Return a stand-in for the output of a delayed op."""
    if not form.requires_grad:
        return _stand_in(delay, form)
    delay.is_put_off = True
    stand_in: torch.Tensor = _classes()[1].apply(delay, form, *tensors(delay.inputs))
    stand_in._amanda_delay = delay  # type: ignore[attr-defined]
    return stand_in


def delay_of(value: Any) -> Delay | None:
    """Return the delay behind a stand-in; None for any other tensor."""
    found: Delay | None = getattr(value, "_amanda_delay", None)
    return found


def value_of(value: Any) -> Any:
    """The output that a value stands for, or itself; for an op of the same match, no outside reader."""
    delay = delay_of(value)
    if delay is not None:
        return delay.value()
    if isinstance(value, (list, tuple)) and any(map(delay_of, value)):
        return type(value)(map(value_of, value))
    return value


def aliased(value: Any) -> Any:
    """The output that a value stands for, or itself, at which no other value's gradients arrive."""
    import torch

    if type(value) in (list, tuple):
        return type(value)(map(aliased, value))
    if not (isinstance(value, torch.Tensor) and value.requires_grad):
        return value_of(value)
    if delay_of(value) is None:
        return value.view_as(value)
    return _classes()[2].apply(value, value_of(value).detach())


def tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, also in lists."""
    from torch import Tensor

    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from tensors(one)


def memory(values: Sequence[Any]) -> set[int]:
    """The storages of tensors."""
    return {one.untyped_storage()._cdata for one in tensors(values) if delay_of(one) is None}


def _stand_in(delay: Delay, form: Form | None) -> torch.Tensor:
    import torch

    assert form is not None
    kind, _, _ = _classes()
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind, form.shape, strides=form.strides, dtype=form.dtype, device=form.device
    )
    made._amanda_delay = delay  # type: ignore[attr-defined]
    return made


_READ_BY_METHODS = (
    "numpy", "tolist", "data_ptr", "storage", "untyped_storage", "share_memory_", "__array__", "__dlpack__",
    "__deepcopy__", "__reduce_ex__", "__repr__",
)  # fmt: skip
"""Methods that no kernel computes."""

HOOKS = ("register_hook", "retain_grad")
"""Methods that ask for the gradient, which comes only if nothing is replaced."""


@cache
def _classes() -> tuple[Any, Any, Any]:
    """Stand-ins; what leads gradients from one to what the op was given, and to one from its output."""
    import torch

    check("rewrite", "torch")

    class Delayed(torch.Tensor):
        # torch's functions take it for what it stands for, so that the ops within them are the same
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.detach.default:
                (given,) = args
                return _stand_in(given._amanda_delay, form_of(given))
            reader = func.overloadpacket.__name__
            return func(*_data(args, reader), **_data(kwargs or {}, reader))

    class PutOff(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, delay: Delay, form: Form, *inputs: torch.Tensor) -> torch.Tensor:
            ctx.delay = delay
            return _stand_in(delay, form)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            inputs = list(tensors(ctx.delay.inputs))
            # what is differentiated once more is freed by that, and this may be called then
            value, given = ctx.delay.again() if torch.is_grad_enabled() else ctx.delay.differentiable()
            given = zip(inputs, tensors(given), strict=True)
            wanted = [alias for one, alias in given if one.requires_grad]
            found = iter(
                torch.autograd.grad(
                    value, wanted, gradients, retain_graph=True,
                    create_graph=torch.is_grad_enabled(), allow_unused=True,
                )
            )  # fmt: skip
            return None, None, *(next(found) if one.requires_grad else None for one in inputs)

    class StoodFor(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, stand_in: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return value.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return *gradients, None

    for name in _READ_BY_METHODS:
        setattr(Delayed, name, _reading(getattr(torch.Tensor, name)))
    for name in HOOKS:
        setattr(Delayed, name, _watching(getattr(torch.Tensor, name)))
    return Delayed, PutOff, StoodFor


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = self._amanda_delay.read(method.__name__)
        own = value if self.requires_grad else value.detach()
        return getattr(own, method.__name__)(*args, **kwargs)

    return read


def _watching(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def watch(self: Any, *args: Any) -> Any:
        self._amanda_delay.read(method.__name__)
        return method(self, *args)

    return watch


def _data(given: Any, reader: str) -> Any:
    """Arguments of a kernel with the outputs for what stands for them."""
    delay = delay_of(given)
    if delay is not None:
        return delay.read(reader).detach()
    if isinstance(given, (list, tuple)):
        return type(given)(_data(one, reader) for one in given)
    if isinstance(given, dict):
        return {name: _data(one, reader) for name, one in given.items()}
    return given
