"""Pruning and quantisation by hand and by tools: the same masks, weights and outputs, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import tensorflow as tf
import torch
from torch import nn

import amanda
from amanda.tools.prune import PruneTool

v1 = tf.compat.v1


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 16), nn.Linear(16, 3)
    )


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    draws = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = torch.rand(4, 3, 8, 8, generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()


def test_masks_of_2_4_are_those_of_asp(example: Callable[[str], ModuleType]) -> None:
    by_hand, model = network(), network()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    asp = example("baselines/apex_torch").ASP(by_hand, optimizer)
    trained(by_hand, optimizer)
    expected = asp.masks
    asp.remove()

    tool = PruneTool(pattern="2:4")
    with amanda.apply(tool):
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    tool.finalize(model)

    state = tool.state_dict().items()
    masks = {name.removesuffix(".weight/mask"): value for name, value in state if name.endswith("/mask")}
    assert list(masks) == list(expected) == ["2", "4", "5"]
    assert all(torch.equal(masks[name].float(), mask) for name, mask in expected.items())
    assert all(map(torch.equal, model.state_dict().values(), by_hand.state_dict().values()))


def test_tiles_are_those_of_a_hook_of_sessions(example: Callable[[str], ModuleType]) -> None:
    kernels = {"conv/kernel": (3, 3, 4, 12), "dense/kernel": (108, 10)}
    draws = np.random.default_rng(0)
    values = {name: draws.normal(size=shape).astype(np.float32) for name, shape in kernels.items()}
    images = draws.normal(size=(2, 5, 5, 4)).astype(np.float32)

    def graph() -> tuple[tf.Graph, list[tf.Tensor]]:
        with tf.Graph().as_default() as made:
            given = v1.placeholder(tf.float32, [None, 5, 5, 4], name="images")
            weights = [v1.get_variable(name, initializer=value) for name, value in values.items()]
            hidden = tf.nn.relu(tf.nn.conv2d(given, weights[0], 1, "VALID"))
            loss = tf.reduce_sum(tf.matmul(tf.reshape(hidden, [-1, 108]), weights[1]) ** 2)
            v1.train.get_or_create_global_step()
            v1.train.MomentumOptimizer(1e-5, 0.9).minimize(loss, name="train")
        return made, weights

    hook = example("baselines/tile_wise_tf").TileWiseHook(sparsity=0.75, granularity=4)
    made, weights = graph()
    with made.as_default(), v1.train.SingularMonitoredSession(hooks=[hook]) as session:
        for _ in range(3):
            session.run("train", {"images:0": images})
        by_hand = session.raw_session().run(weights)

    tool = PruneTool(sparsity=0.75, pattern="tile", granularity=4)
    made, weights = graph()
    with made.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        with amanda.apply(tool):
            for _ in range(3):
                session.run("train", {"images:0": images})
        with session.as_default():
            tool.finalize(weights)
        by_tool = session.run(weights)

    for one, other, name in zip(by_tool, by_hand, kernels, strict=True):
        assert np.array_equal(one, other)
        assert np.array_equal(one != 0, hook.masks[name] != 0)
        assert 0.7 < (one == 0).mean() < 0.8
