"""Unchanged tools on models that train: to the last bit, and as PyTorch's twin has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Parameter, Tensor, nn, ops

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune import PruneTool

WIDTH, HEADS, WORDS, CLASSES = 16, 2, 11, 5


class Block(nn.Cell):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        same = {"pad_mode": "pad", "padding": 1}
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, **same)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, **same)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def construct(self, x: Any) -> Any:
        out = self.norm2(self.conv2(ops.relu(self.norm1(self.conv1(x)))))
        return ops.relu(out + self.shortcut(x))


class ResNet(nn.Cell):
    """A small one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, pad_mode="pad", padding=1, has_bias=True)
        self.pool = nn.MaxPool2d(2, 2)
        self.layer1 = Block(8, 8, 1)
        self.layer2 = Block(8, 16, 2)
        self.head = nn.Dense(16 * 4 * 4, CLASSES)

    def construct(self, x: Any) -> Any:
        x = self.layer2(self.layer1(self.pool(ops.relu(self.stem(x)))))
        return self.head(x.reshape(x.shape[0], -1))


class TorchBlock(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(outputs)
        self.conv2 = torch.nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(outputs)
        self.shortcut = torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Any) -> Any:
        out = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(out + self.shortcut(x))


class TorchResNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, 1, 1)
        self.pool = torch.nn.MaxPool2d(2, 2)
        self.layer1 = TorchBlock(8, 8, 1)
        self.layer2 = TorchBlock(8, 16, 2)
        self.head = torch.nn.Linear(16 * 4 * 4, CLASSES)

    def forward(self, x: Any) -> Any:
        x = self.layer2(self.layer1(self.pool(torch.relu(self.stem(x)))))
        return self.head(x.reshape(x.shape[0], -1))


class Transformer(nn.Cell):
    """One layer of attention and a feed-forward one, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.query, self.key, self.value, self.out = (nn.Dense(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.up, self.down = nn.Dense(WIDTH, 2 * WIDTH), nn.Dense(2 * WIDTH, WIDTH)
        self.head = nn.Dense(WIDTH, CLASSES)

    def construct(self, words: Any) -> Any:
        x = self.words(words)
        batch, length, _ = x.shape

        def heads(projected: Any) -> Any:
            return projected.reshape(batch, length, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        weights = ops.softmax(ops.matmul(q, k.transpose(0, 1, 3, 2)) * (WIDTH // HEADS) ** -0.5, -1)
        attended = ops.matmul(weights, v).transpose(0, 2, 1, 3).reshape(batch, length, WIDTH)
        x = self.norm1(x + self.out(attended))
        x = self.norm2(x + self.down(ops.relu(self.up(x))))
        return self.head(x.mean(1))


class TorchTransformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Any) -> Any:
        x = self.words(words)
        batch, length, _ = x.shape

        def heads(projected: Any) -> Any:
            return projected.reshape(batch, length, HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        weights = torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) * (WIDTH // HEADS) ** -0.5, -1)
        attended = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(batch, length, WIDTH)
        x = self.norm1(x + self.out(attended))
        x = self.norm2(x + self.down(torch.relu(self.up(x))))
        return self.head(x.mean(1))


NAMES = {"gamma": "weight", "beta": "bias", "embedding_table": "weight"}
MODELS = {"resnet": (ResNet, TorchResNet), "transformer": (Transformer, TorchTransformer)}


@pytest.fixture(params=MODELS)
def twins(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A network of MindSpore, PyTorch's with the same weights, and an input."""
    ms.set_seed(0)
    kind, twin = MODELS[request.param]
    network, module = kind(), twin()
    random = np.random.default_rng(0)
    theirs = dict(module.named_parameters())
    for name, parameter in network.parameters_and_names():
        path, _, last = name.rpartition(".")
        if (twin_parameter := theirs.get(f"{path}.{NAMES.get(last, last)}")) is not None:
            value = random.normal(size=parameter.shape).astype(np.float32) * 0.3
            parameter.set_data(Tensor(value))
            twin_parameter.data = torch.from_numpy(value.copy())
    assert len(theirs) == len(network.trainable_params())
    network.set_train(False)
    module.eval()
    if request.param == "resnet":
        return network, module, random.normal(size=(4, 3, 16, 16)).astype(np.float32)
    return network, module, random.integers(0, WORDS, (4, 6)).astype(np.int32)


LABELS = [0, 3, 1, 4]


def trained(network: Any, example: Any, steps: int = 3) -> list[bytes]:
    """Gradients and weights of some steps, bit by bit.

    Not the losses: MindSpore itself gives another last bit in the next run of the same.
    """
    network.set_train()
    x, labels = Tensor(example), Tensor(LABELS, ms.int32)
    parameters = network.trainable_params()
    optimizer = nn.SGD(parameters, 0.1)
    loss_of = nn.CrossEntropyLoss()
    step = ms.value_and_grad(lambda x: loss_of(network(x), labels), None, parameters)
    contents = []
    for _ in range(steps):
        _, gradients = step(x)
        optimizer(gradients)
        contents += [gradient.asnumpy().tobytes() for gradient in gradients]
    return [*contents, *(parameter.asnumpy().tobytes() for parameter in network.get_parameters())]


def again(network: Any) -> Callable[[], None]:
    """What gives the network the weights that it has now."""
    values = [(parameter, parameter.asnumpy().copy()) for parameter in network.get_parameters()]

    def restore() -> None:
        for parameter, value in values:
            parameter.set_data(Tensor(value))

    return restore


def points() -> Iterator[dict[str, bool]]:
    yield from (
        {"backward": backward, "require_outputs": after}
        for backward in (False, True)
        for after in (False, True)
    )


def no_op() -> amanda.Tool:
    """Routines everywhere, which change nothing."""
    tool = amanda.Tool()
    for where in points():
        side = "after" if where["require_outputs"] else "before"
        action = f"insert_{side}_{'backward_op' if where['backward'] else 'op'}"
        tool.add_inst_for_op(
            lambda context, action=action: getattr(context, action)(lambda *_: None), **where
        )
    return tool


def test_training_under_a_tool_that_changes_nothing_is_the_same_to_the_last_bit(twins: Any) -> None:
    network, _, example = twins
    restore = again(network)
    plain = trained(network, example)
    restore()
    with amanda.apply(no_op()):
        assert trained(network, example) == plain
    restore()
    assert trained(network, example) == plain


class Counting(amanda.Tool):
    """Counts executions by MindSpore's names, forward and backward."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.add_inst_for_op(lambda context: self._count(context, "insert_before_op", self.forward))
        self.add_inst_for_op(
            lambda context: self._count(context, "insert_before_backward_op", self.backward), backward=True
        )

    @staticmethod
    def _count(context: amanda.OpContext, action: str, counts: Counter[str]) -> None:
        op = context.get_op() if context.is_forward() else context.get_backward_op()
        name = op.__name__
        getattr(context, action)(lambda *_: counts.update([name]))


class Dispatched(ms.MsDispatchMode):
    """MindSpore's own account of what it dispatches; it leaves views out."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        self.names[func.name] += 1
        return func(*args)


OWN_NAMES = {
    "conv2d": "Conv2D", "batch_norm": "BatchNorm", "relu": "ReLU", "bias_add": "BiasAdd",
    "max_pool": "MaxPool", "softmax": "Softmax", "layer_norm": "LayerNorm", "gather": "Gather",
}  # fmt: skip


def test_ops_are_counted_as_mindspore_dispatches_them(twins: Any) -> None:
    network, _, example = twins
    network.set_train()
    with Dispatched() as dispatched:
        network(Tensor(example))
    counting = Counting()
    with amanda.apply(counting):
        network(Tensor(example))
    counted = {native_name: counting.forward[name] for name, native_name in OWN_NAMES.items()}
    assert counted == {native_name: dispatched.names[native_name] for native_name in OWN_NAMES.values()}
    products = sum(dispatched.names[name] for name in ("MatMul", "BatchMatMul", "MatMulExt"))
    assert sum(counting.forward[name] for name in ("matmul", "batch_mat_mul", "matmul_ext")) == products
    assert sum(counted.values()) > 8


def test_backward_ops_are_those_of_the_graph_of_gradients(twins: Any) -> None:
    network, _, example = twins
    network.set_train()
    counting, x = Counting(), Tensor(example)
    expected: Counter[str] = Counter()

    def summed(x: Any) -> Any:
        result = network(x).sum()
        visited, waiting = set(), [result._grad_node]
        while waiting:
            node = waiting.pop()
            if node is not None and node._unique_id() not in visited:
                visited.add(node._unique_id())
                if not node.is_leaf():
                    name = f"{node.name()}Backward"
                    node.register_prehook(lambda _, name=name: expected.update([name]))
                waiting += [edge[0] for edge in node.next_functions]
        return result

    gradient = ms.value_and_grad(summed, None, network.trainable_params())
    with amanda.apply(counting):
        for _ in range(2):
            gradient(x)
    leaves = counting.backward.pop("AccumulateGrad")
    assert counting.backward == expected
    assert leaves == 2 * len(network.trainable_params())


def test_forward_flops_are_those_of_pytorchs_twin(twins: Any) -> None:
    network, module, example = twins
    ours, theirs = FlopsTool(), FlopsTool()
    with amanda.apply(ours):
        network(Tensor(example))
    with amanda.apply(theirs), torch.no_grad():
        module(torch.from_numpy(example))
    assert ours.result.total("macs") == theirs.result.total("macs") > 0
    assert ours.result.total() == theirs.result.total()


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "structured"])
def test_pruned_weights_are_those_of_pytorchs_twin(twins: Any, pattern: str) -> None:
    network, module, example = twins
    ours, theirs = PruneTool(0.5, pattern, exclude="stem"), PruneTool(0.5, pattern, exclude="stem")
    with amanda.apply(ours):
        output = network(Tensor(example)).asnumpy()
    with amanda.apply(theirs), torch.no_grad():
        expected = module(torch.from_numpy(example)).numpy()
    ours.finalize(network)
    theirs.finalize(module)
    weights = dict(module.named_parameters())
    pruned = 0
    for name, parameter in network.parameters_and_names():
        if isinstance(parameter, Parameter) and name.endswith(".weight"):
            remaining = parameter.asnumpy() != 0
            np.testing.assert_array_equal(remaining, weights[name].detach().numpy() != 0)
            pruned += int((~remaining).sum())
    assert pruned > 100
    np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-3)  # kernels add up in another order


def test_words_and_scopes_are_the_vocabularys(twins: Any) -> None:
    network, _, example = twins
    scopes_and_types: set[tuple[str, str]] = set()

    class Words(amanda.Tool):
        def __init__(self) -> None:
            self.depends_on(StandardMapping())
            self.add_inst_for_op(lambda context: scopes_and_types.add((context.get_scope(), context["type"])))

    with amanda.apply(Words()):
        network(Tensor(example))
    attention = {("words", "embedding"), ("norm1", "layer_norm"), ("", "softmax"), ("query", "matmul")}
    convolution = {("layer1.conv1", "conv2d"), ("layer2.norm2", "batch_norm"), ("pool", "max_pool2d")}
    assert (attention if isinstance(network, Transformer) else convolution) <= scopes_and_types
