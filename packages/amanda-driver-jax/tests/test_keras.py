"""Keras on its JAX backend: training is as bare to the bit, and ops are in the layers that Keras names."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not there")]
STEPS = 20
PROGRAM = Path(__file__).with_name("keras_program.py")


def trained(model: str) -> Any:
    """Return what the program prints, in a process where Keras runs on JAX."""
    done = run([sys.executable, PROGRAM, model], check=True, env={**os.environ, "KERAS_BACKEND": "jax"})
    return json.loads(done.stdout.splitlines()[-1])


def assert_as_bare(printed: Any) -> None:
    bare, idle, looked, counted = printed["losses"]
    assert len(bare) == STEPS
    assert idle == looked == bare
    assert bare[0] != bare[-1]
    assert len(set(printed["digests"][:3])) == 1  # of the weights after all steps
    assert {"dot_general", "dot_general_transpose"} <= set(printed["seen"])
    assert np.allclose(counted, bare[: len(counted)], rtol=1e-5)  # callbacks keep XLA from fusing
    assert not printed["reports"]


def test_a_text_model_is_seen_layer_by_layer() -> None:
    printed = trained("text")
    assert_as_bare(printed)
    attention = ("query", "key", "value", "attention_output")
    layers = [*(f"attention.{name}" for name in attention), "head"]
    assert printed["weights"] == {f"{name}.kernel": name for name in layers}
    products = {name: count for name, count in printed["calls"].items() if name.endswith("dot_general")}
    assert products == {**{f"{name}: dot_general": 2 for name in layers}, "attention: dot_general": 4}


def test_resnet50_is_seen_layer_by_layer() -> None:
    printed = trained("resnet50")
    assert_as_bare(printed)
    convolutions = [name for name in printed["layers"] if name.endswith("conv")]
    assert len(convolutions) == 53
    weights = {name: name for name in (*convolutions, "predictions")}
    assert printed["weights"] == {f"{name}.kernel": layer for name, layer in weights.items()}
    calls = Counter(printed["calls"])
    assert all(calls[f"{name}: conv_general_dilated"] == 2 for name in convolutions)


ON_PYTORCH = """
import jax.numpy, keras, numpy, amanda
from amanda.testing import Silent
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.ELU()])
x = numpy.ones((2, 4), "float32")
bare = model(x)
with amanda.apply(Silent()):
    assert (model(x) == bare).all()
    jax.numpy.ones(3) + 1
"""


def test_layers_of_keras_on_pytorch_are_no_modules_of_jax() -> None:
    run([sys.executable, "-c", ON_PYTORCH], check=True, env={**os.environ, "KERAS_BACKEND": "torch"})
