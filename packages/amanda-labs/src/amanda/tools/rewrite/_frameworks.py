"""Mapping rules of the tool, for the differences of frameworks."""

from __future__ import annotations

import amanda
from amanda.tools.mapping import MappingTool
from amanda.tools.rewrite._attention import attention
from amanda.tools.rewrite._batch_norm import folded_in_pytorch, folded_in_tensorflow
from amanda.tools.rewrite._pytorch import TorchSteps
from amanda.tools.rewrite._steps import Steps


def frameworks() -> MappingTool:
    """Return rules that write these keys into a context.

    steps: the class that records executions.
    rewrites: the replacements of named rules that the framework has.
    channels_last: whether convolutions have the channels last, in the ops that Keras makes.
    reads_others: whether a replacement in a graph may read inputs of other ops.
    """
    return MappingTool([["*", _any], ["pytorch", _pytorch], ["tensorflow", _tensorflow]])


def _any(context: amanda.OpContext) -> None:
    context["steps"], context["rewrites"] = Steps, {}
    context["channels_last"], context["reads_others"] = False, True


def _pytorch(context: amanda.OpContext) -> None:
    context["steps"], context["reads_others"] = TorchSteps, False
    context["rewrites"] = {"fold_batch_norm": folded_in_pytorch, "fuse_attention": attention}


def _tensorflow(context: amanda.OpContext) -> None:
    context["rewrites"] = {"fold_batch_norm": folded_in_tensorflow}
    context["channels_last"] = (context.get_attrs().get("data_format") or b"NHWC") in (b"NHWC", "NHWC")
