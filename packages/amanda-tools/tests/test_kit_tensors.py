"""Bytes and values of tensors: the same words for PyTorch, TensorFlow and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.tools.kit import OpRecord, Tensors, TensorTool, parameter_inputs, tensors_of
from amanda.tools.mapping import StandardMapping

VALUES = np.linspace(-3, 4, 24, dtype=np.float32).reshape(2, 3, 4)


def tensorflow() -> Any:
    import tensorflow as tf

    return tf.constant(VALUES)


TORCH = torch.from_numpy(VALUES)
MADE = {
    "numpy": lambda: VALUES,
    "numpy, transposed": lambda: np.asfortranarray(VALUES),
    "torch": TORCH.clone,
    "torch, in another order": lambda: TORCH.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "torch, negated later": lambda: torch.complex(torch.zeros(2, 3, 4), -TORCH).conj().imag,
    "tensorflow": tensorflow,
}  # fmt: skip


@pytest.mark.parametrize("make_tensor", MADE.values(), ids=MADE)
def test_bytes_of_elements_are_read_and_replaced_in_a_copy(make_tensor: Any) -> None:
    x, at = make_tensor(), np.array([1, 7, 23])
    xp = tensors_of(x)
    rows = xp.bytes_at(x, at)
    assert rows.shape == (3, 4)
    assert rows.copy().view(np.float32)[:, 0].tolist() == VALUES.reshape(-1)[at].tolist()
    changed = xp.with_bytes(x, at, np.array([[1.5], [np.inf], [-0.0]], np.float32).view(np.uint8))
    expected = VALUES.copy()
    expected.reshape(-1)[at] = [1.5, np.inf, -0.0]
    assert type(changed) is type(x)
    assert xp.to_numpy(changed).tobytes() == expected.tobytes()
    assert xp.to_numpy(x).tobytes() == VALUES.tobytes()
    if isinstance(x, torch.Tensor):
        assert changed.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("make_tensor", MADE.values(), ids=MADE)
def test_numbers_are_read_where_a_tensor_lies(make_tensor: Any) -> None:
    x = make_tensor()
    xp = tensors_of(x)
    numbers = xp.stored_values(x)
    assert xp.extents(x) == (2, 3, 4)
    assert np.array_equal(xp.exact(xp.dense(x)), VALUES)
    assert xp.exact(xp.at(x, [1, 7, 23])).tolist() == VALUES.reshape(-1)[[1, 7, 23]].tolist()
    blocks = [np.asarray(block) for block in xp.blocks(numbers)]
    assert np.concatenate(blocks).tolist() == VALUES.ravel().tolist()
    assert xp.unstored(x, numbers) == 0
    assert float(xp.total(numbers)) == pytest.approx(float(VALUES.sum()))


def test_a_sparse_tensor_has_the_zeros_that_it_does_not_store() -> None:
    x = torch.eye(3, dtype=torch.complex64).mul(3 + 4j).to_sparse()
    xp = tensors_of(x)
    numbers = xp.stored_values(x)
    assert numbers.tolist() == [5.0] * 3
    assert xp.unstored(x, numbers) == 6
    assert xp.stored_values(x, widen=True).dtype == torch.float64
    assert xp.exact(xp.dense(x)).shape == (3, 3)


def test_a_tensor_on_the_meta_device_has_no_numbers() -> None:
    x = torch.ones(3, device="meta")
    assert tensors_of(x).stored_values(x) is None
    assert tensors_of(x).dense(x) is None


class Labelled(torch.Tensor):
    """A class that overrides nothing."""


@pytest.mark.parametrize("capacity", [0, 4, 47])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(12),
        lambda: torch.ones(24)[:12],
        lambda: torch.ones(12)[8:],
        lambda: torch.ones(3, 4).t(),
        lambda: torch.ones(12).as_strided((2, 2), (8, 3)),
        lambda: torch.ones(12).expand(2, 12),
        lambda: torch.nn.Parameter(torch.ones(12)),
        lambda: torch.ones(12).as_subclass(Labelled)[4:],
    ],
)
def test_a_tensor_whose_memory_was_freed_has_no_numbers(
    make: Callable[[], torch.Tensor], capacity: int
) -> None:
    x = make()
    xp = tensors_of(x)
    assert xp.unread(x) is None
    x.untyped_storage().resize_(48)
    assert xp.unread(x) is None
    if type(x) is not Labelled:
        assert xp.borrowed(x.detach()) is not None
    x.untyped_storage().resize_(capacity)
    why = xp.unread(x)
    assert why == "its memory was freed, as FSDP does between uses" or (capacity == 0 and type(x) is Labelled)
    assert why is not None
    assert xp.stored_values(x) is None
    assert xp.borrowed(x) is None
    assert not xp.is_dense(x)


def test_a_tensor_without_elements_needs_no_memory() -> None:
    for x in (torch.ones(0), torch.ones(3)[3:], torch.ones(3, 0).t()):
        x.untyped_storage().resize_(0)
        assert tensors_of(x).unread(x) is None


def test_an_exact_array_has_the_type_of_the_tensor() -> None:
    x = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    assert tensors_of(x).exact(x).dtype == ml_dtypes.bfloat16
    assert tensors_of(x).exact(x).tolist() == [1.0, -2.5]
    with pytest.raises(AmandaError, match="'imaginary' is no element type"):
        Tensors.numpy_type("imaginary")


class Met(TensorTool[OpRecord]):
    """Notes the role, position, flat index and execution of each tensor."""

    def __init__(self, *roles: str, **options: Any) -> None:
        super().__init__(roles, **options)
        self.met: list[tuple[str, str, int, int, int]] = []

    def op_record(self, context: amanda.OpContext, phase: str, kind: str) -> OpRecord:
        return OpRecord(phase, kind, context.get_scope(), context.get_source())

    def observe(self, record: OpRecord, tensors: Any, execution: int) -> None:
        self.met += [(record.type, one.role, one.position, one.flat_index, execution) for one in tensors]


def test_a_tool_that_lacks_a_method_or_a_constructor_is_an_error() -> None:
    class Blind(Met):
        observe = TensorTool.observe

    with pytest.raises(ToolError, match="Blind has no method observe"):
        Blind("output")

    class Unprepared(Met):
        def __init__(self) -> None:
            pass

    message = r"Unprepared.__init__ does not call super\(\).__init__\(roles\)"
    with pytest.raises(ToolError, match=message), amanda.apply(Unprepared()):
        torch.ones(2)


def test_a_tool_looks_at_tensors_by_their_roles() -> None:
    model, x = nn.Linear(2, 3), torch.ones(1, 2)
    tool = Met("input", "output", "gradient")
    with amanda.apply(tool):
        model(x).sum().backward()
    linear = [observed[1:] for observed in tool.met if observed[0].startswith(("linear", "addmm"))]
    assert linear[:4] == [
        ("input", 0, 0, 0), ("weight", 1, 1, 0), ("input", 2, 2, 0), ("output", 0, 0, 0),
    ]  # fmt: skip
    assert [observed[1] for observed in tool.met].count("weight gradient") == 1


def test_a_tool_of_gradients_analyses_backward_ops_alone() -> None:
    model, x = nn.Linear(2, 3), torch.ones(1, 2)
    recorded: list[str] = []

    class Recording(Met):
        def op_record(self, context: amanda.OpContext, phase: str, kind: str) -> OpRecord:
            recorded.append(phase)
            return super().op_record(context, phase, kind)

    tool = Recording("gradient")
    with amanda.apply(tool):
        model(x).sum().backward()
    assert {observed[1] for observed in tool.met} == {"gradient", "weight gradient"}
    assert set(recorded) == {"backward"}


def test_a_tool_looks_at_some_executions() -> None:
    some, relu, x = Met("output", every=2, executions=2), nn.ReLU(), torch.ones(2)
    with amanda.apply(some):
        for _ in range(7):
            relu(x)
        x.split(1)
    assert [observed[-1] for observed in some.met if observed[0] == "relu"] == [0, 2]
    assert [observed[3] for observed in some.met if observed[0] == "split"] == [0, 1]
    with pytest.raises(AmandaError, match="every is 0; give an integer >= 1"):
        Met("output", every=0)


def test_a_sparse_tensor_and_a_conjugate_one_become_arrays() -> None:
    xp = tensors_of(torch.zeros(1))
    assert xp.to_numpy(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]
    assert xp.to_numpy(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]


def test_what_has_no_elements_of_its_own_is_not_dense() -> None:
    xp = tensors_of(torch.zeros(1))
    not_dense = [torch.eye(2).to_sparse(), torch.ones(3, device="meta"), torch.ones(0)]
    assert [xp.is_dense(tensor) for tensor in (torch.ones(2), *not_dense)] == [True, False, False, False]


def positions(program: Any) -> dict[str, tuple[int, ...]]:
    """Return the positions of parameters among the inputs of each op, by its type."""
    found = {}

    class Look(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.depends_on(StandardMapping())
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            found[context["type"]] = parameter_inputs(context)

    with amanda.apply(Look()):
        program()
    return found


def test_parameters_and_their_views_are_told_from_leaves() -> None:
    parameter, leaf = nn.Parameter(torch.ones(3, 3)), torch.ones(3, 3, requires_grad=True)

    def program() -> None:
        leaf.neg()
        torch.matmul(leaf, parameter.t())
        torch.cat([parameter, leaf])

    assert positions(program) == {"neg": (), "transpose": (0,), "matmul": (1,), "cat": ()}


def test_values_of_variables_are_parameters() -> None:
    import tensorflow as tf

    variable = tf.Variable(tf.ones((2, 2)))
    traced = tf.function(lambda x: tf.matmul(x, tf.transpose(variable)))
    assert positions(lambda: tf.matmul(tf.ones((2, 2)), variable))["matmul"] == (1,)
    assert positions(lambda: traced(tf.ones((2, 2))))["matmul"] == (1,)
