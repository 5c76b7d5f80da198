"""Tables 3 and 4 of the paper for this repository, into docs/paper-tables.md.

    python benchmarks/paper/paper_tables.py [--write]

Every cell of the first is a test that has to exist; the lines of the second are counted.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/paper-tables.md"
OF_TOOLS = "packages/amanda-tools/tests/"
TOOLS = "packages/amanda-tools/src/amanda/tools/"
BY_HAND = "examples/baselines/"

MODES = ("PyTorch, eager", "TensorFlow, session", "TensorFlow, function", "TensorFlow, eager")


class Task(NamedTuple):
    """What the paper says of a task without and with Amanda, and a test for each of `MODES`."""

    name: str
    paper: str
    tests: Sequence[str | None]  # None where the tool does not do it


def everywhere(in_pytorch: str, in_tensorflow: str) -> tuple[str, str, str, str]:
    """A test for PyTorch, and one that goes through the modes of TensorFlow."""
    return in_pytorch, in_tensorflow, in_tensorflow, in_tensorflow


TASKS = (
    Task("Graph tracing", "graph; module hooks, refactoring", (
        "test_trace.py::test_gradients_lead_through_the_backward_ops",
        "test_trace_tensorflow.py::test_a_session_has_the_ops_that_it_runs",
        *["test_trace_tensorflow.py::test_the_graph_of_a_step_is_the_same_eagerly_and_in_a_function"] * 2,
    )),
    Task("FLOPs profiling", "graph; module hooks, refactoring", everywhere(
        "test_flops.py::test_it_agrees_with_the_counter_of_torch_on_a_training_step",
        "test_flops_tensorflow.py::test_a_twin_of_a_model_of_torchvision_costs_the_same_in_every_mode",
    )),
    Task("Effective path", "graph and source; module hooks, not portable", everywhere(
        "test_effective_path.py::test_paths_are_those_that_are_extracted_element_by_element",
        "test_effective_path_tensorflow.py::test_paths_are_those_of_pytorch_for_the_same_weights",
    )),
    Task("Weight pruning", "session hooks; module parameters, refactoring", everywhere(
        "test_prune.py::test_weights_are_read_and_gradients_are_given_through_the_mask",
        "test_prune_tensorflow.py::test_training_is_that_of_masking_by_hand_in_every_mode",
    )),
    Task("Quantisation after training", "", everywhere(
        "test_quantize.py::test_a_static_linear_layer_is_the_one_quantised_by_hand",
        "test_quantize_tensorflow.py::test_scales_on_transplanted_weights_are_equal_in_every_mode",
    )),
    Task("Quantisation training", "source; module hooks, refactoring", everywhere(
        "test_quantize.py::test_quantisation_aware_training_has_the_losses_of_the_one_written_by_hand",
        "test_quantize_tensorflow.py::test_scales_on_transplanted_weights_are_equal_in_every_mode",
    )),
    Task("Dynamic channel pruning", "", everywhere(
        "test_dynamic_prune_channel.py::test_outputs_and_gradients_are_those_of_a_model_that_was_modified",
        "test_dynamic_prune_tensorflow.py::test_every_mode_gives_what_pytorch_does",
    )),
    Task("Activation pruning", "", everywhere(
        "test_dynamic_prune_activation.py::test_outputs_and_gradients_are_those_of_a_model_that_was_modified",
        "test_dynamic_prune_tensorflow.py::test_every_mode_gives_what_pytorch_does",
    )),
    Task("Attention pruning", "", everywhere(
        "test_dynamic_prune_attention.py::test_states_and_gradients_are_those_of_a_model_that_takes_tokens_away",
        "test_dynamic_prune_tensorflow.py::test_every_mode_gives_what_pytorch_does",
    )),
    Task("Subgraph rewriting", "", everywhere(
        "test_rewrite.py::test_each_convolution_of_a_model_of_torchvision_takes_its_normalisation",
        "test_rewrite_tensorflow.py::test_twins_of_models_of_torchvision_are_folded_in_every_mode",
    )),
    Task("Sweeps of sparsity and bits", "", (
        "test_sweep.py::test_each_point_is_what_one_layer_changed_by_hand_gives",
        "test_sweep_tensorflow.py::test_a_session_is_swept_as_any_program",
        *["test_sweep_tensorflow.py::test_each_point_is_what_one_kernel_pruned_by_hand_gives"] * 2,
    )),
    Task("Rematerialisation", "", (
        "test_remat_models.py::test_models_train_within_a_budget_with_the_same_gradients",
        None, None, None,
    )),
)  # fmt: skip


def functions(file: Path) -> set[str]:
    """Names of the functions of a file."""
    return {one.name for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.FunctionDef)}


def checked(file: str, name: str) -> str:
    """The path of a test.

    Raises LookupError where there is none.
    """
    if not (ROOT / file).exists() or name not in functions(ROOT / file):
        raise LookupError(f"{file} has no test {name}")
    return file


def numbered() -> dict[str, int]:
    """The tests of all cells, with a number for each."""
    named = dict.fromkeys(test for task in TASKS for test in task.tests if test is not None)
    return {test: i for i, test in enumerate(named, 1)}


def tasks() -> list[str]:
    """Table 3: each cell has the number of its test, or a dash."""
    numbers = numbered()
    head = ["task", "by other means, says the paper", *MODES]
    cells = ([f"yes ({numbers[one]})" if one else "-" for one in task.tests] for task in TASKS)
    return lines(head, ([task.name, task.paper, *row] for task, row in zip(TASKS, cells, strict=True)))


def tests() -> list[str]:
    """The tests by their numbers."""
    found = []
    for test, number in numbered().items():
        file, _, name = test.partition("::")
        path = checked(OF_TOOLS + file, name)
        found.append(f"{number}. [{file}](../{path}): `{name}`")
    return found


class Project(NamedTuple):
    """A row of the paper's table, and the same here.

    by_hand: the file, and names in it of what is written for one family of networks.  tool: of the tool's
    package, files or "file::name" that this method alone needs.
    """

    name: str
    paper: tuple[str, int, int]
    interface: str
    by_hand: str
    families: str
    of_a_family: Sequence[str]
    package: str
    tool: Sequence[str]
    works_on: str
    equal: str


STATIC, DYNAMIC = "tests/examples/test_baselines_static.py", "tests/examples/test_baselines_dynamic.py"
PROJECTS = (
    Project(
        "Tile-wise pruning", ("VGGs, BERT", 1203, 213), "session hook", "tile_wise_tf.py",
        "variables named as in layers", (), "prune",
        ("_masks.py::tile_mask", "_masks.py::tiles_kept", "_masks.py::lowest_units_dropped",
         "_patterns.py::_tiles_kept"),
        "any, in PyTorch and TensorFlow", f"{STATIC}::test_tiles_are_those_of_a_hook_of_sessions",
    ),
    Project(
        "Dynamic channel pruning", ("VGG19, ResNet34, SqueezeNet", 387, 115), "source", "channel_torch.py",
        "ResNet-18, 34", ("GatedBlock", "GatedResNet"), "dynamic_prune", ("_channel.py",),
        "any with convolutions", f"{DYNAMIC}::test_channels_are_pruned_as_by_hand",
    ),
    Project(
        "Activation pruning", ("ResNets", 650, 193), "source", "activation_torch.py",
        "ResNet-18, 34", ("SparseBlock", "SparseResNet"), "dynamic_prune",
        ("_activation.py", "_math.py::local", "_math.py::needed", "_math.py::_reaches"),
        "any with residual branches", f"{DYNAMIC}::test_activations_are_pruned_as_by_hand",
    ),
    Project(
        "Attention pruning", ("BERT, Roberta, DistillBERT, ALBERT", 1105, 179), "source",
        "attention_torch.py", "BERT", ("SkimmedBert",), "dynamic_prune", ("_attention.py",),
        "any with attention", f"{DYNAMIC}::test_tokens_are_pruned_as_by_hand",
    ),
    Project(
        "APEX vector-wise pruning", ("models of modules", 499, 279), "modules, optimizer's step",
        "apex_torch.py", "models of modules", (), "prune",
        ("_masks.py::n_m_mask", "_masks.py::n_m_kept", "_patterns.py::_vectors_kept"),
        "any, in PyTorch and TensorFlow", f"{STATIC}::test_masks_of_2_4_are_those_of_asp",
    ),
)  # fmt: skip
OTHERS = (
    ("Magnitude pruning, PyTorch", "magnitude_torch.py"), ("Magnitude pruning, Keras", "magnitude_keras.py"),
    ("Quantisation, PyTorch", "quantize_torch.py"), ("Quantisation, Keras", "quantize_keras.py"),
)  # fmt: skip


def code_lines(file: Path, names: Iterable[str] = ()) -> int:
    """Lines with code: none that are blank, or have nothing but comments or docstrings.

    names: of functions and classes at the top of the file; all of it if there are none.
    Raises LookupError for a name that is not there.
    """
    source = file.read_text()
    tree, wanted = ast.parse(source), set(names)
    top = {one.name: one for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
    if wanted - top.keys():
        raise LookupError(f"{file} has no {', '.join(sorted(wanted - top.keys()))}")
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    said = {
        line
        for one in ast.walk(tree)
        if isinstance(one, holders) and ast.get_docstring(one, clean=False) is not None
        for line in range(one.body[0].lineno, (one.body[0].end_lineno or 0) + 1)
    }
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
               tokenize.ENDMARKER}  # fmt: skip
    coded = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in nothing
        for line in range(token.start[0], token.end[0] + 1)
    }
    if wanted:
        parts = [top[name] for name in wanted]
        starts = [min([one.lineno, *(mark.lineno for mark in one.decorator_list)]) for one in parts]
        inside = {
            line
            for one, first in zip(parts, starts, strict=True)
            for line in range(first, (one.end_lineno or 0) + 1)
        }
        coded &= inside
    return len(coded - said)


def own_lines(project: Project) -> int:
    """Of what the method alone needs in the tool's package."""
    folder, whole, parts = ROOT / TOOLS / project.package, 0, dict[str, list[str]]()
    for one in project.tool:
        file, _, name = one.partition("::")
        if name:
            parts.setdefault(file, []).append(name)
        else:
            whole += code_lines(folder / file)
    return whole + sum(code_lines(folder / file, names) for file, names in parts.items())


def package_lines(package: str) -> int:
    """Of a tool, with everything that it can do, on every framework."""
    return sum(map(code_lines, sorted((ROOT / TOOLS / package).glob("*.py"))))


def projects() -> list[str]:
    """Table 4."""
    head = ["project", "in the paper: networks", "lines", "Amanda", "by hand: interface", "networks", "lines",
            "of them per family", "the tool: of its own", "networks", "equal results"]  # fmt: skip
    rows = []
    for one in PROJECTS:
        file = ROOT / BY_HAND / one.by_hand
        family = code_lines(file, one.of_a_family) if one.of_a_family else 0
        test_file, _, test = one.equal.partition("::")
        checked(test_file, test)
        rows.append([
            one.name, one.paper[0], str(one.paper[1]), str(one.paper[2]), one.interface, one.families,
            f"[{code_lines(file)}](../{BY_HAND}{one.by_hand})", str(family), str(own_lines(one)),
            one.works_on, f"[test](../{test_file})",
        ])  # fmt: skip
    return lines(head, rows)


def lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    marks = "|---" * len(head) + "|"
    return [f"| {' | '.join(head)} |", marks, *(f"| {' | '.join(row)} |" for row in rows)]


PAGE_TEXT = """\
# The paper's tables 3 and 4, here

## Tasks, by framework and mode

The same source of a tool runs in each of these modes; the number is that of the test that holds it.
A dash: the tool does not do it there.

{tasks}

{tests}

The paper's Amanda served PyTorch's eager mode and TensorFlow's sessions.

## Lines of code

Each method of the paper's table 4 is written by hand in [examples/baselines](../examples/baselines), as it is
done without Amanda, and a test holds that it computes what the tool computes. A line counts if it has code:
blank lines, comments and docstrings do not. *Of them per family* is what has to be written again for another
family of networks; *of its own* is what the tool needs for this method alone.

{projects}

What a tool has in all, with every method, option, framework, file and table of results: prune {prune} lines,
quantize {quantize}, dynamic_prune {dynamic}. So for one method on one network a file by hand is as short or
shorter; it is for that network, in that framework, and for nothing else. The tool of [the paper's
Listing 1](../examples/pruning.py), which prunes convolutions of any model, has {listing} lines with its mask.
By hand in the same way, and compared in [accuracy](accuracy.md): {others}.

The figures of the paper are of other code: projects of their authors with training and data, and a first
version of Amanda. They cannot be compared with the lines here, only with each other.

A model is not changed for a tool. [One test](../tests/tools/test_model_families.py) prunes and quantises
VGG, ResNet, MobileNet, SqueezeNet, ViT, GPT-2 and BERT as torchvision and transformers have them,
[another](../tests/tools/test_dynamic_prune_models.py) prunes VGG, ResNet, SqueezeNet, BERT, RoBERTa,
DistilBERT and ALBERT dynamically.

`python benchmarks/paper/paper_tables.py --write` counts again.
"""


def page() -> str:
    """docs/paper-tables.md."""
    others = ", ".join(
        f"{name} [{code_lines(ROOT / BY_HAND / file)}](../{BY_HAND}{file})" for name, file in OTHERS
    )
    return PAGE_TEXT.format(
        tasks="\n".join(tasks()), tests="\n".join(tests()), projects="\n".join(projects()), others=others,
        prune=package_lines("prune"), quantize=package_lines("quantize"),
        dynamic=package_lines("dynamic_prune"),
        listing=code_lines(ROOT / "examples/pruning.py", ("PruningTool", "magnitude_mask")),
    )  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/paper-tables.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
