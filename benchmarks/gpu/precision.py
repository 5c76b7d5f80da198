"""Mixed precision, compiled models, attention's kernels, quantised and 2:4 layers, the allocator's peak."""

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from _cases import Cases, bare
from _device import DEVICE, ON_GPU, peak, placed, timed
from _measure import QUICK, controls
from _models import models
from _tools import Inserting
from compiled import TOOLS as COMPILED
from copies import copied
from streams import ASYNCHRONOUS, WIDE, layers, train
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import amanda
from amanda.drivers.torch._requirements import missing_for_graphs
from amanda.testing import EqualCopies, Silent, Unchanged
from amanda.tools.prune import PruneError, PruneTool

Program = Callable[[], list[Tensor]]
PRODUCTS = ("conv2d", "linear")
HEADS = (2, 4, 64, 32) if QUICK else (4, 16, 2048, 64)
"""Batch, heads, length and width of attention."""


def stage(cases: Cases) -> None:
    """Run each kind of program bare and under tools."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, program in {
        "autocast, bfloat16": functools.partial(autocast, torch.bfloat16),
        "autocast, float16, scaled": functools.partial(autocast, torch.float16, scaled=True),
        "bfloat16": half,
    }.items():
        cases(name, same, program)
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        if ON_GPU or name in ("FLASH_ATTENTION", "MATH"):
            cases(f"attention, {name}", attention, sdpa_kernel(getattr(SDPBackend, name)))
        else:
            cases.skip(f"attention, {name}", "needs a GPU")
    cases("FlexAttention, op by op", flexible, False)
    for library, quantised in {"torchao": by_torchao, "bitsandbytes": by_bitsandbytes}.items():
        if importlib.util.find_spec(library) is None:
            cases.skip(library, "not installed")
        else:
            cases(library, same, quantised)
    torch.use_deterministic_algorithms(False)
    cases("2:4 weights", sparse)
    step = functools.partial(train, placed(layers), placed(lambda: torch.randn(64, WIDE)))
    cases("peak of memory", peaks, step)
    for name, make in {**COMPILED, "observer at convolutions and products": observing}.items():
        for mode in ("default",) if QUICK else ("default", "reduce-overhead"):
            cases(f"compiled, {mode}, {name}", compiled, mode, make)
    cases("FlexAttention, compiled", flexible, True)


def observing() -> amanda.Tool:
    """Return a tool that looks at the output of each convolution and each product with a weight."""
    calls: list[int] = [0]

    @amanda.observer
    def look(_: Tensor) -> None:
        calls[0] += 1

    return Inserting("after", routine=look, where=lambda context: context.get_op_type() in PRODUCTS)


def same(program: Program) -> dict[str, Any]:
    """Return where tensors that a program gives differ under tools that change nothing."""
    wanted, again = bare(program), program()
    amiss, undetermined = [], sum(not equal(*pair) for pair in zip(wanted, again, strict=True))
    for tool in (Silent(), Unchanged(), EqualCopies(copied)):
        with amanda.apply(tool) as scope:
            found = [program() for _ in range(2)][-1]
        wrong = sum(not equal(*pair) for pair in zip(found, wanted, strict=True))
        if wrong > undetermined:
            amiss.append(f"{type(tool).__name__}: {wrong} of {len(wanted)} tensors differ")
    return {"tensors": len(wanted), "undetermined": undetermined, "report": str(scope.report), "amiss": amiss}


def equal(one: Tensor, other: Tensor) -> bool:
    """Return True for tensors of equal values, NaN being equal to itself."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def autocast(dtype: torch.dtype, scaled: bool = False) -> list[Tensor]:
    """Return loss and parameters after two steps in mixed precision."""
    model = placed(layers)
    x = placed(lambda: torch.randn(8, WIDE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=scaled)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [loss.detach(), *(one.detach() for one in model.parameters())]


def half() -> list[Tensor]:
    """Return output and gradients of a model in bfloat16."""
    model = placed(layers).to(torch.bfloat16)
    x = placed(lambda: torch.randn(8, WIDE, dtype=torch.bfloat16))
    y = model(x)
    y.sum().backward()
    return [y.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


def queries() -> list[Tensor]:
    """Return queries, keys and values."""
    return placed(lambda: [torch.randn(HEADS, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)])


def attention(kernels: AbstractContextManager[Any]) -> dict[str, Any]:
    """Return the FLOPs of attention by one kind of kernel, and what torch counts."""

    def program() -> list[Tensor]:
        given = queries()
        y = nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(one.grad for one in given if one.grad is not None)]

    with kernels:
        return same(program) | counted(program)


def counted(program: Program) -> dict[str, Any]:
    """Return FLOPs of a program by the flops tool, and by torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        program()
    with amanda.apply(tool := amanda.load_tool("flops")):
        program()
    return {
        "flops": tool.result.total("flops"),
        "forward": tool.result.total("flops", "forward"),
        "unsupported": dict(tool.result.unsupported),
        "torch's flops": counter.get_total_flops(),
    }


def flexible(by_inductor: bool) -> dict[str, Any]:
    """Return FLOPs and differences of FlexAttention, which is meant to be compiled."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    torch._dynamo.reset()
    function = flex.flex_attention
    if by_inductor:
        function = torch.compile(function, backend="aot_eager" if QUICK else "inductor")

    def program() -> list[Tensor]:
        with torch.no_grad():
            given = [one.detach() for one in queries()]
            return [function(*given, score_mod=lambda score, b, h, q, k: score + (q - k))]

    wanted = bare(program)
    with amanda.apply(tool := amanda.load_tool("flops"), compiled="instrument") as scope:
        found = program()
    close = torch.allclose(found[0], wanted[0], rtol=2e-2, atol=2e-2)
    amiss = [] if close else ["it differs"]
    flops, missing = tool.result.total("flops"), dict(tool.result.unsupported)
    return {"flops": flops, "unsupported": missing, "report": str(scope.report), "amiss": amiss}


def by_torchao() -> list[Tensor]:
    """Return what layers of torchao give, with weights of 8 bits."""
    quantization = importlib.import_module("torchao.quantization")
    model = placed(layers).to(torch.bfloat16)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        return [model(placed(lambda: torch.randn(8, WIDE, dtype=torch.bfloat16)))]


def by_bitsandbytes() -> list[Tensor]:
    """Return what layers of bitsandbytes give, with weights of 8 and of 4 bits."""
    library = importlib.import_module("bitsandbytes")
    torch.manual_seed(0)
    model = nn.Sequential(library.nn.Linear8bitLt(WIDE, WIDE), library.nn.Linear4bit(WIDE, WIDE)).to(DEVICE)
    with torch.no_grad():
        return [model(placed(lambda: torch.randn(8, WIDE, dtype=torch.float16)))]


@torch.no_grad()
def sparse() -> dict[str, Any]:
    """Return seconds of a model with zeros 2:4, and of one with 2:4 weights, which gives the same.

    Without a GPU, the error of the tool.
    """
    model, x = placed(lambda: (layers().to(torch.bfloat16), torch.randn(64, WIDE, dtype=torch.bfloat16)))
    tool = PruneTool(pattern="2:4")
    tool.prepare(model, x)
    tool.finalize(model)
    masked = copy.deepcopy(model)
    try:
        tool.finalize(model, semi_structured=True)
    except PruneError as error:
        if ON_GPU:
            raise
        return {"told": str(error), "amiss": []}
    close = torch.allclose(model(x), masked(x), rtol=2e-2, atol=2e-2)
    medians = {
        name: timed(functools.partial(one, x), controls())["medians"]
        for name, one in {"zeros": masked, "2:4": model}.items()
    }
    return {"medians": medians, "amiss": [] if close else ["it differs"]}


def peaks(step: Callable[[], None]) -> dict[str, Any]:
    """Return bytes that a step has at most, bare and under tools."""
    step()
    found = {"bare": peak(step), "bare again": peak(step)}
    for name, make in ASYNCHRONOUS.items():
        with amanda.apply(make()):
            step()
            found[name] = peak(step)
    most = 1.01 * max(found["bare"], found["bare again"]) + 2**20
    keeping = ("fresh", "prune")  # which give values of their own
    higher = [name for name in found if found[name] > most and name not in keeping and ON_GPU]
    return {"bytes": found, "amiss": [f"{name}: a higher peak" for name in higher]}


@torch.no_grad()
def compiled(mode: str, make: Callable[[], amanda.Tool]) -> dict[str, Any]:
    """Return seconds of a compiled model with a tool in its graph, and whether it gives what it has to.

    With a torch whose graphs cannot be instrumented, whether it is right op by op.
    """
    torch._dynamo.reset()
    model, x = placed(lambda: (layers(), torch.randn(64, WIDE)) if QUICK else models()["ResNet-50"].wide())
    model.eval()
    with amanda.apply(make()):
        wanted = model(x)
    function = torch.compile(model, **({"backend": "aot_eager"} if QUICK else {"mode": mode}))
    step = functools.partial(function, x)
    bare(step)
    scope = functools.partial(amanda.apply, make(), compiled="instrument")
    with scope() as opened:
        found = [step().clone() for _ in range(3)][-1]
    close = torch.allclose(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))
    amiss = [] if close else ["it gives something else"]
    told = {"report": str(opened.report), "missing": missing_for_graphs(), "amiss": amiss}
    return told if told["missing"] else {**timed(step, controls() | {"in a scope": scope}), **told}
