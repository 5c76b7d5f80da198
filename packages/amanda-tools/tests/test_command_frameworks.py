"""Unmodified programs of PyTorch and TensorFlow under `amanda run`: what is told, saved and merged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import children
import pytest

RUN = [sys.executable, "-m", "amanda", "run"]
PATCH = """
import torch  # one that torchvision's binary was not made for lacks what transformers has it declare
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
MODEL = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

torch.set_num_threads(1)
model = Net()
"""
FAILING_TOOL = """
import amanda
import torch


class Failing(amanda.Tool):
    def __init__(self, known: bool = False):
        self.known = known
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        context.insert_before_op(self.fail)

    def fail(self, *inputs):
        raise amanda.errors.ToolError("known") if self.known else KeyError("unknown")
"""


@pytest.mark.slow
def test_a_model_runs_under_tools_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif 'AMANDA_TOOLS' in os.environ:\n  exec({PATCH!r})"
    )
    tiny = "hf:bert:hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
    done = amanda_run(
        tmp_path, "flops,nan", "-o", "results", tiny, "--input-shape", "2,8", "--backward", "--steps", "3",
        PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert "BertModel, 1,002,816 parameters, random weights, input_ids (2, 8)" in done.stderr
    assert calls(tmp_path / "results" / "flops.json", "scaled_dot_product_attention") == 3
    assert calls(tmp_path / "results" / "flops.json", "linear_backward", "backward") == 3 * 7
    assert (tmp_path / "results" / "nan.json").is_file()
    (tmp_path / "nets.py").write_text(
        "import torch\ntorch.ones(3).sum()\nnet = lambda: torch.nn.Linear(4, 2)"
    )
    net = amanda_run(tmp_path, "flops", "-o", "net", "--input-shape", "3,4", "torch:nets.py:net")
    assert "24 MACs, 1 call" in net.stderr  # none of the import
    wrong = amanda_run(tmp_path, "flops", "torch:torch.nn:ReLU", status=2)
    assert "does not say what its inputs are: give --input-shape" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1


FACTORY = """
import torch

table = torch.randn(8, 8) @ torch.randn(8, 8)


def factory():
    return torch.nn.Linear(8, 8), torch.randn(2, 8) * 2


def misfit():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(9, 2))
"""


@pytest.mark.slow
def test_only_the_run_of_a_model_is_counted(tmp_path: Path) -> None:
    (tmp_path / "tables.py").write_text(FACTORY)
    amanda_run(tmp_path, "flops", "-o", "out", "torch:tables.py:factory")
    rows = json.loads((tmp_path / "out" / "flops.json").read_text())["rows"]
    assert [(row["type"], row["calls"]) for row in rows] == [("linear", 1)]
    amanda_run(tmp_path, "--construction", "-t", "flops", "-o", "made", "--", "torch:tables.py:factory")
    assert calls(tmp_path / "made" / "flops.json", "matmul") == 0
    assert calls(tmp_path / "made" / "flops.json", "mul") == 1
    misfit = amanda_run(tmp_path, "flops", "torch:tables.py:misfit", "--input-shape", "2,8", status=2)
    first, second = misfit.stderr.splitlines()
    assert first.startswith("amanda: torch:tables.py:misfit: Sequential, ")
    assert "does not run on input (2, 8): RuntimeError" in second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "last"),
    [
        ("raise ValueError('early')", "ValueError: early"),
        ("import torch\nraise ValueError('no op')", "ValueError: no op"),
        ("import sys\nsys.exit('usage: wrong')", "usage: wrong"),
        ("import argparse\nparser = argparse.ArgumentParser()\nparser.parse_args(['--x'])",
         "train.py: error: unrecognized arguments: --x"),
    ],
)  # fmt: skip
def test_nothing_follows_the_error_of_a_program(script: Path, program: str, last: str) -> None:
    script.write_text(program)
    run = children.run([*RUN, "flops", "train.py"], cwd=script.parent)
    assert run.returncode
    assert run.stderr.splitlines()[-1] == last
    assert "was executed" not in run.stderr


@pytest.mark.slow
def test_the_first_nan_is_printed_when_it_comes(script: Path) -> None:
    script.write_text(
        "import sys\nimport torch\n"
        "for step in range(3):\n"
        "    torch.log(torch.tensor([1.0 - 2 * (step == 1)]))\n"
        "    print('step', step, file=sys.stderr, flush=True)\n"
    )
    lines = amanda_run(script.parent, "nan", "train.py").stderr.splitlines()
    place = f"First NaN: log (forward), {script}:4, step 1"
    told = f"{place}: output has 1 NaN of 1; input 0 was float32[1]: -1 to -1, "
    assert lines[0] == "step 0"
    assert lines[1].startswith(f"amanda: {told}")
    assert lines[2:4] == ["step 1", "step 2"]
    assert lines[4].startswith("First NaN: log (forward), ")
    assert "amanda" not in amanda_run(script.parent, "-q", "-t", "nan", "train.py").stderr


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def amanda_run(
    folder: Path, *arguments: str, status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = children.run(
        [*RUN, *arguments], cwd=folder, limit=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done


def calls(path: Path, type: str, phase: str = "forward") -> int:
    """Executions of a type of op, of a result of the flops tool."""
    rows = json.loads(path.read_text())["rows"]
    return sum(row["calls"] for row in rows if (row["type"], row["phase"]) == (type, phase))


def test_tools_by_import_path_lie_beside_the_script_or_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for tool in ("near.py", "scripts/beside.py"):
        (tmp_path / tool).write_text("from amanda.tools.flops import FlopsTool as Counter")
    (tmp_path / "scripts" / "train.py").write_text("import torch\ntorch.ones(3).cumsum(0)")
    amanda_run(tmp_path, "near.Counter,beside.Counter", "-q", "-o", "out", "scripts/train.py")
    for tool in ("near", "beside"):
        assert calls(tmp_path / "out" / f"{tool}.Counter.json", "cumsum") == 1


def test_results_are_told_and_saved_and_the_program_prints_its_own(script: Path) -> None:
    script.write_text(
        f"{MODEL}\nfor _ in range(3):\n    model(torch.rand(5, 4)).sum().backward()\nprint('done')\n"
        "import os, tempfile\nos.chdir(tempfile.gettempdir())"
    )
    config = script.with_name("amanda.toml")
    config.write_text('[tools.flops]\ntype = ["linear"]\nend = 2\n[tools.nan]\nmodule = "secund"\n')
    command = (script.parent, "--config", "amanda.toml", "-t", "flops:out=x/flops.csv", "train.py")
    refused = amanda_run(*command, status=2)
    assert (refused.stdout, refused.stderr.rpartition("cannot be written: ")[2]) == (
        "", f"there is no folder {script.parent}/x\n",
    )  # fmt: skip
    script.with_name("x").mkdir()
    run = amanda_run(*command)
    assert run.stdout == "done\n"
    rows = [[cell for cell in line.split() if "train.py" not in cell] for line in run.stderr.splitlines()]
    assert ["linear", "first", "2", "320", "720"] in [row[:5] for row in rows]
    assert f"amanda: flops is in {script.parent}/x/flops.csv" in run.stderr
    assert "no op was selected by module=secund; did you mean second?" in run.stderr
    # No table without rows follows, which would say that no op was executed.
    assert "No op that this tool selects ran" not in run.stderr
    assert (script.parent / "x" / "flops.csv").read_text().startswith("phase,type,module,source,calls")
    assert "\x1b" not in run.stderr


@pytest.mark.slow
def test_an_exception_is_told_as_it_is_and_results_are_saved(script: Path) -> None:
    script.write_text(
        f"{MODEL}\nmodel(torch.rand(5, 4))\ntry:\n    model(torch.rand(5, 3))\nfinally:\n    1 / 0"
    )
    plain = children.run([sys.executable, "train.py"], cwd=script.parent)
    run = amanda_run(script.parent, "-t", "flops", "-t", "nan", "-o", "out", "train.py", status=1)
    assert plain.stderr
    # The error is what the reader sees last.
    assert run.stderr.endswith(plain.stderr)
    assert "calls  MACs" in run.stderr
    assert calls(script.parent / "out" / "flops.json", "linear") == 2
    assert (script.parent / "out" / "nan.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_results_are_saved_when_a_signal_ends_the_program(script: Path, number: int) -> None:
    script.write_text(
        f"{MODEL}\nx = torch.rand(5, 4)\nmodel(x)\nprint('ready', flush=True)\nwhile True:\n    model(x)"
    )
    with children.started(
        [*RUN, "-t", "flops", "-o", "out", "train.py"],
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        _, stderr = program.communicate(timeout=120)
    assert program.returncode == -number
    assert ("KeyboardInterrupt" in stderr) == (number == signal.SIGINT)
    assert "amanda/" not in stderr
    assert calls(script.parent / "out" / "flops.json", "linear") >= 2


CHILDREN = """
import multiprocessing, os, sys, threading
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.ones(4).cumsum(0)

def work():
    model(torch.rand(5, 4))

if __name__ == "__main__":
    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)
    os.waitpid(child, 0)
    for batch in DataLoader(Rows(), batch_size=2, num_workers=2):
        model(batch)
"""


@pytest.mark.long
def test_threads_and_processes_of_a_program_are_merged(script: Path) -> None:
    script.write_text(MODEL + CHILDREN)
    run = amanda_run(script.parent, "-t", "flops", "-o", "out", "train.py")
    out = script.parent / "out"
    assert "flops of 6 processes (main, process" in run.stderr
    assert len(list(out.glob("process*.flops.json"))) == 5
    # Of main: its own, its thread's and two batches; one each of three processes; the others load data.
    assert calls(out / "main.flops.json", "linear") == 2 * 4
    assert calls(out / "flops.json", "linear") == 2 * 7
    assert calls(out / "flops.json", "cumsum") == 4


POOL = """
import multiprocessing

def work(number):
    model(torch.rand(5, 4))

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(4) as pool:  # terminates them while they exit
        pool.map(work, range(8), chunksize=1)
"""


@pytest.mark.slow
def test_workers_that_are_terminated_while_they_exit_leave_their_results(script: Path) -> None:
    script.write_text(MODEL + POOL)
    amanda_run(script.parent, "-t", "flops", "-o", "out", "train.py")
    assert calls(script.parent / "out" / "flops.json", "linear") == 2 * 8


FORKED = """
import os, signal

def state():
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

child = os.fork()
if child == 0:
    before = state()
    model(torch.rand(5, 4))
    print("default", before, state(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
print("ends by", os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
def test_a_forked_child_has_handlers_of_signals_once_it_has_results(script: Path) -> None:
    script.write_text(MODEL + FORKED)
    run = amanda_run(script.parent, "-t", "flops", "-o", "out", "train.py")
    assert run.stdout.startswith(f"default True False\nends by {int(signal.SIGTERM)}\n")
    assert len(list((script.parent / "out").glob("process*.flops.json"))) == 1


BUDGET = """
for _ in range(2):
    model(torch.rand(200, 4)).sum().backward()
"""


@pytest.mark.slow
def test_a_program_trains_within_a_budget_of_memory(script: Path) -> None:
    script.write_text(MODEL + BUDGET)
    amanda_run(script.parent, "-t", "remat:budget=4kB", "-o", "out", "train.py")
    content = json.loads((script.parent / "out" / "remat.json").read_text())
    assert any(row["evictions"] for row in content["rows"])


RANKS = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
parallel = DistributedDataParallel(model)
for _ in range(2 + dist.get_rank()):
    loss = model(torch.rand(5, 4)).sum()
parallel(torch.rand(5, 4)).sum().backward()
del parallel  # torch may wait forever where it is freed after its group
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_torchrun_are_merged(script: Path) -> None:
    script.write_text(MODEL + RANKS)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    tools = ["-t", "flops", "-t", "trace:out=graph.json", "-t", "coverage", "-t", "profile"]
    run = amanda_run(script.parent, *tools, "-o", "out", "--", *launcher, *options, "train.py")
    out = script.parent / "out"
    assert "amanda: flops of 2 processes (rank0, rank1)" in run.stderr
    assert [calls(out / f"rank{rank}.flops.json", "linear") for rank in (0, 1)] == [6, 8]
    assert calls(out / "flops.json", "linear") == 14
    assert calls(out / "flops.json", "linear_backward", "backward") == 4
    assert not (out / "main.flops.json").exists()
    for tool in ("coverage", "profile"):
        assert f"amanda: {tool} of 2 processes" in run.stderr
    for rank in (0, 1):  # what cannot be merged is told of each
        assert f"amanda: trace of rank{rank}\n" in run.stderr
        assert json.loads((script.parent / f"rank{rank}.graph.json").read_text())["schema"] == "amanda.trace"


FIT = """
import keras, numpy as np
model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(2)])
model.compile("sgd", "mse")
history = model.fit(np.ones((12, 6)), np.ones((12, 2)), batch_size=4, verbose=0)
print(len(history.history["loss"]))
"""


@pytest.mark.long
def test_a_keras_script_runs_under_tools(script: Path) -> None:
    script.write_text(FIT)
    run = amanda_run(script.parent, "-t", "flops", "-t", "nan:phase=forward", "-o", "out", "train.py")
    assert run.stdout == "1\n"
    assert calls(script.parent / "out" / "flops.json", "matmul") == 6
    assert calls(script.parent / "out" / "flops.json", "matmul_backward", "backward") == 9
    assert json.loads((script.parent / "out" / "nan.json").read_text())["findings"] == []


TRAINER = '''
"""Train a causal language model on random tokens, as transformers' examples do."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator, set_seed
)

class Tokens(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=3)
    arguments = parser.parse_args()
    set_seed(0)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=arguments.output_dir, max_steps=arguments.max_steps, per_device_train_batch_size=4,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=Tokens(),
        data_collator=default_data_collator,
    )
    print(f"loss {trainer.train().training_loss!r}")

if __name__ == "__main__":
    main()
'''


@pytest.mark.long
def test_a_transformers_trainer_runs_under_tools(script: Path) -> None:
    script.write_text(TRAINER)
    (script.parent / "patch").mkdir()
    (script.parent / "patch" / "sitecustomize.py").write_text(PATCH)
    environment = {"PYTHONPATH": str(script.parent / "patch"), "HF_HUB_OFFLINE": "1"}
    plain = children.run(
        [sys.executable, "train.py", "--output_dir", "a"],
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    options = ["-t", "flops:module=transformer.h", "-t", "nan:frequency=2", "-o", "out"]
    run = amanda_run(script.parent, *options, "--", "train.py", "--output_dir", "b", **environment)
    assert losses(run.stdout) == losses(plain.stdout) != []
    content = json.loads((script.parent / "out" / "flops.json").read_text())
    # 3 steps of 4 sequences of 16 tokens: attention's two products beside the four of each of two layers.
    products = 4 * 16 * (16 * 48 + 16 * 16 + 16 * 64 + 64 * 16)
    assert content["totals"]["forward"]["macs"] == 3 * 2 * (products + 2 * 4 * 16 * 16 * 16)
    assert calls(script.parent / "out" / "flops.json", "addmm") == 3 * 2 * 4
    assert json.loads((script.parent / "out" / "nan.json").read_text())["executions"] > 100


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("loss")]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["known=false", "known=true"])
def test_an_error_of_a_tool_shows_the_program_and_the_tool_alone(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool's module imports the framework at whose import the scope opens."""
    (tmp_path / "failing.py").write_text(FAILING_TOOL)
    (tmp_path / "train.py").write_text("import torch\n\ntorch.ones(2)\nprint(torch.__spec__.origin)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    program = children.run([*RUN, f"failing.Failing:{option}", "train.py"], cwd=tmp_path)
    assert program.returncode == 1
    files = [line for line in program.stderr.splitlines() if line.startswith("  File ")]
    assert [file.partition('"')[2].partition('"')[0] for file in files] == [
        str(tmp_path / "train.py"), str(tmp_path / "failing.py"),
    ]  # fmt: skip
    last_line = program.stderr.splitlines()[-1]
    assert last_line.startswith("[amanda] tool Failing, insert_before_op(Failing.fail at ")
