"""Faults: the bits are those of struct and numpy by hand, and a seed gives the same ones again."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from typing import Any

import children
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import Tensor, nn

import amanda
from amanda.tools.inject import InjectError, InjectTool


def injected(program: Callable[[], Any], **options: Any) -> tuple[Any, InjectTool]:
    tool = InjectTool(**options)
    with amanda.apply(tool):
        output = program()
    return output, tool


def changed(before: Tensor, after: Tensor) -> list[tuple[int, ...]]:
    """Where two tensors differ in any byte, NaN and the sign of zero included."""
    width = before.element_size()
    raw = [t.detach().contiguous().view(-1, 1).view(torch.uint8).view(-1, width) for t in (before, after)]
    flat = (raw[0] != raw[1]).any(1).nonzero()[:, 0].tolist()
    return [tuple(int(i) for i in np.unravel_index(position, before.shape)) for position in flat]


def test_sites_are_noted_while_nothing_is_injected() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.rand(3, 4)
    expected = model(x)
    tool = InjectTool("zero", type="linear")
    with amanda.apply(tool):
        with tool.calibrating():
            assert torch.equal(model(x), expected)
        assert [(site.module, site.elements) for site in tool.sites] == [("0", 12), ("1", 6)]
        assert not torch.equal(model(x), expected)
        with pytest.warns(DeprecationWarning, match="look is deprecated since .* use calibrating"):
            tool.look()
        assert torch.equal(model(x), expected)
    assert len(tool.sites) == 2


def test_an_excluded_module_has_no_fault() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.rand(3, 4)
    expected = model(x)
    output, tool = injected(
        lambda: model(x), fault="zero", module=["0", "1"], exclude="1", count=12, type="linear"
    )
    assert torch.equal(output, model[1](torch.zeros(3, 4)))
    tool = InjectTool("zero", target="grad_outputs", exclude="1", type="linear", count=12)
    with amanda.apply(tool):
        model(x).sum().backward()
    assert {injection.module for injection in tool.result.injections} == {"0"}
    assert not torch.equal(output, expected)


def test_a_flipped_bit_of_a_float_is_that_of_struct() -> None:
    x = torch.rand(3, 4)
    for seed in range(40):
        y, tool = injected(lambda: torch.neg(x), seed=seed)
        (hit,) = tool.result.injections
        assert changed(-x, y) == [hit.element]
        word = struct.unpack("<I", struct.pack("<f", -x[hit.element].item()))[0] ^ (1 << hit.bits[0])
        assert struct.pack("<f", y[hit.element].item()) == struct.pack("<I", word)
        assert (hit.phase, hit.type, hit.tensor, hit.dtype) == ("forward", "neg", "outputs[0]", "float32")
        assert (hit.old, hit.execution) == (-x[hit.element].item(), 0)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS_8 = [
    getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS_8, *INTEGERS, *COMPLEX, torch.bool], ids=str)
def test_every_bit_of_every_type_can_be_flipped_and_no_other_is(dtype: torch.dtype) -> None:
    x = torch.arange(6).reshape(2, 3).to(dtype)
    width = 1 if dtype == torch.bool else 8 * x.element_size()
    for bit in range(width):
        y, tool = injected(lambda: x.clone(), bits=[bit], seed=bit)
        (hit,) = tool.result.injections
        assert changed(x, y) == [hit.element]
        before, after = (int.from_bytes(_bytes(t[hit.element]), "little") for t in (x, y))
        assert before ^ after == 1 << bit
        assert hit.bits == (bit,)
        assert x.sum().item() == torch.arange(6).to(dtype).sum().item() if dtype in INTEGERS else True
    _, tool = injected(lambda: x.clone(), bits=[width])
    assert not tool.result.injections


def _bytes(scalar: Tensor) -> bytes:
    return bytes(scalar.contiguous().view(1, 1).view(torch.uint8).flatten().tolist())


def test_old_and_new_values_are_told_as_numbers() -> None:
    x = torch.tensor([1.5], dtype=torch.bfloat16)
    _, tool = injected(lambda: x.clone(), bits=[15])
    assert [(injection.old, injection.new) for injection in tool.result.injections] == [(1.5, -1.5)]
    _, tool = injected(lambda: torch.tensor([1 + 2j]).clone(), bits=[63], type="clone")
    assert [(injection.old, injection.new) for injection in tool.result.injections] == [(1 + 2j, 1 - 2j)]
    _, tool = injected(lambda: torch.tensor([True]).clone(), type="clone")
    assert [(injection.old, injection.new) for injection in tool.result.injections] == [(True, False)]


@pytest.mark.parametrize(
    ("dtype", "sign", "exponent"),
    [(torch.float32, [31], range(23, 31)), (torch.bfloat16, [15], range(7, 15)),
     (torch.float16, [15], range(10, 15)), (torch.float8_e5m2, [7], range(2, 7)),
     (torch.int32, [31], []), (torch.uint8, [], []),
     (torch.complex64, [31, 63], [*range(23, 31), *range(55, 63)])],
    ids=str,
)  # fmt: skip
def test_the_fields_of_a_number_are_where_its_format_has_them(
    dtype: torch.dtype, sign: Any, exponent: Any
) -> None:
    x = torch.ones(400).to(dtype)
    for field, expected in (("sign", sign), ("exponent", exponent)):
        _, tool = injected(lambda: x.clone(), field=field, probability=1.0)
        assert {injection.bits[0] for injection in tool.result.injections} == set(expected)


def test_several_bits_of_an_element_are_flipped_together() -> None:
    x = torch.zeros(50, dtype=torch.int16)
    y, tool = injected(lambda: x.clone(), flips=3, probability=1.0)
    assert all(bin(one & 0xFFFF).count("1") == 3 for one in y.tolist())
    assert all(len(set(one.bits)) == 3 for one in tool.result.injections)


def test_a_stuck_bit_has_its_value_whatever_it_was() -> None:
    x = torch.tensor([0, 1, 2, 3], dtype=torch.uint8)
    assert injected(lambda: x.clone(), fault="stuck_at_1", bits=[1], probability=1.0)[0].tolist() == [
        2,
        3,
        2,
        3,
    ]
    assert injected(lambda: x.clone(), fault="stuck_at_0", bits=[0], probability=1.0)[0].tolist() == [
        0,
        0,
        2,
        2,
    ]


def test_values_and_zeros_take_the_place_of_elements() -> None:
    x = torch.rand(4, 5) + 1
    y, tool = injected(lambda: x.clone(), fault="zero", count=3)
    assert sorted(injection.element for injection in tool.result.injections) == changed(x, y)
    assert (y == 0).sum() == 3
    y, _ = injected(lambda: x.clone(), fault="value", value=float("inf"), count=20)
    assert y.isinf().all()
    whole = torch.ones(3, dtype=torch.int8)
    assert injected(lambda: whole.clone(), fault="value", value=1e9, count=3)[0].tolist() == [127] * 3
    with pytest.raises(ValueError, match="NaN cannot be written into elements of type int8"):
        injected(lambda: whole.clone(), fault="value", value=float("nan"))


@pytest.mark.parametrize(
    ("fault", "spread"), [("gaussian", 0.5), ("uniform", 0.5 / 3**0.5), ("relative", 0.5 * 7)]
)
def test_noise_has_the_spread_that_was_asked_for(fault: str, spread: float) -> None:
    x = torch.full((20_000,), 7.0)
    y, _ = injected(lambda: x.clone(), fault=fault, scale=0.5, probability=1.0)
    assert (y - x).std().item() == pytest.approx(spread, rel=0.03)
    assert (y - x).mean().item() == pytest.approx(0, abs=0.1)
    if fault == "uniform":
        assert (y - x).abs().max() <= 0.5


def test_noise_is_rounded_to_what_the_type_holds() -> None:
    y, _ = injected(lambda: torch.ones(100).half().clone(), fault="gaussian", probability=1.0, type="clone")
    assert y.dtype == torch.half
    assert len(y.unique()) > 50
    y, _ = injected(
        lambda: torch.full((100,), 127, dtype=torch.int8), fault="gaussian", scale=5.0, probability=1.0
    )
    assert (y.min() < 127) & (y.max() == 127)
    _, tool = injected(lambda: torch.ones(3, dtype=torch.bool).clone(), fault="gaussian", type="clone")
    assert not tool.result.injections


def test_exactly_so_many_elements_or_each_with_its_probability() -> None:
    x = torch.zeros(100, 100)
    for count in (1, 7, 10_000, 20_000):
        y, tool = injected(lambda: x.clone(), fault="value", value=1.0, count=count)
        assert tool.result.total == y.sum() == min(count, 10_000)
    y, tool = injected(lambda: x.clone(), fault="value", value=1.0, probability=0.05)
    assert binomtest(int(y.sum()), 10_000, 0.05).pvalue > 1e-3
    _, tool = injected(lambda: x.clone(), probability=0.0)
    assert tool.result.total == 0


def test_ops_are_selected_by_type_and_module_and_tensors_by_index() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.rand(2, 4)
    _, tool = injected(lambda: model(x), type="lin*", module="2")
    assert [(injection.type, injection.module) for injection in tool.result.injections] == [("linear", "2")]
    _, tool = injected(lambda: model(x), type=["relu", "sigmoid"])
    assert [injection.module for injection in tool.result.injections] == ["1"]
    _, tool = injected(lambda: x.max(0), index=1)
    assert [(injection.tensor, injection.dtype) for injection in tool.result.injections] == [
        ("outputs[1]", "int64")
    ]
    _, tool = injected(lambda: model(x), type="conv2d")
    assert "No op was selected; the ops' types were linear, relu" in str(tool.result)


def test_inputs_are_changed_for_the_op_alone_and_weights_are_left_as_they_are() -> None:
    layer, x = nn.Linear(4, 3), torch.rand(2, 4)
    weight, faulty_input = layer.weight.detach().clone(), x.clone()
    y, tool = injected(lambda: layer(x), target="inputs", fault="value", value=9.0)
    (hit,) = tool.result.injections
    assert hit.tensor == "inputs[0]"
    faulty_input[hit.element] = 9.0
    torch.testing.assert_close(y, F.linear(faulty_input, layer.weight, layer.bias))
    y, tool = injected(lambda: layer(x), target="weights", fault="value", value=9.0, index=1)
    (hit,) = tool.result.injections
    assert hit.tensor == "weights[1]"
    assert torch.equal(layer.weight, weight)
    weight[hit.element] = 9.0
    torch.testing.assert_close(y, F.linear(x, weight, layer.bias))


def test_elements_of_tensors_in_lists_are_hit() -> None:
    parts = [torch.zeros(3), torch.zeros(2)]
    y, tool = injected(lambda: torch.cat(parts), target="inputs", fault="value", value=1.0, count=5)
    assert y.tolist() == [1.0] * 5
    assert {injection.tensor for injection in tool.result.injections} == {"inputs[0][0]", "inputs[0][1]"}
    y, tool = injected(lambda: torch.zeros(4).unbind(), type="unbind", fault="value", value=1.0, count=2)
    assert sum(map(float, y)) == 2
    assert not any(map(torch.any, parts))


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 2), nn.Linear(5, 4)])
def test_gradients_of_weights_are_changed_though_the_first_pass_made_none(layer: nn.Module) -> None:
    """A layer that is frozen at first, or an attack on the inputs."""
    layer.zero_grad()
    x = torch.rand(2, 3, 5, 5, requires_grad=True)
    tool = InjectTool(target="weight_grads", fault="value", value=99.0)
    with amanda.apply(tool):
        layer.requires_grad_(False)
        layer(x).sum().backward()
        layer.requires_grad_(True)
        torch.autograd.grad(layer(x).sum(), x)
        assert not tool.result.injections
        layer(x).sum().backward()
    assert len(tool.result.injections) == 1
    assert layer.weight.grad.eq(99).sum() == 1  # type: ignore[union-attr]


def test_gradients_are_hit_on_their_way() -> None:
    x, weight = torch.rand(2, 3, requires_grad=True), torch.rand(4, 3, requires_grad=True)

    def program() -> Tensor:
        x.grad = weight.grad = None
        F.linear(x, weight).sum().backward()
        assert weight.grad is not None
        return weight.grad

    plain = program()
    assert x.grad is not None
    of_x = x.grad.clone()
    grad, tool = injected(program, target="weight_grads", fault="value", value=99.0, type="linear")
    (hit,) = tool.result.injections
    assert (hit.phase, hit.tensor) == ("backward", "weight_grads[0]")
    assert changed(plain, grad) == [hit.element]
    assert torch.equal(x.grad, of_x)
    grad, tool = injected(program, target="grad_outputs", fault="zero", type="sum", count=1)
    assert tool.result.injections[0].type == "sum_backward"
    grad, tool = injected(program, target="grad_inputs", type="sum", count=3)  # it is expanded
    assert tool.result.total == 3
    grad, tool = injected(program, target="grad_outputs", fault="zero", type="accumulate_grad", count=12)
    assert not grad.any()
    grad, tool = injected(program, target="grad_inputs", fault="value", value=5.0, type="linear", count=99)
    assert (grad == 5).all()


def test_autograd_computes_with_what_was_changed() -> None:
    x = torch.rand(5, requires_grad=True)
    y, tool = injected(lambda: x.exp(), fault="value", value=3.0)
    (hit,) = tool.result.injections
    y.sum().backward()
    expected = x.detach().exp()
    expected[hit.element] = 3.0  # what exp saved is its own result, its gradient passes straight through
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert y.detach().tolist() == pytest.approx(expected.tolist())


def test_views_channels_last_and_in_place_ops_keep_their_meaning() -> None:
    x = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    y, tool = injected(lambda: F.relu(x))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert changed(F.relu(x), y) == [tool.result.injections[0].element]
    base = torch.zeros(3, 4)
    _, tool = injected(lambda: base.t().add_(1), type="add", fault="value", value=7.0)
    (hit,) = tool.result.injections
    assert base.t()[hit.element] == 7.0
    assert (base == 1).sum() == 11
    y, tool = injected(lambda: torch.ones(3, dtype=torch.complex64).conj() * 1, target="inputs", type="mul",
                       bits=[63], probability=1.0)  # fmt: skip
    assert len(tool.result.injections) == 3


def test_what_has_no_elements_of_its_own_is_left_alone() -> None:
    sparse = torch.eye(3).to_sparse()
    for program in (
        lambda: sparse * 2,
        lambda: torch.ones(0).clone(),
        lambda: torch.ones(3, device="meta") * 2,
    ):
        assert injected(program, type=["mul", "clone"])[1].result.total == 0


def test_executions_are_chosen_by_start_end_and_frequency() -> None:
    layer, x = nn.Linear(2, 2), torch.rand(1, 2)
    _, tool = injected(lambda: [layer(x) for _ in range(10)], start=2, end=9, frequency=3)
    assert [injection.execution for injection in tool.result.injections] == [2, 5, 8]
    assert tool.result.executions == 10
    with amanda.apply(tool), amanda.cache_disabled():
        tool.clear()
        for _ in range(10):
            layer(x)
    assert [injection.execution for injection in tool.result.injections] == [2, 5, 8]


def test_a_permanent_fault_is_the_same_at_every_execution() -> None:
    layer, x = nn.Linear(20, 20), torch.rand(1, 20)
    _, tool = injected(lambda: [layer(x) for _ in range(5)], permanent=True)
    assert len({(injection.element, injection.bits) for injection in tool.result.injections}) == 1
    _, tool = injected(lambda: [layer(x) for _ in range(5)])
    assert (
        len({(injection.element, injection.bits) for injection in tool.result.injections}) > 2
    )  # two may be equal by chance


SCRIPT = """
import torch, torch.nn.functional as F, amanda
from amanda.tools.inject import InjectTool
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
x = torch.rand(2, 3, 6, 6)
def program():
    for _ in range(2):
        model(x).sum().backward()
def faults(**options):
    tool = InjectTool(probability=0.01, **options)
    with amanda.apply(tool):
        program()
    return tool.result.rows()
print([faults(seed=5), faults(seed=5, target="grad_inputs")])
"""


@pytest.mark.slow
def test_a_seed_gives_the_same_faults_again_also_in_another_process() -> None:
    outputs = [children.run([sys.executable, "-c", SCRIPT], check=True).stdout for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("backward") > 2
    model, x = nn.Linear(30, 30), torch.rand(4, 30)
    tool_1, tool_2 = InjectTool(seed=1, probability=0.1), InjectTool(seed=2, probability=0.1)
    rows = []
    for tool in (tool_1, tool_1, tool_2):
        tool.clear()
        with amanda.apply(tool):
            model(x)
        rows.append(tool.result.rows())
    assert rows[0] == rows[1] != rows[2]


def test_what_other_ops_do_is_no_matter() -> None:
    first, second, x = nn.Linear(9, 9), nn.Linear(9, 9), torch.rand(4, 9)

    def program(layers: list[nn.Module]) -> None:
        for layer in layers:
            layer(x)

    program([first, second])
    _, both = injected(lambda: program([first, second]), seed=4)
    _, alone = injected(lambda: program([second]), seed=4)
    assert both.result.injections[1:] == alone.result.injections
    assert both.result.injections[0].op != both.result.injections[1].op


def test_random_numbers_of_the_program_are_left_alone() -> None:
    def program() -> Tensor:
        torch.manual_seed(3)
        np.random.seed(3)
        return torch.rand(4) + F.dropout(torch.ones(4)) * torch.from_numpy(np.random.rand(4))

    plain = program()
    y, tool = injected(program, type="neg")
    assert torch.equal(plain, y)
    y, tool = injected(lambda: (torch.manual_seed(3), torch.rand(4), torch.rand(4))[2], probability=1.0)
    torch.manual_seed(3)
    torch.rand(4)
    assert len(changed(torch.rand(4), y)) == 4
    assert tool.result.total == 8


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fault": "flip"}, "fault is 'flip'; give one of 'bit_flip'"),
        ({"target": "output"}, "target is 'output'"),
        ({"field": "signs"}, "field is 'signs'"),
        ({"probability": 2}, "from 0 to 1"),
        ({"probability": 0.1, "count": 2}, "not both"),
        ({"count": 0}, "count is 0; give an integer >= 1"),
        ({"frequency": 0}, "frequency is 0"),
        ({"start": 3, "end": 2}, "end is 2, start 3"),
        ({"bits": []}, "bits is \\[\\]; give a non-empty list of integers"),
        ({"bits": [1], "fault": "zero"}, "for faults of bits"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_that_make_no_sense_are_errors(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InjectError, match=match):
        InjectTool(**options)


def test_a_result_goes_to_files_and_says_what_it_left_out(tmp_path) -> None:
    _, tool = injected(
        lambda: torch.ones(9).clone(), type="clone", fault="value", value=float("nan"), count=9, limit=4
    )
    content = json.loads(tool.result.save(tmp_path / "faults.json").read_text(), parse_constant=pytest.fail)
    assert (content["schema"], content["injected"], len(content["rows"])) == ("amanda.inject", 9, 4)
    assert content["rows"][0]["new"] == "nan"
    assert "The table has the first 4 elements" in str(tool.result)
    assert tool.result.counts("type") == {"clone": 4}


def test_it_is_loaded_by_name() -> None:
    assert isinstance(amanda.load_tool("inject", fault="zero"), InjectTool)


@pytest.mark.parametrize("target", ["grad_outputs", "grad_inputs", "weight_grads"])
def test_the_word_of_an_op_selects_one_of_its_backward_ops(target: Any) -> None:
    layer, x = nn.Linear(4, 2), torch.rand(3, 4, requires_grad=True)
    tool = InjectTool(type="linear", target=target)
    with amanda.apply(tool):
        for _ in range(3):
            layer(x).sum().backward()
    assert len(tool.result.injections) == 3
    (kind,) = {injection.type for injection in tool.result.injections}
    assert kind == ("transpose_backward" if target == "weight_grads" else "linear_backward")
    both = InjectTool(type=["linear_backward", "transpose_backward"], target="grad_outputs")
    with amanda.apply(both):
        layer(x).sum().backward()
    assert len(both.result.injections) == 2


def test_multi_bit_flips_adjacent_bits() -> None:
    x = torch.zeros(2_000, dtype=torch.int32)  # of which each start is hit
    for flips in (2, 5):
        y, tool = injected(lambda: x.clone(), fault="multi_bit", flips=flips, probability=1.0)
        assert all(
            hit.bits == tuple(range(hit.bits[0], hit.bits[0] + flips)) for hit in tool.result.injections
        )
        assert all(bin(number & 0xFFFFFFFF).count("1") == flips for number in y.tolist())
        assert {hit.bits[0] for hit in tool.result.injections} == set(range(33 - flips))
    assert len(injected(lambda: x.clone(), fault="multi_bit")[1].result.injections[0].bits) == 2
    _, tool = injected(lambda: x.clone(), fault="multi_bit", bits=[3, 5, 7])
    assert not tool.result.injections


def test_a_stuck_lane_is_wrong_at_every_execution_at_the_same_index_and_bit() -> None:
    x, layer = torch.rand(6, 5), nn.Linear(5, 8)
    options = {"fault": "stuck_at_1", "axis": -1, "permanent": True, "field": "exponent", "type": "linear"}
    for seed in range(5):
        outputs, tool = injected(lambda: [layer(x * scale) for scale in (1.0, 1.0)], seed=seed, **options)
        hits = tool.result.injections
        assert len(hits) == 2 * 6
        assert len({hit.element[1] for hit in hits}) == len({hit.bits for hit in hits}) == 1
        lane = hits[0].element[1]
        assert all({element[1] for element in changed(layer(x), output)} <= {lane} for output in outputs)
        assert all(word & 1 << hits[0].bits[0] for word in outputs[0][:, lane].view(torch.int32).tolist())


def test_a_wrong_row_is_another_row() -> None:
    x = torch.arange(40.0).reshape(2, 5, 4)
    for seed in range(20):
        y, tool = injected(lambda: x.clone(), fault="wrong_row", seed=seed)
        (row,) = {hit.element[1] for hit in tool.result.injections}
        sources = [source for source in range(5) if torch.equal(y[:, row], x[:, source])]
        assert len(sources) == 1
        assert sources != [row]
        unchanged = [i for i in range(5) if i != row]
        assert torch.equal(y[:, unchanged], x[:, unchanged])
    y, _ = injected(lambda: x.clone(), fault="wrong_row", axis=0, seed=1)
    assert torch.equal(y[0], y[1])
    assert not injected(lambda: torch.rand(4).clone(), fault="wrong_row")[1].result.injections
    assert not injected(lambda: torch.rand(1, 4).clone(), fault="wrong_row")[1].result.injections


def test_a_share_of_elements_becomes_nan() -> None:
    x = torch.rand(100, 100)
    # Faults depend on the seed and the op's id, and so on the folder of this file: hence 1e-6.
    outputs = [injected(lambda: x.clone(), fault="nan", probability=0.03, seed=seed)[0] for seed in range(5)]
    assert binomtest(sum(int(y.isnan().sum()) for y in outputs), 50_000, 0.03).pvalue > 1e-6
    assert not injected(lambda: torch.ones(3, dtype=torch.int32).clone(), fault="nan")[1].result.injections


def test_slices_have_the_same_bits_and_are_counted_as_one() -> None:
    x = torch.rand(4, 3, 5)

    def program() -> Tensor:
        return x.clone()

    y, tool = injected(program, axis=1, count=2, seed=3)
    hits = tool.result.injections
    assert len(hits) == len(changed(x, y)) == 2 * 4 * 5
    by_slice = {
        hit.element[1]: {injection.bits for injection in hits if injection.element[1] == hit.element[1]}
        for hit in hits
    }
    assert len(by_slice) == 2
    assert all(len(bits) == 1 for bits in by_slice.values())
    assert torch.equal(injected(program, axis=1, count=2, seed=3)[0], y)
    assert not injected(lambda: x.clone(), axis=3)[1].result.injections
