"""Records of executions, live tensors and sent gradients, natively and in pure Python."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from amanda import interceptor
from amanda.interceptor import _fallback

BOTH = pytest.mark.parametrize("module", [interceptor, _fallback])


class Value:
    """An object like a tensor or a storage."""


@BOTH
def test_an_index_ends_with_its_tensor(module: Any) -> None:
    live, tensors = module.LiveTensors(), [Value() for _ in range(100)]
    for index, tensor in enumerate(tensors):
        live.set(tensor, index, index)
    assert [live.find(tensor)[:2] for tensor in tensors] == [(index, 0) for index in range(100)]
    assert live.find(tensors[3])[2]() is tensors[3]
    kept, addresses = tensors[::2], [id(tensor) for tensor in tensors[1::2]]
    del tensors, tensor
    gc.collect()
    assert [live.find(tensor)[0] for tensor in kept] == list(range(0, 100, 2))
    others = [Value() for _ in range(200)]
    assert addresses
    assert all(live.find(other) is None for other in others)


@BOTH
def test_a_value_without_weak_references_is_kept(module: Any) -> None:
    live, value = module.LiveTensors(), (1, 2, object())
    live.set(value, 3, 3)
    index, serial, reference = live.find(value)
    assert (index, serial) == (3, 0)
    assert reference() is value


@BOTH
def test_writes_are_numbered_and_end_with_their_storage(module: Any) -> None:
    live, storage, other = module.LiveTensors(), Value(), Value()
    span, half = (0, (2, 3), (3, 1), 4), (3, (3,), (1,), 4)
    live.note_write(storage, 1000, 7, span)
    live.note_write(other, 2000, 8, half)
    live.note_write(storage, 1000, 9, half)
    tensor = Value()
    live.set(tensor, 1, 1)
    assert live.find(tensor)[1] == live.serial == 3
    assert live.writes(1000, 0) == [(3, 9, half), (1, 7, span)]
    assert live.writes(1000, 1) == [(3, 9, half)]
    assert live.writes(3000, 0) == []
    for op in range(300):
        live.note_write(storage, 1000, op, span)
    assert [op for _, op, _ in live.writes(1000, 0)] == list(range(299, 171, -1))
    del storage
    gc.collect()
    assert live.writes(1000, 0) == []
    assert live.writes(2000, 0) == [(2, 8, half)]


@BOTH
def test_live_tensors_end_before_their_tensors(module: Any) -> None:
    tensor, storage = Value(), Value()
    live = module.LiveTensors()
    live.set(tensor, 0, 0)
    live.note_write(storage, 1000, 0, (0, (), (), 4))
    del live
    gc.collect()
    del tensor, storage
    gc.collect()


@BOTH
def test_executions_end_innermost_first_in_their_thread(module: Any) -> None:
    records = module.ExecutionRecords(module.LiveTensors(), [], ())
    assert records.end() is None
    assert records.current() is None
    records.begin("outer")
    records.begin("inner")
    ends: list[Any] = []

    def work() -> None:
        records.begin("other")
        ends.extend([records.current(), records.end(), records.end()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ends == ["other", "other", None]
    assert records.current() == "inner"
    assert [records.end(), records.end(), records.end()] == ["inner", "outer", None]
    for number in range(1000):  # that raise
        records.begin(number)
    assert [records.end() for _ in range(257)] == [*range(999, 743, -1), None]


@BOTH
def test_the_latest_execution_has_made_a_node(module: Any) -> None:
    records = module.ExecutionRecords(module.LiveTensors(), [], ())
    records.add_nodes(5, 8, 1)
    records.add_nodes(7, 9, 2)
    assert [records.op_of_node(number) for number in range(4, 10)] == [None, 1, 1, 2, 2, None]
    assert records.op_of_node(2**64 - 1) is None
    for number in range(100, 400):
        records.add_nodes(number, number + 1, number)
    assert records.op_of_node(5) is None
    assert [records.op_of_node(number) for number in (143, 144, 399)] == [None, 144, 399]


@BOTH
def test_copies_know_nothing(module: Any) -> None:
    live, tensor = module.LiveTensors(), Value()
    live.set(tensor, 0, 0)
    records = module.ExecutionRecords(live, [3], (0,))
    records.add(module.ExecutionRecord(3, (0, None), (0, None), ((1, None),), ((1, None),), ((0, 2, 0),)))
    records.begin("execution")
    copied_live, copied_records = copy.deepcopy([live, records])
    assert copied_live.find(tensor) is None
    assert copied_records.live is copied_live
    assert copied_records.end() is None
    assert records.end() == "execution"


class Leaf:
    """The backward op of a leaf."""

    def __init__(self) -> None:
        self.variable = SimpleNamespace(grad="gradient")
        self.next_functions = ()


class Op:
    """A backward op with a number."""

    def __init__(self, number: int, *next_functions: Any) -> None:
        self.number, self.next_functions = number, next_functions

    def _sequence_nr(self) -> int:
        return self.number


@BOTH
def test_gradients_reach_the_next_ops_of_their_pass(module: Any) -> None:
    present = SimpleNamespace(op=None, number=1)
    gradients = module.SentGradients(lambda: present.op, lambda: present.number, Leaf)
    leaf, other_leaf, last = Leaf(), Leaf(), Op(3)
    first = Op(9, (leaf, 0), (None, 0), (last, 1), (last, 1), (other_leaf, 0))

    def receive(op: Any, count: int, take: bool = True) -> Any:
        present.op = op
        number, summands = gradients.receive(count, take)
        return number, [tuple(indices) for indices in summands]

    assert receive(None, 1) == (None, [()])
    assert gradients.send([1]) is None
    assert receive(first, 2) == (9, [(), ()])
    assert gradients.send((10, 11, 12, 13)) is None
    present.number = 2
    assert receive(last, 2) == (3, [(), ()])
    present.number = 1
    assert receive(last, 2, take=False) == (3, [(), (12, 13)])
    assert receive(last, 2) == (3, [(), (12, 13)])
    assert receive(last, 2) == (3, [(), ()])
    assert receive(other_leaf, 1) == (None, [()])
    assert receive(leaf, 1) == (None, [(10,)])
    assert gradients.send([None]) == "gradient"
    for present.number in range(3, 40):  # that fail
        present.op = first
        gradients.send([None, 0, 1, None])
    present.number = 10
    assert receive(last, 2) == (3, [(), ()])
    present.number = 39
    assert receive(last, 2) == (3, [(), (1,)])


@BOTH
def test_saved_values_are_read_of_the_ops_of_one_execution(module: Any) -> None:
    packs: list[bool] = []
    saved = module.SavedTensorReader(
        "maker",
        "next_functions",
        "_sequence_nr",
        lambda kind: ["saved", "freed", "other"],
        lambda: bool(packs),
    )

    class Freed(Op):
        saved = other = None

        @property
        def freed(self) -> Any:
            raise RuntimeError("freed")

    def make(number: int, *next_ops: Any) -> Any:
        op = Freed(number, *[(next_op, 0) for next_op in next_ops])
        op.saved, op.other = f"saved {number}", [number]
        return op

    older = make(4)
    inner = make(6, older, None)
    outer = make(7, older, inner, inner)
    tensors = [SimpleNamespace(maker=maker) for maker in (inner, None, outer)]
    assert saved.between(tensors, 5, 8) == ["saved 7", [7], "saved 6", [6]]
    assert saved.between(tensors[:1], 0, 7) == ["saved 6", [6], "saved 4", [4]]
    assert saved.between(tensors, 7, 7) == []
    assert copy.deepcopy(saved).between(tensors[:2], 5, 8) == ["saved 6", [6]]
    packs.append(True)
    assert saved.between(tensors, 5, 8) == []
    packs.clear()
    with pytest.raises(AttributeError, match="maker"):
        saved.between([object()], 5, 8)
    outer.next_functions = (("no op", 0),)
    with pytest.raises(AttributeError, match="_sequence_nr"):
        saved.between(tensors, 5, 8)


@BOTH
def test_an_error_of_a_node_is_raised(module: Any) -> None:
    def fail() -> Any:
        raise RuntimeError("no node")

    gradients = module.SentGradients(fail, lambda: 1, Leaf)
    with pytest.raises(RuntimeError, match="no node"):
        gradients.receive(1, True)
    with pytest.raises(RuntimeError, match="no node"):
        gradients.send([1])


@pytest.mark.skipif(not interceptor.NATIVE, reason=interceptor.REASON or "")
def test_hooks_of_a_node_may_be_collected_for_as_their_end_is_heard() -> None:
    ends: list[int] = []
    for _ in range(3):
        hooks, handle = interceptor.HookRegistrar.add(None, ends.append)
        assert handle is hooks
        _, other = interceptor.HookRegistrar.add(hooks, ends)
        assert (handle.hook, other.hook, len(hooks)) == (ends.append, ends, 2)
        handle.remove()
        other.remove()
        handle.remove()
        assert not hooks
        reference = weakref.ref(hooks, lambda _: ends.append(gc.collect()))
        del hooks, handle, other, _
        assert reference() is None
    assert len(ends) == 3


@pytest.mark.skipif(not interceptor.NATIVE, reason=interceptor.REASON or "")
def test_a_hook_that_is_replaced_keeps_its_place_and_one_that_was_removed_stays_away() -> None:
    hooks, first = interceptor.HookRegistrar.add(None, "first")
    second, third = (interceptor.HookRegistrar.add(hooks, hook)[1] for hook in ("second", "third"))
    for handle, hook in ((first, "new first"), (second, "new second")):
        handle.replace(hook)
        assert handle.hook == hook
    assert [*hooks.values()] == ["new first", "new second", "third"]
    for handle in (first, second, third):
        handle.remove()
        handle.replace("late")
    assert not hooks


@pytest.mark.skipif(not interceptor.NATIVE, reason=interceptor.REASON or "")
def test_chain_of_hooks_ends_without_recursion() -> None:
    hook: Any = None
    for _ in range(300_000):
        hook, _ = interceptor.HookRegistrar.add(None, hook)
    del hook, _


@pytest.mark.skipif(not interceptor.NATIVE, reason=interceptor.REASON or "")
def test_gradients_are_received_and_sent_while_a_collection_runs_passes() -> None:
    class Leaf:
        pass

    class Node:
        def __init__(self, number: int, next_functions: tuple[Any, ...] = ()) -> None:
            self.number, self.next_functions = number, next_functions

        def _sequence_nr(self) -> int:
            return self.number

    target = Node(7)
    source, other = Node(1, tuple((target, place) for place in range(6))), Node(2, ((Node(9), 0),))
    current: list[Any] = [source, 1]
    waiting: list[int] = []

    def run_passes(phase: str, _: Any) -> None:
        if phase == "start" and waiting and not waiting.pop():
            before = list(current)
            for number in range(100, 120):
                current[:] = [other, number]
                gradients.send([5])
            current[:] = before

    gc.callbacks.append(run_passes)
    threshold = gc.get_threshold()
    try:
        for collection in range(1, 8):
            gradients = interceptor.SentGradients(lambda: current[0], lambda: current[1], Leaf)
            current[:] = [source, 1]
            for i in range(40):
                gradients.send([1000 + i] * 6)
            current[:] = [target, 1]
            waiting[:] = [0, *[1] * collection]
            gc.set_threshold(1)
            received = gradients.receive(6, False)[1]
            gc.set_threshold(*threshold)
            waiting.clear()
            assert all(list(each) in ([], list(range(1000, 1040))) for each in received)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(run_passes)
