"""What a null control expects of two runs, the sentence that tells where they part, and what proves it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amanda
from amanda.errors import AmandaError
from amanda.tools.diff import Command, Float64Tool, diff
from amanda.tools.diff._run import open_bundle
from amanda.tools.dump import Dump, DumpTool
from amanda.tools.stats import StatsTool


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


X = torch.linspace(-1, 1, 24).reshape(3, 8)


def with_eps(eps: float) -> nn.Sequential:
    model = small()
    model[1].eps = eps
    return model


def test_float64_finds_an_epsilon_that_the_tolerance_of_float32_hides() -> None:
    assert not diff(small(), with_eps(1.5e-5), X)
    first = diff(small(), with_eps(1.5e-5), X, control="float64").first
    assert first is not None
    assert (first.type, first.module, first.inputs) == ("layer_norm", "1", True)
    assert first.expected is not None
    assert first.expected < 1e-6 < first.relative < 1e-4


def test_float64_expects_what_another_order_of_summation_rounds() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 16, 12, 12), torch.randn(8, 16, 3, 3)

    def another_kernel() -> Tensor:
        torch._C._set_mkldnn_enabled(False)
        try:
            return F.conv2d(x, weight).relu()
        finally:
            torch._C._set_mkldnn_enabled(True)

    pair = (lambda: F.conv2d(x, weight).relu()), another_kernel
    assert not torch.equal(pair[0](), pair[1]())
    assert not diff(*pair, control="float64")
    assert diff(*pair, control="again")


def test_again_expects_no_other_bit_of_a_run_that_repeats_itself() -> None:
    model, other = small(), small()
    other[0].bias.data[0] += 1e-7
    assert not diff(model, small(), X, control="again")
    first = diff(model, other, X, control="again").first
    assert first is not None
    assert (first.module, first.expected, first.tolerance) == ("0", 0.0, 0.0)
    assert first.weight == 0.0


def test_again_expects_what_a_run_does_otherwise_each_time() -> None:
    noise = np.random.default_rng(0)  # which no run starts anew

    def noisy(scale: float) -> Callable[[], Tensor]:
        return lambda: (X + float(noise.normal()) * scale).exp()

    assert diff(noisy(1e-3), noisy(1e-3))
    assert not diff(noisy(1e-3), noisy(1e-3), control="again")
    assert diff(noisy(1e-3), noisy(10.0), control="again")


def test_a_dump_is_a_control(tmp_path: Path) -> None:
    model = small()
    for name, tools in (("a", []), ("control", [Float64Tool()])):
        dump = DumpTool(tmp_path / name, outputs="full")
        with amanda.apply(*tools, dump):
            model(X)
        assert dump.result.entries
    result = diff(tmp_path / "a", with_eps(1.5e-5), X, control=tmp_path / "control")
    assert result.first is not None
    assert result.first.module == "1"


def test_the_precision_of_the_less_precise_run_is_expected_where_it_is_a() -> None:
    less = small().bfloat16()
    cast = lambda: less(X.bfloat16())  # noqa: E731
    assert diff(lambda: small()(X), cast, control="float64")
    assert not diff(cast, lambda: small()(X), control="float64")
    wrong = small()
    wrong[3].bias.data += 0.1
    first = diff(cast, lambda: wrong(X), control="float64").first
    assert first is not None
    assert first.module == "3"


class Rotary(nn.Module):
    """Attention with rotary positions, whose angles have the type of a buffer."""

    def __init__(self, is_exact: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_exact = is_exact
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        dtype = torch.float32 if self.is_exact else self.inverse.dtype
        exact = 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8) if self.is_exact else self.inverse
        angles = torch.outer(torch.arange(tokens.shape[1], dtype=dtype), exact)
        cos, sin = (table.to(x.dtype) for table in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        y = F.scaled_dot_product_attention(rotated, rotated, x, is_causal=True)
        return self.head(x + y)  # type: ignore[no-any-return]


TOKENS = torch.arange(1000).remainder(50)[None]


def test_a_fault_that_comes_with_the_precision_is_found_in_the_advised_order() -> None:
    lower = Rotary().bfloat16()
    result = diff(lambda: lower(TOKENS), lambda: Rotary()(TOKENS), control="float64")
    assert result.first is not None
    assert (result.first.type, result.first.inputs) == ("cos", True)
    assert result.first.relative > 0.3
    assert result.first.expected == 0.008
    exact = Rotary(is_exact=True).bfloat16()
    assert not diff(lambda: exact(TOKENS), lambda: Rotary()(TOKENS), control="float64")
    retyped = diff(lambda: lower(TOKENS), lambda: exact(TOKENS), control="float64").first
    assert retyped is not None
    assert (retyped.type, retyped.dtypes) == ("arange", ("bfloat16", "float32"))


@pytest.mark.parametrize("function", [torch.inner, torch.kron, torch.linalg.solve])
def test_the_control_writes_the_result_that_a_function_is_given(function: Any) -> None:
    x, y = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0))

    def scaled(factor: float) -> Tensor:
        result = torch.zeros(function(x, y).shape)
        function(x.exp(), y, out=result)
        return result * factor

    first = diff(lambda: scaled(1.0), lambda: scaled(1.01), control="float64").first
    assert first is not None
    assert first.type == "mul"
    assert not diff(lambda: scaled(1.0), lambda: scaled(1.0), control="float64")


def test_an_overflow_of_half_precision_is_no_expected_error() -> None:
    def scaled(x: Tensor) -> Tensor:
        return (x * 300).square().mean() / 90000

    x = torch.linspace(1, 2, 12)
    first = diff(lambda: scaled(x.half()), lambda: scaled(x), control="float64").first
    assert first is not None
    assert first.type == "square"


@pytest.mark.parametrize("factor", [-1.0, 0.0])
def test_another_nan_or_inf_behind_an_overflow_is_a_divergence(factor: float) -> None:
    x = torch.full((4,), 2.0).half()

    def scaled(factor: float) -> Callable[[], Tensor]:
        return lambda: (x * 60000) * factor

    result = diff(scaled(1.0), scaled(factor), control="float64")
    assert result.first is not None
    assert (result.first.type, result.first.relative) == ("mul", float("inf"))
    assert max(one.expected or 0.0 for one in result.comparisons) <= 1.0
    assert not diff(scaled(1.0), scaled(1.0), control="float64")


def test_beside_an_overflow_only_finite_numbers_count() -> None:
    x = torch.tensor([2.0, 2.0, 0.5, 0.25]).half()

    def scaled(factor: float) -> Callable[[], Tensor]:
        return lambda: (x * 60000) * factor

    first = diff(scaled(1.0), scaled(1.05), control="float64").first
    assert first is not None
    assert first.expected is not None
    assert first.expected < 1e-3 < first.relative < 0.1


def test_the_distance_of_equal_inputs_from_the_control_explains_no_difference() -> None:
    torch.manual_seed(0)
    x = torch.rand(4) * 1e-3

    def cancelled(factor: int) -> Callable[[], Tensor]:
        return lambda: ((x + 1e4) - 1e4) * factor

    first = diff(cancelled(1), cancelled(3), control="float64").first
    assert first is not None
    assert (first.type, first.inputs, first.expected) == ("mul", True, 0.008)
    indices = lambda pick: lambda: pick((x + 1e4) - 1e4)  # noqa: E731
    first = diff(indices(torch.argmax), indices(torch.argmin), control="float64").first
    assert first is not None
    assert (first.type, first.expected) == ("argmax", 0.0)


def test_gradients_behind_an_equal_forward_pass_explain_no_difference() -> None:
    torch.manual_seed(0)
    x = (torch.rand(4) * 1e-3).requires_grad_()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return y * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            return gradient * ctx.factor, None

    def trained(factor: float) -> Callable[[], Any]:
        return lambda: Scaled.apply((x + 1e4) - 1e4, factor).square().sum().backward()

    first = diff(trained(1.0), trained(3.0), control="float64").first
    assert first is not None
    assert first.phase == "backward"
    assert not diff(trained(1.0), trained(1.0), control="float64")


def test_a_tolerance_of_two_types_is_advised_where_it_helps() -> None:
    pair = (lambda: small()(X)), (lambda: small().bfloat16()(X.bfloat16()))
    assert "pass rtol=0.08 (--rtol 0.08) for the tolerance of bfloat16" in str(diff(*pair))
    assert "pass rtol" not in str(diff(*pair, rtol=1e-3))
    assert "pass rtol" not in str(diff(*pair, rtol=0.08))
    result = diff(*reversed(pair), control="float64")
    assert result.sentence.startswith("No difference beyond the expected error")
    assert "rtol" not in str(result)


def test_a_tolerance_for_all_is_no_expected_error() -> None:
    result = diff(small(), with_eps(1.5e-5), X, control="float64", rtol=0.1)
    assert result.sentence.startswith("No difference beyond the tolerance: ")
    assert "(allowed 0.1)" in result.sentence


def test_an_error_that_grows_step_by_step_is_a_warning() -> None:
    def summed(dtype: torch.dtype) -> Tensor:
        total = torch.zeros((), dtype=dtype)
        for _ in range(600):
            total = total + torch.ones((), dtype=dtype)
        return total

    result = diff(lambda: summed(torch.bfloat16), lambda: summed(torch.float32), control="float64")
    assert not result
    assert ". Warning: a itself is off by 57% from its control, at add" in result.sentence


def test_gradients_of_the_control_do_not_stay_at_the_parameters() -> None:
    model = small().bfloat16()

    def train() -> None:
        model.zero_grad()
        model(X.bfloat16()).float().sum().backward()

    for _ in range(2):
        assert not diff(train, train, control="float64")
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} <= {torch.bfloat16}


class Programs:
    """What a run in float64 has to survive: writes, random numbers, statistics, optimizers, integers."""

    @staticmethod
    def training() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5)
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 3, 8, 8)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert int(model[1].num_batches_tracked) == 2
        model.eval()(torch.randn(2, 3, 8, 8))

    @staticmethod
    def writes() -> None:
        out = torch.zeros(4, 4)
        out[1:3] = torch.randn(2, 4)
        out.index_add_(0, torch.tensor([0, 1]), torch.randn(2, 4))
        out.masked_fill_(out > 0.5, 0.25).addmm_(torch.randn(4, 3), torch.randn(3, 4))
        torch.cumsum(out, 0).sort(-1).values.topk(2).indices.float().mean()

    @staticmethod
    def attention() -> None:
        q = torch.randn(2, 4, 6, 8, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    @staticmethod
    def autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            nn.Linear(4, 4)(torch.randn(2, 4)).softmax(-1)


@pytest.mark.parametrize("name", ["training", "writes", "attention", "autocast"])
def test_a_run_in_float64_is_near_the_run_and_draws_its_numbers(name: str) -> None:
    program = getattr(Programs, name)
    torch.manual_seed(0)
    result = diff(program, program, control="float64")
    assert result.first_difference is None
    errors = [one.expected for one in result.comparisons if one.expected is not None]
    assert len(errors) == len(result.comparisons) > 4
    assert max(errors) < (3e-2 if name == "autocast" else 1e-4)
    assert torch.rand(1).dtype == torch.float32  # nothing of the mode is left
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_every_run_starts_where_the_first_did() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        noise = random.random() + float(np.random.rand())
        (model(X) + torch.randn(3, 8) + noise).square().sum().backward()
        optimizer.step()

    result = diff(step, step, control="again")
    assert result.first_difference is None
    assert {one.phase for one in result.comparisons} == {"forward", "backward", "optimizer"}


def test_the_sentence_names_op_module_line_error_inputs_and_proof(tmp_path: Path) -> None:
    result = diff(small(), with_eps(1e-3), X, control="float64", bisect=True)
    assert result.sentence.startswith("The runs first differ at layer_norm in 1 (forward)")
    for part in (
        "); its inputs agree (input 0: float32[3,16] from ",
        "not one bit of it remains",
    ):
        assert part in result.sentence
    assert str(result).startswith(result.sentence)
    assert result.remaining is not None
    assert not result.remaining
    assert [one.type for one in result.growth] == ["layer_norm", "linear"]
    found = result.to_dict()
    assert (found["sentence"], found["remaining"]) == (result.sentence, result.remaining.sentence)
    assert result.sentence.split(":")[0] in result.to_html()
    assert diff(small(), small(), X).sentence.startswith("No difference: all 4 are the same")


def test_what_remains_is_a_second_difference() -> None:
    other = with_eps(1e-3)
    other[3].bias.data[1] += 0.5
    remaining = diff(small(), other, X, bisect=True).remaining
    assert remaining is not None
    assert remaining.first is not None
    assert (remaining.first.module, remaining.first.inputs) == ("3", False)
    assert "its inputs differ already (parameter 3.bias by " in remaining.sentence
    assert {one.verdict for one in remaining.comparisons[:3]} == {"same"}


def test_a_gradient_is_replaced_too() -> None:
    x = torch.zeros(2, 3, requires_grad=True)  # where the gradient of one is 0, and of the other 1
    relu = lambda: x.mul(2).relu().mul(X[:2, :3]).sum().backward()  # noqa: E731
    clamp = lambda: x.mul(2).clamp(min=0).mul(X[:2, :3]).sum().backward()  # noqa: E731
    result = diff(relu, clamp, bisect=True)
    assert result.first is not None
    assert result.remaining is not None
    assert result.first.phase == "backward"
    assert result.remaining.first_difference is None


def test_loops_have_the_value_of_each_round_in_place() -> None:
    cell, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(cell.state_dict())
    other.bias.data += 0.01

    def program(one: nn.Linear) -> Callable[[], Tensor]:
        def run() -> Tensor:
            x = torch.ones(2, 4)
            for _ in range(5):
                x = one(x).tanh()
            return x

        return run

    result = diff(program(cell), program(other), bisect=True)
    assert result.remaining is not None
    assert result.remaining.first_difference is None
    assert len(result.remaining.comparisons) == 11


def test_a_bundle_is_compared_by_someone_else(tmp_path: Path) -> None:
    path = tmp_path / "found.zip"
    result = diff(small(), with_eps(1.5e-5), X, control="float64", bundle=path)
    with open_bundle(path) as runs:
        assert set(runs) == {"a", "b", "control"}
        again = diff(runs["a"], runs["b"], control=runs["control"])
        assert again.comparisons == result.comparisons
        assert diff(runs["a"], small(), X, control=runs["control"]).first is None
    assert b"pickle" not in path.read_bytes()


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    dump = DumpTool(tmp_path / "dump", outputs="full")
    with amanda.apply(dump):
        small()(X)
    folder = dump.result.folder
    with pytest.raises(AmandaError, match="a is not a program to run; give a dump as the control"):
        diff(folder, small(), X, control="again")
    with pytest.raises(AmandaError, match="bisect runs b again, but b is not a program"):
        diff(with_eps(1e-2), Dump(folder), X, bisect=True)
    with pytest.raises(AmandaError, match="1 inputs were given, and neither a nor b is a function"):
        diff(folder, folder, X)
    (tmp_path / "other.zip").write_bytes(b"PK")
    with pytest.raises(AmandaError, match="is no bundle of amanda diff"), open_bundle(tmp_path / "other.zip"):
        pass
    with pytest.raises(AmandaError, match="ended with status 3"):
        diff(Command("-c 'import sys; sys.exit(3)'"), folder)


def test_a_bundle_that_is_not_written_whole_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, program = tmp_path / "found.zip", small()
    path.write_bytes(b"the one before")
    tool = StatsTool()
    with amanda.apply(tool):
        program(X)
    tool.result.save(tmp_path / "stats.json")
    with pytest.raises(AmandaError, match="a bundle holds dumps, and a is a file of statistics"):
        diff(tmp_path / "stats.json", program, X, bundle=path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ZipFile, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        diff(program, program, X, bundle=path)
    assert path.read_bytes() == b"the one before"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["found.zip", "stats.json"]
