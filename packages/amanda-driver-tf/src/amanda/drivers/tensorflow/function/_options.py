"""Calls of functions without TensorFlow's graph optimizer, where the optimizer can change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

_CALLBACK = "EagerPyFunc"
_DEFAULT = rewriter_config_pb2.RewriterConfig()


def is_torn(definitions: Sequence[Any]) -> bool:
    """Return True if functions have as many calls of Python as operators, so that none can be fused."""
    types = [node.op for definition in definitions for node in definition.node_def]
    return 2 * types.count(_CALLBACK) >= len(types)


def unoptimized(call: Callable[..., Any], *args: Any) -> Any:
    """Call the runtime without its graph optimizer, which takes most of the time of a first call."""
    current = context.context()
    before = current.function_call_options
    current.function_call_options = _without_optimizer(before.config_proto_serialized, before.executor_type)
    try:
        return call(*args)
    finally:
        current.function_call_options = before


@lru_cache(maxsize=16)
def _without_optimizer(serialized: bytes, executor_type: str | None) -> Any:
    """Return these options without the optimizer, unless the user has set options of the optimizer."""
    config = config_pb2.ConfigProto.FromString(serialized)
    options = config.graph_options.rewrite_options
    options.disable_meta_optimizer = options.disable_meta_optimizer or options == _DEFAULT
    return context.FunctionCallOptions(executor_type, config)
