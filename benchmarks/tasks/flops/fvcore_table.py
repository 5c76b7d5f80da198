"""Run a transformer encoder of six layers forward."""

import torch
from fvcore.nn import FlopCountAnalysis, flop_count_table
from torch import nn

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 6)
x = torch.rand(8, 128, 512)
print(flop_count_table(FlopCountAnalysis(model, x), max_depth=1))
