"""Torch's own operator database: the products that its calls dispatch to, forward and backward, are counted.

A sample runs with the tests, all of it by `nox -s opdb`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from math import prod
from typing import Any

import pytest
import torch
from opinfo import op_db
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amanda
from amanda.tools.flops import FlopsTool

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says of its prototypes and deprecations

SLOTS, EVERY = 4, 6
"""One op of so many is in the sample, which is tested in parts."""

TWO_FACTORS = {
    "mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1,
    "_sparse_addmm": 1, "_addmm_activation": 1,
}  # fmt: skip
"""Where the first factor is."""

OUTER_PRODUCTS = frozenset(
    "addmv addr dot einsum inner matmul mv tensordot vdot __rmatmul__ linalg.vecdot".split()
)
"""Ops with vectors, some of whose gradients autograd computes elementwise and the tool counts as products."""

OTHERWISE = frozenset({
    "nn.functional.bilinear",  # is one kernel, which the reference does not know
    "sparse.mm.reduce", "sparse.sampled_addmm",
    "svd_lowrank", "pca_lowrank",  # some outputs of a decomposition have no gradient, shapes do not tell
    "nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none",
})  # fmt: skip
"""Ops that count otherwise, and why."""


class Products(TorchDispatchMode):
    """Counts the multiply-accumulates of the matrix products and convolutions that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        self.macs += _macs(op.overloadpacket.__name__, args, made)
        return made


def _macs(name: str, args: Any, made: Any) -> int:
    if name in TWO_FACTORS:
        left, right = args[TWO_FACTORS[name] :][:2]
        return left.numel() * (right.shape[-1] if right.dim() > 1 else 1)
    if name == "convolution":
        data, weight, transposed = args[0], args[1], args[6]
        return (data if transposed else made).numel() * weight.numel() // weight.shape[0]
    if name == "convolution_backward":
        grad, data, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        return (data if transposed else grad).numel() * weight.numel() // weight.shape[0] * sum(wanted[:2])
    if name.startswith("_scaled_dot_product"):
        q, k, v = args[1:4] if name.endswith("backward") else args[:3]
        sides = 3 * q.shape[-1] + 2 * v.shape[-1] if name.endswith("backward") else q.shape[-1] + v.shape[-1]
        return prod(q.shape[:-1]) * k.shape[-2] * sides
    return 0


@cache
def database() -> dict[str, Any]:
    """Every OpInfo of single precision that runs on a CPU, by its name and that of its test variant."""
    return {
        f"{op.name}.{op.variant_test_name}".rstrip("."): op
        for op in op_db()
        if torch.float32 in op.supported_dtypes("cpu")
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each op, where they are not deselected anyhow: the database imports half of torch."""
    if "name" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("markexpr") in ("", "opdb")
        metafunc.parametrize("name", list(database()) if chosen else ["every op"])


@pytest.mark.parametrize("slot", range(SLOTS))
def test_products_of_the_sample_are_counted(slot: int) -> None:
    names = list(database())[::EVERY][slot::SLOTS]
    assert [one for name in names for one in differences(name, 3)] == []


@pytest.mark.opdb
def test_products_are_counted(name: str) -> None:
    assert list(differences(name, 12)) == []


def differences(name: str, most: int) -> Iterator[str]:
    """What the tool counts of each sample call, where that is not what is dispatched and it names no op."""
    if name in OTHERWISE:
        return
    op = database()[name]
    for sample in islice(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd), most):
        with amanda.disabled():
            wanted = _dispatched(op, sample)
        if wanted is None:
            continue
        tool = FlopsTool()
        with amanda.apply(tool):
            _call(op, sample, backward=True)
        found = [tool.result.total("macs", phase) for phase in ("forward", "backward")]
        more = op.name in OUTER_PRODUCTS and all(
            one >= least for one, least in zip(found, wanted, strict=True)
        )
        if found != wanted and not more and not tool.result.unsupported:
            yield f"{name}: {found}, not {wanted}"


def _dispatched(op: Any, sample: Any) -> list[int] | None:
    """Multiply-accumulates of the forward and backward pass; None where the database refuses a gradient."""
    try:
        _call(op, sample, backward=True)  # under a mode torch leaves out some of its checks
        with Products() as forward:
            _call(op, sample, backward=False)
        with Products() as both:
            _call(op, sample, backward=True)
    except Exception:
        return None
    return [forward.macs, both.macs - forward.macs]


def _call(op: Any, sample: Any, backward: bool) -> None:
    torch.manual_seed(0)
    made = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
    outputs = [one for one in made if isinstance(one, Tensor) and one.requires_grad]
    given = tree_leaves((sample.input, sample.args, sample.kwargs))
    leaves = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
    if backward and outputs and leaves:
        grads = [torch.ones_like(one) for one in outputs]
        torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
