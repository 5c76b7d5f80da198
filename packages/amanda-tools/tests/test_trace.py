"""The traced graph: ops, and the tensors between them, with PyTorch."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.tools.trace import Graph, Op, TraceTool, load


def trace(program: Callable[[], Any], **options: Any) -> Graph:
    tool = TraceTool(**options)
    with amanda.apply(tool):
        program()
    return tool.graph


def named(graph: Graph, *types: str, phase: str = "forward") -> list[Op]:
    return [op for op in graph.ops if op.type in types and op.phase == phase]


def edges(graph: Graph) -> list[tuple[str, str]]:
    """Types of the ops at both ends of each tensor."""
    return [
        (graph.ops[tensor.producer].type, graph.ops[consumer].type)
        for tensor in graph.tensors
        if tensor.producer is not None
        for consumer in tensor.consumers
    ]


def feeds(graph: Graph, first: Op, then: Op) -> bool:
    """Whether what one op makes reaches another."""
    return networkx.has_path(graph.to_networkx(), first.index, then.index)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_ops_tell_their_type_module_line_arguments_and_tensors() -> None:
    model, x = mlp(), torch.rand(3, 4)
    graph = trace(lambda: F.softmax(model(x), dim=-1))
    assert [(op.type, op.module) for op in graph.ops] == [
        ("linear", "0"), ("relu", "1"), ("linear", "2"), ("softmax", "")
    ]  # fmt: skip
    first, last = graph.ops[0], graph.ops[-1]
    assert first.source.startswith(f"{__file__}:")
    assert (first.phase, first.name, first.calls, first.forward) == ("forward", "linear", 1, None)
    assert last.attributes is not None
    assert last.attributes["dim"] == -1
    assert [
        (tensor.kind, tensor.name, tensor.shape, tensor.dtype, tensor.bytes) for tensor in graph.inputs(first)
    ] == [
        ("input", None, (3, 4), "float32", 48),
        ("parameter", "0.weight", (8, 4), "float32", 128),
        ("parameter", "0.bias", (8,), "float32", 32),
    ]
    (output,) = graph.outputs(first)
    assert (output.kind, output.shape, output.producer, output.consumers) == ("activation", (3, 8), 0, (1,))
    assert output.device == "cpu"


def test_tensors_lead_from_the_op_that_makes_them_to_those_that_read_them() -> None:
    x = torch.rand(3, 3)

    def program() -> None:
        y = x.exp()
        (y * y + y.sin()).sum()

    graph = trace(program)
    exp, mul, sin, add, _ = graph.ops
    assert mul.inputs == (exp.outputs[0], exp.outputs[0])
    assert graph.consumers(exp) == (mul, sin)
    assert graph.producers(add) == (mul, sin)
    assert edges(graph) == [
        ("exp", "mul"), ("exp", "sin"), ("mul", "add"), ("sin", "add"), ("add", "sum")
    ]  # fmt: skip


def test_lists_of_tensors_are_one_input_and_several_results_are_several_outputs() -> None:
    x = torch.rand(4, 6)

    def program() -> None:
        a, _, c = x.split(2, dim=1)
        torch.cat([c, a, x], 1)

    split, cat = trace(program).ops
    a, _, c = split.outputs
    assert cat.inputs[0] == (c, a, split.inputs[0])


def test_a_list_of_lists_of_numbers_has_no_tensors() -> None:
    x = torch.rand(2, 2)
    graph = trace(lambda: x.exp().tolist())
    op = graph.ops[-1]
    assert (op.type, graph.outputs(op), graph.consumers(op)) == ("tolist", (), ())


def test_an_lstm_is_one_op_whose_outputs_are_told_apart() -> None:
    lstm, x = nn.LSTM(3, 5), torch.rand(7, 2, 3)

    def program() -> None:
        _, (h, c) = lstm(x)
        (h * 2, c * 3)

    graph = trace(program)
    op, first, second = named(graph, "lstm") + named(graph, "mul")
    shapes = [tensor.shape for tensor in graph.outputs(op)]
    assert shapes == [(7, 2, 5), (1, 2, 5), (1, 2, 5)]
    assert first.reads == (graph.outputs(op)[1].index,)
    assert second.reads == (graph.outputs(op)[2].index,)
    assert {tensor.name for tensor in graph.inputs(op) if tensor.kind == "parameter"} == {
        "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"
    }  # fmt: skip


def test_a_tensor_written_in_place_is_another_one_afterwards() -> None:
    x = torch.rand(3, 3)

    def program() -> None:
        y = x.exp()
        z = F.relu(y, inplace=True)
        (y + z).sum()

    graph = trace(program)
    exp, relu, add, _ = graph.ops
    (written,) = graph.outputs(relu)
    assert relu.in_place
    assert written.alias_of == exp.outputs[0]
    assert add.inputs[:2] == (written.index, written.index)


def test_a_view_shares_the_memory_of_its_base() -> None:
    x = torch.rand(4, 4)
    graph = trace(lambda: x[1:].t().exp())
    rows, turned, exp = graph.ops
    assert graph.outputs(rows)[0].alias_of == rows.reads[0]
    assert graph.outputs(turned)[0].alias_of == rows.outputs[0]
    assert graph.outputs(exp)[0].alias_of is None


def test_what_is_written_through_a_view_reaches_readers_of_its_base() -> None:
    x = torch.rand(4, 4)

    def program() -> None:
        y = x.exp()
        y[1].mul_(2)
        y.sum()

    graph = trace(program)
    exp, _, mul, total = graph.ops
    assert graph.producers(total) == (mul,)
    (base,) = graph.inputs(total)
    assert mul.writes == (base.index,)
    assert base.alias_of == exp.outputs[0]
    assert mul.index in graph.tensors[exp.makes[0]].consumers
    assert feeds(graph, exp, total)


def test_what_is_written_through_a_base_reaches_readers_of_its_views() -> None:
    x = torch.rand(4, 4)

    def program() -> None:
        y = x.exp()
        row = y[1]
        y.mul_(2)
        row.sum()

    graph = trace(program)
    mul, total = named(graph, "mul", "sum")
    assert graph.producers(total) == (mul,)


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_that_do_not_overlap_do_not_depend_on_each_other(axis: int) -> None:
    x = torch.rand(4, 4)

    def program() -> None:
        q, k = x.exp().chunk(2, axis)
        q.mul_(3)
        k.sum()
        q.sum()

    graph = trace(program)
    _, chunk, mul, of_k, of_q = graph.ops
    assert graph.producers(of_k) == (chunk,)
    assert graph.producers(of_q) == (mul,)
    assert not feeds(graph, mul, of_k)


def test_slices_written_one_after_another_all_reach_the_reader() -> None:
    def program() -> None:
        cache = torch.zeros(3, 2)
        rows = [cache[i] for i in range(3)]
        rows[0].add_(0)
        rows[1].add_(1)
        rows[2].add_(2)
        cache.sum()

    graph = trace(program)
    (total,) = named(graph, "sum")
    assert len(named(graph, "add")) == 3
    assert all(feeds(graph, add, total) for add in named(graph, "add"))


def test_an_assignment_to_a_subscript_writes_the_tensor() -> None:
    def program() -> None:
        y = torch.zeros(3)
        y[0] = 1.0
        y.exp()

    graph = trace(program)
    zeros, assigned, exp = graph.ops
    assert (len(assigned.outputs), assigned.writes) == (1, ())
    assert exp.reads == assigned.outputs
    assert zeros.outputs[0] in assigned.reads


def test_running_averages_are_written_by_the_normalisation() -> None:
    norm, x = nn.BatchNorm1d(4), torch.rand(3, 4)
    graph = trace(lambda: (norm(x), norm.running_mean + 1))  # type: ignore[operator]
    (normalised,) = named(graph, "batch_norm")
    names = {graph.tensors[i].name: graph.tensors[i].kind for i in normalised.writes}
    assert names == {"running_mean": "buffer", "running_var": "buffer"}
    assert graph.producers(named(graph, "add")[-1]) == (normalised,)


def test_a_result_given_by_out_is_the_tensor_that_was_written() -> None:
    x, out = torch.rand(3), torch.empty(3)
    graph = trace(lambda: (torch.exp(x, out=out), out.sin()))
    exp, sin = graph.ops
    assert graph.producers(sin) == (exp,)


def test_writes_are_seen_in_the_inference_mode_too() -> None:
    def program() -> None:
        with torch.inference_mode():
            y = torch.rand(3).exp()
            y.mul_(2)
            y[0] = 1.0
            y.sum()

    graph = trace(program)
    _, exp, mul, assigned, total = graph.ops
    assert [graph.producers(op) for op in (mul, assigned, total)] == [(exp,), (mul,), (assigned,)]


def test_ops_within_an_autograd_function_are_between_its_inputs_and_outputs() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * ctx.saved_tensors[0].sign().abs() * 2

    x = torch.rand(3, requires_grad=True)
    graph = trace(lambda: Doubled.apply(x.exp()).sum().backward())
    (function,) = named(graph, "Doubled")
    (total,) = named(graph, "sum")
    assert graph.producers(total) == (function,)
    assert "exp" in [op.type for op in graph.producers(function)]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_tensors_whose_extents_are_no_numbers_have_none(layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
        graph = trace(lambda: nested.sin())
    given, output = graph.tensors
    assert (output.shape, output.bytes) == (None if layout == torch.strided else (2, None, 3), None)
    assert given.consumers == (0,)
    assert Graph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph


def test_sparse_tensors_are_followed() -> None:
    x = torch.eye(3)
    graph = trace(lambda: (x.to_sparse() * 2).to_dense())
    assert edges(graph) == [("to_sparse", "mul"), ("mul", "to_dense")]


def test_arguments_of_any_kind_are_told() -> None:
    class Own(Tensor):
        pass

    x = torch.ones(3)
    graph = trace(lambda: x.as_subclass(Own))
    assert graph.ops[0].attributes is not None
    assert str(graph.ops[0].attributes["cls"]).endswith("Own")


def test_a_second_step_is_counted_at_the_ops_of_the_first() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tool = TraceTool()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()

    with amanda.apply(tool):
        step()
        first = tool.graph
        step()
        step()
    again = tool.graph
    assert [op.calls for op in first.ops] == [1] * len(first.ops)
    assert [op.calls for op in again.ops] == [3] * len(first.ops)
    assert again.tensors == first.tensors


def test_an_op_that_comes_later_finds_what_made_its_inputs_in_that_step() -> None:
    model, batches = mlp(), [torch.rand(3, 4) for _ in range(3)]
    tool = TraceTool()
    with amanda.apply(tool):
        for step, batch in enumerate(batches):
            y = model(batch)
            if step == 2:
                y.exp()
    (exp,) = named(tool.graph, "exp")
    assert tool.graph.producers(exp) == (tool.graph.ops[2],)


def test_a_model_called_on_what_it_made_is_in_the_graph_twice() -> None:
    layer, x = nn.Linear(2, 2), torch.rand(1, 2)

    def program() -> None:
        layer(layer(x)).sum().backward()

    tool = TraceTool()
    with amanda.apply(tool):
        program()
        program()
    first, second = named(tool.graph, "linear")
    assert (first.id, first.calls) == (second.id, second.calls)
    assert tool.graph.producers(second) == (first,)
    backward = named(tool.graph, "linear_backward", phase="backward")
    assert [op.forward for op in backward] == [second.index, first.index]
    assert [op.calls for op in backward] == [2, 2]
    assert tool.graph.producers(backward[1]) == (backward[0],)


def test_the_steps_of_a_recurrent_cell_are_ops_up_to_a_bound() -> None:
    cell, steps = nn.GRUCell(3, 2), torch.rand(5, 1, 3).unbind()

    def program() -> None:
        state = torch.zeros(1, 2)
        for step in steps:
            state = cell(step, state)
        state.sum().backward()

    for executions, count in ((8, 5), (3, 3), (1, 1)):
        graph = trace(program, executions=executions)
        cells = [op for op in graph.ops if op.name == "gru_cell"]
        assert len(cells) == count
        assert sum(op.calls or 0 for op in cells) == 5
        assert all(cells[i] in graph.producers(cells[i + 1]) for i in range(count - 1))


def test_a_generator_and_a_discriminator_are_connected() -> None:
    generator, judge = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizer = torch.optim.Adam(generator.parameters())
    tool = TraceTool()

    def step() -> None:
        real, noise = torch.rand(4, 3), torch.rand(4, 2)
        fake = generator(noise)
        (judge(real).mean() - judge(fake.detach()).mean()).backward()
        judge(fake).mean().backward()
        optimizer.step()

    with amanda.apply(tool):
        step()
        first = len(tool.graph.ops)
        step()
        step()
    linears = [op for op in named(tool.graph, "linear") if "0" not in op.module]
    generated, *judged = linears
    assert len(tool.graph.ops) == first
    assert [tool.graph.producers(op)[0].type for op in judged] == ["rand", "detach", "linear"]
    assert tool.graph.producers(judged[2]) == (generated,)


def test_what_training_adds_up_in_place_does_not_make_the_graph_longer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    tool = TraceTool()
    lengths = []
    with amanda.apply(tool):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.rand(3, 4)).sum().backward()
            optimizer.step()
            lengths.append((len(tool.graph.ops), len(tool.graph.tensors)))
    assert len(set(lengths)) == 1


def test_the_rounds_of_a_loop_are_ops_up_to_a_bound() -> None:
    def program() -> None:
        y = torch.ones(2)
        for _ in range(100):
            y = y * 2

    graph = trace(program)
    products = named(graph, "mul")
    assert 2 < len(products) < 100
    assert sum(op.calls or 0 for op in products) == 100
    assert graph.producers(products[1]) == (products[0],)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_the_same_op(use_reentrant: bool) -> None:
    model, x = mlp(), torch.rand(3, 4, requires_grad=True)

    def program() -> None:
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()

    graph = trace(program)
    last = 1 if use_reentrant else 0  # otherwise torch stops when it has what the backward pass needs
    assert [(op.calls, op.recomputations) for op in named(graph, "linear", "relu")] == [
        (1, 1),
        (1, 1),
        (1, last),
    ]
    backward = named(graph, "linear_backward", "relu_backward", phase="backward")
    assert [graph.ops[op.forward].type for op in backward if op.forward is not None] == [
        "linear", "relu", "linear"
    ]  # fmt: skip


def test_without_gradients_the_forward_graph_is_the_same() -> None:
    model, x = mlp(), torch.rand(3, 4)

    def without() -> None:
        with torch.no_grad():
            model(x)

    plain, bare = trace(lambda: model(x)), trace(without)
    assert edges(plain) == edges(bare)
    assert [op.type for op in bare.ops] == ["linear", "relu", "linear"]


def test_two_models_in_one_scope_stay_apart() -> None:
    first_model, second_model = mlp(), mlp()
    x = torch.rand(3, 4)
    graph = trace(lambda: (first_model(x), second_model(x)))
    assert len(graph.ops) == 6
    assert not feeds(graph, graph.ops[0], graph.ops[5])
    assert len([tensor for tensor in graph.tensors if tensor.name == "0.weight"]) == 2


def test_the_graph_is_the_same_without_the_cache() -> None:
    model, x = mlp(), torch.rand(3, 4)

    def uncached() -> None:
        with amanda.cache_disabled():
            model(x).sum().backward()
            model(x).sum().backward()

    def cached() -> None:
        model(x).sum().backward()
        model(x).sum().backward()

    first, second = trace(cached), trace(uncached)
    assert [(op.type, op.calls) for op in first.ops] == [(op.type, op.calls) for op in second.ops]
    assert edges(first) == edges(second)


def test_ops_over_the_limit_are_counted_and_not_kept() -> None:
    model, x = mlp(), torch.rand(3, 4)
    tool = TraceTool(limit=2)
    with amanda.apply(tool):
        model(x)
        model(x)
    assert [(op.type, op.calls) for op in tool.graph.ops] == [("linear", 2), ("relu", 2)]
    assert tool.graph.dropped == 1
    assert "Not recorded: 1 more op;" in str(tool.result)


def test_an_op_that_raises_leaves_no_trace() -> None:
    x = torch.rand(3, 4)

    def program() -> None:
        with pytest.raises(RuntimeError):
            x @ x
        x.exp().sum()

    graph = trace(program)
    assert [op.type for op in graph.ops] == ["exp", "sum"]
    assert edges(graph) == [("exp", "sum")]


def test_clear_starts_anew() -> None:
    model, x = mlp(), torch.rand(3, 4)
    tool = TraceTool()
    with amanda.apply(tool):
        graphs = []
        for _ in range(2):
            model(x)
            graphs.append(tool.graph)
            tool.clear()
            assert tool.graph.ops == ()
    assert graphs[0] == graphs[1]
    assert len(graphs[0].ops) == 3


@pytest.mark.parametrize("options", [{"executions": 0}, {"limit": 0}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ToolError, match="is 0; give an integer >= 1"):
        TraceTool(**options)  # type: ignore[arg-type]


def test_gradients_lead_through_the_backward_ops() -> None:
    model, x = mlp(), torch.rand(3, 4)
    graph = trace(lambda: model(x).sum().backward())
    linear, relu, _, total = graph.ops[:4]
    (relu_backward,) = named(graph, "relu_backward", phase="backward")
    assert relu_backward.forward == relu.index
    assert graph.backward(relu) == (relu_backward,)
    assert [op.type for op in graph.producers(relu_backward)] == ["linear_backward"]
    assert [op.type for op in graph.consumers(relu_backward)] == ["linear_backward"]
    assert all(graph.tensors[i].kind == "gradient" for i in relu_backward.makes)
    (first,) = [op for op in named(graph, "sum_backward", phase="backward") if op.forward == total.index]
    assert feeds(graph, first, relu_backward)
    assert linear.index == 0


def test_gradients_that_are_added_up_are_all_told() -> None:
    x = torch.rand(3, requires_grad=True)

    def program() -> None:
        y = x.exp()
        (y.sin() + y * y).sum().backward()

    graph = trace(program)
    (backward,) = named(graph, "exp_backward", phase="backward")
    (entering,) = backward.inputs
    assert isinstance(entering, tuple)
    makers = sorted(op.type for op in graph.producers(backward))
    assert makers == ["mul_backward", "sin_backward"]
    assert len(entering) == 3  # both factors of y * y give one


def test_the_optimizer_reads_the_gradients_that_were_accumulated() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, foreach=False)

    x = torch.rand(1, 2)

    def program() -> None:
        layer(x).sum().backward()
        optimizer.step()
        layer.weight.exp()

    graph = trace(program)
    updates = [op for op in graph.ops if op.in_place and op.phase == "optimizer"]
    assert [graph.tensors[op.reads[0]].name for op in updates] == ["weight", "bias"]
    assert [[item.type for item in graph.producers(op)] for op in updates] == [["accumulate_grad"]] * 2
    (later,) = named(graph, "exp")
    assert [(item.kind, item.name) for item in graph.inputs(later)] == [("parameter", "weight")]
    assert graph.producers(later) == (updates[0],)


def test_gradients_of_gradients_are_connected() -> None:
    x = torch.rand(3, requires_grad=True)

    def program() -> None:
        (grad,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        grad.sin().sum().backward()

    graph = trace(program)
    (sin,) = named(graph, "sin")
    assert [op.type for op in graph.producers(sin)] == ["exp_backward"]


def test_backward_ops_are_left_out_on_request() -> None:
    model, x = mlp(), torch.rand(3, 4)
    graph = trace(lambda: model(x).sum().backward(), backward=False)
    assert {op.phase for op in graph.ops} == {"forward"}


def test_training_is_the_same_to_the_bit() -> None:
    def train(*tools: amanda.Tool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 2)
        )
        optimizer = torch.optim.Adam(model.parameters())
        with amanda.apply(*tools):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.rand(6, 4)).square().mean().backward()
                optimizer.step()
        state = [*model.state_dict().values(), torch.get_rng_state()]
        assert not any(vars(parameter) for parameter in model.parameters())
        return state

    assert all(map(torch.equal, train(), train(TraceTool())))


def test_tensors_are_not_kept_alive() -> None:
    model = mlp()
    tool = TraceTool()
    with amanda.apply(tool):
        y = model(torch.rand(3, 4))
        reference = weakref.ref(y)
        y.sum().backward()
        del y
        gc.collect()
        assert reference() is None
        again = weakref.ref(model)
        del model
        gc.collect()
    assert again() is None
    assert len(tool.graph.ops) > 6


def test_the_storage_of_a_tensor_that_is_gone_is_freed() -> None:
    with amanda.apply(TraceTool()):
        y = torch.rand(1000).exp()
        view = y[10:]
        view.mul_(2)
        storage = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
        del y, view
        gc.collect()
        assert storage.expired()


def test_a_new_tensor_is_not_taken_for_one_that_is_gone() -> None:
    tool = TraceTool()
    for i in range(50):
        fresh = torch.full((4,), float(i))  # outside the scope, where an old one was
        with amanda.apply(tool):
            fresh.exp()
        del fresh
        with amanda.apply(tool):
            torch.rand(4).sin()
    exp, *further_ops = named(tool.graph, "exp")
    assert (exp.calls, further_ops) == (50, [])
    assert tool.graph.producers(exp) == ()


class Looker(amanda.Tool):
    """Notes which ops lead to each op."""

    def __init__(self) -> None:
        super().__init__()
        self.producers_by_type: dict[str, list[str]] = {}
        self.above: dict[str, list[str]] = {}
        self.depends_on(TraceTool())
        self.add_inst_for_op(self.look)
        self.add_inst_for_op(self.look_backward, backward=True)

    def look(self, context: amanda.OpContext) -> None:
        graph = context["graph"]
        self.producers_by_type[context["type"]] = [op.type for op in graph.producers(context)]
        self.above[context["type"]] = [op.type for op in graph.ancestors(context)]
        assert graph.op(context) is None
        assert len(graph.graph.ops) == len(self.producers_by_type) - 1

    def look_backward(self, context: amanda.OpContext) -> None:
        graph = context["graph"]
        self.producers_by_type[context["backward_type"]] = [op.type for op in graph.producers(context)]


def test_a_dependent_tool_finds_the_producers_of_an_op() -> None:
    x = torch.rand(3, 3, requires_grad=True)
    looker = Looker()
    with amanda.apply(looker):
        y = x.exp()
        (y.sin() * y).sum().backward()
    producers = looker.producers_by_type
    assert producers["exp"] == []
    assert producers["mul"] == ["sin", "exp"]
    assert looker.above["sum"] == ["mul", "sin", "exp"]
    assert producers["mul_backward"] == ["sum_backward"]
    assert sorted(producers["exp_backward"]) == ["mul_backward", "sin_backward"]


def test_a_dependent_tool_that_changes_outputs_does_not_break_the_graph() -> None:
    class Doubling(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.tracer = TraceTool()
            self.depends_on(self.tracer)
            self.add_inst_for_op(
                lambda context: context.insert_after_op(lambda *y: tuple(output * 2 for output in y))
            )

    tool = Doubling()
    x = torch.rand(3)
    with amanda.apply(tool):
        x.exp().sin()
    assert edges(tool.tracer.graph) == [("exp", "sin")]


def test_a_saved_graph_is_read_back_as_it_was(tmp_path: Path) -> None:
    model, x = mlp(), torch.rand(3, 4)
    tool = TraceTool()
    with amanda.apply(tool):
        model(x).sum().backward()
    path = tool.result.save(tmp_path / "graph.json")
    content = json.loads(path.read_text())
    assert (content["schema"], content["version"], content["executions"]) == ("amanda.trace", 1, 8)
    assert len(content["ops"][0]["id"]) == 16
    assert content["frameworks"] == [f"pytorch/{torch.__version__.split('+')[0]}/eager"]
    assert load(path) == tool.graph


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "amanda.flops", "version": 1}'])
def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(AmandaError, match=r"other\.json"):
        load(path)


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "later.json"
    path.write_text('{"schema": "amanda.trace", "version": 2}')
    with pytest.raises(AmandaError, match="version 2"):
        load(path)


def test_networkx_has_a_node_for_each_op_and_an_edge_for_each_tensor() -> None:
    model, x = mlp(), torch.rand(3, 4)
    graph = trace(lambda: model(x))
    digraph = graph.to_networkx()
    assert networkx.is_directed_acyclic_graph(digraph)
    assert [digraph.nodes[i]["type"] for i in networkx.topological_sort(digraph)] == [
        "linear",
        "relu",
        "linear",
    ]
    assert [(a, b, data["shape"]) for a, b, data in digraph.edges(data=True)] == [
        (0, 1, (3, 8)),
        (1, 2, (3, 8)),
    ]


def test_the_listing_has_a_line_for_each_op() -> None:
    model, x = mlp(), torch.rand(3, 4)
    tool = TraceTool()
    with amanda.apply(tool):
        model(x)
    lines = tool.result.to_text().splitlines()
    assert "  parameter %0.weight: float32[8,4]" in lines
    assert any(line.startswith("  %4: float32[3,8] = relu(%3)  # forward 1, 1, ") for line in lines)


def test_names_in_dot_are_quoted() -> None:
    model = nn.Sequential()
    model.add_module('a"b\\', nn.Linear(2, 2))
    tool, x = TraceTool(), torch.rand(1, 2)
    with amanda.apply(tool):
        model(x)
    text = tool.result.to_dot()
    assert 'label="a\\"b\\\\";' in text
    assert "tensor0 -> op0" in text


def test_model_explorer_is_given_nodes_and_edges_by_their_names(tmp_path: Path) -> None:
    model, x = mlp(), torch.rand(3, 4)
    tool = TraceTool()
    with amanda.apply(tool):
        model(x).sum().backward()
    path = tool.result.save(tmp_path / "graph.model-explorer.json")
    (graph,) = json.loads(path.read_text())["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"])
    for node in nodes.values():
        assert {"id", "label", "namespace"} <= node.keys()
        for edge in node.get("incomingEdges", ()):
            source = nodes[edge["sourceNodeId"]]
            assert edge["sourceNodeOutputId"] in [entry["id"] for entry in source["outputsMetadata"]]
        assert all(isinstance(entry["value"], str) for entry in node["attrs"])
    assert nodes["op0"]["namespace"] == "0"
    assert {node["namespace"].split("/")[0] for node in nodes.values() if "backward" in node["label"]} == {
        "backward"
    }


def test_a_suffix_that_names_no_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AmandaError, match=r"\.csv, \.dot, \.html, \.json, \.txt"):
        TraceTool().result.save(tmp_path / "graph.onnx")


def test_the_table_has_a_row_for_each_op() -> None:
    model, x = mlp(), torch.rand(3, 4)
    tool = TraceTool()
    with amanda.apply(tool):
        model(x)
    frame = tool.result.to_pandas()
    assert list(frame.columns) == ["phase", "type", "module", "source", "inputs", "outputs", "calls"]
    assert frame["outputs"].tolist() == ["float32[3,8]", "float32[3,8]", "float32[3,2]"]
