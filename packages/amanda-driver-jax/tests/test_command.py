"""`amanda run` on a training script of JAX as it is, with distributions that are installed."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from children import run

SCRIPT = """
import jax
import jax.numpy as jnp
import optax
from flax import nnx

class Network(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 2, (3, 3), rngs=rngs)
        self.linear = nnx.Linear(128, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear(nnx.relu(self.conv(x)).reshape(len(x), -1))

model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

@nnx.jit
def step(model, optimizer, x, y):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value

x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
for _ in range(3):
    print(round(float(step(model, optimizer, x, jnp.array([0, 1, 2, 0]))), 4))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "jax" not in {entry.name for entry in entry_points(group="amanda.drivers")}, reason="it is not installed"
)
def test_an_unmodified_script_is_counted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    bare = run([sys.executable, "train.py"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "amanda", "run", "-t", "flops", "-o", "out", "--", "train.py"]
    done = run(command, cwd=tmp_path, check=True, env={**os.environ, "COLUMNS": "160"})
    assert done.stdout == bare.stdout
    rows = json.loads((tmp_path / "out" / "flops.json").read_text())["rows"]
    counts = {(row["phase"], row["module"], row["type"]): (row["calls"], row["MACs"]) for row in rows}
    assert counts["forward", "conv", "conv2d"] == (3, 3 * 4 * 64 * 2 * 9)
    assert counts["forward", "linear", "linear"] == (3, 3 * 4 * 128 * 3)
    assert counts["backward", "linear", "linear_backward"] == (3, 2 * 3 * 4 * 128 * 3)
