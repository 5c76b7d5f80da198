"""partition: the files of an ONNX model's parts compute what the model does, to the bit."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import amanda
from amanda.errors import ArtefactError, FileError
from amanda.tools.command import instrument
from amanda.tools.partition import PartitionResult, PartitionTool, ProtectError, StageChain

Array = NDArray[Any]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def node(type: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> NodeProto:
    return helper.make_node(type, inputs.split(), outputs.split(), name, **attributes)


def model_of(
    nodes: Sequence[NodeProto], inputs: dict[str, Sequence[Any]], outputs: Sequence[str],
    weights: dict[str, Array], kinds: dict[str, int] | None = None,
) -> ModelProto:  # fmt: skip
    """Return a model; inputs: shapes by name, of float32 unless `kinds` says otherwise."""
    inputs_info = [
        helper.make_tensor_value_info(name, (kinds or {}).get(name, TensorProto.FLOAT), shape)
        for name, shape in inputs.items()
    ]
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(
        nodes, "graph", inputs_info, [onnx.ValueInfoProto(name=name) for name in outputs], initializers
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.example", 3)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9, producer_name="someone")
    helper.set_model_props(model, {"licence": "theirs"})
    return onnx.shape_inference.infer_shapes(model)


def mlp() -> ModelProto:
    """Four layers, of which the first and the last share a weight, and all the shape of a bias."""
    nodes, last = list[NodeProto](), "x"
    for i in range(4):
        weight = "w0" if i == 3 else f"w{i}"
        nodes += [
            node("MatMul", f"{last} {weight}", f"m{i}", f"/layers.{i}/MatMul"),
            node("Constant", "", f"b{i}", value=numpy_helper.from_array(random(16, seed=20 + i))),
            node("Add", f"m{i} b{i}", f"a{i}", f"/layers.{i}/Add"),
            node("Relu", f"a{i}", f"r{i}", f"/layers.{i}/Relu"),
        ]
        last = f"r{i}"
    weights = {f"w{i}": random(16, 16, seed=i) for i in range(3)}
    return model_of(nodes, {"x": ["n", 16]}, ["r3", "r1"], weights)


def residual() -> ModelProto:
    """Convolutions with residual connections, and an input that the first and the last op read."""
    nodes, last = list[NodeProto](), "x"
    weights: dict[str, Array] = {}
    for i in range(4):
        weights |= {f"k{i}": random(8, 8, 3, 3, seed=i), f"c{i}": random(8, seed=10 + i)}
        conv = node("Conv", f"{last} k{i} c{i}", f"v{i}", f"/block{i}/Conv", pads=[1, 1, 1, 1])
        nodes += [
            conv, node("Relu", f"v{i}", f"r{i}", f"/block{i}/Relu"),
            node("Add", f"r{i} {last}", f"s{i}", f"/block{i}/Add"),
        ]  # fmt: skip
        last = f"s{i}"
    nodes += [
        node("Mul", f"{last} scale", "scaled", "/head/Mul"),
        node("Add", "scaled x", "y", "/head/Add"),
    ]
    return model_of(nodes, {"x": [2, 8, 12, 12], "scale": [1]}, ["y"], weights)


def branching() -> ModelProto:
    """An `If` whose bodies read what ops before it make, an input, and an initializer."""
    then = helper.make_graph(
        [node("MatMul", "h w1", "t0"), node("Add", "t0 x", "t")], "then", [], [onnx.ValueInfoProto(name="t")]
    )
    otherwise = helper.make_graph(
        [node("Mul", "h factor", "e")], "else", [], [onnx.ValueInfoProto(name="e")],
        [numpy_helper.from_array(np.array(3, np.float32), "factor")],
    )  # fmt: skip
    nodes = [
        node("MatMul", "x w0", "m", "/first/MatMul"),
        node("Tanh", "m", "h", "/first/Tanh"),
        helper.make_node("If", ["choice"], ["i"], "/middle/If", then_branch=then, else_branch=otherwise),
        node("MatMul", "i w2", "y", "/last/MatMul"),
    ]
    weights = {f"w{i}": random(16, 16, seed=i) for i in range(3)}
    shapes: dict[str, Sequence[Any]] = {"x": [4, 16], "choice": []}
    return model_of(nodes, shapes, ["y"], weights, {"choice": TensorProto.BOOL})


FEEDS: dict[Callable[[], ModelProto], list[dict[str, Array]]] = {
    mlp: [{"x": random(n, 16)} for n in (1, 5)],
    residual: [{"x": random(2, 8, 12, 12), "scale": np.array([0.5], np.float32)}],
    branching: [{"x": random(4, 16), "choice": np.array(flag)} for flag in (True, False)],
}


def plain() -> Any:
    """Return options of sessions without fusion."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def whole(path: Path, feed: dict[str, Array], options: Any = None) -> list[Array]:
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    return list(session.run(None, feed))


def written(folder: Path, model: ModelProto, **options: Any) -> tuple[PartitionResult, Path]:
    """Return the result and the folder of a model's parts."""
    onnx.save_model(model, folder / "model.onnx")
    tool = PartitionTool(**options)
    amanda.instrument(folder / "model.onnx", tool, out=folder / "parts")
    result = tool.result
    assert isinstance(result, PartitionResult)
    return result, folder / "parts"


def plan_of(folder: Path) -> Any:
    return json.loads((folder / "partition.json").read_text())


@pytest.mark.parametrize("options", [None, plain()], ids=["fused", "plain"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("build", FEEDS)
def test_stages_give_the_bits_of_the_whole(
    build: Callable[[], ModelProto], stages: int, options: Any, tmp_path: Path
) -> None:
    _, folder = written(tmp_path, build(), stages=stages)
    assert [output["file"] for output in plan_of(folder)["files"]] == [
        f"model.stage{i}.onnx" for i in range(stages)
    ]
    chain = StageChain(folder, options)
    for feed in FEEDS[build]:
        for output, expected in zip(
            chain.run(None, feed), whole(tmp_path / "model.onnx", feed, options), strict=True
        ):
            np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("build", FEEDS)
def test_minimum_cut_gives_the_bits_of_the_whole(build: Callable[[], ModelProto], tmp_path: Path) -> None:
    _, folder = written(tmp_path, build(), method="min_cut", tolerance=0.9)
    for feed in FEEDS[build]:
        for output, expected in zip(
            StageChain(folder).run(None, feed), whole(tmp_path / "model.onnx", feed), strict=True
        ):
            np.testing.assert_array_equal(output, expected)


def test_initializers_are_where_they_are_read_and_the_rest_is_kept(tmp_path: Path) -> None:
    result, folder = written(tmp_path, mlp(), stages=4)
    stages = [onnx.load(path) for path in sorted(folder.glob("*.onnx"))]
    assert [sorted(entry.name for entry in stage.graph.initializer) for stage in stages] == [
        ["w0"], ["w1"], ["w2"], ["w0"],
    ]  # fmt: skip
    assert result.shared == {"w0": [0, 3]}
    assert "In the files of several parts: w0 (0, 3)." in str(result)
    for number, stage in enumerate(stages):
        onnx.checker.check_model(stage, full_check=True)
        assert [(entry.domain, entry.version) for entry in stage.opset_import] == [
            ("", 18),
            ("com.example", 3),
        ]
        properties = {entry.key: entry.value for entry in stage.metadata_props}
        assert (stage.ir_version, stage.producer_name, properties["licence"]) == (9, "someone", "theirs")
        (note,) = json.loads(properties["amanda"])
        assert (note["model"], note["part"]) == ("model.onnx", f"stage{number}")
    # An extent that is open stays open between the stages.
    (input_info,) = stages[1].graph.input
    assert input_info.type.tensor_type.shape.dim[0].dim_param == "n"


def test_plan_names_what_crosses(tmp_path: Path) -> None:
    _, folder = written(tmp_path, residual(), stages=2)
    plan = plan_of(folder)
    assert plan["inputs"] == ["x", "scale"]
    assert plan["outputs"] == ["y"]
    assert [
        (entry["name"], entry["from"], entry["to"], entry["shape"], entry["bytes"])
        for entry in plan["crossings"]
    ] == [("s1", 0, 1, [2, 8, 12, 12], 4 * 2 * 8 * 144)]
    # The model's input goes to both stages that read it.
    assert [entry["inputs"] for entry in plan["files"]] == [["x"], ["x", "scale", "s1"]]
    assert [entry["outputs"] for entry in plan["files"]] == [["s1"], ["y"]]
    assert [entry["bytes"] for entry in plan["files"]] == [2 * 4 * (8 * 8 * 9 + 8)] * 2


def test_outputs_that_no_op_makes_and_inputs_with_a_default(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x w", "h", "/a/MatMul"), node("Add", "h shift", "g", "/b/Add"),
        node("MatMul", "g w", "y", "/c/MatMul"), node("Identity", "w", "same"),
    ]  # fmt: skip
    shift = random(4, seed=3)
    model = model_of(nodes, {"x": [2, 4], "shift": [4]}, ["y", "same"], {"w": random(4, 4), "shift": shift})
    _, folder = written(tmp_path, model, stages=2)
    for more in ({}, {"shift": random(4, seed=9)}):
        feed = {"x": random(2, 4, seed=1), **more}
        for one, other in zip(
            StageChain(folder).run(None, feed), whole(tmp_path / "model.onnx", feed), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_external_data_stay_outside_each_file_with_its_own(tmp_path: Path) -> None:
    onnx.save_model(
        mlp(), tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    amanda.instrument(tmp_path / "model.onnx", PartitionTool(stages=2), out=tmp_path / "parts")
    names = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert names == [
        "model.stage0.onnx", "model.stage0.onnx.data", "model.stage1.onnx", "model.stage1.onnx.data",
        "partition.json",
    ]  # fmt: skip
    (tmp_path / "parts").rename(tmp_path / "moved")
    feed = {"x": random(3, 16)}
    expected = whole(tmp_path / "model.onnx", feed)
    (tmp_path / "weights.bin").unlink()
    for one, other in zip(StageChain(tmp_path / "moved").run(None, feed), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_costs_of_sessions_come_before_those_of_shapes(tmp_path: Path) -> None:
    onnx.save_model(mlp(), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", plain())
    totals = {}
    for cost, unit in (("flops", "FLOPs"), ("time", "s")):
        tool = PartitionTool(stages=2, cost=cost)  # type: ignore[arg-type]
        with amanda.apply(tool):
            session.run(None, {"x": random(64, 16)})
        amanda.instrument(tmp_path / "model.onnx", tool, out=tmp_path / cost)
        result = tool.result
        assert isinstance(result, PartitionResult)
        assert result.work.unit == unit
        totals[cost] = result.work.total.sum()
    assert totals["flops"] == 64 * 4 * (2 * 16 * 16 + 2 * 16)
    assert 0 < totals["time"] < 1
    tool = PartitionTool(stages=2)
    with amanda.apply(tool):
        session.run(None, {"x": random(1, 16)})
    onnx.save_model(residual(), tmp_path / "other.onnx")
    with pytest.raises(ArtefactError, match="ops are not among the 16 that ran in scopes of the tool"):
        amanda.instrument(tmp_path / "other.onnx", tool, out=tmp_path / "other")


def test_open_extents_are_told(tmp_path: Path) -> None:
    result, _ = written(tmp_path, mlp(), stages=2)
    assert "Extents that the file leaves open count as 1, in x" in str(result)
    assert result.work.total.sum() == 4 * (2 * 16 * 16 + 2 * 16)


def test_command_writes_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save_model(mlp(), "model.onnx")
    assert instrument(["model.onnx", "-t", "partition:stages=2", "-o", "parts"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "parts\n"
    assert "2 stages: the slowest has 51.5% of the FLOPs" in captured.err
    assert "Run in this order: model.stage0.onnx, model.stage1.onnx." in captured.err
    assert "routines" not in captured.err
    assert sorted(path.name for path in Path("parts").iterdir()) == [
        "model.stage0.onnx", "model.stage1.onnx", "partition.json",
    ]  # fmt: skip
    assert instrument(["model.onnx", "-t", "partition:stages=3", "-o", "parts"]) == 1
    assert "parts is there already" in capsys.readouterr().err
    assert instrument(["model.onnx", "-t", "partition:stages=3", "-o", "parts", "--force", "-q"]) == 0
    assert Path("parts/model.stage2.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["model.onnx", "-t", "partition:stages=99"], 1, "stages=99, but model.onnx has 12 ops"),
        (["model.onnx", "-t", "partition:stagse=2"], 2, "did you mean stages?"),
        (["model.onnx", "-t", "partition:cost=time"], 1, "cost='time' is measured while a session runs"),
        (["text.onnx", "-t", "partition"], 1, "text.onnx is not a complete ONNX model"),
        (["model.pt", "-t", "partition"], 1, "model.pt is not a file that an installed driver reads"),
        (["model.onnx", "-t", "partition", "-t", "prune"], 1, "PartitionTool, PruneTool: a tool that writes"),
        (
            ["model.onnx", "-t", "partition:protect=module=nowhere"],
            1,
            "protect='module=nowhere' selects no op",
        ),
        (["model.onnx", "-t", "partition:protect=module=layer"], 1, "did you mean layers."),
    ],
)
def test_faults_are_told_and_nothing_is_written(
    arguments: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    onnx.save_model(mlp(), "model.onnx")
    for name in ("text.onnx", "model.pt"):
        Path(name).write_text("no model")
    assert instrument([*arguments, "-o", "parts"]) == status
    assert message in capsys.readouterr().err
    assert not Path("parts").exists()


def test_chain_of_a_folder_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"partition\.json cannot be read: No such file"):
        StageChain(tmp_path)
    for text in ("{}", '{"outputs": [], "files": [{"file": "../other.onnx"}]}'):
        (tmp_path / "partition.json").write_text(text)
        with pytest.raises(ArtefactError, match=r"partition\.json is no plan of files"):
            StageChain(tmp_path)
    _, folder = written(tmp_path, mlp())
    with pytest.raises(ArtefactError, match="there is no output 'z'; there are r3, r1"):
        StageChain(folder).run(["z"], {})
    (only,) = StageChain(folder).run(["r1"], {"x": random(1, 16)})
    assert only.shape == (1, 16)


@pytest.mark.parametrize(
    ("protect", "build", "kinds", "secret"),
    [
        ("module=block1|block2", residual, ["public", "protected", "public"], ["k1", "k2", "c1", "c2"]),
        ("module=block0", residual, ["protected", "public"], ["k0", "c0"]),
        ("module=block3|head", residual, ["public", "protected"], ["k3", "c3"]),
        ("type=conv2d module=block1", residual, ["public", "protected", "public"], ["k1", "c1"]),
        ("module=block0/Conv", residual, ["protected", "public"], ["k0", "c0"]),
        ("type=Conv", residual, ["protected", "public"] * 4, ["k0", "k1", "k2", "k3"]),
        ("module=middle", branching, ["public", "protected", "public"], ["w1"]),
        ("module=layers.1", mlp, ["public", "protected", "public"], ["w1", "b1"]),
    ],
)
def test_public_files_hold_no_byte_of_what_is_protected(
    protect: str, build: Callable[[], ModelProto], kinds: list[str], secret: list[str], tmp_path: Path
) -> None:
    model = build()
    result, folder = written(tmp_path, model, protect=protect)
    plan = plan_of(folder)
    assert [item["kind"] for item in plan["files"]] == kinds
    assert [item["file"] for item in plan["files"]] == [
        f"model.{i}.{kind}.onnx" for i, kind in enumerate(kinds)
    ]
    values = {item.name: numpy_helper.to_array(item).tobytes() for item in model.graph.initializer}
    constants = [item for item in model.graph.node if item.op_type == "Constant"]
    values |= {item.output[0]: numpy_helper.to_array(item.attribute[0].t).tobytes() for item in constants}
    for file, kind in zip(plan["files"], kinds, strict=True):
        content = (folder / file["file"]).read_bytes()
        for name in secret:
            assert kind == "protected" or all(
                values[name][i : i + 16] not in content for i in range(0, len(values[name]), 16)
            )
    everything = b"".join(path.read_bytes() for path in folder.glob("*protected.onnx"))
    assert all(values[name] in everything for name in secret)
    assert "are in model." in result.title
    for feed in FEEDS[build]:
        for item, expected in zip(
            StageChain(folder).run(None, feed), whole(tmp_path / "model.onnx", feed), strict=True
        ):
            np.testing.assert_array_equal(item, expected)


def test_protected_external_data_are_in_no_public_file(tmp_path: Path) -> None:
    model = residual()
    secret = numpy_helper.to_array(model.graph.initializer[2]).tobytes()
    onnx.save_model(
        model, tmp_path / "model.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    amanda.instrument(tmp_path / "model.onnx", PartitionTool(protect="module=block1"), out=tmp_path / "parts")
    holding = [path.name for path in (tmp_path / "parts").iterdir() if secret in path.read_bytes()]
    assert holding == ["model.1.protected.onnx.data"]


def test_an_op_that_is_not_selected_may_not_read_what_is_protected(tmp_path: Path) -> None:
    with pytest.raises(
        ProtectError, match=r"MatMul /layers.3/MatMul, which is not selected, reads w0, which"
    ):
        written(tmp_path, mlp(), protect="module=layers.0")
    model = residual()
    for tensor in model.graph.initializer:
        if tensor.name == "k2":
            tensor.CopyFrom(numpy_helper.from_array(random(8, 8, 3, 3, seed=1), "k2"))
    with pytest.raises(ProtectError, match="reads k2, which has the same values as k1, which is protected"):
        written(tmp_path, model, protect="module=block1")
    nodes = [node("MatMul", "x w", "y", "/a/MatMul"), node("Identity", "w", "same")]
    passing = model_of(nodes, {"x": [2, 4]}, ["y", "same"], {"w": random(4, 4)})
    with pytest.raises(ProtectError, match=r"an output of the model reads (w|same)"):
        written(tmp_path, passing, protect="module=a")


def test_extents_and_numbers_are_in_both_parts_and_told(tmp_path: Path) -> None:
    nodes = [
        node("Reshape", "x extents", "a", "/a/Reshape"), node("MatMul", "a w", "b", "/b/MatMul"),
        node("Reshape", "b extents", "y", "/b/Reshape"),
    ]  # fmt: skip
    weights = {"w": random(4, 4), "extents": np.array([-1, 4])}
    result, folder = written(tmp_path, model_of(nodes, {"x": [8]}, ["y"], weights), protect="module=b")
    assert "In public and protected parts, as extents or one number: extents." in str(result)
    assert StageChain(folder).run(None, {"x": random(8)})[0].shape == (2, 4)


def weights(*numbers: int) -> dict[str, Array]:
    return {f"w{i}": random(16, 16, seed=i) / 4 for i in numbers}


def sequences() -> ModelProto:
    """A list of tensors crosses."""
    nodes = [
        node("MatMul", "x w0", "a", "/a/MatMul"),
        node("SplitToSequence", "a", "list", "/b/Split", axis=0, keepdims=1),
        node("SequenceAt", "list i", "e", "/c/At"),
        node("MatMul", "e w1", "y", "/d/MatMul"),
    ]
    return model_of(nodes, {"x": [4, 16]}, ["y"], {**weights(0, 1), "i": np.array(1)})


def functions() -> ModelProto:
    """Local functions, which are inlined."""
    inner = [node("MatMul", "x w", "t"), node("MatMul", "t w", "z")]
    twice = helper.make_function(
        "com.example", "Twice", ["x", "w"], ["z"], inner, [helper.make_opsetid("", 18)]
    )
    nodes = [node("MatMul", "x w0", "a", "/a"), node("MatMul", "a w1", "y", "/b")]
    model = model_of(nodes, {"x": [4, 16]}, ["y"], weights(0, 1))
    for call in model.graph.node:
        call.op_type, call.domain = "Twice", "com.example"
    model.functions.append(twice)
    return model


def old() -> ModelProto:
    """Initializers are inputs, as before IR version 4."""
    model = mlp()
    model.ir_version = 3
    model.graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [16, 16]) for name in ("w0", "w1", "w2")
    )
    return model


def runtimes_own() -> ModelProto:
    """Ops of ONNX Runtime, whose types ONNX does not infer."""
    model = mlp()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type, node.domain = "Gelu", "com.microsoft"
    del model.graph.value_info[:]
    return model


def looping() -> ModelProto:
    """A loop whose body reads an initializer."""
    body = helper.make_graph(
        [node("MatMul", "v w1", "v2"), node("Identity", "go", "on")], "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []),
         helper.make_tensor_value_info("go", TensorProto.BOOL, []),
         helper.make_tensor_value_info("v", TensorProto.FLOAT, [4, 16])],
        [helper.make_tensor_value_info("on", TensorProto.BOOL, []),
         helper.make_tensor_value_info("v2", TensorProto.FLOAT, [4, 16])],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["times", "yes", "h"], ["l"], "/loop/Loop", body=body)
    nodes = [node("MatMul", "x w0", "h", "/a/MatMul"), loop, node("MatMul", "l w2", "y", "/b/MatMul")]
    initializers = {**weights(0, 1, 2), "times": np.array(3), "yes": np.array(True)}
    return model_of(nodes, {"x": [4, 16]}, ["y"], initializers)


def sparse() -> ModelProto:
    """A sparse initializer."""
    model = mlp()
    number = [tensor.name for tensor in model.graph.initializer].index("w2")
    del model.graph.initializer[number]
    values = numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w2")
    places = numpy_helper.from_array(np.array([0, 17, 34]), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [16, 16]))
    return model


def drawing() -> ModelProto:
    """A random op, which two others read."""
    nodes = [
        node("RandomNormal", "", "r", "/r/Random", shape=[4, 16], seed=1.0),
        node("Add", "x r", "a", "/a/Add"),
        node("MatMul", "a w0", "b", "/b/MatMul"),
        node("Add", "b r", "y", "/c/Add"),
    ]
    return model_of(nodes, {"x": [4, 16]}, ["y"], weights(0))


@pytest.mark.parametrize(
    ("made", "protect"),
    [
        (sequences, "module=b|c"), (functions, "type=MatMul"), (old, "module=layers.1"),
        (runtimes_own, "type=Gelu"), (looping, "module=loop"), (sparse, "module=layers.2"),
        (drawing, "module=b"),
    ],
)  # fmt: skip
def test_models_of_rarer_kinds(made: Callable[[], ModelProto], protect: str, tmp_path: Path) -> None:
    feed = {"x": random(4, 16)}
    asked: dict[str, dict[str, Any]] = {"stages": {"stages": 3}, "protect": {"protect": protect}}
    for name, options in asked.items():
        (tmp_path / name).mkdir()
        _, folder = written(tmp_path / name, made(), **options)
        for one, other in zip(
            StageChain(folder).run(None, feed), whole(tmp_path / name / "model.onnx", feed), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_trained_model_of_a_package(tmp_path: Path) -> None:
    package = importlib.util.find_spec("basic_pitch")
    assert package is not None, "basic-pitch, which ships a trained ONNX model, is in the group `dev`"
    place = next(iter(package.submodule_search_locations or ()))
    path = Path(place, "saved_models", "icassp_2022", "nmp.onnx")
    tool = PartitionTool(stages=3)
    amanda.instrument(path, tool, out=tmp_path / "parts")
    audio = np.random.default_rng(0).normal(0, 0.2, (1, 43844, 1)).astype(np.float32)
    feed = {onnxruntime.InferenceSession(path).get_inputs()[0].name: audio}
    for item, expected in zip(
        StageChain(tmp_path / "parts", plain()).run(None, feed), whole(path, feed, plain()), strict=True
    ):
        np.testing.assert_array_equal(item, expected)
    result = tool.result
    assert isinstance(result, PartitionResult)
    # One convolution has two thirds of all FLOPs.
    assert max(item.cost for item in result.stages) < 1.05 * result.work.total.max()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what exporting makes torch and onnxscript warn of
def test_transformer_that_torch_exports(transformers: Any, tmp_path: Path) -> None:
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(
                vocab_size=50, max_position_embeddings=16, hidden_size=32, num_hidden_layers=4,
                num_attention_heads=2, intermediate_size=48,
            )  # fmt: skip
            self.model = transformers.BertModel(config, add_pooling_layer=False)

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.model(tokens).last_hidden_state

    tokens = torch.arange(12).reshape(2, 6) * 7 % 50
    exported = torch.onnx.export(Logits().train(False), (tokens,), dynamo=True, verbose=False)
    assert exported is not None
    exported.save(tmp_path / "bert.onnx")
    feed = {onnxruntime.InferenceSession(tmp_path / "bert.onnx").get_inputs()[0].name: tokens.numpy()}
    for stages in (2, 4):
        tool = PartitionTool(stages=stages)
        amanda.instrument(tmp_path / "bert.onnx", tool, out=tmp_path / str(stages))
        result = tool.result
        assert isinstance(result, PartitionResult)
        assert result.imbalance < 0.15
        for options in (None, plain()):
            one = StageChain(tmp_path / str(stages), options).run(None, feed)[0]
            other = whole(tmp_path / "bert.onnx", feed, options)[0]
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if options else 1e-6)
    protect = "module=model.encoder.layer.1|model.encoder.layer.2"
    amanda.instrument(tmp_path / "bert.onnx", PartitionTool(protect=protect), out=tmp_path / "protected")
    assert [one["kind"] for one in plan_of(tmp_path / "protected")["files"]] == [
        "public",
        "protected",
        "public",
    ]
    one = StageChain(tmp_path / "protected", plain()).run(None, feed)[0]
    np.testing.assert_array_equal(one, whole(tmp_path / "bert.onnx", feed, plain())[0])
