"""Parameters of functional frameworks: slots in trees of arrays, and what drivers do with them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from amanda.backend import TreeSlot, TreeSlots, named_leaves, path_among, with_slots, without_slots
from amanda.errors import AmandaError


def arrays(*paths: str) -> dict[str, Any]:
    return {path: np.zeros(2) for path in paths}


def test_leaves_have_their_paths_in_dicts_lists_and_tuples() -> None:
    first, second = np.zeros(1), np.ones(1)
    tree = {"layers": [{"weight": first}, (second, "text")], "step": 3}
    leaves = list(named_leaves(tree, np.ndarray))
    assert [path for path, _ in leaves] == ["layers.0.weight", "layers.1.0"]
    assert path_among(leaves, second) == "layers.1.0"
    assert path_among(leaves, np.ones(1)) == "", "an equal array is another one"


def test_leaves_are_found_in_boxes_and_modules() -> None:
    class Module:
        def __init__(self, **attributes: Any) -> None:
            vars(self).update(attributes)

    inner = Module(weight=np.zeros(1))
    tree = Module(inner=inner)

    def content(node: Any) -> Any:
        return vars(node) if isinstance(node, Module) else node

    assert [path for path, _ in named_leaves(tree, np.ndarray, content)] == ["inner.weight"]
    assert path_among(named_leaves(tree, Module, content), inner) == "inner"


def test_a_new_array_at_a_path_has_the_slot_of_the_former_one() -> None:
    slots = TreeSlots("framework")
    step = arrays("w", "b")
    slots.put(step, "loss")
    slot = slots.get(step["w"])
    assert slot is slots.at("loss", "w")
    assert (slot.framework, slot.root, slot.path) == ("framework", "loss", "w")
    assert slot.tensor() is step["w"]
    step = arrays("w", "b")
    gc.collect()
    assert slot.tensor() is None
    slots.put(step, "loss")
    assert slots.get(step["w"]) is slot
    assert slots.get(np.zeros(2)) is None


def test_an_array_that_lies_in_a_slot_stays_there_for_other_roots() -> None:
    slots = TreeSlots("framework")
    step = arrays("w")
    slots.put(step, "loss")
    slots.put({"weight": step["w"]}, "penalty")
    assert slots.at("penalty", "weight") is slots.at("loss", "w")


def test_arrays_without_a_root_have_that_of_a_tree_with_their_paths() -> None:
    slots = TreeSlots("framework")
    slots.put(arrays("w", "b"), "loss")
    step = arrays("w", "b")
    slots.put(step)
    assert slots.get(step["b"]) is slots.at("loss", "b")
    first, second = arrays("w"), arrays("w")
    slots.put(first)
    slots.put(second)
    assert slots.get(first["w"]) is not slots.get(second["w"]), "no root has this path alone"


def test_several_roots_with_the_paths_of_arrays_are_an_error() -> None:
    slots = TreeSlots("framework")
    for root in ("first", "second"):
        slots.put(arrays("w"), root)
    with pytest.raises(AmandaError, match="those of first and second"):
        slots.put(arrays("w"))


def test_slots_come_before_the_arguments_within_a_scope_alone() -> None:
    slot = TreeSlot("framework", "loss", "w")
    call = with_slots(lambda *args, **kwargs: (args, kwargs), {"weight": slot}.get)
    assert call("weight", axis=0) == (("weight",), {"axis": 0})
    assert without_slots(lambda *args, **kwargs: (args, kwargs))(slot, "weight", axis=0) == (
        ("weight",),
        {"axis": 0},
    )
