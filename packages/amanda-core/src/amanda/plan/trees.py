"""Parameters of functional frameworks: places in trees of arrays, where new arrays come after each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from amanda import interceptor
from amanda.errors import AmandaError
from amanda.plan.tensors import TensorMap


class TreeSlot:
    """A parameter: a place in the tree of a model, or in that of an argument of a function.

    tensor: returns the array that was put there last; None once it is dead.

    Args:
        framework: Name by which tools choose tensors and the store of parameters.
        root: Name of the object that tells trees apart, such as the class of a model, or the code of a
            function.
        path: Path of the place in the tree, "layers.0.kernel".
    """

    __slots__ = ("__weakref__", "framework", "path", "root", "tensor")

    def __init__(self, framework: str, root: str, path: str) -> None:
        self.framework, self.root, self.path = framework, root, path
        self.tensor: Callable[[], Any] = lambda: None

    def __repr__(self) -> str:
        return f"<weight {self.path}{f' of {self.root}' if self.root else ''}>"


class TreeSlots(TensorMap[TreeSlot]):
    """The slots of a framework: by the array that lies in a slot, and by the root and path of the place."""

    def __init__(self, framework: str) -> None:
        super().__init__()
        self._framework = framework
        # A root that is an object, such as code, is held weakly: a later one may have the same paths.
        self._slots_by_object: weakref.WeakKeyDictionary[Any, dict[str, TreeSlot]]
        self._slots_by_object = weakref.WeakKeyDictionary()
        self._slots_by_name: dict[str, dict[str, TreeSlot]] = {}

    def __setitem__(self, tensor: Any, slot: TreeSlot) -> None:
        super().__setitem__(tensor, slot)
        slot.tensor = weakref.ref(tensor)

    def at(self, root: Any, path: str, slot: TreeSlot | None = None) -> TreeSlot:
        """Return the slot at a path; a path without a slot gets one.

        Args:
            root: Name or object that tells trees apart; None for a tree that resembles no other, whose slots
                are new.
            path: Path of the place in the tree.
            slot: Slot for a path that has none; None for a new one.
        """
        slots_by_root: Any = self._slots_by_name if isinstance(root, str) else self._slots_by_object
        slot_by_path: dict[str, TreeSlot] = {} if root is None else slots_by_root.setdefault(root, {})
        root_name = "" if root is None else str(root)
        return slot_by_path.setdefault(path, slot or TreeSlot(self._framework, root_name, path))

    def put(self, arrays: Mapping[str, Any], root: Any = None) -> None:
        """Put arrays into the slots at their paths; an array that lies in a slot stays there.

        The slot of such an array becomes that of its path, too, if the path has none.

        Args:
            arrays: Arrays by path.
            root: Name or object that tells trees apart; None for the root whose slots have the same paths, if
                there is one, and new slots else.

        Raises:
            AmandaError: If several roots have slots at these paths, and not the same slots.
        """
        is_array_alone = "" in arrays  # the path of an array that is in no tree
        if root is None and not is_array_alone and not all(map(self.get, arrays.values())):
            root = self._root_with_paths(arrays)
        for path, array in arrays.items():
            present_slot = self.get(array)
            slot_at_path = self.at(root, path, present_slot)
            if present_slot is None:
                self[array] = slot_at_path

    def _root_with_paths(self, arrays: Mapping[str, Any]) -> Any:
        """Return the root whose slots have the paths of these arrays; None if there is none.

        Raises AmandaError if several have, and not the same slots.
        """
        slots_by_root = [*self._slots_by_name.items(), *self._slots_by_object.items()]
        candidates = [(root, slots) for root, slots in slots_by_root if slots.keys() == arrays.keys()]
        if not candidates:
            return None
        first_root, first_slots = candidates[0]
        if any(slots != first_slots for _, slots in candidates):
            names = " and ".join(str(root) for root, _ in candidates)
            raise AmandaError(f"several trees have such parameters, those of {names}; name the one")
        return first_root


def with_slots(detour: Callable[..., Any], slot_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that calls a detour with the slots of the arguments before these.

    So slots enter the ids of ops where the interceptor does not see parameters among the arguments.
    The detour's site is that of `without_slots`; `SignatureCall` takes the slots away.
    Where no activation is in force, the detour gets the arguments alone.

    Args:
        detour: Stand-in of a callable, which takes slots before the arguments.
        slot_of: Returns the slot of an argument; None for an argument without one.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        slots = [slot for slot in map(slot_of, args) if slot] if interceptor.active() else ()
        return detour(*slots, *args, **kwargs)

    return call


def without_slots(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another without the slots among its arguments."""
    return lambda *args, **kwargs: function(*(x for x in args if not isinstance(x, TreeSlot)), **kwargs)


def named_leaves(
    tree: Any, kind: type, content: Callable[[Any], Any] = lambda node: node, path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield what is of a type in a tree of dicts, lists and tuples, with its path: "layers.0.weight".

    Args:
        tree: Dicts, lists and tuples, and boxes or modules that `content` opens.
        kind: Type of the leaves.
        content: Returns the value in a box, or the attributes of a module; another node as it is.
        path: Path of the tree itself, before those of its leaves.
    """
    if isinstance(tree, kind):
        yield path, tree
    inner = content(tree)
    if inner is not tree:
        yield from named_leaves(inner, kind, content, path)
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        members = tree.items()
    elif isinstance(tree, (list, tuple)):
        members = enumerate(tree)
    for name, member in members:
        yield from named_leaves(member, kind, content, f"{path}.{name}".lstrip("."))


def path_among(leaves: Iterable[tuple[str, Any]], value: Any) -> str:
    """Return the path of a value among leaves with paths; "" for a value that is not among them.

    Args:
        leaves: Pairs of a path and a leaf.
        value: Object that is compared by identity.
    """
    return next((path for path, leaf in leaves if leaf is value), "")
