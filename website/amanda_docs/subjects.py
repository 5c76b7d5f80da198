"""Programs with the tensor subclasses and the modes that torch ships, each run to plain results.

A subject that cannot be built by a few lines on a CPU has a reason instead of a program.
"""

# Programs as users write them, whose calls and attributes torch leaves untyped.
# mypy: allow-untyped-calls, disable-error-code="attr-defined,union-attr,assignment,override"

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Program = Callable[[], list[Any]]


def _of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def network() -> nn.Sequential:
    """Return a small model with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def train() -> list[Any]:
    """Run a training step of a small model."""
    model, x = network(), torch.linspace(-1, 1, 12).reshape(3, 4)
    y = model(x)
    y.sum().backward()
    return [y, *(one.grad for one in model.parameters())]


def _within(
    mode: Callable[[], AbstractContextManager[Any]], log: Callable[[Any], Any] = lambda _: None
) -> Program:
    """Return a training step in a mode, and what the mode has noted."""

    def run() -> list[Any]:
        with mode() as entered:
            results = train()
        return [*results, log(entered)]

    return run


def _on(make: Callable[[], Any], compute: Callable[[Any], Any] = lambda x: (x * 2).sum()) -> Program:
    """Return a computation on one tensor of a subclass, twice."""

    def run() -> list[Any]:
        torch.manual_seed(0)
        return [compute(make()) for _ in range(2)]

    return run


def _x(*extents: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(extents or (3, 4)).numel()).reshape(extents or (3, 4))


@contextmanager
def group() -> Iterator[Any]:
    """Context with a process group of one rank."""
    distributed = torch.distributed
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        yield _of("torch.distributed.device_mesh.init_device_mesh")("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def _parallel() -> list[Any]:
    with group() as mesh:
        styles = (
            _of("torch.distributed.tensor.parallel.ColwiseParallel"),
            _of("torch.distributed.tensor.parallel.RowwiseParallel"),
        )
        plan = {"0": styles[0](), "2": styles[1]()}
        model = _of("torch.distributed.tensor.parallel.parallelize_module")(network(), mesh, plan)
        y = model(_x())
        y.sum().backward()
        return [y, *(one.grad.full_tensor() for one in model.parameters())]


def _collective() -> list[Any]:
    with group():
        reduced = _of("torch.distributed._functional_collectives.all_reduce")(_x(), "sum", [0])
        return [reduced * 2]


def _nested() -> list[Any]:
    rows = [_x(2, 4), _x(3, 4)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    weight = torch.ones(4, 3, requires_grad=True)
    y = torch.relu(jagged @ weight)
    y.values().sum().backward()
    return [y.values(), weight.grad]


def _masked() -> list[Any]:
    a = torch.masked.masked_tensor(_x(), _x() > 0, requires_grad=True)
    total = (a * 2).sum()
    total.backward()
    return [total.get_data(), a.grad.get_data()]


def _lazy() -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(2))
    y = model(_x(3, 2, 5))
    y.sum().backward()
    return [y, *(one.grad for one in model.parameters())]


def _fake() -> list[Any]:
    with _of("torch._subclasses.fake_tensor.FakeTensorMode")():
        model = network()
        y = model(torch.rand(3, 4))
        y.sum().backward()
    return [tuple(y.shape), *(tuple(one.grad.shape) for one in model.parameters())]


def _copied_fake() -> list[Any]:
    mode = _of("torch._subclasses.fake_tensor.FakeTensorMode")()
    with _of("torch._subclasses.fake_tensor.FakeCopyMode")(mode):
        return [tuple(_of("copy.deepcopy")(network())[0].weight.shape)]


def _per_sample() -> list[Any]:
    call = _of("torch.nn.utils._per_sample_grad.call_for_per_sample_grads")
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    y = call(model)(_x(5, 4))
    y.sum().backward()
    return [y, model.weight.grad_sample]


def _functional() -> list[Any]:
    apart = _of("torch._subclasses.functional_tensor.dispatch_functionalize")
    return [apart(lambda x: x.add_(1).relu())(_x())]


def _traced() -> list[Any]:
    graph = _of("torch.fx.experimental.proxy_tensor.make_fx")(lambda x: (x * 2).relu())(_x())
    return [graph.code, graph(_x())]


def _selective() -> list[Any]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = network(), _x().requires_grad_()
    y = checkpoint(
        model, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    y.sum().backward()
    return [y, x.grad, *(one.grad for one in model.parameters())]


def _batched() -> list[Any]:
    jacobian = torch.autograd.functional.jacobian(lambda x: x.sin() @ torch.ones(4, 4), _x(4), vectorize=True)
    x = _x().requires_grad_()
    y = network()(x)
    grads = torch.autograd.grad(y, x, torch.eye(6).reshape(6, 3, 2), is_grads_batched=True)
    return [jacobian, *grads]


def _transformed() -> list[Any]:
    model = network()
    values = dict(model.named_parameters())

    def loss(values: Any, x: Any) -> Any:
        return torch.func.functional_call(model, values, (x[None],)).sum()

    return [*torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, _x()).values()]


def _dual() -> list[Any]:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(_x(), torch.ones(3, 4))
        return [one for _ in range(3) for one in forward_ad.unpack_dual((dual * 2).relu() * dual)]


def _biased() -> list[Any]:
    bias = _of("torch.nn.attention.bias.causal_lower_right")(3, 3)
    q = _x(1, 1, 3, 4)
    return [nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)]


def _mutated() -> list[Any]:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        x = _x().requires_grad_()
        y = x * 2
        z = y.sin()
        y.mul_(3)
        z.sum().backward()
    return [x.grad]


class Refusing(torch.Tensor):
    """A subclass that refuses every operation on it, and every look at it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.matmul:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args)
        raise RuntimeError(f"no {function}")


class Closed(torch.Tensor):
    """A wrapper whose elements are out of reach: it refuses every operation but one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Closed:
        made: Closed = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.neg.default:
            return args[0].inner.neg()
        raise TypeError(f"no {function}")


class Wrapped:
    """No tensor, though it has a shape, an element type and `__torch_function__`."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.value.device)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one.value if isinstance(one, Wrapped) else one for one in args]
        made = function(*given, **(kwargs or {}))
        return Wrapped(made) if isinstance(made, torch.Tensor) else made


class Constrained(torch.Tensor):
    """A subclass that is not complete inside its own `__new__`."""

    limit: float

    @staticmethod
    def __new__(cls, x: torch.Tensor, limit: float) -> Constrained:
        made = x.as_subclass(cls)
        made.limit = limit
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        limits = [one.limit for one in args if isinstance(one, cls) and function.__name__ != "__set__"]
        made = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(made, cls) and limits:
            made.limit = limits[0]
        return made


_TESTING = "torch.testing._internal"


def _sub(name: str) -> Any:
    return _of(f"{_TESTING}.common_subclass.{name}")


def _two(x: torch.Tensor) -> Any:
    return _of(f"{_TESTING}.two_tensor.TwoTensor")(x, x + 1)


SUBCLASSES: dict[str, Program | str] = {
    "torch.nn.parameter.Parameter": train,
    "torch.nn.parameter.Buffer": _on(lambda: nn.Buffer(_x())),
    "torch.nn.parameter.UninitializedParameter": _lazy,
    "torch.nn.parameter.UninitializedBuffer": _lazy,
    "torch.nested._internal.nested_tensor.NestedTensor": _nested,
    "torch.masked.maskedtensor.core.MaskedTensor": _masked,
    "torch._subclasses.fake_tensor.FakeTensor": _fake,
    "torch._subclasses.functional_tensor.FunctionalTensor": _functional,
    "torch._subclasses.complex_tensor._core.ComplexTensor": _on(
        lambda: _of("torch._subclasses.complex_tensor.ComplexTensor")(_x(), _x()), lambda x: (x * x).re
    ),
    "torch.nn.utils._expanded_weights.expanded_weights_impl.ExpandedWeight": _per_sample,
    "torch.nn.attention.bias.CausalBias": _biased,
    "torch.distributed.tensor._api.DTensor": _parallel,
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": _collective,
    "torch.distributed._local_tensor.LocalTensor": _on(
        lambda: _of("torch.distributed._local_tensor.LocalTensor")({0: _x(), 1: _x()}),
        lambda x: (x * 2)._local_tensors[1],
    ),
    f"{_TESTING}.logging_tensor.LoggingTensor": _on(
        lambda: _of(f"{_TESTING}.logging_tensor.LoggingTensor")(_x()), lambda x: (x * 2).sum().elem
    ),
    f"{_TESTING}.logging_tensor.LoggingTensorReentrant": _on(
        lambda: _of(f"{_TESTING}.logging_tensor.LoggingTensorReentrant")(_x()), lambda x: (x * 2).sum().elem
    ),
    f"{_TESTING}.common_subclass.DiagTensorBelow": _on(
        lambda: _sub("DiagTensorBelow")(_x(4)), lambda x: (x * 2).diag
    ),
    f"{_TESTING}.common_subclass.NonWrapperTensor": _on(lambda: _sub("NonWrapperTensor")(_x())),
    f"{_TESTING}.common_subclass.SubclassWithTensorFactory": _on(
        lambda: _sub("SubclassWithTensorFactory")(_x()), lambda x: (x * 2).src
    ),
    f"{_TESTING}.two_tensor.TwoTensor": _on(lambda: _two(_x()), lambda x: (x * 2).sum().b),
    f"{_TESTING}.subclasses.WrapperSubclass": _on(
        lambda: _of(f"{_TESTING}.subclasses.WrapperSubclass")(_x()), lambda x: (x * 2).sum().a
    ),
    f"{_TESTING}.custom_tensor.ConstantExtraMetadataTensor": _on(
        lambda: _of(f"{_TESTING}.custom_tensor.ConstantExtraMetadataTensor")(_x()),
        lambda x: (x * 2).sum().elem,
    ),
    f"{_TESTING}.custom_tensor.CustomTensorPlainOut": _on(
        lambda: _of(f"{_TESTING}.custom_tensor.CustomTensorPlainOut")(_x(), _x())
    ),
    "torch.sparse.semi_structured.SparseSemiStructuredTensor": "base of the next two",
    "torch.sparse.semi_structured.SparseSemiStructuredTensorCUTLASS": "CUDA only",
    "torch.sparse.semi_structured.SparseSemiStructuredTensorCUSPARSELT": "CUDA only",
    "torch.distributed.fsdp._flat_param.FlatParameter": "a Parameter that FSDP of an accelerator makes",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensorBase": "base of the next one",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "deprecated in favour of DTensor",
    "torch.distributed.tensor._shards_wrapper.LocalShardsWrapper": "a container inside of DTensors",
    f"{_TESTING}.common_subclass.WrapperTensor": "base of others",
    f"{_TESTING}.common_subclass.WrapperTensorWithCustomSizes": "has an extent of its own, and no op",
    f"{_TESTING}.common_subclass.WrapperTensorWithCustomStrides": "has strides of its own, and no op",
    f"{_TESTING}.common_subclass.SparseTensor": "abstract: has no op",
    f"{_TESTING}.common_subclass.RedispatchTensor": "base for tests of torch's own",
}
"""Subclasses of torch.Tensor by their names, each with a program, or with why there is none."""


def _debug(mode: Any) -> Any:
    return mode.debug_string()


_TOOLS = "torch.distributed._tools"
_GRAPHS = "torch._higher_order_ops.cudagraph_conditional_nodes"
MODES: dict[str, Program | str] = {
    "torch.utils.checkpoint._CachingTorchDispatchMode": _selective,
    "torch.utils.checkpoint._CachedTorchDispatchMode": _selective,
    "torch.utils._debug_mode._mode.DebugMode": _within(
        lambda: _of("torch.utils._debug_mode.DebugMode")(), _debug
    ),
    "torch.utils.flop_counter._FlopCounterMode": _within(
        lambda: _of("torch.utils.flop_counter.FlopCounterMode")(display=False),
        lambda mode: mode.get_total_flops(),
    ),
    "torch.utils._python_dispatch.BaseTorchDispatchMode": _within(
        lambda: _of("torch.utils._python_dispatch.BaseTorchDispatchMode")()
    ),
    "torch.overrides.BaseTorchFunctionMode": _within(lambda: _of("torch.overrides.BaseTorchFunctionMode")()),
    "torch.utils._device.DeviceContext": _within(lambda: torch.device("cpu")),
    "torch._subclasses.fake_tensor.FakeTensorMode": _fake,
    "torch._subclasses.fake_tensor.FakeCopyMode": _copied_fake,
    "torch._subclasses.functional_tensor.FunctionalTensorMode": _functional,
    "torch._subclasses.schema_check_mode.SchemaCheckMode": _within(
        lambda: _of("torch._subclasses.schema_check_mode.SchemaCheckMode")(), lambda mode: mode.ops
    ),
    "torch._subclasses.complex_tensor._ops.common.ComplexTensorMode": _within(
        lambda: _of("torch._subclasses.complex_tensor._ops.common.ComplexTensorMode")()
    ),
    "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode": _traced,
    "torch.autograd.graph._CloneArgBeforeMutateMode": _mutated,
    "torch.distributed.tensor.debug._comm_mode.CommDebugMode": _within(
        lambda: _of("torch.distributed.tensor.debug.CommDebugMode")(), lambda mode: mode.get_total_counts()
    ),
    f"{_TOOLS}.mem_tracker.MemTracker": _within(lambda: _of(f"{_TOOLS}.mem_tracker.MemTracker")()),
    f"{_TOOLS}.memory_tracker.MemoryProfileDispatchMode": "made by MemoryTracker, which needs CUDA",
    f"{_TOOLS}.fsdp2_mem_tracker.FSDPMemTracker": "needs FSDP on an accelerator",
    f"{_TOOLS}.runtime_estimator.RuntimeEstimator": "needs CUDA",
    f"{_TOOLS}.sac_estimator.SACEstimator": "needs CUDA",
    f"{_TESTING}.logging_tensor.LoggingTensorMode": _within(
        lambda: _of(f"{_TESTING}.logging_tensor.LoggingTensorMode")()
    ),
    f"{_TESTING}.two_tensor.TwoTensorMode": _on(
        lambda: _x(), lambda x: _of("amanda_docs.subjects.in_two")(x)
    ),
    f"{_TESTING}.common_utils.CrossRefMode": _within(lambda: _of(f"{_TESTING}.common_utils.CrossRefMode")()),
    "torch._prims.context.TorchRefsMode": _on(
        lambda: _x(), lambda x: _of("amanda_docs.subjects.by_references")(x)
    ),
    "torch._subclasses.fake_utils.CrossRefFakeMode": _within(
        lambda: _of("torch._subclasses.fake_utils.CrossRefFakeMode")()
    ),
    "torch.distributed._local_tensor.LocalTensorMode": "runs the ranks of one program, with LocalTensor",
    "torch._subclasses.complex_tensor._ops.common.WrapComplexMode": "base of ComplexTensorMode",
    "torch.distributed.tensor._decompositions.PlacementTrackingMode": "part of DTensor's propagation",
    "torch.distributed.tensor._ops.strategy_validation._CaptureAtenOp": "part of DTensor's own tests",
    "torch._functorch._aot_autograd.runtime_wrappers._AnalyzeCustomOpInputOutputMode": "part of compilers",
    f"{_GRAPHS}.CUDAGraphCaptureControlFlowOpDispatchMode": "CUDA only",
    f"{_GRAPHS}.ControlFlowOpWarmupDispatchMode": "CUDA only",
    "torch.cuda._sanitizer.CUDASanitizerDispatchMode": "CUDA only",
    "torch.utils._cuda_debug._TensorTrackingMode": "CUDA only",
    "torch._dynamo.polyfills.NoEnterTorchFunctionMode": "part of dynamo",
    "torch.fx.experimental.proxy_tensor.TorchFunctionMetadataMode": "part of make_fx",
    "torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode": "part of make_fx",
    "torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex": "part of flex attention",
    "torch._export.non_strict_utils._NonStrictTorchFunctionHandler": "part of torch.export",
    "torch.export._safeguard.AutogradStateOpsFailSafeguard": "part of torch.export",
    f"{_TESTING}.optests.generate_tests.OpCheckMode": "part of opcheck's generated tests",
}
"""Dispatch and function modes by their names, each with a program, or with why there is none."""


def in_two(x: torch.Tensor) -> Any:
    """Compute in a mode whose factories make tensors of two."""
    with _of(f"{_TESTING}.two_tensor.TwoTensorMode")():
        return (torch.ones(3, 4) * 2).sum().a + x.sum()


def by_references(x: torch.Tensor) -> Any:
    """Compute by torch's reference implementations, which have no backward ops."""
    with torch.no_grad(), _of("torch._prims.context.TorchRefsMode")():
        return (x * 2).relu()


OTHERS: dict[str, Program] = {
    "gradients under vmap (`is_grads_batched`)": _batched,
    "`torch.func` transforms": _transformed,
    "forward-mode gradients": _dual,
    "inference mode": _on(lambda: _x(), lambda x: _of("amanda_docs.subjects.inferred")(x)),
    "device meta": _within(lambda: torch.device("meta"), lambda _: None),
    "a subclass that refuses every function": _on(
        lambda: _x(4, 4).as_subclass(Refusing), lambda x: torch.matmul(x, _x(4, 4))
    ),
    "a subclass that refuses every op": _on(lambda: Closed(_x()), lambda x: -x),
    "a class with `__torch_function__` that is no tensor": _on(
        lambda: Wrapped(_x(3, 3)), lambda x: torch.matmul(torch.exp(x), _x(3, 3)).value
    ),
    "a subclass inside its own `__new__`": _on(lambda: Constrained(_x(), 3.0), lambda x: (x * 2).limit),
}
"""Further surroundings in which ops run."""


def inferred(x: torch.Tensor) -> Any:
    """Compute in inference mode."""
    with torch.inference_mode():
        return network()(x)
