"""Files of TensorFlow Lite: integers, scales and outputs, against the simulation and plain arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import amanda
from amanda.tools.quantize import QuantizeError, QuantizeTool, convert
from amanda.tools.select import select

pytestmark = pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")

PRODUCTS = ["conv*", "depthwise_conv*", "matmul"]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


X = random(16, 8, 8, 2)


@pytest.fixture(autouse=True)
def _names_and_numbers_begin_anew() -> None:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)


def shaken(model: keras.Model) -> keras.Model:
    """Give biases and statistics of normalisation values other than 0 and 1; some gammas are negative."""
    for one in model.weights:
        if "kernel" not in one.name:
            noise = random(*one.shape) * (1 if "gamma" in one.name else 0.1)
            one.assign(np.abs(noise) + 0.5 if "variance" in one.name else noise)
    return model


def network() -> keras.Model:
    return shaken(keras.Sequential([
        layers.Input((8, 8, 2)), layers.Conv2D(8, 3, activation="relu"), layers.DepthwiseConv2D(3),
        layers.BatchNormalization(), layers.ReLU(), layers.MaxPool2D(2), layers.Flatten(),
        layers.Dense(16, activation="relu"), layers.Dense(5, activation="softmax"),
    ]))  # fmt: skip


def residual() -> keras.Model:
    image, extra = layers.Input((8, 8, 2)), layers.Input((6,))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(image)))
    y = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x))
    x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.Concatenate()([layers.GlobalAveragePooling2D()(x), extra])
    return shaken(keras.Model([image, extra], layers.Dense(5, activation="softmax")(x)))


def simulated(model: keras.Model, x: Any, tool: QuantizeTool) -> np.ndarray:
    """Calibrate a tool, and return the outputs in its scope."""
    with amanda.apply(tool):
        with tool.calibrating():
            model.predict(x, verbose=0)
        found: np.ndarray = model.predict(x, verbose=0)
    return found


class Run:
    """One run of a file: its outputs, its tensors by number, and its ops."""

    def __init__(self, path: Path, *inputs: np.ndarray, delegate: bool = False) -> None:
        kinds = tf.lite.experimental.OpResolverType
        lite = tf.lite.Interpreter(
            str(path), experimental_preserve_all_tensors=not delegate,
            experimental_op_resolver_type=kinds.AUTO if delegate else kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )  # fmt: skip
        given = {one.shape[1:]: one for one in inputs}
        for one in lite.get_input_details():
            lite.resize_tensor_input(one["index"], given[tuple(one["shape"][1:])].shape)
        lite.allocate_tensors()
        for one in lite.get_input_details():
            lite.set_tensor(one["index"], given[tuple(one["shape"][1:])])
        lite.invoke()
        self.output = lite.get_tensor(lite.get_output_details()[0]["index"])
        self.tensors = {one["index"]: one for one in lite.get_tensor_details()}
        self.ops = lite._get_ops_details()
        self._lite = lite

    def kinds(self) -> list[tuple[str, str]]:
        """Return the type of each op and of its first input."""
        return [(one["op_name"], self.tensors[one["inputs"][0]]["dtype"].__name__) for one in self.ops]

    def scale(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        found = self.tensors[index]["quantization_parameters"]
        return found["scales"], found["zero_points"]

    def integers(self, index: int) -> np.ndarray:
        return self._lite.get_tensor(index).astype(np.float64)

    def real(self, index: int) -> np.ndarray:
        """Return the numbers that a tensor stands for."""
        (scale, zero), x = self.scale(index), self.integers(index)
        axis = self.tensors[index]["quantization_parameters"]["quantized_dimension"]
        spread = [-1 if i == axis and scale.size > 1 else 1 for i in range(x.ndim)]
        return (x - zero.reshape(spread)) * scale.reshape(spread).astype(np.float64)

    def products(self) -> list[tuple[int, int, int, int, str]]:
        """Return input, weight, bias and output of each product, and its type."""
        kinds = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
        ops = [one for one in self.ops if one["op_name"] in kinds]
        return [(*one["inputs"], one["outputs"][0], one["op_name"]) for one in ops]


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_file_has_the_tools_scales_and_integers(tmp_path: Path, symmetric: bool) -> None:
    model, tool = network(), QuantizeTool(type=[*PRODUCTS, "softmax"], symmetric_activations=symmetric)
    wanted = simulated(model, X, tool)
    result = convert(model, tool, tmp_path / "m.tflite")
    run = Run(result.model, X)
    assert result.left == {}
    assert run.kinds() == [
        ("QUANTIZE", "float32"), ("CONV_2D", "int8"), ("DEPTHWISE_CONV_2D", "int8"), ("MAX_POOL_2D", "int8"),
        ("RESHAPE", "int8"), ("CONV_2D", "int8"), ("RESHAPE", "int8"), ("CONV_2D", "int8"),
        ("RESHAPE", "int8"), ("SOFTMAX", "int8"), ("DEQUANTIZE", "int8"),
    ]  # fmt: skip
    rows = {(one.module, one.type, one.tensor): one for one in tool.result}
    weights = {one.path.split("/")[-2]: one.numpy() for one in model.weights if "kernel" in one.name}
    for name, (x, weight, _, _, _) in zip(weights, run.products(), strict=True):
        kind = "depthwise_conv2d" if "depthwise" in name else "conv2d" if "conv" in name else "matmul"
        activation, own = (rows[name, kind, tensor] for tensor in ("input 0", "weight"))
        assert run.tensors[x]["dtype"] is run.tensors[weight]["dtype"] is np.int8
        np.testing.assert_allclose(run.scale(x)[0], activation.scale, rtol=2e-7)
        assert run.scale(x)[1] == activation.zero_point[0] - (0 if symmetric else 128)
        scale = np.float32(own.scale)
        codes = np.clip(np.rint(weights[name].reshape(-1, len(scale)) * (1 / scale)), -128, 127)
        stored = run.integers(weight)
        if kind == "depthwise_conv2d":  # normalisation is folded into its scales, and its sign into integers
            gamma, _, _, variance = model.layers[2].get_weights()
            factor = gamma / np.sqrt(variance + model.layers[2].epsilon)
            codes = np.clip(codes * np.sign(factor), -128, 127)
            wide = codes * np.abs(factor) * scale
            np.testing.assert_allclose(run.real(weight).reshape(9, 8), wide, rtol=1e-5)
            continue
        np.testing.assert_array_equal(stored.reshape(len(scale), -1).T, codes)
        np.testing.assert_allclose(run.scale(weight)[0], scale, rtol=2e-7)
    np.testing.assert_allclose(run.output, wanted, rtol=0, atol=2 / 256)
    np.testing.assert_allclose(Run(result.model, X, delegate=True).output, wanted, rtol=0, atol=2 / 256)


def test_each_kernel_is_within_a_step_of_plain_arithmetic(tmp_path: Path) -> None:
    model, tool = network(), QuantizeTool(type=[*PRODUCTS, "softmax"])
    simulated(model, X, tool)
    run = Run(convert(model, tool, tmp_path / "m.tflite").model, X)
    for x, weight, bias, output, kind in run.products():
        given, held = run.real(x), run.real(weight)
        if kind == "DEPTHWISE_CONV_2D":
            found = tf.nn.depthwise_conv2d(given, held[0][..., None], [1] * 4, "VALID").numpy()
        else:
            found = tf.nn.conv2d(given, held.transpose(1, 2, 3, 0), 1, "VALID").numpy()
        found = found + run.real(bias)
        scale, zero = run.scale(output)
        integers = np.clip(found / scale + zero, -128, 127)
        assert np.abs(run.integers(output) - integers).max() <= 1


def test_an_op_without_a_scale_behind_it_stays_in_floating_point_and_is_named(tmp_path: Path) -> None:
    model, tool = network(), QuantizeTool()
    wanted = simulated(model, X, tool)
    before = tool.state_dict()
    result = convert(model, tool, tmp_path / "m.tflite")
    run = Run(result.model, X)
    assert [kind for kind in run.kinds() if "CONV" in kind[0]] == [
        ("CONV_2D", "int8"), ("DEPTHWISE_CONV_2D", "int8"), ("CONV_2D", "int8"), ("CONV_2D", "float32"),
    ]  # fmt: skip
    (product, softmax), (why, other) = result.left, result.left.values()
    assert product == "CONV_2D of dense_1"
    assert "no op that reads its output is quantised" in why
    assert softmax.startswith("SOFTMAX of ")
    assert other == "its inputs have no scales"
    assert [row[:2] for row in result.rows()][-2:] == [
        ("dense", "weight, int8"),
        ("dense_1", "input 0, int8"),
    ]
    assert result.after == result.model.stat().st_size
    assert all(np.array_equal(before[name], value) for name, value in tool.state_dict().items())
    np.testing.assert_allclose(run.output, wanted, rtol=0, atol=2 / 256)


def test_a_residual_network_of_two_inputs_computes_with_integers(tmp_path: Path) -> None:
    model, given = residual(), [X, random(16, 6)]
    tool = QuantizeTool(type=[*PRODUCTS, "softmax", "add", "mean", "cat"])
    select(tool, module=["conv2d*", "add", "global*", "concatenate", "dense"])
    wanted = simulated(model, given, tool)
    result = convert(model, tool, tmp_path / "m.tflite")
    run = Run(result.model, *given)
    assert result.left == {}
    assert ("ADD", "int8") in run.kinds()
    np.testing.assert_allclose(run.output, wanted, rtol=0, atol=3 / 256)


@pytest.mark.parametrize("options", [{"method": "qat"}, {"rounding": "half_up"}, {"observer": "mse"}])
def test_saved_scales_make_the_same_file(tmp_path: Path, options: dict[str, Any]) -> None:
    model, tool = network(), QuantizeTool(**options)
    simulated(model, X, tool)
    tool.save(tmp_path / "scales.json")
    again = QuantizeTool(**options)
    again.load(tmp_path / "scales.json")
    made = [convert(model, one, tmp_path / f"{i}.tflite") for i, one in enumerate((tool, again))]
    first, second = (Run(one.model, X).output for one in made)
    np.testing.assert_array_equal(first, second)
    assert made[0].after == made[1].after


def test_products_without_weights_and_of_sequences(tmp_path: Path) -> None:
    given = layers.Input((10, 16))
    x = layers.MultiHeadAttention(2, 8)(given, given)
    model = shaken(keras.Model(given, layers.Dense(4)(layers.Dense(8)(x))))
    x, tool = random(4, 10, 16), QuantizeTool(symmetric_activations=True)
    wanted = simulated(model, x, tool)
    result = convert(model, tool, tmp_path / "m.tflite")
    noise = np.abs(model.predict(x, verbose=0) - wanted).max()
    for delegate in (False, True):
        assert np.abs(Run(result.model, x, delegate=delegate).output - wanted).max() < 2 * noise
    tool = QuantizeTool()
    simulated(model, x, tool)
    with pytest.raises(QuantizeError, match="multiplies two activations, of which one has a zero point"):
        convert(model, tool, tmp_path / "other.tflite")


def test_a_trained_network_has_the_simulations_accuracy(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = digits.images[..., None].astype(np.float32) / 16, digits.target
    model = keras.Sequential([
        layers.Input((8, 8, 1)), layers.Conv2D(32, 3, padding="same", use_bias=False),
        layers.BatchNormalization(), layers.ReLU(), layers.MaxPool2D(2),
        layers.Conv2D(64, 3, activation="relu"), layers.Flatten(), layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ])  # fmt: skip
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    model.fit(x[:1200], y[:1200], epochs=5, batch_size=30, verbose=0)
    exact = model.predict(x[1200:], verbose=0)
    tool = QuantizeTool(type=[*PRODUCTS, "softmax"])
    with amanda.apply(tool):
        with tool.calibrating():
            model.predict(x[:200], verbose=0)
        wanted = model.predict(x[1200:], verbose=0)
    result = convert(model, tool, tmp_path / "m.tflite")
    found = Run(result.model, x[1200:]).output
    right = [(one.argmax(1) == y[1200:]).mean() for one in (exact, wanted, found)]
    assert right[0] > 0.9
    assert max(right) - min(right) < 0.01
    assert result.left == {}
    assert result.after < 0.45 * result.before


def test_what_the_kernels_lack_is_refused_before_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = network(), tmp_path / "m.tflite"
    tool = QuantizeTool()
    simulated(model, X, tool)

    def refused(why: str, *given: Any, **options: Any) -> None:
        with pytest.raises(QuantizeError, match=why):
            convert(*given, **options)
        assert list(tmp_path.iterdir()) == []

    refused("give the path of a file of TensorFlow Lite", model, tool)
    refused("give the path of a file of TensorFlow Lite", model, tool, tmp_path / "m.onnx")
    refused("there is no folder", model, tool, tmp_path / "none" / "m.tflite")
    refused("a float was given", model, 8.0, out)
    refused("has no scale: calibrate", model, QuantizeTool(), out)
    refused("no op of sequential is quantised", model, QuantizeTool(type="einsum"), out)
    for options, why in (
        ({"method": "dynamic"}, "'dynamic' has no fixed scales"),
        ({"method": "lsq"}, "'lsq' has no fixed scales"),
        ({"weight_bits": 4}, "weight_bits is 4"),
        ({"weight_bits": {"conv2d": 8, "*": 4}}, "weight_bits is "),
        ({"weight_bits": "e4m3"}, "weight_bits is 'e4m3'"),
        ({"activation_bits": 16}, "activation_bits is 16"),
        ({"activation_bits": None}, "activation_bits is None"),
        ({"group_size": 32}, "group_size is 32"),
        ({"symmetric_weights": False}, "symmetric_weights is False"),
    ):
        refused(why, model, QuantizeTool(**options), out)
    transposed = keras.Sequential([layers.Input((8, 8, 2)), layers.Conv2DTranspose(3, 3)])
    other = QuantizeTool()
    simulated(transposed, X, other)
    refused("scales along its axes", transposed, other, out)
    refused("has no scale: calibrate", transposed, tool, out)
    grouped = keras.Sequential([layers.Input((8, 8, 2)), layers.Conv2D(4, 3, groups=2)])
    other = QuantizeTool()
    simulated(grouped, X, other)
    refused("conv2d of conv2d_1 is in a tf.function of its own", grouped, other, out)
    refused("a Model has no symbolic inputs", keras.Model(), tool, out)
    refused("a Module has no symbolic inputs", tf.Module(), tool, out)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    refused("Keras runs on jax", model, tool, out)


def test_a_failure_leaves_no_file_and_keeps_the_one_that_is_there(tmp_path: Path) -> None:
    out, given = tmp_path / "m.tflite", layers.Input((4,))
    model = keras.Model(given, keras.ops.erfinv(layers.Dense(4)(given)))
    tool = QuantizeTool()
    simulated(model, random(8, 4), tool)
    out.write_bytes(b"kept")
    with pytest.raises(QuantizeError, match="is there already"):
        convert(model, tool, out)
    with pytest.raises(QuantizeError, match="TensorFlow's converter cannot make a file of the model"):
        convert(model, tool, out, force=True)
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"kept"]
