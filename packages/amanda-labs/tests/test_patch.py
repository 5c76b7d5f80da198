import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import children
import pytest

import amanda
from amanda.errors import ArtefactError
from amanda.tools.patch import PatchError, PatchTool, patch_sweep

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any, scale: Any = None) -> Any:
        hidden = self.inner(x).relu_()
        return self.outer(hidden) + x, {"hidden": hidden}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.last = nn.Identity()

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)[0]
        return self.last(x)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x() -> Any:
    return torch.rand(2, 3, 4)


@pytest.fixture
def vector() -> Any:
    return torch.rand(4)


def by_hand(module: Any, hook: Any, run: Any, before: bool = False) -> Any:
    """Run with a forward hook, or a pre-hook, on one module."""
    handle = (module.register_forward_pre_hook if before else module.register_forward_hook)(hook)
    try:
        return run()
    finally:
        handle.remove()


def under(tool: Any, run: Any, **options: Any) -> Any:
    with amanda.apply(tool, **options):
        return run()


def test_a_vector_added_to_what_a_module_returns_equals_a_hook(model: Any, x: Any, vector: Any) -> None:
    def hook(module: Any, args: Any, result: Any) -> Any:
        return result[0] + vector, result[1]

    expected = by_hand(model.layers[1], hook, lambda: model(x))
    tool = PatchTool("layers.1", add=vector)
    for _ in range(2):
        assert torch.equal(under(tool, lambda: model(x)), expected)
    assert [(record.point, record.executions, record.changed) for record in tool.result.patched] == [
        ("layers.1", 2, 2)
    ]
    assert not torch.equal(model(x), expected)
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("mode", ["eager", "instrument"])
def test_compiled_models_are_patched_alike(model: Any, x: Any, vector: Any, mode: Any) -> None:
    tool = PatchTool("layers.*", add=vector, positions=[0, -1])

    def hook(module: Any, args: Any, result: Any) -> Any:
        changed = result[0].clone()
        changed[:, [0, 2]] += vector
        return changed, result[1]

    def run() -> Any:
        return by_hand(model.layers[1], hook, lambda: model(x))

    expected = by_hand(model.layers[0], hook, run)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(under(tool, lambda: compiled(x), compiled=mode), expected)
    assert sum(record.changed for record in tool.result.patched) == 2
    whole = PatchTool("", scale=2.0)
    assert torch.equal(under(whole, lambda: compiled(x), compiled=mode), model(x) * 2)


def test_saved_values_are_set_in_another_run(model: Any, x: Any) -> None:
    other_x, clean = torch.rand(2, 3, 4), PatchTool("layers.0")
    expected = under(clean, lambda: model(x))
    assert torch.equal(clean.saved["layers.0"][0], model.layers[0](x)[0])
    patched = under(PatchTool("layers.0", set=clean), lambda: model(other_x))
    assert torch.equal(patched, expected)

    def hook(module: Any, args: Any, result: Any) -> Any:
        changed = result[0].clone()
        changed[:, 1] = clean.saved["layers.0"][0][:, 1]
        return changed, result[1]

    patched_row = under(PatchTool("layers.0", set=clean, positions=1), lambda: model(other_x))
    assert torch.equal(patched_row, by_hand(model.layers[0], hook, lambda: model(other_x)))


def test_a_saved_value_is_not_what_is_written_later(model: Any, x: Any) -> None:
    tool = PatchTool("layers.0.inner")
    under(tool, lambda: model(x))
    assert torch.equal(tool.saved["layers.0.inner"][0], model.layers[0].inner(x))  # relu_ writes into it
    assert (tool.saved["layers.0.inner"][0] < 0).any()


def test_index_names_one_of_several_tensors(model: Any, x: Any) -> None:
    tool = PatchTool("layers.1", index=1)
    under(tool, lambda: model(x))
    expected = model.layers[1](model.layers[0](x)[0])[1]["hidden"]
    assert torch.equal(tool.saved["layers.1[1]"][0], expected)
    both = PatchTool("layers.1", index=None)
    under(both, lambda: model(x))
    assert list(both.saved) == ["layers.1", "layers.1[1]"]


def test_a_module_that_executes_no_op_has_a_point(model: Any, x: Any) -> None:
    assert torch.equal(under(PatchTool("last", scale=0.5), lambda: model(x)), model(x) * 0.5)


def test_heads_at_the_input_of_a_module_are_ablated(model: Any, x: Any) -> None:
    def zero(module: Any, args: Any) -> Any:
        changed = args[0].clone()
        changed[..., 2:4] = 0
        return (changed,)

    expected = by_hand(model.layers[1].outer, zero, lambda: model(x), before=True)
    tool = PatchTool("layers.1.outer", side="input", set=0, heads=1, num_heads=4)
    assert torch.equal(under(tool, lambda: model(x)), expected)

    clean = PatchTool("layers.1.outer", side="input")
    under(clean, lambda: [model(x), model(x * 2)])
    mean = (
        torch.cat([value.double() for value in clean.saved["layers.1.outer"]])
        .mean((0, 1), keepdim=True)
        .float()
    )
    assert torch.allclose(clean.mean()["layers.1.outer"], mean, rtol=1e-6)

    def means(module: Any, args: Any) -> Any:
        changed = args[0].clone()
        changed[..., -2:] = clean.mean()["layers.1.outer"][..., -2:]
        return (changed,)

    expected = by_hand(model.layers[1].outer, means, lambda: model(x), before=True)
    tool = PatchTool("layers.1.outer", side="input", set=clean.mean(), heads=-1, num_heads=4)
    assert torch.equal(under(tool, lambda: model(x)), expected)


def test_a_module_names_the_points_of_all_that_lies_in_it(model: Any, x: Any) -> None:
    tool = PatchTool(module="layers.0")
    under(tool, lambda: model(x))
    assert sorted(tool.saved) == ["layers.0", "layers.0.inner", "layers.0.outer"]
    tool = PatchTool(module="layers", exclude=["layers.1", "*.outer"])
    under(tool, lambda: model(x))
    assert sorted(tool.saved) == ["layers.0", "layers.0.inner"]
    tool = PatchTool("layers.*", exclude="layers.1")
    under(tool, lambda: model(x))
    assert sorted(tool.saved) == ["layers.0"]
    tool = PatchTool(type="linear", module="layers.0", exclude="layers.0.inner")
    under(tool, lambda: model(x))
    assert sorted(tool.saved) == ["layers.0.outer/linear"]
    sweep = patch_sweep(lambda: model(x).sum(), module="layers.0", exclude="*.inner", scale=0)
    assert [row[0] for row in sweep.rows()] == ["layers.0.outer", "layers.0"]


def test_a_pattern_without_a_point_is_named(model: Any, x: Any) -> None:
    tool = PatchTool(["layers.0", "layer.1"], exclude="lost")
    with amanda.apply(tool) as scope:
        model(x)
    sentences = [
        "no point was selected by points=layer.1; did you mean layers.1 or layers.1.outer?",
        "no op was excluded by exclude=lost; there were layers.0",
    ]
    assert [entry.reason for entry in scope.report] == sentences
    assert len(tool.result.remarks) == 2


def test_ops_are_points_by_type(model: Any, x: Any) -> None:
    tool = PatchTool("layers.0", type="relu", scale=0.0)
    patched = under(tool, lambda: model(x))
    changed = copy.deepcopy(model)
    changed.layers[0].outer.weight.data.zero_()
    assert torch.equal(patched, changed(x))
    inputs_tool = PatchTool("layers.0.outer", type="linear", side="input")
    under(inputs_tool, lambda: model(x))
    assert torch.equal(inputs_tool.saved["layers.0.outer/linear"][0], model.layers[0].inner(x).relu())


def test_without_an_index_every_output_of_an_op_is_a_point(x: Any) -> None:
    tool = PatchTool(type="unbind", index=None)
    under(tool, lambda: [rows.unbind() for rows in (x[:1], x, x[:, :1])])
    (base,) = {point.removesuffix("[1]") for point in tool.saved}
    assert [list(value.shape) for value in tool.saved[base]] == [[3, 4], [3, 4], [1, 4]]
    assert torch.equal(tool.saved[f"{base}[1]"][0], x[1])
    assert [record.executions for record in tool.result.patched] == [3, 2]

    values, indices = under(PatchTool(type="topk", index=None, scale=0), lambda: x.topk(2))
    assert not values.any()
    assert not indices.any()
    vector = torch.ones((), requires_grad=True)
    adding = PatchTool(type="unbind", index=None, add=vector, differentiable=True)
    under(adding, lambda: torch.stack(x.unbind()).sum().backward())
    assert vector.grad == x.numel()


def test_an_index_counts_the_inputs_in_a_list(x: Any) -> None:
    for index in range(3):
        parts = [x, x + 1, x + 2]
        expected = torch.cat([part * 0 if i == index else part for i, part in enumerate(parts)])
        tool = PatchTool(type="cat", side="input", index=index, scale=0)
        assert torch.equal(under(tool, lambda parts=parts: torch.cat(parts)), expected)
    assert not under(
        PatchTool(type="cat", side="input", index=None, scale=0), lambda: torch.cat([x, x])
    ).any()


def test_the_index_of_an_output_that_an_op_lacks_is_an_error_with_their_number(x: Any) -> None:
    with pytest.raises(PatchError, match=r"index is 2 and /topk has 2 outputs, .* or None for all"):
        under(PatchTool(type="topk", index=2), lambda: x.topk(2))


def test_the_index_of_an_input_that_an_op_lacks_is_an_error_with_their_number(x: Any) -> None:
    with pytest.raises(PatchError, match=r"index is 3 and /relu has 1 input, .* or None for all"):
        under(PatchTool(type="relu", side="input", index=3), lambda: x.relu())


def test_gradients_reach_a_vector_where_asked(model: Any, x: Any, caplog: Any) -> None:
    vector = torch.rand(4, requires_grad=True)
    under(PatchTool("layers.0", add=vector, differentiable=True), lambda: model(x).sum().backward())
    patched_gradient, vector.grad = vector.grad, None
    by_hand(
        model.layers[0], lambda module, args, result: (result[0] + vector, result[1]),
        lambda: model(x).sum().backward(),
    )  # fmt: skip
    assert torch.equal(patched_gradient, vector.grad)
    assert not caplog.records

    compiled = torch.compile(model, backend="aot_eager")
    expected, vector.grad = vector.grad, None
    tool = PatchTool("layers.0", add=vector, differentiable=True)
    under(tool, lambda: compiled(x).sum().backward(), compiled="instrument")
    assert torch.equal(expected, vector.grad)

    tool = PatchTool("layers.0", add=vector)
    assert "requires a gradient and gets none" in tool.result.remarks[0]
    tool = PatchTool("layers.0", add=vector, differentiable=True)
    with torch.no_grad():
        under(tool, lambda: model(x))
    assert tool.result.remarks == ["No gradient reaches the value of add: autodiff is off at layers.0."]


def test_saved_values_keep_their_gradient_where_asked(model: Any, x: Any) -> None:
    tool = PatchTool("layers.0", differentiable=True)
    under(tool, lambda: model(x))
    tool.saved["layers.0"][0].sum().backward()
    assert model.layers[0].inner.weight.grad is not None


def test_a_result_stays_as_it_is_while_the_tool_counts_on_and_after_clear(model: Any, x: Any) -> None:
    tool = PatchTool("layers.*", scale=0.0)
    under(tool, lambda: model(x))
    result = tool.result
    rows = result.rows()
    under(tool, lambda: model(x))
    tool.clear()
    assert result.rows() == rows
    assert {(record.executions, record.changed) for record in result.patched} == {(1, 1)}


def test_steps_choose_executions(model: Any, x: Any) -> None:
    tool = PatchTool("layers.0", scale=0.0, steps=[1])
    first, second, third = under(tool, lambda: [model(x), model(x), model(x)])
    assert torch.equal(first, model(x))
    assert torch.equal(third, model(x))
    assert not torch.equal(second, first)
    absent = PatchTool("layers.0", scale=0.0, positions=7)
    assert torch.equal(under(absent, lambda: model(x)), model(x))
    assert "At 1 execution no selected position existed." in absent.result.notes()


def test_a_sweep_has_a_table_and_a_picture(model: Any, x: Any, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    clean, other_x = PatchTool("layers.*"), torch.rand(2, 3, 4)
    under(clean, lambda: model(x))
    sweep = patch_sweep(lambda: model(other_x).sum(), "layers.*", set=clean, positions=range(3))
    assert sweep.baseline == model(other_x).sum().item()
    expected = under(PatchTool("layers.1", set=clean, positions=2), lambda: model(other_x).sum().item())
    assert sweep.rows()[-1] == ("layers.1", 2, expected)
    assert len(sweep.to_pandas()) == 6
    assert sweep.to_dict()["baseline"] == sweep.baseline
    for suffix in ("svg", "png", "json"):
        assert sweep.save(tmp_path / f"sweep.{suffix}").stat().st_size > 100
    assert patch_sweep(lambda: model(x).sum(), "*", scale=0).rows()[0][0] == "last"  # not the model itself
    assert [row[0] for row in patch_sweep(lambda: model(x).sum(), "layers.*", scale=0).rows()] == [
        "layers.0", "layers.1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"positions": []}, {"positions": range(0)}, {"heads": [], "num_heads": 2}]
)
def test_a_sweep_of_no_place_is_an_error(model: Any, x: Any, options: Any) -> None:
    with pytest.raises(PatchError, match="give at least one, or None for whole modules"):
        patch_sweep(lambda: model(x).sum(), "layers.*", scale=0, progress=False, **options)


def failing_metric() -> Any:
    """Return a metric that raises where the intervention makes it negative."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.rand(1, 3, 4)

    def metric() -> float:
        with torch.no_grad():
            total = float(model(x).sum())
        if total < 0:
            raise ValueError("negative")
        return total

    return metric


@pytest.mark.slow
def test_a_sweep_is_equal_for_any_number_of_processes() -> None:
    sweeps = [
        patch_sweep(failing_metric(), "*", add=0.5, positions=range(3), jobs=jobs, progress=False)
        for jobs in (None, 2, 4)
    ]
    assert sweeps[0].to_dict() == sweeps[1].to_dict() == sweeps[2].to_dict()
    assert len({row[2] for row in sweeps[0].rows()}) > 4
    pid, x = os.getpid(), torch.ones(2)
    layer = nn.Identity()

    def metric() -> Any:
        return layer(x).sum() * (1 if os.getpid() == pid else 2)

    with pytest.raises(PatchError, match=r"in another process the metric .* is 4 at 1 points instead of 2"):
        patch_sweep(metric, "", scale=0, jobs=2, progress=False)


def test_a_metric_that_raises_leaves_the_others(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    metric = failing_metric()
    sweep = patch_sweep(metric, "*", add=-2.0, progress=False)
    failed = [row for row in sweep.rows() if row[1] is None]
    assert 0 < len(failed) < 3
    assert sweep.errors == {row[0]: "ValueError: negative" for row in failed}
    assert f"No metric at {failed[0][0]}: ValueError: negative." in str(sweep)
    sweep.save(tmp_path / "sweep.svg")


def test_a_sweep_goes_on_from_its_file(tmp_path: Any) -> None:
    metric, calls, path = failing_metric(), [], tmp_path / "sweep.jsonl"

    def counted() -> float:
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return metric()

    options: dict[str, Any] = {"positions": range(3), "add": torch.full((4,), 0.5), "progress": False}
    whole = patch_sweep(metric, "*", **options)
    with pytest.raises(KeyboardInterrupt):
        patch_sweep(counted, "*", resume=path, **options)
    assert patch_sweep(counted, "*", resume=path, **options).to_dict() == whole.to_dict()
    assert len(calls) == 5 + 1 + 6
    with pytest.raises(ArtefactError, match="options was"):
        patch_sweep(metric, "*", resume=path, **options | {"add": torch.zeros(4)})


def test_filters_of_warnings_that_a_program_sets_in_a_scope_stay(model: Any, x: Any) -> None:
    with warnings.catch_warnings():
        filters = list(warnings.filters)
        with amanda.apply(PatchTool("layers.0"), PatchTool("layers.1", side="input")):
            model(x)
            warnings.filterwarnings("ignore", "of the program")
        warnings.warn("of the program", stacklevel=1)
        assert warnings.filters[1:] == filters


def test_nothing_selected_is_an_error_that_names_modules(model: Any, x: Any) -> None:
    with pytest.raises(PatchError, match=r"points=layer\.1 .* there are the modules .*layers\.1"):
        under(PatchTool("layer.1", scale=0.0), lambda: model(x))
    with pytest.raises(ZeroDivisionError):  # not hidden by the error of the tool
        under(PatchTool("layer.1", scale=0.0), lambda: [model(x), 1 / 0])
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no points and no type"),
        ({"module": "a", "add": 1, "scale": 2}, "add and scale are given"),
        ({"module": "a", "heads": 0, "set": 0}, "give num_heads, the number of all heads"),
        ({"module": "a", "heads": 4, "num_heads": 4, "set": 0}, "heads has 4"),
        ({"module": "a", "positions": 0}, "saved whole"),
        ({"module": "a", "side": "inputs"}, "give 'input' or 'output'"),
    ],
)
def test_options_that_do_not_go_together(options: Any, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        PatchTool(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"set": torch.zeros(5)}, r"shape \(5,\) and does not fit layers.0, whose shape is \(2, 3, 4\)"),
        ({"add": torch.zeros(4, 2, 3, 4)}, "does not fit layers.0, whose shape is"),
        ({"set": {"layers.1": 0}}, "no value for layers.0; it has layers.1"),
        ({"set": []}, r"set is \[\]; give a number"),
        ({"set": 0, "heads": 0, "num_heads": 3}, "3 heads do not divide it"),
        ({"set": 0, "positions": 0, "axis": 3}, "lacks axis 3"),
    ],
)
def test_values_that_do_not_fit(model: Any, x: Any, options: Any, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        under(PatchTool("layers.0", **options), lambda: model(x))


@pytest.mark.parametrize("edit", ["set", "add", "scale"])
@pytest.mark.parametrize("positions", [None, -1])
@pytest.mark.parametrize("length", [1, 5])
def test_a_value_saved_at_another_length_is_an_error(
    model: Any, edit: str, positions: int | None, length: int
) -> None:
    clean = PatchTool("layers.0")
    under(clean, lambda: model(torch.rand(1, length, 4)))
    tool = PatchTool("layers.0", **{edit: clean}, positions=positions)
    message = rf"shape \(1, {length}, 4\) and does not fit layers.0, whose shape is \(1, 3, 4\), at"
    with pytest.raises(PatchError, match=message):
        under(tool, lambda: model(torch.rand(1, 3, 4)))
    last_token = PatchTool("layers.0", **{edit: clean.saved["layers.0"][0][:, -1:]}, positions=positions)
    under(last_token, lambda: model(torch.rand(2, 3, 4)))
    assert last_token.result.patched[0].changed == 1


def test_a_saved_prompt_is_set_in_each_row_of_a_batch(model: Any) -> None:
    clean, batch = torch.rand(1, 3, 4), torch.rand(2, 3, 4)
    saved = PatchTool("layers.0")
    expected = under(saved, lambda: model(clean))
    patched = under(PatchTool("layers.0", set=saved), lambda: model(batch))
    assert torch.equal(patched, expected.expand_as(patched))


def test_inputs_by_keyword_are_named_in_the_error() -> None:
    class Keyword(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.b(input=self.a(x))

    with pytest.raises(PatchError, match="gives them by keyword: select the output of what makes them"):
        under(PatchTool("b", side="input"), lambda: Keyword()(torch.rand(2, 4)))


PROGRAM = """
import torch

print(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Identity())(torch.ones(1, 2)).tolist())
"""


@pytest.mark.slow
def test_a_framework_that_the_program_imports_in_the_scope_has_points(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "amanda", "run", "-t", "patch:module=0,set=0", "--", "program.py"]
    done = children.run(command, cwd=tmp_path, check=True)
    assert "[[0.0, 0.0]]" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("side", ["input", "output"])
def test_a_model_compiled_with_fullgraph_is_steered_as_by_hooks(model: Any, x: Any, side: Any) -> None:
    expected = under(PatchTool("layers.0", side=side, add=1.0), lambda: model(x))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with amanda.apply(PatchTool("layers.0", side=side, add=1.0), compiled="instrument") as scope:
        output = compiled(x)
    assert torch.allclose(output, expected, atol=1e-6)
    assert not list(scope.report)


@pytest.mark.slow
def test_generate_is_steered_as_by_hooks(torchvision: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids, vector = torch.randint(0, 64, (2, 7)), torch.randn(32) * 3

    def generate() -> Any:
        return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)

    def every(module: Any, args: Any, result: Any) -> Any:
        return result + vector

    expected = by_hand(model.model.layers[1], every, generate)
    assert torch.equal(under(PatchTool("model.layers.1", add=vector), generate), expected)
    assert not torch.equal(generate(), expected)

    def last_of_prompt(module: Any, args: Any, result: Any) -> Any:
        changed = result.clone()
        if result.shape[1] > 1:
            changed[:, -1] += vector
        return changed

    expected = by_hand(model.model.layers[1], last_of_prompt, generate)
    tool = PatchTool("model.layers.1", add=vector, positions=-1, steps=0)
    assert torch.equal(under(tool, generate), expected)
    assert [(record.executions, record.changed) for record in tool.result.patched] == [(6, 1)]


def test_saved_values_are_shown_by_their_shapes() -> None:
    tool = PatchTool("0")
    with amanda.apply(tool):
        nn.Sequential(nn.Linear(4, 8))(torch.rand(2, 4))
    assert repr(tool.saved) == "{'0': [float32[2, 8]]}"
