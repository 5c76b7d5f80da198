"""How many ops hooks of modules see, of those that Amanda does: the paper's figure 9 for today's models.

python examples/hook_coverage.py [MODEL ...]
"""

import sys
from collections.abc import Callable

import torch
from models import bert, resnet50, vision

import amanda
from amanda.tools.coverage import CoverageResult, CoverageTool

IMAGE, TOKENS = torch.rand(1, 3, 64, 64), torch.ones(1, 32, dtype=torch.long)
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], torch.Tensor]] = {
    "VGG19": (lambda: vision("vgg19"), IMAGE),
    "ResNet-50": (resnet50, IMAGE),
    "Inception-v3": (lambda: vision("inception_v3", init_weights=False), torch.rand(1, 3, 299, 299)),
    "BERT-base, eager attention": (lambda: bert(attn_implementation="eager"), TOKENS),
    "BERT-base, SDPA": (lambda: bert(attn_implementation="sdpa"), TOKENS),
}


def coverage(name: str) -> CoverageResult:
    """What one forward and backward pass of a model in evaluation mode executes."""
    make, x = MODELS[name]
    model, tool = make().eval(), CoverageTool()
    with amanda.apply(tool):
        output = model(x)
        (output if isinstance(output, torch.Tensor) else output[1]).sum().backward()
    return tool.result


def row(name: str) -> str:
    """A line of the table."""
    result = coverage(name)
    cells = [
        cell
        for phase in ("forward", "backward")
        for cell in (f"{result.total('calls', phase):,}", f"{result.total('whole', phase):,}",
                     f"{result.share(phase):.0%}")
    ]  # fmt: skip
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        print(row(name))
