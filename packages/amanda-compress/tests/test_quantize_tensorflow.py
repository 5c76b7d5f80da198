"""The tool that quantises: one program on PyTorch and on TensorFlow in every mode, with equal scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

import amanda
from amanda.tools.quantize import (
    Grid,
    QuantizeError,
    QuantizeTool,
    choose_qparams,
    extremes,
    fake_quantize,
)

RATE = 0.05
Arrays = list[NDArray[np.float32]]


class Weights:
    """Of a convolution, a depthwise one and a linear layer, in TensorFlow's layouts."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        shapes = ((3, 3, 2, 3), (3,), (3, 3, 3, 2), (6,), (4 * 4 * 6, 5), (5,))
        self.arrays: Arrays = [random.normal(size=shape).astype(np.float32) * 0.3 for shape in shapes]
        self.batches: Arrays = [random.normal(size=(4, 8, 8, 2)).astype(np.float32) for _ in range(3)]
        self.target = np.zeros((4, 5), np.float32)


@pytest.fixture
def weights() -> Weights:
    return Weights()


class TorchModel(nn.Module):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.conv, self.depthwise, self.linear = (
            nn.Conv2d(2, 3, 3),
            nn.Conv2d(3, 6, 3, groups=3),
            nn.Linear(96, 5),
        )
        conv, conv_bias, depthwise, depthwise_bias, linear, linear_bias = map(
            torch.from_numpy, weights.arrays
        )
        self.load_state_dict({
            "conv.weight": conv.permute(3, 2, 0, 1), "conv.bias": conv_bias,
            "depthwise.weight": depthwise.permute(2, 3, 0, 1).reshape(6, 1, 3, 3),
            "depthwise.bias": depthwise_bias, "linear.weight": linear.T, "linear.bias": linear_bias,
        })  # fmt: skip

    def forward(self, x: Any) -> Any:
        x = self.depthwise(torch.relu(self.conv(x.permute(0, 3, 1, 2))))
        return self.linear(torch.relu(x).permute(0, 2, 3, 1).flatten(1))


class Program:
    """One model under one tool: `forward` of a batch, and a `step` of training it with SGD."""

    def __init__(self, weights: Weights, tool: QuantizeTool) -> None:
        self.weights, self.tool = weights, tool
        self.prepare()

    def prepare(self) -> None: ...

    def forward(self, x: Any) -> Any: ...

    def step(self, x: Any) -> None: ...

    def scales(self) -> list[Any]:
        """What is trained, but for those of the images.

        In a graph the user's program computes no gradient for the images, and so none for their scale.
        """
        return list(self.tool.parameters())[{"lsq": 1, "lsq+": 2}.get(self.tool.options.method, 0) :]

    def train_scales(self) -> None:
        for gradient, variable in self.tool.gradients():
            if any(variable is one for one in self.scales()):
                variable.assign_sub(RATE * gradient)


class Torch(Program):
    def prepare(self) -> None:
        self.model = TorchModel(self.weights)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            return self.model(torch.from_numpy(x)).numpy()

    def step(self, x: Any) -> None:
        self.model.zero_grad()
        for one in self.tool.parameters():
            one.grad = None
        F.mse_loss(self.model(torch.from_numpy(x)), torch.zeros(4, 5)).backward()
        with torch.no_grad():
            for one in [*self.model.parameters(), *self.scales()]:
                one -= RATE * one.grad


class Keras(Program):
    eagerly = False

    def prepare(self) -> None:
        made = keras.layers
        self.model = keras.Sequential([
            made.Input((8, 8, 2)), made.Conv2D(3, 3, activation="relu"),
            made.DepthwiseConv2D(3, depth_multiplier=2, activation="relu"), made.Flatten(), made.Dense(5),
        ])  # fmt: skip
        self.model.set_weights(self.weights.arrays)
        self.model.compile(keras.optimizers.SGD(RATE), "mse", run_eagerly=self.eagerly)

    def forward(self, x: Any) -> Any:
        return self.model.predict_on_batch(x)

    def step(self, x: Any) -> None:
        self.model.fit(x, self.weights.target, batch_size=4, verbose=0)
        self.train_scales()


class KerasEager(Keras):
    eagerly = True


class Function(Keras):
    def prepare(self) -> None:
        super().prepare()
        self.called = tf.function(self.model)
        self.trained = tf.function(self.train)

    def train(self, x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x, training=True)))
        for one, gradient in zip(
            self.model.trainable_variables, tape.gradient(loss, self.model.trainable_variables), strict=True
        ):
            one.value.assign_sub(RATE * gradient)

    def forward(self, x: Any) -> Any:
        return self.called(x).numpy()

    def step(self, x: Any) -> None:
        self.trained(x)
        self.train_scales()


class Session(Program):
    def prepare(self) -> None:
        v1 = tf.compat.v1
        with tf.Graph().as_default() as graph:
            self.x = v1.placeholder(tf.float32, (4, 8, 8, 2))
            conv, conv_bias, depthwise, depthwise_bias, linear, bias = map(v1.Variable, self.weights.arrays)
            y = tf.nn.relu(tf.nn.conv2d(self.x, conv, 1, "VALID") + conv_bias)
            y = tf.nn.relu(tf.nn.depthwise_conv2d(y, depthwise, [1, 1, 1, 1], "VALID") + depthwise_bias)
            self.y = tf.matmul(tf.reshape(y, (4, 96)), linear) + bias
            self.trained = v1.train.GradientDescentOptimizer(RATE).minimize(tf.reduce_mean(self.y**2))
            initial = v1.global_variables_initializer()
        self.session = v1.Session(graph=graph)
        with amanda.disabled():
            self.session.run(initial)

    def forward(self, x: Any) -> Any:
        return self.session.run(self.y, {self.x: x})

    def step(self, x: Any) -> None:
        self.session.run(self.trained, {self.x: x})
        self.train_scales()


def told(tool: QuantizeTool) -> list[tuple[str, str]]:
    names = {"depthwise_conv2d": "conv2d", "matmul": "linear"}
    return [(names.get(one.type, one.type), one.tensor) for one in tool.result]


def outcome(kind: Callable[..., Program], weights: Weights, options: dict[str, Any]) -> Any:
    """Scales, zero points and outputs after calibration; and after training, where the method trains."""
    tool = QuantizeTool(**options)
    method, found = options["method"], []
    with amanda.apply(tool) as scope:
        program = kind(weights, tool)
        with tool.calibrating():
            for x in weights.batches[:2]:
                program.forward(x)
        if method in ("qat", "lsq", "lsq+"):
            for x in weights.batches:
                program.step(x)
        tool.freeze()
        found.append(program.forward(weights.batches[2]))
    assert [one for one in scope.report if "dataset" not in one.what] == []
    for one in tool.result:
        found += [np.array(one.scale or 0.0), np.array(one.zero_point or 0.0)]
        found.append(np.array(one.sqnr or 0.0))
    return told(tool), found


OPTIONS = {
    "static": {"method": "static", "observer": "histogram", "sqnr": True},
    "percentile, affine weights": {"method": "static", "observer": "percentile", "symmetric_weights": False},
    "mse, per tensor, half up": {
        "method": "static", "observer": "mse", "weight_observer": "mse", "per_channel": False,
        "rounding": "half_up",
    },
    "dynamic": {"method": "dynamic"},
    "qat": {"method": "qat", "averaging": 0.3},
    "lsq": {"method": "lsq"},
    "lsq+": {"method": "lsq+"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_scales_on_transplanted_weights_are_equal_in_every_mode(name: str, weights: Weights) -> None:
    options = {"weight_bits": 5, "activation_bits": 6, **OPTIONS[name]}
    wanted_names, wanted = outcome(Torch, weights, options)
    assert wanted_names == [(kind, tensor) for kind in ("conv2d", "conv2d", "linear")
                            for tensor in ("input 0", "weight")]  # fmt: skip
    modes = [KerasEager, Keras, Session, *([Function] if "q" in name else [])]  # those that train
    for kind in modes:
        names, found = outcome(kind, weights, options)
        assert names == wanted_names, kind
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=5e-5, atol=5e-5, err_msg=str(kind))


def test_noise_of_outputs_is_the_same_in_every_mode(weights: Weights) -> None:
    found = []
    for kind in (KerasEager, Function, Session):
        tool = QuantizeTool("dynamic", 4, 4, sqnr=True)
        with amanda.apply(tool):
            kind(weights, tool).forward(weights.batches[0])
        found.append([ratio for *_, ratio in tool.result.worst()])
    assert len(found[0]) == 3
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-4)


def test_the_scale_of_what_has_no_gradient_in_a_graph_stays(weights: Weights) -> None:
    for kind, trained in ((KerasEager, 6), (Keras, 5)):
        tool = QuantizeTool("lsq")
        with amanda.apply(tool):
            program = kind(weights, tool)
            program.train_scales = lambda: None
            program.step(weights.batches[0])
        pairs = tool.gradients()
        assert len(pairs) == trained, kind
        assert tool.gradients() == []
        learned = list(tool.parameters())
        assert len(learned) == 6
        assert all(any(variable is one for one in learned) for _, variable in pairs)
        assert all(np.abs(gradient).max() > 0 for gradient, _ in pairs)


@pytest.mark.parametrize(("method", "as_file"), [("static", True), ("qat", False), ("lsq+", True)])
def test_what_fit_has_learned_predicts_under_another_tool(
    method: Any, as_file: bool, weights: Weights, tmp_path: Path
) -> None:
    tool, again = (QuantizeTool(method, weight_bits=4) for _ in range(2))
    with amanda.apply(tool):
        program = Keras(weights, tool)
        with tool.calibrating():
            program.forward(weights.batches[0])
        program.step(weights.batches[1])
        tool.freeze()
        wanted = program.forward(weights.batches[2])
    if as_file:
        again.load(tool.save(tmp_path / "scales.safetensors"))
    else:
        again.load_state_dict({name: one.numpy() for name, one in tool.state_dict().items()})
    again.freeze()
    with amanda.apply(again):
        np.testing.assert_array_equal(program.forward(weights.batches[2]), wanted)
    assert len(list(again.parameters())) == len(list(tool.parameters()))


def test_an_error_in_a_graph_is_the_tools_own(weights: Weights) -> None:
    tool = QuantizeTool()
    with pytest.raises(QuantizeError, match="input 0 has no scale") as caught, amanda.apply(tool):
        Session(weights, tool).forward(weights.batches[0])
    assert any("Conv2D" in note for note in caught.value.__notes__)


class Experts(tf.Module):  # type: ignore[misc]
    """A convolution with kernels of quite different sizes: slices of a variable that the data choose."""

    def __init__(self) -> None:
        super().__init__()
        sizes = np.array([1, 20, 400], np.float32).reshape(3, 1, 1, 1, 1)
        draws = np.random.default_rng(5)
        self.kernel = tf.Variable(draws.standard_normal((3, 1, 1, 4, 4)).astype(np.float32) * sizes)

    def __call__(self, x: Any, chosen: Any) -> Any:
        return tf.nn.conv2d(x, self.kernel[chosen], 1, "SAME")


@pytest.mark.parametrize("method", ["static", "qat", "lsq"])
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_slices_that_the_data_choose_have_scales_of_their_own(mode: str, method: Any) -> None:
    x, tool = np.ones((1, 1, 1, 4), np.float32), QuantizeTool(method, weight_bits=4, activation_bits=None)
    model, v1 = Experts(), tf.compat.v1
    kernels = model.kernel.numpy()
    if mode == "session":
        with tf.Graph().as_default():
            model, chosen = Experts(), v1.placeholder(tf.int32, ())
            y = model(tf.constant(x), chosen)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                with amanda.apply(tool):
                    found = [session.run(y, {chosen: i}) for i in (0, 2, 1)]
    else:
        call = tf.function(model) if mode == "function" else model
        with amanda.apply(tool):
            found = [call(tf.constant(x), tf.constant(i)).numpy() for i in (0, 2, 1)]
    grid = Grid.of(4, symmetric=True)
    for i, one in zip((0, 2, 1), found, strict=True):
        kernel = kernels[i]
        if method != "lsq":
            kernel = fake_quantize(kernel, *choose_qparams(*extremes(kernel, (3,)), grid), grid, (3,))
        np.testing.assert_allclose(one.reshape(-1), kernel.reshape(4, 4).sum(0), rtol=1e-4)
    assert bool(tool.result.left) == (method == "lsq")


def test_the_end_of_a_calibration_runs_no_op_that_tools_see() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    x, seen = np.ones((3, 4), np.float32), amanda.Tool()
    names: list[str] = []
    seen.add_inst_for_op(lambda context: names.append(context.get_op_type()))
    everything = QuantizeTool(type=["*"])
    with amanda.apply(everything, seen), amanda.cache_disabled():
        with everything.calibrating():
            model(x)
            calibrated = len(names)
        assert len(names) == calibrated
        model(x)
    assert len(names) == 2 * calibrated
    assert not everything.result.waiting
