"""Tools on networks of MindSpore: quantised, pruned and counted, and a NaN found where it begins."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool


def network() -> Any:
    ms.set_seed(0)
    return nn.SequentialCell(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Dense(32, 3))


IMAGE = Tensor(np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 1, 4, 4))


@pytest.mark.parametrize("method", ["static", "dynamic", "qat", "lsq", "lsq+"])
def test_weights_and_activations_are_quantised_and_gradients_pass(method: Any) -> None:
    model, tool = network(), QuantizeTool(method)
    plain = model(IMAGE).asnumpy()
    with amanda.apply(tool), tool.calibrating():
        model(IMAGE)
    step = ms.value_and_grad(lambda x: model(x).sum(), None, model.trainable_params())
    with amanda.apply(tool) as scope:
        quantised = model(IMAGE).asnumpy()
        _, gradients = step(IMAGE)
    assert len(tool.result.rows()) == 4
    assert scope.report == []
    assert 0 < np.abs(quantised - plain).max() < 0.1
    assert all(np.abs(gradient.asnumpy()).sum() > 0 for gradient in gradients)


def test_an_lstm_is_counted_layer_by_layer() -> None:
    tool = FlopsTool()
    with amanda.apply(tool):
        nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True)(ops.ones((3, 6, 8)))
    assert tool.result.total("macs") == 96768


def test_weights_that_are_read_transposed_are_pruned_and_written_into_the_model() -> None:
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    model.set_train(False)
    x = Tensor(np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32))
    tool = PruneTool(0.5)
    with amanda.apply(tool):
        pruned = model(x).asnumpy()
    tool.finalize(model)
    matrices = {name: parameter for name, parameter in model.parameters_and_names() if parameter.ndim == 2}
    assert len(matrices) == 4
    assert all(np.mean(parameter.asnumpy() == 0) == 0.5 for parameter in matrices.values())
    np.testing.assert_array_equal(model(x).asnumpy(), pruned)


def test_a_nan_is_found_at_its_op_beside_ops_that_write() -> None:
    tool = NanTool()
    x = Tensor(np.ones((3, 3), np.float32)) * 2
    with amanda.apply(tool):
        x[0] = 1.0
        x[:, 1] += 2
        ops.relu(ops.log(x - 3))
    assert [finding.type for finding in tool.result.findings] == ["log"]
