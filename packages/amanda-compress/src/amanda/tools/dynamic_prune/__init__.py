"""Pruning that depends on the input: channels of convolutions, positions of activations, tokens.

tool = DynamicChannelPruneTool(density=0.5)
tool.prepare(model, images)
optimizer = torch.optim.SGD([*model.parameters(), *tool.parameters()], lr=0.1)
with amanda.apply(tool):
    loss = criterion(model(images), labels) + tool.loss()
    loss.backward()
print(tool.result)
"""

from amanda.tools.dynamic_prune._attention import AttentionPruneTool
from amanda.tools.dynamic_prune._base import DynamicPruneResult, DynamicPruneTool
from amanda.tools.dynamic_prune._convolution import ActivationPruneTool, DynamicChannelPruneTool

__all__ = [
    "ActivationPruneTool",
    "AttentionPruneTool",
    "DynamicChannelPruneTool",
    "DynamicPruneResult",
    "DynamicPruneTool",
]
