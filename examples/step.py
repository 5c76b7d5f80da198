"""One pass of a well-known model, which tools of the command may look at; it knows nothing of them.

amanda run -t flops -- examples/step.py mobilenet_v2 [--train]
"""

import argparse
from collections.abc import Callable

import torch
from models import bert, gpt2, resnet50, vision
from torch import nn

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet50,
    "mobilenet_v2": lambda: vision("mobilenet_v2"),
    "vit_b_16": lambda: vision("vit_b_16"),
    "bert": lambda: bert(attn_implementation="eager"),
    "bert-sdpa": lambda: bert(attn_implementation="sdpa"),
    "gpt2": gpt2,
}


def main() -> None:
    """An image of 224 by 224 or 128 tokens, forward in evaluation mode, or forward and backward."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--train", action="store_true", help="backward too, as in training")
    options = parser.parse_args()
    model = MODELS[options.model]().train(options.train)
    of_text = options.model in ("bert", "bert-sdpa", "gpt2")
    x = torch.ones(1, 128, dtype=torch.long) if of_text else torch.rand(1, 3, 224, 224)
    with torch.set_grad_enabled(options.train):
        outputs = model(x)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        if options.train:
            first.sum().backward()
    print(tuple(first.shape))


if __name__ == "__main__":
    main()
