"""Train an attention layer; at step 2 its mask hides a whole row, and the loss becomes NaN."""

import torch
from model import Model

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.autograd.set_detect_anomaly(True)
for step in range(4):
    x, mask = torch.randn(2, 8, 32), torch.zeros(8, 8, dtype=torch.bool)
    mask[5, : 4 * step] = True
    optimizer.zero_grad()
    loss = model(x, mask).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
