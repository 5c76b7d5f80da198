"""Methods of pruning and quantisation in Keras, each by a tool and by hand.

Each takes a study, a dense model and a seed, and gives what it scores; the model is left trained on.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from baselines.magnitude_keras import MagnitudePruning
from baselines.quantize_keras import Quantized

import amanda
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool

Study, Model, Scores = Any, Any, dict[str, float]
LAYERS = ["conv2d", "matmul"]


def dense(study: Study, model: Model, seed: int) -> Scores:
    """The model as it is."""
    scores: Scores = study.score(model)
    return scores


def pruned(study: Study, model: Model, seed: int, tune: bool = False) -> Scores:
    """Half of each weight dropped."""
    tool = PruneTool(sparsity=0.5, type=LAYERS)
    with amanda.apply(tool):
        study.calibrate(model)
        if tune:
            study.tune(model, seed)
        scores: Scores = study.score(model)
    tool.finalize(model)
    return scores


def static(study: Study, model: Model, seed: int, bits: int) -> Scores:
    """Quantised after training."""
    tool = QuantizeTool(weight_bits=bits, activation_bits=bits, type=LAYERS)
    with amanda.apply(tool):
        with tool.calibrating():
            study.calibrate(model)
        scores: Scores = study.score(model)
    return scores


def trained(study: Study, model: Model, seed: int, bits: int) -> Scores:
    """Trained on with quantisation."""
    tool = QuantizeTool("qat", bits, bits, type=LAYERS)
    with amanda.apply(tool):
        with tool.calibrating():
            study.calibrate(model)
        study.tune(model, seed)
        tool.freeze()
        scores: Scores = study.score(model)
    return scores


def pruned_by_hand(study: Study, model: Model, seed: int, tune: bool = False) -> Scores:
    """The same with a callback."""
    pruning = MagnitudePruning(model, 0.5)
    if tune:
        study.tune(model, seed, pruning)
    scores: Scores = study.score(model)
    return scores


def static_by_hand(study: Study, model: Model, seed: int, bits: int) -> Scores:
    """The same with other classes of layers."""
    quantized = Quantized(model, study.calibrate, bits)
    scores: Scores = study.score(model)
    quantized.remove()
    return scores


def trained_by_hand(study: Study, model: Model, seed: int, bits: int) -> Scores:
    """The same with other classes of layers."""
    quantized = Quantized(model, study.calibrate, bits)
    quantized.set("train")
    study.tune(model, seed)
    quantized.set("fixed")
    scores: Scores = study.score(model)
    quantized.remove()
    return scores


Method = Callable[..., Scores]
METHODS: dict[str, tuple[Method, Method, dict[str, Any]]] = {
    "dense": (dense, dense, {}),
    "pruned 50 %": (pruned, pruned_by_hand, {}),
    "pruned 50 %, fine-tuned": (pruned, pruned_by_hand, {"tune": True}),
    "PTQ, 8 bits": (static, static_by_hand, {"bits": 8}),
    "PTQ, 4 bits": (static, static_by_hand, {"bits": 4}),
    "QAT, 4 bits": (trained, trained_by_hand, {"bits": 4}),
}
"""By name: with a tool, by hand, options."""
