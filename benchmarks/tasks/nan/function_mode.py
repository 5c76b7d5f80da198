"""Train an attention layer; at step 2 its mask hides a whole row, and the loss becomes NaN."""

import traceback

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class Attention(nn.Module):
    """One head of attention over 8 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / 8
        weights = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
        out: torch.Tensor = self.out(weights @ value)
        return out


class Model(nn.Module):
    """Attention between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(32, 64), Attention(), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.attention(self.embed(x), mask))
        return out


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
                frame for frame in reversed(traceback.extract_stack()) if "torch" not in frame.filename
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
