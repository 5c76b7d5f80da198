"""Train an attention layer; at step 2 its mask hides a whole row, and the loss becomes NaN."""

import traceback

import torch
from model import Model
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class FirstNan(TorchFunctionMode):
    """Print the first call whose output holds NaN and whose inputs hold none, with the caller's line."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not self.found and holds_nan(tree_leaves(out)) and not holds_nan(inputs):
            self.found = True
            caller = next(
                frame for frame in reversed(traceback.extract_stack()[:-1]) if "torch" not in frame.filename
            )
            print(f"{function.__name__} at {caller.filename}:{caller.lineno}")
        return out


def holds_nan(values: list[object]) -> bool:
    """Return True if a floating-point tensor holds NaN."""
    return any(x.isnan().any() for x in values if isinstance(x, torch.Tensor) and x.is_floating_point())


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with FirstNan():
    for step in range(4):
        x, mask = torch.randn(2, 8, 32), torch.zeros(8, 8, dtype=torch.bool)
        mask[5, : 4 * step] = True
        optimizer.zero_grad()
        loss = model(x, mask).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
