"""Counts multiply-accumulates with Amanda and with its neighbours, in one run, into docs/flops-compared.md.

python benchmarks/flops_compared.py [MODEL ...] prints the rows of some models; --write writes the page.
The neighbours: python -m pip install --no-deps ptflops thop calflops torchinfo accelerate
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from _pages import DOCS, render
from _tables import table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import bert, gpt2, resnet50, vision

import amanda
from amanda.tools.flops import FlopsTool

PAGE = DOCS / "flops-compared.md"
IMAGE, TOKENS = torch.rand(1, 3, 224, 224), torch.ones(1, 128, dtype=torch.long)


def encoder(tokens: int, width: int, layers: int) -> int:
    """Sum projections, two layers of four times the width, and the two products of attention."""
    return layers * (12 * tokens * width**2 + 2 * tokens**2 * width)


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, int]] = {
    "ResNet-50": (resnet50, IMAGE, 4_089_184_256),
    "MobileNetV2": (lambda: vision("mobilenet_v2"), IMAGE, 300_774_272),
    "ViT-B/16": (
        lambda: vision("vit_b_16"), IMAGE, encoder(197, 768, 12) + 196 * 768 * 3 * 16**2 + 768 * 1000
    ),
    "BERT-base, eager": (
        lambda: bert(attn_implementation="eager"), TOKENS, encoder(128, 768, 12) + 768**2
    ),
    "BERT-base, SDPA": (
        lambda: bert(attn_implementation="sdpa"), TOKENS, encoder(128, 768, 12) + 768**2
    ),
    "GPT-2": (gpt2, TOKENS, encoder(128, 768, 12) + 128 * 768 * 50257),
}  # fmt: skip
"""How a model is made, its input, and the multiply-accumulates that its formulas give."""


def by_amanda(model: nn.Module, x: torch.Tensor) -> float:
    """Count the ops that run."""
    tool = FlopsTool()
    with amanda.apply(tool):
        model(x)
    return tool.result.total("macs")


def by_torch(model: nn.Module, x: torch.Tensor) -> float:
    """torch.utils.flop_counter: two for each multiply-accumulate."""
    with FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops() / 2


def by_fvcore(model: nn.Module, x: torch.Tensor) -> float:
    """Count the ops of a trace, without autograd."""
    from fvcore.nn import FlopCountAnalysis

    analysis = FlopCountAnalysis(model, x)
    return analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()


def by_ptflops(model: nn.Module, x: torch.Tensor) -> float:
    """Count the functions that are called."""
    from ptflops import get_model_complexity_info

    argument = "input_ids" if x.dtype == torch.long else "x"
    inputs = {argument: x} if argument == "input_ids" else None
    macs, _ = get_model_complexity_info(
        model, tuple(x.shape[1:]), print_per_layer_stat=False, as_strings=False, backend="aten",
        input_constructor=(lambda _: inputs) if inputs else None,
    )  # fmt: skip
    return macs or 0


def by_thop(model: nn.Module, x: torch.Tensor) -> float:
    """Count modules."""
    from thop import profile

    return profile(model, inputs=(x,), verbose=False)[0]


def by_calflops(model: nn.Module, x: torch.Tensor) -> float:
    """Count functions that it patches."""
    from calflops import calculate_flops

    _, macs, _ = calculate_flops(
        model, args=[x], print_results=False, print_detailed=False, output_as_string=False
    )
    return macs


def by_torchinfo(model: nn.Module, x: torch.Tensor) -> float:
    """Count modules: products of parameters and outputs."""
    from torchinfo import summary

    return summary(model, input_data=x, verbose=0).total_mult_adds


COUNTERS: dict[str, Callable[[nn.Module, torch.Tensor], float]] = {
    "amanda": by_amanda, "torch": by_torch, "fvcore": by_fvcore, "ptflops": by_ptflops, "thop": by_thop,
    "calflops": by_calflops, "torchinfo": by_torchinfo,
}  # fmt: skip


def counted(counter: Callable[..., float], name: str, why: dict[str, str]) -> str:
    """Return the GMACs of a forward pass without gradients, or a dash with the reason in `why`."""
    make, x, _ = MODELS[name]
    try:
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return f"{counter(make().eval(), x) / 1e9:.4f}"
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        why[f"{counter.__name__.removeprefix('by_')} on {name}"] = f"{type(error).__name__}: {reason[:80]}"
        return "-"


def row(name: str, why: dict[str, str]) -> list[str]:
    """Return a line of the table."""
    counts = [counted(counter, name, why) for counter in COUNTERS.values()]
    return [name, f"{MODELS[name][2] / 1e9:.4f}", *counts]


def training(counter: Callable[[nn.Module, torch.Tensor], float]) -> str:
    """Return the GMACs of MobileNetV2's forward and backward pass."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = vision("mobilenet_v2").eval()

        def forward(self, x: torch.Tensor) -> None:
            self.model(x).sum().backward()

    return f"{counter(Step(), IMAGE) / 1e9:.4f}"


def page() -> str:
    """Return docs/flops-compared.md."""
    why: dict[str, str] = {}
    others = ("torch", "fvcore", "ptflops", "thop", "calflops", "torchinfo")
    return render(
        "flops-compared",
        table=table(["model", "formula", *COUNTERS], (row(name, why) for name in MODELS), words=True),
        own=training(by_amanda),
        torchs=training(by_torch),
        why=why,
        versions=", ".join(f"{name} {metadata.version(name)}" for name in others),
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        reasons: dict[str, str] = {}
        for model in sys.argv[1:] or MODELS:
            print(*row(model, reasons))
        for what, reason in reasons.items():
            print(f"{what}: {reason}")
