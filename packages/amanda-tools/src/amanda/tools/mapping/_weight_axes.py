"""Axes of the weights of products and convolutions: one table for every framework and every tool."""

from __future__ import annotations

import re
from typing import Any

from amanda import OpContext
from amanda.tools.mapping._products import MATRIX_PRODUCTS, are_transposed

_CONVOLUTION = re.compile(r"(conv_transpose|depthwise_conv|conv)([123])d")
_WINDOWS = {"1": "W", "2": "HW", "3": "DHW"}
_CHANNELS = {"conv": "OI", "conv_transpose": "IO", "depthwise_conv": "IM"}
_CHANNELS_LAST = {"conv": "IO", "conv_transpose": "OI", "depthwise_conv": "IM"}
"""TensorFlow's order, behind the axes of the window."""
_GROUPS = ("groups", "group", "feature_group_count")


class WeightLayout(str):
    """Letters of a weight's axes, of a transposed convolution in groups: I of all groups, M outputs of each.

    groups: number of the groups.
    """

    groups: int

    def __new__(cls, axes: str, groups: int) -> WeightLayout:
        """Return the letters, with the number of groups."""
        layout = super().__new__(cls, axes)
        layout.groups = groups
        return layout

    def __reduce__(self) -> Any:
        return WeightLayout, (str(self), self.groups)


def write_weight_axes(context: OpContext) -> None:
    """Write `weight_groups`, and `weight_layout` unless the framework's half has written that."""
    if "weight_index" not in context:  # a half that writes some of the keys alone
        return
    index = context["weight_index"]
    is_convolution = index is not None and convolution_axes(context["type"]) is not None
    if "weight_groups" not in context:
        given = (context.get_attrs().get(name) for name in _GROUPS) if is_convolution else ()
        context["weight_groups"] = next((int(one) for one in given if one), 1)
    if "weight_layout" not in context:
        if is_convolution:
            context["weight_layout"] = convolution_axes(context["type"], context["weight_groups"])
        else:
            context["weight_layout"] = None if index is None else _product_axes(context, index)


def convolution_axes(kind: str, groups: int = 1, channels_last: bool = False) -> str | None:
    """Return the axes of a convolution's weight: O out, I in, M how many come of each group; None of others.

    Of a convolution in groups, I counts the channels of one group and O those of all; of a transposed one it
    is the other way round.

    >>> convolution_axes("conv_transpose2d"), convolution_axes("conv_transpose2d", groups=3)
    ('IOHW', 'IMHW')
    """
    if kind == "conv_tbc":
        return "WIO"
    convolution = _CONVOLUTION.fullmatch(kind)
    if convolution is None:
        return None
    word, window = convolution[1], _WINDOWS[convolution[2]]
    channels = (_CHANNELS_LAST if channels_last else _CHANNELS)[word]
    if word == "conv_transpose" and groups > 1:
        channels = channels.replace("O", "M")
    axes = window + channels if channels_last else channels + window
    return WeightLayout(axes, groups) if word == "conv_transpose" and groups > 1 else axes


def _product_axes(context: OpContext, index: int) -> str | None:
    """Return the axes of a matrix that is a factor of a product; None of more axes, and of other ops."""
    kind, extents = context["type"], context["shape"](context.get_inputs()[index])
    if kind == "linear" and context.get_op_type() != "Gemm":
        return "OI"
    if kind not in MATRIX_PRODUCTS or (kind != "linear" and (extents is None or len(extents) != 2)):
        return None
    side = MATRIX_PRODUCTS[kind].factors.index(index)
    return "OI" if are_transposed(context.get_attrs())[side] == (side == 1) else "IO"


def spatial_axes(layout: str) -> list[int]:
    """Return the positions of the axes of a layout that are neither batch nor channels."""
    return [i for i, axis in enumerate(layout) if axis not in "NC"]
