"""Weights of transposed convolutions in groups have a scale and a filter for each output everywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import amanda
from amanda.drivers.onnxruntime import session_options
from amanda.tools.axes import canonical, canonical_extents, restored
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool, convert

Array = NDArray[Any]
SIZES = np.float32([1, 10, 100, 1000, 0.1, 0.01])
"""Magnitudes of the outputs, group by group."""


def kernel(groups: int) -> Array:
    """A weight (6, 6 / groups, 2, 2), whose inputs come first: IMHW."""
    weight = np.random.default_rng(0).uniform(0.5, 1, (6, 6 // groups, 2, 2)).astype(np.float32)
    for output, size in enumerate(SIZES):
        group, within = divmod(output, 6 // groups)
        weight[6 // groups * group : 6 // groups * (group + 1), within] *= size
    return weight


X = np.random.default_rng(1).uniform(-1, 1, (1, 6, 3, 3)).astype(np.float32)


def model(groups: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], "up", group=groups)], "g",
        [helper.make_tensor_value_info("x", 1, X.shape)], [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(kernel(groups), "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def onnxruntime_program(groups: int) -> Callable[[], Array]:
    session = onnxruntime.InferenceSession(model(groups).SerializeToString(), session_options())
    return lambda: np.asarray(session.run(None, {"x": X})[0])


def torch_program(groups: int) -> Callable[[], Array]:
    layer = torch.nn.ConvTranspose2d(6, 6, 2, groups=groups, bias=False)
    layer.weight.data = torch.from_numpy(kernel(groups))
    return lambda: np.asarray(layer(torch.from_numpy(X)).detach().numpy())


PROGRAMS = {"onnxruntime": onnxruntime_program, "pytorch": torch_program}


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("framework", PROGRAMS)
def test_each_output_has_a_scale_of_its_own(framework: str, groups: int) -> None:
    program = PROGRAMS[framework](groups)
    bare = program()
    tool = QuantizeTool("dynamic", activation_bits=None, weight_bits=8)
    with amanda.apply(tool) as scope:
        given = program()
    assert scope.report == []
    (scale,) = (np.asarray(one) for name, one in tool.state_dict().items() if name.endswith("scale"))
    assert scale.shape == (6,)
    errors = np.abs(given - bare).max((0, 2, 3)) / np.abs(bare).max((0, 2, 3))
    assert errors.max() < 0.02


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("framework", PROGRAMS)
def test_structured_pruning_drops_the_smallest_outputs(framework: str, groups: int) -> None:
    program = PROGRAMS[framework](groups)
    with amanda.apply(PruneTool(0.5, "structured")):
        given = program()
    gone = ~np.abs(given).any((0, 2, 3))
    assert gone.tolist() == (np.argsort(np.argsort(SIZES)) < 3).tolist()


@pytest.mark.parametrize("groups", [2, 3])
def test_a_file_has_the_scales_too(groups: int, tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "quantized.onnx"
    onnx.save(model(groups), source)
    program = onnxruntime_program(groups)
    tool = QuantizeTool("static", activation_bits=None, weight_bits=8)
    with amanda.apply(tool):
        expected = program()
    amanda.instrument(source, tool, out=target)
    (given,) = onnxruntime.InferenceSession(str(target), session_options()).run(None, {"x": X})
    np.testing.assert_array_equal(given, expected)
    integers = convert(source, tool, tmp_path / "integers.onnx").model
    (given,) = onnxruntime.InferenceSession(str(integers), session_options()).run(None, {"x": X})
    np.testing.assert_allclose(given, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def layouts_of(program: Callable[[], Any]) -> list[tuple[str, str | None, int]]:
    found = []

    class Look(amanda.Tool):
        def __init__(self) -> None:
            self.depends_on(StandardMapping())
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context["weight_layout"] is not None:
                found.append((context["type"], context["weight_layout"], context["weight_groups"]))

    with amanda.apply(Look()):
        program()
    return found


def test_groups_are_told_in_every_framework() -> None:
    assert (
        layouts_of(torch_program(3))
        == layouts_of(onnxruntime_program(3))
        == [("conv_transpose2d", "IMHW", 3)]
    )
    data, weight = tf.ones((1, 4, 4, 6)), tf.ones((3, 3, 2, 6))
    assert layouts_of(lambda: tf.nn.conv2d(data, weight, 1, "SAME")) == [("conv2d", "HWIO", 3)]
    weight = tf.ones((3, 3, 6, 2))
    depthwise = layouts_of(lambda: tf.nn.depthwise_conv2d(data, weight, (1, 1, 1, 1), "SAME"))
    assert depthwise == [("depthwise_conv2d", "HWIM", 6)]
    weight = tf.ones((3, 3, 2, 6))
    assert layouts_of(lambda: tf.nn.conv2d_transpose(data, weight, (1, 4, 4, 2), 1)) == [
        ("conv_transpose2d", "HWOI", 1)
    ]

    def in_groups() -> None:
        with suppress(tf.errors.InvalidArgumentError):  # TensorFlow has no such kernel for CPUs
            tf.nn.conv2d_transpose(data, weight, (1, 4, 4, 6), 1)

    assert layouts_of(in_groups) == [("conv_transpose2d", "HWMI", 3)]


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_the_canonical_form_has_outputs_first_and_leads_back(groups: int) -> None:
    ((_, layout, _),) = layouts_of(torch_program(groups))
    weight = kernel(groups)
    turned = canonical(weight, layout)
    assert turned.shape == canonical_extents(weight.shape, layout) == (6, 6 // groups, 2, 2)
    assert [round(float(np.log10(abs(one).mean() / 0.75))) for one in turned] == [0, 1, 2, 3, -1, -2]
    np.testing.assert_array_equal(restored(turned, layout, weight.shape), weight)
    batch = np.stack([weight, weight + 1])
    np.testing.assert_array_equal(canonical(batch, layout)[1], canonical(weight + 1, layout))
    np.testing.assert_array_equal(restored(canonical(batch, layout), layout, batch.shape), batch)


@pytest.mark.parametrize("layout", ["OIHW", "HWIO", "IMHW"])
def test_a_weight_of_fewer_axes_than_its_layout_is_an_error(layout: str) -> None:
    weight = np.ones((6, 6))
    for call in (lambda: canonical(weight, layout), lambda: canonical_extents(weight.shape, layout)):
        with pytest.raises(ValueError, match=rf"shape \(6, 6\) has fewer axes than its layout {layout}"):
            call()
