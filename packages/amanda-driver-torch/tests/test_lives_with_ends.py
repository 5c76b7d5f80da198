"""Forks, exits and deep graphs, each in a process of its own: a native crash is never an outcome."""

import os
import sys
import textwrap
from typing import Any

import children
import pytest

from amanda.interceptor import NATIVE

BEGIN = """
import gc, logging, os, signal, sys, threading, time
import amanda, torch

class Same(amanda.Tool):
    def __init__(self, act=lambda: None):
        self.act, self.calls = act, 0
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)
    def forward(self, context):
        context.insert_before_op(self.same)
        context.insert_after_op(self.same)
    def backward(self, context):
        context.insert_before_backward_op(self.same)
        context.insert_after_backward_op(self.same)
    def same(self, *values):
        self.calls += 1
        self.act()
        return values

net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
def step():
    net(x).sum().backward()
def vanilla():
    return type(torch.nn.Module.__call__).__name__ == "function"
"""


def run(program: str, **env: Any) -> tuple[int, list[str]]:
    """Exit status and what was printed, where nothing was on stderr."""
    done = children.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + textwrap.dedent(program)],
        limit=120,
        env={**os.environ, **env},
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")


@pytest.mark.slow
@fork
def test_a_child_that_was_forked_in_a_scope_leaves_it_in_peace() -> None:
    program = """
        with amanda.apply(Same()):
            step()
            child = os.fork()
            if child:
                print("ended", os.waitpid(child, 0)[1], flush=True)
        step()
        print(vanilla(), flush=True)
        with amanda.apply(Same()) as scope:
            step()
        try:
            scope.stop()
        except amanda.errors.ScopeError:
            print("closed once")
    """
    assert run(program) == (0, ["True", "closed once", "ended 0", "True", "closed once"])


@pytest.mark.slow
@fork
def test_a_child_may_exit_within_the_scope_and_within_a_routine() -> None:
    program = """
        def act():
            global child
            if child is None:
                child = os.fork()
                if child == 0:
                    sys.exit(6)
        with amanda.apply(Same()):
            step()
            child = os.fork()
            if child == 0:
                sys.exit(5)
        print(os.waitpid(child, 0)[1] >> 8, flush=True)
        child = None
        with amanda.apply(Same(act)):
            step()
        print(os.waitpid(child, 0)[1] >> 8, flush=True)
    """
    assert run(program) == (0, ["5", "6"])


@fork
def test_a_child_uses_a_tool_whose_routine_runs_on_another_thread_of_the_parent() -> None:
    program = """
        begun, done = threading.Event(), threading.Event()
        tool = Same(lambda: (begun.set(), done.wait(60)))
        thread = threading.Thread(target=amanda.apply(tool)(step))
        thread.start()
        begun.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            tool.act = lambda: None
            with amanda.apply(tool):
                step()
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        done.set()
        thread.join()
    """
    assert run(program) == (0, ["0"])


@pytest.mark.slow
@pytest.mark.parametrize(("leave", "status"), [("sys.exit(4)", 4), ("os._exit(5)", 5)])
def test_a_routine_may_end_the_process(leave: str, status: int) -> None:
    assert run(f"with amanda.apply(Same(lambda: {leave})): step()") == (status, [])


def test_the_interpreter_ends_within_a_scope() -> None:
    program = """
        import atexit
        class Last:
            def __del__(self):
                net(x)
        atexit.register(lambda: (step(), print("at exit")))
        scope = amanda.apply(Same()).start()
        step()
        def suspended():
            with amanda.apply(Same()):
                yield step()
        suspended = suspended()
        next(suspended)
        scope.last, sys.modules["last"] = Last(), Last()
    """
    assert run(program) == (0, ["at exit"])


@pytest.mark.parametrize("waiting", ["time.sleep(100)", "[0 for _ in iter(int, 1)]"])
def test_the_interpreter_ends_while_a_daemon_thread_is_in_a_routine(waiting: str) -> None:
    program = f"""
        begun = threading.Event()
        tool = Same(lambda: (begun.set(), {waiting}))
        threading.Thread(target=amanda.apply(tool)(lambda: net(x)), daemon=True).start()
        begun.wait(60)
        with amanda.apply(Same()):
            step()
        print("ended")
    """
    assert run(program) == (0, ["ended"])


@pytest.mark.slow
def test_graphs_of_any_depth_are_made_walked_and_freed() -> None:
    program = """
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, grad):
                return grad
        class Copies(amanda.Tool):
            def __init__(self):
                self.add_inst_for_op(lambda context: context.insert_after_op(torch.clone, outputs=[0]))
                self.add_inst_for_op(lambda context: None, backward=True)
        def deep(op, depth):
            y = x.clone().requires_grad_()
            for _ in range(depth):
                y = op(y)
            return y.sum()
        watching = amanda.Tool()
        watching.add_inst_for_op(lambda context: None, backward=True)
        with amanda.apply(watching):
            loss = deep(lambda y: y * 1.0, 60_000)
            del loss  # whose nodes were looked at
            print("freed", flush=True)
            loss = deep(lambda y: y * 1.0, 5_000)
            loss.backward()
            del loss
            print("walked", flush=True)
        logging.getLogger("amanda").setLevel("ERROR")  # it says that calls of Twice run in Python
        with amanda.apply(Copies()):
            loss = deep(Twice.apply, 5_000)
            del loss
        print("copied")
    """
    assert run(program, OMP_NUM_THREADS="1") == (0, ["freed", "walked", "copied"])


@pytest.mark.skipif(not NATIVE, reason="Python finalizers lose what a signal's handler raises in them")
def test_no_interrupt_is_lost_while_a_graph_is_freed() -> None:
    program = """
        import random
        raised = caught = 0
        class Interrupt(BaseException): pass
        def interrupt(*_):
            global raised
            raised += 1
            raise Interrupt
        signal.signal(signal.SIGALRM, interrupt)
        watching = amanda.Tool()
        watching.add_inst_for_op(lambda context: None, backward=True)
        leaf = x.clone().requires_grad_()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            try:
                try:
                    with amanda.apply(watching):
                        loss = leaf
                        for _ in range(400):
                            loss = loss * 1.0
                        loss.sum().backward(retain_graph=True)
                        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 4e-4))
                        del loss
                        for _ in range(300):
                            pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                caught += 1
        print(raised > 10, raised - caught)
    """
    assert run(program, OMP_NUM_THREADS="1") == (0, ["True 0"])
