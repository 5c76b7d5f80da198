"""One trained model as an ONNX file and as a SavedModel: one tool through two drivers sees the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf

import amanda
from amanda.drivers.onnxruntime import instrument, session_options
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune import PruneTool

pytestmark = pytest.mark.filterwarnings("ignore")  # what an old SavedModel makes TensorFlow warn of


def folder() -> Path:
    """Where basic-pitch (Spotify, 2022) has its models; the package itself is not imported."""
    package = importlib.util.find_spec("basic_pitch")
    assert package is not None
    (place,) = package.submodule_search_locations or ()
    return Path(place, "saved_models", "icassp_2022")


@pytest.fixture(scope="module")
def session() -> Any:
    return onnxruntime.InferenceSession(folder() / "nmp.onnx", session_options())


@pytest.fixture(scope="module")
def audio() -> Any:
    """Two seconds of noise: at every pitch there is some, so that its logarithm magnifies no rounding."""
    return np.random.default_rng(0).normal(0, 0.2, (1, 43844, 1)).astype(np.float32)


class Layers(amanda.Tool):
    """What convolutions, rectifiers and sigmoids give, channels first, by type and name of the layer."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], Any] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        if context["type"] not in ("conv2d", "relu", "sigmoid"):
            return
        name = context.get_op().name
        if "/" not in name:  # one that the converter has made of a convolution and its activation
            name = context.get_inputs()[0].name
        key = context["type"], name.partition(";")[0]
        last = context.namespace.matches("tensorflow")
        context.insert_after_op(self.keep, outputs=[0], key=key, channels_last=last)

    @amanda.observer
    def keep(self, value: Any, key: tuple[str, str], channels_last: bool) -> None:
        array = np.asarray(value)
        self.values[key] = np.moveaxis(array, -1, 1) if channels_last else array


def test_layers_of_the_file_and_of_the_saved_model_give_the_same(session: Any, audio: Any) -> None:
    saved, filed = Layers(), Layers()
    model = tf.saved_model.load(str(folder() / "nmp"))
    with amanda.apply(saved):
        model.signatures["serving_default"](tf.constant(audio))
    with amanda.apply(filed) as scope:
        session.run(None, {session.get_inputs()[0].name: audio})
    assert scope.report == []
    common = saved.values.keys() & filed.values.keys()
    types = [kind for kind, _ in common]
    # The other six convolutions have their normalisation and bias folded into them in the file.
    assert {kind: types.count(kind) for kind in types} == {"conv2d": 26, "relu": 3, "sigmoid": 3}
    for key in common:
        np.testing.assert_allclose(filed.values[key], saved.values[key], atol=1e-3, err_msg=str(key))


def test_a_pruned_file_gives_what_the_pruned_session_does(session: Any, audio: Any) -> None:
    feed = {session.get_inputs()[0].name: audio}
    bare = session.run(None, feed)
    with amanda.apply(PruneTool()):
        pruned = session.run(None, feed)
    written = instrument(folder() / "nmp.onnx", PruneTool()).SerializeToString()
    made = onnxruntime.InferenceSession(written, session_options()).run(None, feed)
    for one, other, plain in zip(made, pruned, bare, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
        assert np.abs(one - plain).max() > 1e-2
    for one, other in zip(session.run(None, feed), bare, strict=True):
        np.testing.assert_array_equal(one, other)
