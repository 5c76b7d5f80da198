"""Whether a tool sees all that a call computes, forward and backward."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import amanda
from amanda.drivers.torch._targets import by_callable

from ._execution import Program, cotangent
from ._tools import Outside, Watch
from ._variants import Sample, Variant


def unseen(watch: Watch, variant: Variant, sample: Sample) -> str | None:
    """What a call computes that the tool does not see, or None: kernels, the op itself, backward nodes."""
    watch.clear()
    with amanda.disabled():
        prepared = variant.prepared(sample)
        if prepared is None:
            return None
    outside = Outside(watch)
    try:
        with outside:
            result = Program()(variant, *prepared)
    except Exception:
        return None
    if outside.kernels:
        return f"no op seen while torch ran {', '.join(outside.kernels)}"
    target = _target(variant.call)
    if target is not None and target.canonical not in watch.types:
        return f"{target.canonical} is not among the ops seen: {watch.types}"
    outputs = [
        output for output in tree_leaves(result) if isinstance(output, Tensor) and output.requires_grad
    ]
    if not outputs:
        return None
    with amanda.disabled(), _executed(outputs) as nodes:
        cotangents = [cotangent(output) for output in outputs]
        with amanda.enabled():
            try:
                torch.autograd.backward(outputs, cotangents)
            except Exception:
                return None
    missed = Counter(nodes) - Counter(watch.nodes)
    if variant.in_place:  # the argument was cloned outside
        missed -= Counter(["CloneBackward0", "AccumulateGrad"])
    return f"backward ops not seen: {dict(missed)}" if missed else None


def _target(called: Any) -> Any:
    try:
        return by_callable().get(called)
    except TypeError:  # it has no hash, so it is none of torch's own
        return None


@contextmanager
def _executed(outputs: Sequence[Tensor]) -> Iterator[list[str]]:
    """Names of the nodes that execute, in a list that grows."""
    names: list[str] = []
    hooks = [node.register_prehook(_noting(names, type(node).__name__)) for node in _nodes(outputs)]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def _noting(names: list[str], name: str) -> Callable[[Any], None]:
    return lambda _: names.append(name)


def _nodes(outputs: Sequence[Tensor]) -> list[Any]:
    nodes: dict[int, Any] = {}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in nodes:
            nodes[id(node)] = node
            waiting += [child for child, _ in node.next_functions]
    return list(nodes.values())
