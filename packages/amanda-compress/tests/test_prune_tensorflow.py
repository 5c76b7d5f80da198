"""Pruning on TensorFlow: in every mode as on PyTorch, with equal masks on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray
from torch import nn

import amanda
from amanda.tools.prune import PruneError, PruneTool, element_mask

pytestmark = pytest.mark.filterwarnings("ignore")  # what Keras warns of is not ours

Array = NDArray[Any]
layers = keras.layers


def twins() -> tuple[nn.Module, Any]:
    """A network of PyTorch and one of Keras with the same weights: convolution, depthwise one, product."""
    torch.manual_seed(0)
    keras.utils.set_random_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    other = keras.Sequential(
        [
            layers.Input((8, 8, 4)), layers.Conv2D(8, 3), layers.ReLU(), layers.DepthwiseConv2D(3),
            layers.ReLU(), layers.Permute((3, 1, 2)), layers.Flatten(), layers.Dense(4),
        ]
    )  # fmt: skip
    conv, depthwise, linear = (model[i] for i in (0, 2, 5))
    for layer, one, axes in (
        (other.layers[0], conv, (2, 3, 1, 0)), (other.layers[2], depthwise, (2, 3, 0, 1)),
        (other.layers[-1], linear, (1, 0)),
    ):  # fmt: skip
        layer.set_weights([one.weight.detach().numpy().transpose(axes), one.bias.detach().numpy()])
    return model, other


X = np.random.default_rng(0).random((6, 4, 8, 8), np.float32)
LABELS = np.arange(6) % 4
MODES: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "eager": lambda model: model,
    "function": lambda model: tf.function(lambda x: model(x)),
    "predict": lambda model: lambda x: model.predict(x, verbose=0),
}
OPTIONS: list[dict[str, Any]] = [
    {"sparsity": 0.6}, {"pattern": "2:4"}, {"pattern": "2:4", "permute": True},
    {"pattern": "tile", "granularity": 4}, {"pattern": "structured"}, {"scope": "global", "sparsity": 0.7},
    {"pattern": "block", "block": (4, 1)}, {"importance": "random"}, {"importance": "wanda"},
    {"importance": "sparsegpt", "pattern": "2:4"},
]  # fmt: skip


def masks(tool: PruneTool) -> list[Array]:
    """Masks with outputs and inputs first."""
    return [np.asarray(weight.keep_mask_like(weight.mask)) for weight in tool.weights]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_masks_are_those_of_pytorch_in_every_mode(options: dict[str, Any]) -> None:
    model, _ = twins()
    reference = PruneTool(**options)
    reference.prepare(model, torch.tensor(X))
    with amanda.apply(reference), torch.no_grad():
        wanted = model(torch.tensor(X)).numpy()
    for name in list(MODES)[: 3 if options == OPTIONS[0] else 2]:
        _, other = twins()
        tool, run = PruneTool(**options), MODES[name](other)
        x = tf.constant(X.transpose(0, 2, 3, 1))
        tool.prepare(run, x)
        with amanda.apply(tool):
            y = np.asarray(run(x))
        assert len(masks(tool)) == len(masks(reference)) > 1, name
        for one, mask in zip(masks(tool), masks(reference), strict=True):
            assert np.array_equal(one, mask), name
        assert np.allclose(y, wanted, atol=1e-5)
        tool.finalize(other)
        assert np.array_equal(np.asarray(run(x)), y)


def trained(model: Any, tool: PruneTool | None, way: str, steps: int = 6) -> list[float]:
    """Losses of a training with momentum, in one of three ways."""
    x, y = tf.constant(X.transpose(0, 2, 3, 1)), tf.constant(LABELS)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if way == "fit":
        model.compile(optimizer, loss)
        with amanda.apply(*[tool] if tool else []):
            history = model.fit(x, y, batch_size=6, epochs=steps, verbose=0, shuffle=False)
        return [float(one) for one in history.history["loss"]]

    def step() -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        grads = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return value

    optimizer.build(model.trainable_variables)
    run = tf.function(step) if way == "function" else step
    with amanda.apply(*[tool] if tool else []):
        return [float(run()) for _ in range(steps)]


def by_hand(model: Any, begin: int, sparsity: float, steps: int = 6) -> tuple[list[float], list[Array]]:
    """The same with weights and gradients masked by hand."""
    x, y = tf.constant(X.transpose(0, 2, 3, 1)), tf.constant(LABELS)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found: dict[int, Any] = {}
    losses = []
    for number in range(steps):
        for i, variable in enumerate(model.trainable_variables):
            if number == begin and len(variable.shape) > 1:
                found[i] = element_mask(tf.constant(variable.numpy()), sparsity)
            if i in found:
                variable.assign(variable * found[i])
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        grads = tape.gradient(value, model.trainable_variables)
        grads = [grad * found[i] if i in found else grad for i, grad in enumerate(grads)]
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        losses.append(float(value))
    for i, mask in found.items():
        model.trainable_variables[i].assign(model.trainable_variables[i] * mask)
    return losses, [one.numpy() for one in model.trainable_variables]


def test_training_is_that_of_masking_by_hand_in_every_mode() -> None:
    """There is momentum when the masks are made, and it revives nothing."""
    _, model = twins()
    wanted, weights = by_hand(model, 3, 0.6)
    for way in ("eager", "function", "fit"):
        _, model = twins()
        tool = PruneTool(0.6, begin=3)
        assert np.allclose(trained(model, tool, way), wanted, atol=1e-6), way
        tool.finalize(model)
        for one, hand in zip(model.trainable_variables, weights, strict=True):
            assert np.allclose(one.numpy(), hand, atol=1e-6), way
            assert np.array_equal(one.numpy() == 0, hand == 0) or len(one.shape) < 2, way


@pytest.mark.parametrize("regrow", ["gradient", "random"])
def test_masks_that_change_are_those_of_pytorch(regrow: Any) -> None:
    options: dict[str, Any] = {
        "sparsity": 0.7, "schedule": "cubic", "end": 5, "frequency": 2, "regrow": regrow,
        "type": ["conv2d", "matmul", "linear"],
    }  # fmt: skip
    model, _ = twins()
    model[2].weight.data.abs_()
    reference = PruneTool(**options, exclude="2")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with amanda.apply(reference):
        for _ in range(7):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.tensor(X)), torch.tensor(LABELS)).backward()
            optimizer.step()
    for way in ("eager", "function", "fit") if regrow == "gradient" else ("function",):
        _, other = twins()
        depthwise = other.layers[2].trainable_variables[0]
        depthwise.assign(np.abs(depthwise.numpy()))
        tool = PruneTool(**options)
        trained(other, tool, way, 7)
        assert tool.result.sparsity == pytest.approx(reference.result.sparsity)
        same = [np.mean(one == mask) for one, mask in zip(masks(tool), masks(reference), strict=True)]
        assert min(same) > 0.99, way  # the last bits of gradients differ


class Session:
    """The network as a graph of TensorFlow 1, with its training."""

    def __init__(self, resource: bool) -> None:
        model, _ = twins()
        v1 = tf.compat.v1
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.kernel = v1.Variable(
                model[0].weight.detach().numpy().transpose(2, 3, 1, 0), use_resource=resource, name="kernel"
            )
            self.matrix = v1.Variable(
                np.random.default_rng(2).random((288, 4), np.float32) - 0.5,
                use_resource=resource,
                name="matrix",
            )
            self.x = v1.placeholder(tf.float32, (None, 8, 8, 4))
            hidden = tf.nn.relu(tf.nn.conv2d(self.x, self.kernel, 1, "VALID"))
            self.logits = tf.matmul(tf.reshape(hidden, (-1, 288)), self.matrix)
            labels = tf.constant(LABELS)
            self.loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.logits))
            self.train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(self.loss)
            self.session = v1.Session(graph=self.graph)
            self.session.run(v1.global_variables_initializer())
        self.feed = {self.x: X.transpose(0, 2, 3, 1)}

    def step(self) -> Any:
        return self.session.run([self.loss, self.train], self.feed)[0]


@pytest.mark.parametrize("resource", [True, False])
def test_a_session_is_pruned_and_its_variables_are_finalized(resource: bool) -> None:
    graph, tool = Session(resource), PruneTool(0.5, begin=2, scope="global")
    with amanda.apply(tool):
        losses = [graph.step() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert [(row[1], row[2]) for row in tool.result.rows()] == [("conv2d", ""), ("matmul", "")]
    assert tool.result.sparsity == 0.5
    with amanda.apply(tool):
        pruned = graph.session.run(graph.logits, graph.feed)
    nodes = len(graph.graph.get_operations())
    with pytest.raises(PruneError, match="as_default"):
        tool.finalize([graph.kernel, graph.matrix])
    with graph.session.as_default():
        tool.finalize([graph.kernel, graph.matrix])
    assert len(graph.graph.get_operations()) == nodes
    assert np.array_equal(graph.session.run(graph.logits, graph.feed), pruned)
    values = np.concatenate([one.ravel() for one in graph.session.run([graph.kernel, graph.matrix])])
    assert np.mean(values == 0) == 0.5


def test_training_in_a_session_is_that_of_masking_by_hand() -> None:
    graph, hand = Session(True), Session(True)
    tool = PruneTool(0.5, begin=2)
    with amanda.apply(tool):
        losses = [graph.step() for _ in range(6)]
    wanted, found = [], {}
    for number in range(6):
        for variable in (hand.kernel, hand.matrix):
            value = hand.session.run(variable)
            if number == 2:
                found[variable.name] = element_mask(value)
            if variable.name in found:
                assign = variable.initializer
                hand.session.run(assign, {assign.inputs[1]: value * found[variable.name]})
        wanted.append(hand.step())
    assert np.allclose(losses, wanted, atol=1e-6)


def test_keras_attention_and_dense_on_sequences_are_pruned() -> None:
    """Their weights are reshaped before the product."""
    inputs = layers.Input((5, 8))
    attended = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    model = keras.Model(inputs, layers.EinsumDense("abc,cd->abd", (5, 4))(layers.Dense(8)(attended)))
    x = np.random.default_rng(0).random((2, 5, 8), np.float32)
    found = {}
    for name, mode in MODES.items():
        run, tool = mode(model), PruneTool(pattern="2:4")
        with amanda.apply(tool):
            y = np.asarray(run(tf.constant(x)))
        weights = model.get_weights()
        tool.finalize(model)
        assert np.allclose(np.asarray(run(tf.constant(x))), y, atol=1e-6), name
        kernels = [one.numpy() for one in model.weights if one.name == "kernel"]
        assert sum(int((one == 0).sum()) for one in kernels) == tool.result.zeros
        found[name] = sorted(row[6] for row in tool.result.rows())
        model.set_weights(weights)
    assert found["eager"] == found["function"] == found["predict"] == [32, 64, 64, 64, 64, 64]


def test_an_embedding_that_a_product_shares_is_left() -> None:
    table, matrix = tf.Variable(tf.random.normal((10, 8))), tf.Variable(tf.random.normal((8, 8)))

    def logits(tokens: Any) -> Any:
        return tf.matmul(tf.matmul(tf.gather(table, tokens), matrix), table, transpose_b=True)

    tokens = tf.constant([1, 2])
    for program in (logits, tf.function(logits)):
        tool = PruneTool()
        with amanda.apply(tool):
            y = program(tokens)
        assert [row[4] for row in tool.result.rows()] == ["8x8"]
        before = matrix.numpy()
        tool.finalize([table, matrix])
        assert np.array_equal(logits(tokens), y)
        matrix.assign(before)


def test_masks_outlive_the_process(tmp_path: Any) -> None:
    _, model = twins()
    tool = PruneTool(0.6, schedule="cubic", end=6, frequency=2)
    trained(model, tool, "function", 4)
    np.savez(tmp_path / "masks.npz", **tool.state_dict())
    again = PruneTool(0.6, schedule="cubic", end=6, frequency=2)
    again.load_state_dict(dict(np.load(tmp_path / "masks.npz")))
    trained(model, again, "function", 1)
    for one, other in zip(masks(tool), masks(again), strict=True):
        assert not (other & ~one).any()
    assert again.state_dict()["step"] == 5


def test_mixed_precision_is_pruned() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((8,)), layers.Dense(4, dtype="mixed_float16")])
    for mode in ("eager", "function"):
        tool, run = PruneTool(pattern="2:4"), MODES[mode](model)
        x = tf.random.normal((3, 8))
        with amanda.apply(tool):
            y = run(x)
        kernel = model.get_weights()
        tool.finalize(model)
        assert np.array_equal(run(x), y)
        assert int((model.get_weights()[0] == 0).sum()) == 16
        model.set_weights(kernel)


def test_a_model_that_is_none_is_said() -> None:
    tool = PruneTool()
    weight = tf.Variable(tf.ones((2, 2)))
    with amanda.apply(tool):
        tf.matmul(tf.ones((1, 2)), weight)
    with pytest.raises(PruneError, match="int has no variables"):
        tool.finalize(3)
    with pytest.raises(PruneError, match="none of the 1 weights"):
        tool.finalize([tf.Variable(tf.ones((2, 2)))])


def test_finalize_writes_all_variables_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = [tf.Variable(np.random.default_rng(i).standard_normal((4, 4))) for i in range(3)]
    before = [one.numpy().copy() for one in variables]
    tool, written = PruneTool(), PruneTool.finalized
    with amanda.apply(tool):
        tf.matmul(tf.matmul(tf.matmul(tf.ones((1, 4), tf.float64), variables[0]), variables[1]), variables[2])

    def failing(tool: PruneTool, weight: Any, value: Any) -> Any:
        if weight.number == 2:
            raise KeyboardInterrupt
        return written(tool, weight, value)

    with monkeypatch.context() as patch:
        patch.setattr(PruneTool, "finalized", failing)
        with pytest.raises(KeyboardInterrupt):
            tool.finalize(variables)
    for one, wanted in zip(variables, before, strict=True):
        np.testing.assert_array_equal(one.numpy(), wanted)
    tool.finalize(variables)
    assert all(int((one.numpy() == 0).sum()) == 8 for one in variables)


class Tied(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(np.random.default_rng(3).standard_normal((8, 16)).astype(np.float32))

    def __call__(self, x: Any) -> Any:
        return tf.nn.relu(x @ self.weight) @ tf.transpose(self.weight)


@pytest.mark.parametrize("pattern", ["2:4", "structured"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_variable_and_its_transpose_are_one_weight(mode: str, pattern: str) -> None:
    model, tool = Tied(), PruneTool(sparsity=0.5, pattern=pattern)
    x = np.random.default_rng(4).random((4, 8), np.float32)
    with amanda.apply(tool):
        y = MODES[mode](model)(x).numpy()
    assert len(tool.result.rows()) == 1
    tool.finalize(model)
    np.testing.assert_allclose(MODES[mode](model)(x).numpy(), y, rtol=1e-5)
    assert (model.weight.numpy() == 0).mean() == 0.5


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_what_an_embedding_reads_too_is_left_in_any_form(mode: str) -> None:
    layer, tool = layers.ReversibleEmbedding(8, 4), PruneTool(sparsity=0.5)

    def model(tokens: Any) -> Any:
        return layer(layer(tokens), reverse=True)

    tokens = np.arange(8)[None]
    y = np.asarray(model(tokens))
    with amanda.apply(tool):
        np.testing.assert_allclose(np.asarray(MODES[mode](model)(tokens)), y, rtol=1e-5)
    assert "embedding" in str(tool.result.left)
    assert not tool.result.rows()


class Experts(tf.Module):  # type: ignore[misc]
    """A product and a convolution whose weights are slices of variables, which the data choose."""

    def __init__(self, way: str) -> None:
        super().__init__()
        draws = np.random.default_rng(5)
        self.way = way
        self.weight = tf.Variable(draws.standard_normal((3, 4, 4)).astype(np.float32))
        self.kernel = tf.Variable(draws.standard_normal((3, 1, 1, 4, 4)).astype(np.float32))

    def __call__(self, x: Any, chosen: Any) -> Any:
        if self.way == "batch":
            return tf.matmul(x[:, None], tf.gather(self.weight, [chosen, chosen]))
        weight, kernel = (
            tf.gather(one, chosen) if self.way == "gather" else one[chosen]
            for one in (self.weight, self.kernel)
        )
        return tf.nn.conv2d(tf.reshape(x @ weight, (1, 1, -1, 4)), kernel, 1, "SAME")


@pytest.mark.parametrize("way", ["index", "gather", "batch"])
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_slices_that_the_data_choose_are_told_to_be_left(mode: str, way: str) -> None:
    x, tool = np.random.default_rng(6).random((2, 4), np.float32), PruneTool(sparsity=0.5)
    if mode == "session":
        with tf.Graph().as_default():
            v1 = tf.compat.v1
            model, chosen = Experts(way), v1.placeholder(tf.int32, ())
            y = model(tf.constant(x), chosen)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                wanted = [session.run(y, {chosen: i}) for i in (0, 2)]
                with amanda.apply(tool):
                    found = [session.run(y, {chosen: i}) for i in (0, 2)]
    else:
        model = Experts(way)
        call = tf.function(model) if mode == "function" else model
        wanted = [model(tf.constant(x), tf.constant(i)).numpy() for i in (0, 2)]
        with amanda.apply(tool):
            found = [call(tf.constant(x), tf.constant(i)).numpy() for i in (0, 2)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert len(tool.result.left) == (1 if way == "batch" else 2)
    assert "select" in str(tool.result.left)
    assert not tool.result.rows()


def test_slices_that_are_always_the_same_have_masks_in_a_graph() -> None:
    kernel = tf.Variable(np.random.default_rng(5).standard_normal((3, 1, 1, 4, 4)).astype(np.float32))
    x, tool = tf.ones((1, 2, 2, 4)), PruneTool(sparsity=0.5)

    @tf.function
    def model(x: Any) -> Any:
        return tf.nn.conv2d(tf.nn.conv2d(x, kernel[0], 1, "SAME"), kernel[2], 1, "SAME")

    with amanda.apply(tool):
        found = model(x).numpy()
    for one in (0, 2):
        kernel.scatter_nd_update([[one]], [kernel[one] * element_mask(kernel[one], 0.5)])
    np.testing.assert_allclose(model(x).numpy(), found, rtol=1e-5)
    assert len(tool.result.rows()) == 2


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_kernels_that_a_layer_splits_have_masks(mode: str) -> None:
    model = keras.Sequential([layers.Input((3, 6, 4)), layers.ConvLSTM1D(4, 3)])
    tool = PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        MODES[mode](model)(tf.ones((2, 3, 6, 4)))
    assert {row[9] for row in tool.result.rows()} == {0.5}
    assert not tool.result.left
