"""Programs that train: networks of MindSpore's own layers, optimizers, running statistics, random state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


class Program(NamedTuple):
    """make: gives the network; it ends in one number for each example and class.  example: its input.

    optimizer: gives the optimizer of parameters.
    """

    make: Callable[[], Any]
    example: tuple[int, ...]
    optimizer: Callable[[Any], Any]


class Last(nn.Cell):
    """The last step of a recurrent network."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def construct(self, x: Any) -> Any:
        return self.layer(x)[0][:, -1]


class Attention(nn.Cell):
    """A layer of a transformer, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)

    def construct(self, x: Any) -> Any:
        return self.layer(x).mean(1)


class Written(nn.Cell):
    """A network that writes into what it has computed, and into views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(8, 8), nn.Dense(8, 3)

    def construct(self, x: Any) -> Any:
        hidden = ops.relu(self.first(x))
        noise = ops.stop_gradient(hidden) * 1
        noise[0] = 0.5
        row = noise[1]
        row[2] = 4.0
        noise[:, 3] += 1
        return self.second(hidden + noise)


def _convolutions() -> Any:
    return nn.SequentialCell(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten(), nn.Dense(64, 3)
    )


def _depthwise() -> Any:
    return nn.SequentialCell(
        nn.Conv2d(4, 4, 3, group=4), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2dTranspose(4, 2, 3, 2),
        nn.Flatten(), nn.Dense(2 * 16 * 16, 3),
    )  # fmt: skip


def _dropped() -> Any:
    return nn.SequentialCell(nn.Dense(8, 16), nn.BatchNorm1d(16), nn.Dropout(p=0.3), nn.Dense(16, 3))


PROGRAMS: Mapping[str, Program] = {
    "convolutions, SGD": Program(_convolutions, (4, 3, 8, 8), lambda p: nn.SGD(p, 0.05, momentum=0.9)),
    "convolutions, Adam": Program(_convolutions, (4, 3, 8, 8), lambda p: nn.Adam(p, 0.01)),
    "depthwise, Momentum": Program(_depthwise, (4, 4, 8, 8), lambda p: nn.Momentum(p, 0.01, 0.9)),
    "dropout, AdamWeightDecay": Program(_dropped, (4, 8), lambda p: nn.AdamWeightDecay(p, 0.01)),
    "dropout, RMSProp": Program(_dropped, (4, 8), lambda p: nn.RMSProp(p, 0.01)),
    "dropout, Adagrad": Program(_dropped, (4, 8), lambda p: nn.Adagrad(p)),
    "LSTM, FTRL": Program(lambda: Last(nn.LSTM(8, 6, batch_first=True)), (4, 5, 8), lambda p: nn.FTRL(p)),
    "GRU, Adadelta": Program(
        lambda: Last(nn.GRU(8, 6, batch_first=True)), (4, 5, 8), lambda p: nn.Adadelta(p)
    ),
    "attention, LazyAdam": Program(Attention, (4, 5, 8), lambda p: nn.LazyAdam(p, 0.01)),
    "written, ProximalAdagrad": Program(Written, (4, 8), lambda p: nn.ProximalAdagrad(p)),
    "written, ASGD": Program(Written, (4, 8), lambda p: nn.ASGD(p, 0.05)),
    "written, Rprop": Program(Written, (4, 8), lambda p: nn.Rprop(p, 0.05)),
}


def trained(program: Program, steps: int = 2) -> dict[str, bytes]:
    """Make a network, train it, and return parameters, statistics, optimizer and random state, bit by bit."""
    ms.set_seed(0)
    network = program.make()
    network.set_train()
    optimizer = program.optimizer(network.trainable_params())
    x = Tensor(np.random.RandomState(0).uniform(-1, 1, program.example).astype(np.float32))
    step = ms.value_and_grad(lambda x: (network(x) ** 2).mean(), None, optimizer.parameters)
    for _ in range(steps):
        _, gradients = step(x)
        optimizer(gradients)
    state = {f"network {parameter.name}": parameter for parameter in network.get_parameters()}
    state.update({f"optimizer {parameter.name}": parameter for parameter in optimizer.get_parameters()})
    state["drawn afterwards"] = ops.rand(2)
    return {name: tensor.asnumpy().tobytes() for name, tensor in state.items()}
