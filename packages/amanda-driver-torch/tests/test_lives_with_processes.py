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


def test_threads_train_models_of_their_own_under_tools_of_their_own(seen: Any) -> None:
    trained: dict[int, list[torch.Tensor]] = {}
    networks = [network() for _ in range(3)]
    tools = [seen, type(seen)(), None]

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
    assert seen.names == tools[1].names
    linear = [{one for one, name in zip(t.ids, t.names, strict=True) if name == "linear"} for t in tools[:2]]
    assert not linear[0] & linear[1]


def test_a_model_is_trained_on_a_thread_in_the_scope(seen: Any) -> None:
    net, grads = network(), []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_backward_op(lambda *given: grads.append(context["name"])),
        backward=True,
    )
    tool.add_inst_for_op(lambda context: context.update(name=context.get_op_type()))

    def step() -> None:
        net(X).sum().backward()

    with amanda.apply(tool, seen) as scope:
        for _ in range(2):
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()
    assert seen.names == ["linear", "relu", "linear", "sum", "ones_like"] * 2
    assert (grads.count("relu"), grads.count("sum")) == (2, 2)
    assert grads.count("linear") > 4
    assert scope.report == []


def test_tasks_do_not_see_each_others_scopes(seen: Any) -> None:
    other = type(seen)()

    async def work(tool: amanda.Tool, op: str) -> None:
        with amanda.apply(tool):
            for _ in range(3):
                getattr(torch, op)(X)
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(work(seen, "relu"), work(other, "tanh"))

    asyncio.run(main())
    assert seen.names == ["relu"] * 3
    assert other.names == ["tanh"] * 3


class Items(Dataset[torch.Tensor]):
    """Rows whose last value says whether the worker is instrumented."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        instrumented = type(torch.nn.Module.__call__).__name__ != "function"
        return torch.relu(torch.tensor([float(index), float(instrumented)]))


def test_a_data_loader_that_a_pool_walks_is_in_the_scope(seen: Any) -> None:
    with ThreadPool(2) as pool, amanda.apply(seen):
        batches = pool.imap(torch.neg, DataLoader(Items(), batch_size=2))
        assert [len(batch) for batch in batches] == [2, 2]
    assert seen.names.count("neg") == 2
    assert seen.names.count("stack") == 2  # of the loader, which a thread of the pool walks


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_data_loader_workers_run_as_without_a_scope(seen: Any, method: str) -> None:
    with amanda.apply(seen) as scope:
        loader = DataLoader(Items(), batch_size=2, num_workers=1, multiprocessing_context=method, timeout=300)
        batches = torch.cat(list(loader))
    assert torch.equal(batches, torch.tensor([[0.0, 0], [1, 0], [2, 0], [3, 0]]))
    assert "relu" not in seen.names
    assert [entry.what for entry in scope.report] == ["worker processes of a DataLoader"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_data_loader_workers_from_before_are_in_the_report(seen: Any) -> None:
    loader = DataLoader(Items(), batch_size=2, num_workers=1, persistent_workers=True, timeout=300)
    list(loader)
    with amanda.apply(seen) as scope:
        list(loader)
    assert [entry.what for entry in scope.report] == ["worker processes of a DataLoader"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_vanilla_and_may_open_scopes(seen: Any) -> None:
    reader, writer = os.pipe()
    with amanda.apply(seen):
        child = os.fork()
        if child == 0:
            children.end_after(60)
            torch.relu(torch.ones(2))
            before = type(torch.nn.Module.__call__).__name__, tuple(seen.names)
            own = type(seen)()
            with amanda.apply(own):
                torch.relu(torch.ones(2))
            os.write(writer, repr((before, own.names)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        torch.relu(torch.ones(2))
    assert os.read(reader, 1000).decode() == "(('function', ()), ['ones', 'relu'])"
    assert seen.names == ["ones", "relu"]


def is_instrumented(answers: Any) -> None:
    answers.put(type(torch.nn.Module.__call__).__name__)


def test_a_spawned_process_is_vanilla(seen: Any) -> None:
    context = multiprocessing.get_context("spawn")
    with amanda.apply(seen):
        answers = context.SimpleQueue()
        process = context.Process(target=is_instrumented, args=(answers,))
        process.start()
        with children.killed([process]):
            process.join()
    assert answers.get() == "function"
