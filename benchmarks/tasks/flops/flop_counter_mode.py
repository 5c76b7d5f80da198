"""Run a transformer encoder of six layers forward."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 6)
x = torch.rand(8, 128, 512)
with FlopCounterMode(depth=1):
    model(x)
