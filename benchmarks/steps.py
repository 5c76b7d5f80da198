"""Training steps of ResNet-50 and BERT under tools, beside bare steps of the same run."""

import contextlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from _measure import (
    BeforeAfterTool,
    EmptyBackwardTool,
    EmptyTool,
    Variant,
    arguments,
    declare_vision_ops,
    interleaved,
    publish,
    ratio_interval,
)

import amanda


def training_step(model: torch.nn.Module, example: torch.Tensor) -> Callable[[], None]:
    """Forward, loss and backward of a model on one example."""

    def step() -> None:
        model.zero_grad()
        output: Any = model(example)
        loss = output if isinstance(output, torch.Tensor) else output[0]
        loss.sum().backward()

    return step


def models(quick: bool) -> dict[str, Callable[[], None]]:
    """Steps by name: batch 1, ResNet at 224 x 224 and BERT-base at 128 tokens; small ones if quick."""
    _library = declare_vision_ops()
    from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification

    if quick:
        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        resnet = ResNetConfig(depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 8, 8], embedding_size=8)
        return {
            "ResNet, tiny": training_step(ResNetForImageClassification(resnet), torch.rand(2, 3, 64, 64)),
            "BERT, tiny": training_step(BertModel(BertConfig(**small)), torch.randint(0, 100, (1, 8))),
        }
    return {
        "ResNet-50": training_step(ResNetForImageClassification(ResNetConfig()), torch.rand(1, 3, 224, 224)),
        "BERT-base": training_step(BertModel(BertConfig()), torch.randint(0, 30_000, (1, 128))),
    }


def main() -> None:
    """Measure and publish."""
    options = arguments(__doc__ or "")
    tools = {
        "empty tool": EmptyTool(),
        "empty, backward too": EmptyBackwardTool(),
        "before + after every op": BeforeAfterTool(),
    }
    variants: dict[str, Variant] = {"bare": contextlib.nullcontext, "bare again": contextlib.nullcontext}
    for name, tool in tools.items():
        variants[name] = lambda tool=tool: amanda.apply(tool)  # type: ignore[misc]
    rows = []
    for model, step in models(options.quick).items():
        print(f"{model} ...", file=sys.stderr)
        taken = interleaved(variants, step, rounds=3 if options.quick else 30)
        for name, times in taken.items():
            ratio, low, high = ratio_interval(times, taken["bare"])
            milliseconds = statistics.median(times) * 1e3
            rows.append([model, name, f"{milliseconds:.1f} ms", f"{ratio:.3f}", f"{low:.3f} - {high:.3f}"])
    columns = ["model", "variant", "median step", "ratio to bare", "quartiles"]
    publish("Training step, forward and backward", columns, rows, options)


if __name__ == "__main__":
    main()
