"""`get_device()` is the device of an op's tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import amanda


@pytest.mark.parametrize(
    ("call", "device"),
    [
        (lambda: torch.ones(2) + 1, "cpu"),
        (lambda: torch.ones(2, device="meta") * 2, "meta"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.cat([torch.ones(1, device="meta"), torch.ones(1, device="meta")]), "meta"),
        (lambda: torch.ones(2, device="meta").requires_grad_().sum().backward(), "meta"),
    ],
)
def test_ops_name_the_device_of_their_tensors(call: Callable[[], Any], device: str) -> None:
    devices: list[str] = []
    see = amanda.Tool()
    see.add_inst_for_op(lambda context: devices.append(context.get_device()), require_outputs=True)
    see.add_inst_for_op(lambda context: devices.append(context.get_device()), backward=True)
    with amanda.apply(see):
        call()
    assert set(devices) == {device}


def test_an_op_without_tensors_has_no_device() -> None:
    devices: list[str] = []
    see = amanda.Tool()
    see.add_inst_for_op(lambda context: devices.append(context.get_device()))
    with amanda.apply(see):
        torch.zeros(2)
    assert devices == [""]


def test_ops_of_compiled_code_name_it_too() -> None:
    devices: list[str] = []
    see = amanda.Tool()
    see.add_inst_for_op(lambda context: devices.append(context.get_device()))
    see.add_inst_for_op(lambda context: devices.append(context.get_device()), backward=True)
    compiled, x = (
        torch.compile(lambda x: (x * 2).sum(), backend="aot_eager"),
        torch.ones(2, requires_grad=True),
    )
    with amanda.apply(see, compiled="instrument"):
        compiled(x).backward()
    assert set(devices) == {"cpu"}
