"""Run a transformer encoder of six layers forward."""

import torch
from torch import nn

from amanda.tools.flops import summary

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 6)
x = torch.rand(8, 128, 512)
print(summary(model, x, depth=1))
