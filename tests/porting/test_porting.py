"""Tools in the manner of the paper's listings and of the tutorial, with the names of the first Amanda.

Each is a program of its own.  A program that has to change raises the error that `CHANGES` names; the page
docs/porting.md says what to write.
"""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from torch import nn

import amanda

PROGRAMS: dict[str, Callable[[], None]] = {}
CHANGES: dict[str, tuple[type[Exception], str]] = {
    "read a weight of a graph at analysis": (AttributeError, "'SymbolicTensor' object has no attribute"),
    "files by amanda.io": (ModuleNotFoundError, "No module named 'amanda.io'"),
}
"""Programs that have to change, and the error that they get."""
PAGE = Path(__file__).parents[2] / "docs" / "porting.md"


def program(function: Callable[[], None]) -> Callable[[], None]:
    """Register a program under its name in words."""
    PROGRAMS[function.__name__.replace("_", " ").replace("amanda io", "amanda.io")] = function
    return function


class Counter(amanda.Tool):
    def __init__(self, op_name: str, backward_op_name: str = "", namespace: str | None = None) -> None:
        super().__init__(**({} if namespace is None else {"namespace": namespace}))
        self.counter = self.backward_counter = 0
        self.op_name, self.backward_op_name = op_name, backward_op_name
        self.add_inst_for_op(self.callback)
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    def callback(self, context: amanda.OpContext) -> None:
        if self.op_name in context.get_op().__name__:
            context.insert_before_op(self.count)

    def backward_callback(self, context: amanda.OpContext) -> None:
        if self.backward_op_name and self.backward_op_name in context.get_backward_op().__name__:
            context.insert_after_backward_op(self.count_backward)

    def count(self, *inputs: Any) -> Any:
        self.counter += 1
        return inputs

    def count_backward(self, *inputs: Any) -> Any:
        self.backward_counter += 1
        return inputs


def network() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)
    return nn.Sequential(*layers), torch.rand(2, 3, 8, 8)


@program
def count_an_op() -> None:
    model, x = network()
    tool = Counter("conv2d")
    with amanda.apply(tool):
        model(x)
    assert tool.counter == 2


@program
def count_backward_ops_by_amanda_tool_apply() -> None:
    model, x = network()
    tool = Counter("conv2d", "Conv")
    with amanda.tool.apply(tool):
        y = model(x)
        y.backward(torch.rand_like(y))
    assert (tool.counter, tool.backward_counter) == (2, 2)


@program
def a_tool_of_one_framework() -> None:
    model, x = network()
    tools = [Counter("conv2d", namespace=one) for one in ("pytorch", "amanda/pytorch", "tensorflow")]
    with amanda.tool.apply(*tools):
        model(x)
    assert [tool.counter for tool in tools] == [2, 2, 0]


@program
def read_the_op_and_its_inputs_by_key() -> None:
    class Shapes(amanda.Tool):
        def __init__(self) -> None:
            super().__init__(namespace="amanda/pytorch")
            self.add_inst_for_op(self.forward)
            self.seen: list[Any] = []

        def forward(self, context: amanda.OpContext) -> None:
            self.seen.append((context["op"].__name__, tuple(context["inputs"][0].shape)))

    model, x = network()
    with amanda.tool.apply(tool := Shapes()):
        model(x)
    assert tool.seen[:2] == [("conv2d", (2, 3, 8, 8)), ("relu", (2, 4, 6, 6))]


@program
def read_outputs_and_backward_ops_by_key() -> None:
    class Graph(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.forward, require_outputs=True)
            self.add_inst_for_op(self.backward, backward=True)
            self.shapes: list[Any] = []
            self.pairs: list[Any] = []

        def forward(self, context: amanda.OpContext) -> None:
            self.shapes += [tuple(one.shape) for one in context["outputs"]]

        def backward(self, context: amanda.OpContext) -> None:
            self.pairs.append((context["op"].__name__, context["backward_op"].__name__))

    model, x = network()
    with amanda.tool.apply(tool := Graph()):
        model(x).sum().backward()
    assert tool.shapes[0] == (2, 4, 6, 6)
    assert ("conv2d", "ConvolutionBackward0") in tool.pairs


@program
def trace_with_keywords_of_a_routine() -> None:
    class Trace(amanda.Tool):
        def __init__(self) -> None:
            super().__init__(namespace="amanda/pytorch")
            self.add_inst_for_op(self.forward)
            self.add_inst_for_op(self.backward, backward=True, require_outputs=False)
            self.lines: list[str] = []

        def forward(self, context: amanda.OpContext) -> None:
            context.insert_before_op(self.dump, None, name=context.get_op().__name__)

        def backward(self, context: amanda.OpContext) -> None:
            name = context.get_backward_op().__name__
            context.insert_before_backward_op(self.dump, None, name=name)

        def dump(self, *inputs: Any, name: str) -> None:
            self.lines.append(name)

    model, x = network()
    with amanda.tool.apply(tool := Trace()):
        model(x).sum().backward()
    assert tool.lines[:2] == ["conv2d", "relu"]
    assert "ConvolutionBackward0" in tool.lines


def torch_type(context: amanda.OpContext) -> None:
    context["type"] = context.get_op().__name__
    if not context.is_forward():
        is_convolution = context.get_backward_op().__name__ == "ConvolutionBackward0"
        context["backward_type"] = "conv2d_backward" if is_convolution else ""


@program
def prune_by_a_mapping_tool() -> None:
    class PruningTool(amanda.Tool):
        def __init__(self) -> None:
            self.depends_on(
                amanda.tools.mapping.MappingTool(  # type: ignore[attr-defined]
                    rules=[["pytorch", torch_type]]
                )
            )
            self.add_inst_for_op(self.instrumentation)
            self.add_inst_for_op(self.backward_instrumentation, backward=True, require_outputs=True)

        def get_mask(self, tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.abs() > tensor.abs().median()).to(tensor.dtype)

        def instrumentation(self, context: amanda.OpContext) -> None:
            if context["type"] in ["conv2d"]:
                mask = self.get_mask(context.get_inputs()[1])
                context["mask"] = mask
                context.insert_before_op(self.mask_weight, inputs=[1], mask=mask)

        def backward_instrumentation(self, context: amanda.OpContext) -> None:
            if context["backward_type"] in ["conv2d_backward"]:
                context.insert_after_backward_op(self.mask_weight, grad_inputs=[1], mask=context["mask"])

        def mask_weight(self, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return weight * mask

    model, x = network()
    with amanda.apply(PruningTool()):
        model(x).sum().backward()
    gradient = model[0].weight.grad
    assert isinstance(gradient, torch.Tensor)
    assert 0.4 < 1 - torch.count_nonzero(gradient) / gradient.numel() < 0.6


@program
def switch_the_cache_by_amanda_cache() -> None:
    from amanda.cache import cache_disabled, cache_enabled, is_cache_enabled

    model, x = network()
    analysed = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: analysed.append(context.get_op_id()))
    with amanda.tool.apply(tool), cache_disabled():
        assert not is_cache_enabled()
        model(x)
        model(x)
        with cache_enabled():
            assert amanda.is_cache_enabled()
    assert len(analysed) == 2 * len(set(analysed))


@program
def switch_instrumentation_off_and_on() -> None:
    model, x = network()
    tool = Counter("conv2d")
    with amanda.tool.apply(tool), amanda.disabled():
        model(x)
        with amanda.enabled():
            model(x)
    assert tool.counter == 2


@program
def inject_an_error_into_outputs() -> None:
    class ErrorInjection(amanda.Tool):
        def __init__(self, modify: Callable[..., Any]) -> None:
            super().__init__(namespace="amanda/pytorch")
            self.add_inst_for_op(self.forward, require_outputs=True)
            self.modify = modify

        def forward(self, context: amanda.OpContext) -> None:
            if context["op"].__name__ == "relu":
                context.insert_after_op(self.modify, outputs=[0], by=2.0)

    model, x = network()
    with amanda.tool.apply(ErrorInjection(lambda output, by: output * 0 + by)):
        y = model[:2](x)
    assert bool((y == 2.0).all())


@program
def replace_an_op() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.replace_op(torch.tanh) if context.get_op().__name__ == "relu" else None
    )
    x = torch.randn(4)
    with amanda.apply(tool):
        y = torch.relu(x)
    assert torch.equal(y, torch.tanh(x))


def graph_of_tensorflow() -> tuple[Any, Any, Any, Any]:
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        weight = tf.compat.v1.get_variable("weight", initializer=tf.ones([4, 2]))
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        y = tf.matmul(x, weight)
    return tf, graph, x, y


def run_graph(tool: amanda.Tool) -> Any:
    tf, graph, x, y = graph_of_tensorflow()
    with amanda.tool.apply(tool), tf.compat.v1.Session(graph=graph) as session:
        session.run(tf.compat.v1.variables_initializer(graph.get_collection("variables")))
        return session.run(y, {x: [[1.0, 2.0, 3.0, 4.0]]})


@program
def count_an_op_of_a_graph() -> None:
    class CountOp(amanda.Tool):
        def __init__(self) -> None:
            super().__init__(namespace="tensorflow")
            self.counter = 0
            self.add_inst_for_op(self.callback)

        def callback(self, context: amanda.OpContext) -> None:
            if context["op"].type == "MatMul":
                context.insert_before_op(self.count)

        def count(self, *inputs: Any) -> Any:
            self.counter += 1
            return inputs

    run_graph(tool := CountOp())
    assert tool.counter == 1


@program
def change_an_input_of_a_graph_by_its_ops() -> None:
    import tensorflow as tf

    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: (
            context.insert_before_op(lambda x: tf.multiply(x, 2.0), inputs=[0])
            if context.get_op().type == "MatMul"
            else None
        )
    )
    assert run_graph(tool).tolist() == [[20.0, 20.0]]


@program
def read_a_weight_of_a_graph_at_analysis() -> None:
    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type == "MatMul":
            context.get_inputs()[1].numpy()

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    run_graph(tool)


@program
def build_the_routine_of_graph_ops() -> None:
    import tensorflow as tf

    def later(*inputs: Any, op: Any) -> Any:
        with tf.control_dependencies([op]):
            return [tf.identity(one) for one in inputs]

    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: (
            context.insert_after_op(later, op=context.get_op()) if context.get_op().type == "MatMul" else None
        )
    )
    run_graph(tool)


@program
def insert_before_an_op_of_a_graph_once_its_outputs_are_known() -> None:
    class Profiler(amanda.Tool):
        def __init__(self) -> None:
            super().__init__(namespace="tensorflow")
            self.events: list[str] = []
            self.add_inst_for_op(self.forward, require_outputs=True)

        def forward(self, context: amanda.OpContext) -> None:
            op = context.get_op()
            if context.namespace == "tensorflow" and op.type == "MatMul":
                assert op.inputs[0].name.startswith("Placeholder")
                assert not op.node_def.attr["transpose_a"].b
                context.insert_before_op(lambda *inputs: self.events.append(f"before {op.name}"))
                context.insert_after_op(lambda *outputs: self.events.append(f"after {op.name}"))

    run_graph(tool := Profiler())
    assert tool.events == ["before MatMul", "after MatMul"]


@program
def files_by_amanda_io() -> None:
    importlib.import_module("amanda.io.file").ensure_dir("trace.txt")


CHECKOUT = {
    "src/examples/__init__.py": "",
    "src/examples/count/pytorch/tool.py": """
        import amanda
        import no_such_package
        from amanda.io.file import ensure_dir

        @no_such_package.command()
        def main(): ...

        class Counts(amanda.Tool):
            def __init__(self, op_name):
                super().__init__(namespace="amanda/pytorch")
                self.file = ensure_dir("folder/file")
                self.add_inst_for_op(lambda context: context.insert_before_op(self.count))

            def count(self, *inputs): ...

        class Logs(Counts, amanda.Tool):
            def count(self, *inputs):
                no_such_package.log(inputs)

        class Events(amanda.Tool):
            def __init__(self):
                self.register_event(amanda.event.before_op_executed, self.test)

            def test(self, context: amanda.EventContext): ...

        class Calls(amanda.Tool):
            def __init__(self):
                self.register_event(amanda.event.on_op_call, self.test)

            def test(self, context): ...

        class Fails(amanda.Tool):
            def __init__(self):
                self.add_inst_for_op(lambda context: context.get_inputs()[7])
        """,
    "README.md": """
        ```python
        class Idle(amanda.Tool):
            def __init__(self):
                self.add_inst_for_op(self.analyse, backward=True)
                super().__init__(namespace="label")

            def analyse(self, context): ...
        ```
        """,
}
"""Files of a checkout in the manner of the first Amanda's."""


def test_the_count_says_why_a_tool_does_not_run(tmp_path: Path) -> None:
    for name, text in CHECKOUT.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).replace("```python\n", "```python\nimport amanda\n"))
    script = Path(__file__).with_name("count.py")
    ran = children.run([sys.executable, script, tmp_path, "--least", "0.5"])
    kinds = {line[23:].split()[0]: line[:22].strip() for line in ran.stdout.splitlines() if ":" in line[23:]}
    found = {name: kinds.get(name) for name in ("Counts", "Logs", "Events", "Calls", "Fails", "Idle")}
    assert found == {
        "Counts": "runs", "Logs": "missing package", "Events": "fault of the original",
        "Calls": "no counterpart", "Fails": "error", "Idle": "did nothing",
    }, ran.stdout + ran.stderr  # fmt: skip
    assert "1 of 4 tools that can run do run (6 in all)" in ran.stdout
    assert ran.returncode == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_is_written(name: str) -> None:
    if "graph" in name:
        pytest.importorskip("tensorflow")
    if name not in CHANGES:
        PROGRAMS[name]()
        return
    kind, part = CHANGES[name]
    with pytest.raises(kind, match=re.escape(part)):
        PROGRAMS[name]()


def test_the_page_has_the_number() -> None:
    found = re.search(r"(\d+) of (\d+) programs", PAGE.read_text())
    assert found is not None
    assert (int(found[1]), int(found[2])) == (len(PROGRAMS) - len(CHANGES), len(PROGRAMS))
