"""Tools that look, on programs of torch.func: every sample of a vmap is counted and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.func import (  # noqa: E402
    functional_call,
    grad,
    hessian,
    jacfwd,
    jvp,
    stack_module_state,
    vmap,
)

import amanda  # noqa: E402
from amanda.tools.diff import diff  # noqa: E402
from amanda.tools.dump import Dump, DumpTool  # noqa: E402
from amanda.tools.flops import FlopsTool  # noqa: E402
from amanda.tools.nan import NanTool  # noqa: E402
from amanda.tools.profile import ProfileTool  # noqa: E402
from amanda.tools.stats import StatsTool  # noqa: E402
from amanda.tools.trace import Graph, TraceTool  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

ROWS, FIRST, SECOND = 5, 3 * 4, 4 * 2


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def macs(program: Callable[[], Any]) -> dict[str, int]:
    """Return the multiply-accumulates of a program by phase."""
    tool = FlopsTool()
    with amanda.apply(tool):
        program()
    counts = {"forward": 0, "backward": 0}
    for place in tool.result.ops:
        assert place.macs is not None
        counts[place.phase] = counts.get(place.phase, 0) + place.calls * place.macs
    return counts


def clipped_gradients(net: Any, x: Any) -> Any:
    """Return the sum of the gradients of each sample, clipped to a norm of 1."""
    parameters = {name: value.detach() for name, value in net.named_parameters()}

    def loss(parameters: Any, x: Any) -> Any:
        return functional_call(net, parameters, (x,)).square().sum()

    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in gradients.values()]).norm(dim=0)
    factors = (1 / norms).clamp(max=1)
    return {name: torch.tensordot(factors, value, 1) for name, value in gradients.items()}


def test_gradients_of_each_sample_cost_what_their_batch_costs() -> None:
    net, x = network(), torch.rand(ROWS, 3)
    clipping = sum(ROWS * value.numel() for value in net.parameters())
    counts = macs(lambda: clipped_gradients(net, x))
    assert counts == {
        "forward": ROWS * (FIRST + SECOND) + clipping,
        "backward": ROWS * (FIRST + 2 * SECOND),  # the input of the first layer needs no gradient
    }
    assert macs(lambda: net(x).square().sum().backward())["backward"] == counts["backward"]


def test_every_model_of_an_ensemble_is_counted() -> None:
    models = [network() for _ in range(3)]
    parameters, buffers = stack_module_state(models)

    def run(parameters: Any, buffers: Any, x: Any) -> Any:
        return functional_call(models[0], (parameters, buffers), (x,))

    x = torch.rand(ROWS, 3)
    counts = macs(lambda: vmap(run, in_dims=(0, 0, None))(parameters, buffers, x))
    assert counts == {"forward": 3 * ROWS * (FIRST + SECOND), "backward": 0}


def test_a_batch_of_another_size_is_counted_too() -> None:
    net, tool = network(), FlopsTool()
    with amanda.apply(tool):
        for rows in (2, 3, 3):
            vmap(net)(torch.rand(rows, 3))
        vmap(vmap(net))(torch.rand(2, 3, 3))
        net(torch.rand(3))
    total = sum(place.calls * (place.macs or 0) for place in tool.result.ops)
    assert total == (2 + 3 + 3 + 6 + 1) * (FIRST + SECOND)


def test_second_derivatives_of_a_loss_have_backward_ops() -> None:
    net, x = network(), torch.rand(ROWS, 3)
    laplacians = vmap(hessian(lambda x: net(x).sum()))
    counts = macs(lambda: laplacians(x).diagonal(dim1=1, dim2=2).sum())
    assert counts["forward"] == ROWS * (FIRST + SECOND)
    assert counts["backward"] == ROWS * (FIRST + SECOND)
    # Three directions, of each product and of each gradient but that of the sum, which is constant.
    assert counts["tangent"] == 3 * ROWS * (FIRST + SECOND + FIRST)


def test_a_step_that_differentiates_a_step_is_counted_at_both_levels() -> None:
    x, weight, target = torch.rand(5, 3), torch.rand(3, 2), torch.rand(5, 2)

    def loss(weight: Any) -> Any:
        return (torch.mm(x, weight) - target).square().sum()

    def adapted_loss(weight: Any) -> Any:
        return loss(weight - 0.1 * grad(loss)(weight))

    product = 5 * 3 * 2
    counts = macs(lambda: grad(adapted_loss)(weight))
    # Backward: the inner step, the outer one, and through the product of the inner one to both its factors.
    assert counts == {"forward": 2 * product, "backward": 4 * product}


NET = network()
A, B = torch.rand(5, 3), torch.rand(3, 2)
SQUARE = torch.rand(3, 3)
IMAGES = torch.rand(2, 3, 8, 8)
QUERY = torch.rand(1, 2, 7, 4)
MM, CONV = 5 * 3 * 2, 2 * 4 * 6 * 6 * 3 * 9
SCORES = 2 * 7 * 7 * 4  # and as many for the product with the values


def twice_differentiated(x: Any, direction: Any) -> Any:
    return jvp(lambda y: jvp(lambda z: z @ z, (y,), (direction(y),))[1], (x,), (x,))


def attention(query: Any, key: Any, value: Any) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(
    ("program", "forward", "tangent"),
    [
        (lambda: jvp(lambda a: a @ B, (A,), (A,)), MM, MM),
        (lambda: jvp(torch.mm, (A, B), (A, B)), MM, 2 * MM),
        (lambda: jvp(lambda a, b: torch.einsum("ij,jk->ik", a, b), (A, B), (A, B)), MM, 2 * MM),
        (lambda: jvp(lambda a: torch.addmm(torch.ones(2), a, B), (A,), (A,)), MM, MM),
        (lambda: jvp(NET, (A,), (A,)), 5 * (FIRST + SECOND), 5 * (FIRST + SECOND)),
        (lambda: jacfwd(NET)(A[0]), FIRST + SECOND, 3 * (FIRST + SECOND)),
        (lambda: vmap(jacfwd(NET))(A), 5 * (FIRST + SECOND), 5 * 3 * (FIRST + SECOND)),
        (lambda: jvp(vmap(lambda a: B.t() @ a), (A,), (A,)), MM, MM),
        # Of 3 ** 2 products of components without a common level one is the forward product.
        (lambda: twice_differentiated(SQUARE, lambda y: y), 27, 8 * 27),
        (lambda: twice_differentiated(SQUARE, lambda y: SQUARE), 27, 6 * 27),
        (lambda: jvp(lambda x: torch.conv2d(x, torch.ones(4, 3, 3, 3)), (IMAGES,), (IMAGES,)), CONV, CONV),
        (lambda: jvp(attention, (QUERY,) * 3, (QUERY,) * 3), 2 * SCORES, 4 * SCORES),
        (lambda: jvp(lambda v: attention(QUERY, QUERY, v), (QUERY,), (QUERY,)), 2 * SCORES, SCORES),
    ],
)  # fmt: skip
def test_tangents_cost_a_product_for_each_factor_that_has_one(
    program: Callable[[], Any], forward: int, tangent: int
) -> None:
    assert macs(program) == {"forward": forward, "backward": 0, "tangent": tangent}


def test_tangents_of_elementwise_ops_cost_an_operation_for_each_element_and_tangent() -> None:
    tool = FlopsTool()
    with amanda.apply(tool):
        jvp(lambda a: a.sin() * a + 1, (A,), (A,))
        jvp(lambda a: a.t().reshape(-1), (A,), (A,))
    assert tool.result.total(phase="forward") == 3 * 15
    assert tool.result.total(phase="tangent") == (1 + 2 + 1) * 15
    rows = tool.result.by("phase", "type").rows()
    assert ("tangent", "mul") in {tuple(row[:2]) for row in rows}


def test_tangents_of_gradients_are_counted() -> None:
    weight = torch.ones(4, 3, 3, 3)

    def loss(x: Any) -> Any:
        return torch.conv2d(x, weight).square().sum()

    # The gradient of the images alone: its kernel has no tangent, what enters has.
    counts = macs(lambda: jvp(grad(loss), (IMAGES,), (IMAGES,)))
    assert counts == {"forward": CONV, "backward": CONV, "tangent": 2 * CONV}


def test_all_products_that_torch_runs_for_tangents_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    # Where all factors have tangents; of others torch's counter counts products with tangents of zeros.
    for program in (lambda: jvp(torch.mm, (A, B), (A, B)), lambda: twice_differentiated(SQUARE, lambda y: y)):
        with FlopCounterMode(display=False) as counter:
            program()
        assert sum(macs(program).values()) == counter.get_total_flops() // 2


def test_tangents_that_no_formula_knows_are_named() -> None:
    tool = FlopsTool()
    with amanda.apply(tool):
        jvp(torch.linalg.inv, (SQUARE + torch.eye(3),), (SQUARE,))
    assert tool.result.unsupported == {"linalg_inv": 1}


def test_samples_of_a_vmap_are_counted_in_compiled_graphs() -> None:
    net, tool = network(), FlopsTool()
    compiled = torch.compile(lambda x: vmap(lambda row: (net[0].weight @ row).sin())(x), backend="aot_eager")
    with amanda.apply(tool, compiled="instrument"):
        compiled(A)
    assert tool.result.total("macs") == 5 * FIRST
    assert tool.result.total("flops") == 5 * (2 * FIRST + 4)


def test_ops_in_bodies_of_compiled_control_flow_are_named_as_not_counted() -> None:
    def program(x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x @ B, lambda x: x[:, :2].sin(), (x,))

    tool = FlopsTool()
    with torch.no_grad(), amanda.apply(tool, compiled="instrument"):
        torch.compile(program, backend="aot_eager")(A)
    assert tool.result.unseen == {"matmul": 1, "sin": 1}
    with amanda.apply(eager := FlopsTool()):
        program(A)
    assert (eager.result.total("macs"), eager.result.unseen) == (MM, {})


def test_a_nan_of_one_sample_is_found_at_its_op() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

    def loss(x: Any) -> Any:
        return (2 * x).log().sum()

    tool = NanTool()
    with amanda.apply(tool):
        vmap(grad(loss))(rows)
    (finding,) = tool.result.findings
    assert finding.type == "log"


def test_statistics_are_those_of_all_samples() -> None:
    net, x = network(), torch.rand(ROWS, 3)
    tool, plain, columns = StatsTool(), StatsTool(), x.t()
    with amanda.apply(plain):
        net(x)
    with amanda.apply(tool):
        vmap(net)(x)
        vmap(net, in_dims=1)(columns)
    elements: dict[str, list[int]] = {}
    for entry in tool.result.measured:
        elements.setdefault(entry.tensor, []).append(entry.statistics.elements)
    expected = [entry.statistics.elements for entry in plain.result.measured if entry.tensor == "output 0"]
    assert elements["output 0 (vmap 5)"] == [2 * count for count in expected]


def batched_program() -> None:
    """Run a network on each of five samples, and compute the gradients of each."""
    net, x = network(), torch.rand(ROWS, 3)
    vmap(grad(lambda x: net(x).square().sum()))(x)


def test_results_name_the_axes_of_batches(tmp_path: Any) -> None:
    stats, trace, profile = StatsTool(), TraceTool(), ProfileTool()
    dump = DumpTool(tmp_path / "dump", inputs="full", outputs="full")
    for tool in (stats, trace, profile, dump):
        with amanda.apply(tool):
            batched_program()
    measured = {(entry.module, entry.tensor) for entry in stats.result}
    assert ("0", "output 0 (vmap 5)") in measured
    assert ("0", "weight") in measured
    traced = str(trace.result)
    assert "f32[vmap 5,3] f32[4,3] f32[4]" in traced
    assert Graph.from_dict(trace.result.graph.to_dict()) == trace.result.graph
    assert "ops ran under vmap at first: a call computed all samples, 5." in str(profile.result)
    linear = next(place for place in profile.result.ops if place.type == "linear")
    assert linear.allocated == ROWS * 4 * 4
    shapes = {(row[2], row[4]): row[7] for row in dump.result.rows()}
    assert shapes["0", "output 0"] == ["vmap 5", 4]
    assert shapes["0", "weight 1"] == [4, 3]
    assert "(vmap 5)x4" in str(dump.result)
    entry = next(entry for entry in Dump(tmp_path / "dump").entries if entry.batches)
    assert entry.shape[0] == ROWS


def test_batches_of_several_sizes_are_one_row() -> None:
    net, tool = network(), StatsTool(weights=False)
    with amanda.apply(tool):
        for rows in (2, 5, 3):
            vmap(net)(torch.rand(rows, 3))
        vmap(vmap(net))(torch.rand(4, 2, 3))
        net(torch.rand(3))
    labels = [entry.tensor for entry in tool.result if entry.module == "1"]
    assert labels == ["output 0 (vmap 2 to 5)", "output 0 (vmap 4x2)", "output 0"]


def test_a_finding_and_a_difference_name_the_axes_of_batches() -> None:
    net, x = network(), torch.rand(ROWS, 3)
    tool = NanTool()
    with amanda.apply(tool):
        vmap(lambda x: (net(x) - 10).log())(x)
    (finding,) = tool.result.findings
    assert str(finding.outputs[0]).startswith("float32[vmap 5,2]: 10 NaN")
    leaky = torch.nn.functional.leaky_relu
    result = diff(
        lambda: vmap(lambda x: leaky(net(x), 0.1))(x), lambda: vmap(lambda x: leaky(net(x), 0.2))(x)
    )
    assert "float32[vmap 5,2]" in str(result)


@pytest.mark.parametrize("rows", [ROWS, 4])  # 4: as many samples as the layers have columns
def test_a_backward_pass_outside_of_a_vmap_is_counted_once(rows: int) -> None:
    net, x = network(), torch.rand(rows, 3)
    counts = macs(lambda: vmap(net)(x).sum().backward())
    assert counts == macs(lambda: net(x).sum().backward())
    models = [network() for _ in range(2)]
    parameters, _ = stack_module_state(models)

    def ensemble() -> None:
        vmap(lambda parameters: functional_call(net, parameters, (x,)))(parameters).sum().backward()

    assert macs(ensemble) == {phase: 2 * count for phase, count in counts.items()}


def test_a_step_that_adapts_weights_to_each_task_is_counted_at_both_levels() -> None:
    net, support, queries = network(), torch.rand(6, 5, 3), torch.rand(6, 7, 3)
    parameters = {name: value.detach() for name, value in net.named_parameters()}

    def loss(parameters: Any, x: Any) -> Any:
        return functional_call(net, parameters, (x,)).square().sum()

    def adapted_loss(parameters: Any, support: Any, queries: Any) -> Any:
        slopes = grad(loss)(parameters, support)
        return loss({name: parameters[name] - 0.1 * slopes[name] for name in parameters}, queries)

    def step() -> None:
        grad(lambda p: vmap(adapted_loss, (None, 0, 0))(p, support, queries).sum())(parameters)

    gradients = FIRST + 2 * SECOND  # the inputs need none
    through_both = 2 * FIRST + 6 * SECOND
    assert macs(step) == {
        "forward": 6 * (5 + 7) * (FIRST + SECOND),
        "backward": 6 * ((5 + 7) * gradients + 5 * through_both),
    }
