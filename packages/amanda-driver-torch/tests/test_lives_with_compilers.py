"""torch.compile, TorchScript, tracing and function transforms in a scope: correct, or said."""

import sys
from typing import Any

import children
import pytest
import torch

import amanda

warnings = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


X = torch.linspace(-1, 1, 20).reshape(5, 4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_callables_run_op_by_op_in_a_scope_and_compiled_after_it(op_log: Any, backend: str) -> None:
    from torch._dynamo.backends.registry import lookup_backend

    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(network(), backend=counting)
    bare = compiled(X)
    before = len(graphs)
    with amanda.apply(op_log):
        output = compiled(X)
        inside = torch.compile(lambda x: torch.relu(x) + 1, backend=counting)
        inside(X)
    assert torch.equal(output, bare)
    assert op_log.names == ["linear", "relu", "linear", "relu", "__add__"]
    assert len(graphs) == before
    assert torch.equal(compiled(X), bare)
    assert len(graphs) == before
    inside(X)
    assert len(graphs) == before + 1


def test_the_stance_is_restored_after_an_exception() -> None:
    import torch._dynamo.eval_frame as frames

    before = repr(frames._stance)
    inside = ""
    try:
        with amanda.apply(amanda.Tool()):
            inside = repr(frames._stance)
            raise KeyError
    except KeyError:
        pass
    assert "force_eager" in inside
    assert repr(frames._stance) == before


@pytest.mark.slow
def test_a_scope_does_not_import_the_compiler() -> None:
    program = (
        "import amanda, torch, sys\n"
        "with amanda.apply(amanda.Tool()): torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
        "print('torch._dynamo' in sys.modules)\n"
        "with amanda.apply(amanda.Tool()):\n"
        "    import torch._dynamo\n"
        "    print('force_eager' in repr(torch._dynamo.eval_frame._stance))\n"
        "print('force_eager' in repr(torch._dynamo.eval_frame._stance))\n"
    )
    done = children.run([sys.executable, "-c", program], check=True)
    assert done.stdout.split() == ["False", "True", "False"]


@warnings
def test_a_scripted_function_is_one_op_and_said_once(
    harmless: amanda.Tool, op_log: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = torch.jit.script(network())
    bare = scripted(X)
    with amanda.apply(harmless) as scope:
        for _ in range(3):
            output = scripted(X)
            output.sum().backward()
    assert torch.equal(output, bare)
    assert [entry.what for entry in scope.report] == ["inside of TorchScript forward"]
    assert caplog.text.count("inside of TorchScript") == 1
    with amanda.apply(op_log):
        scripted(X)
    assert op_log.names == ["forward"]


@warnings
def test_tracing_in_a_scope_records_the_program_and_no_tool(harmless: amanda.Tool) -> None:
    bare = torch.jit.trace(network(), X)
    with amanda.apply(harmless) as scope:
        traced = torch.jit.trace(network(), X)
    assert traced.code == bare.code
    assert "torch.jit.trace" in [entry.what for entry in scope.report]


def test_symbolic_tracing_and_export_record_the_program_and_no_tool(harmless: amanda.Tool) -> None:
    bare = torch.fx.symbolic_trace(network()).code
    exported = [node.name for node in torch.export.export(network(), (X,)).graph.nodes]
    with amanda.apply(harmless):
        assert torch.fx.symbolic_trace(network()).code == bare
        again = torch.export.export(network(), (X,))
    assert [node.name for node in again.graph.nodes] == exported


@warnings
def test_function_transforms_are_correct_and_nothing_is_reported(harmless: amanda.Tool) -> None:
    from torch.func import functional_call, grad, hessian, jvp, vmap

    net = network()
    parameters = dict(net.named_parameters())

    def loss(values: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, values, (x,)).square().sum()

    def transformed() -> list[torch.Tensor]:
        return [
            grad(loss)(parameters, X)["0.weight"],
            vmap(lambda row: net(row[None])[0])(X),
            vmap(grad(loss), in_dims=(None, 0))(parameters, X[:, None])["2.weight"],
            jvp(lambda x: net(x).sum(), (X,), (torch.ones_like(X),))[1],
            hessian(lambda x: net(x).square().sum())(X[0]),
        ]

    bare = transformed()
    with amanda.apply(harmless) as scope:
        for _ in range(2):
            assert all(map(torch.equal, bare, transformed()))
    assert scope.report == []


@pytest.mark.slow
def test_work_compiled_after_a_scope_in_which_the_compiler_was_loaded_is_compiled() -> None:
    program = (
        "import amanda, torch\n"
        "net, x = torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
        "with amanda.apply(amanda.Tool()):\n"
        "    torch.export.export(net, (x,))\n"
        "    torch.compile(net, backend='eager')(x)\n"
        "print(torch.equal(torch.compile(net, backend='eager', fullgraph=True)(x), net(x)))\n"
    )
    done = children.run([sys.executable, "-c", program], check=True)
    assert done.stdout.split() == ["True"]
