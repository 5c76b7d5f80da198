"""Threads, processes and tasks beside a scope."""

import asyncio
import multiprocessing
import os
import threading
from multiprocessing.pool import ThreadPool
from typing import Any

import children
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import amanda


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


X = torch.linspace(-1, 1, 20).reshape(5, 4)


def test_threads_train_models_of_their_own_under_tools_of_their_own(op_log: Any) -> None:
    trained: dict[int, list[torch.Tensor]] = {}
    networks = [network() for _ in range(3)]
    tools = [op_log, type(op_log)(), None]

    def train(index: int) -> None:
        optimizer = torch.optim.SGD(networks[index].parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            networks[index](X).square().sum().backward()
            optimizer.step()
        trained[index] = [p.detach() for p in networks[index].parameters()]

    def run(index: int) -> None:
        with amanda.apply(*([tools[index]] if tools[index] else [])):
            train(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for i in (0, 1) for a, b in zip(trained[i], trained[2], strict=True))
    assert op_log.names == tools[1].names
    linear = [
        {op_id for op_id, name in zip(t.ids, t.names, strict=True) if name == "linear"} for t in tools[:2]
    ]
    assert not linear[0] & linear[1]


def test_a_model_is_trained_on_a_thread_in_the_scope(op_log: Any) -> None:
    net, grads = network(), []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_backward_op(lambda *gradients: grads.append(context["name"])),
        backward=True,
    )
    tool.add_inst_for_op(lambda context: context.update(name=context.get_op_type()))

    def step() -> None:
        net(X).sum().backward()

    with amanda.apply(tool, op_log) as scope:
        for _ in range(2):
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()
    assert op_log.names == ["linear", "relu", "linear", "sum", "ones_like"] * 2
    assert (grads.count("relu"), grads.count("sum")) == (2, 2)
    assert grads.count("linear") > 4
    assert scope.report == []


def test_tasks_do_not_see_each_others_scopes(op_log: Any) -> None:
    second_log = type(op_log)()

    async def work(tool: amanda.Tool, op: str) -> None:
        with amanda.apply(tool):
            for _ in range(3):
                getattr(torch, op)(X)
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(work(op_log, "relu"), work(second_log, "tanh"))

    asyncio.run(main())
    assert op_log.names == ["relu"] * 3
    assert second_log.names == ["tanh"] * 3


class Items(Dataset[torch.Tensor]):
    """Rows whose last value says whether the worker is instrumented."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        instrumented = type(torch.nn.Module.__call__).__name__ != "function"
        return torch.relu(torch.tensor([float(index), float(instrumented)]))


def test_a_data_loader_that_a_pool_walks_is_in_the_scope(op_log: Any) -> None:
    with ThreadPool(2) as pool, amanda.apply(op_log):
        batches = pool.imap(torch.neg, DataLoader(Items(), batch_size=2))
        assert [len(batch) for batch in batches] == [2, 2]
    assert op_log.names.count("neg") == 2
    assert op_log.names.count("stack") == 2  # of the loader, which a thread of the pool walks


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_data_loader_workers_run_as_without_a_scope(op_log: Any, method: str) -> None:
    with amanda.apply(op_log) as scope:
        loader = DataLoader(Items(), batch_size=2, num_workers=1, multiprocessing_context=method, timeout=300)
        batches = torch.cat(list(loader))
    assert torch.equal(batches, torch.tensor([[0.0, 0], [1, 0], [2, 0], [3, 0]]))
    assert "relu" not in op_log.names
    assert [entry.what for entry in scope.report] == ["worker processes of a DataLoader"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_data_loader_workers_from_before_are_in_the_report(op_log: Any) -> None:
    loader = DataLoader(Items(), batch_size=2, num_workers=1, persistent_workers=True, timeout=300)
    list(loader)
    with amanda.apply(op_log) as scope:
        list(loader)
    assert [entry.what for entry in scope.report] == ["worker processes of a DataLoader"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_vanilla_and_may_open_scopes(op_log: Any) -> None:
    reader, writer = os.pipe()
    with amanda.apply(op_log):
        child = os.fork()
        if child == 0:
            children.end_after(60)
            torch.relu(torch.ones(2))
            before = type(torch.nn.Module.__call__).__name__, tuple(op_log.names)
            child_log = type(op_log)()
            with amanda.apply(child_log):
                torch.relu(torch.ones(2))
            os.write(writer, repr((before, child_log.names)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        torch.relu(torch.ones(2))
    assert os.read(reader, 1000).decode() == "(('function', ()), ['ones', 'relu'])"
    assert op_log.names == ["ones", "relu"]


def is_instrumented(answers: Any) -> None:
    answers.put(type(torch.nn.Module.__call__).__name__)


def test_a_spawned_process_is_vanilla(op_log: Any) -> None:
    context = multiprocessing.get_context("spawn")
    with amanda.apply(op_log):
        answers = context.SimpleQueue()
        process = context.Process(target=is_instrumented, args=(answers,))
        process.start()
        with children.killed([process]):
            process.join()
    assert answers.get() == "function"
