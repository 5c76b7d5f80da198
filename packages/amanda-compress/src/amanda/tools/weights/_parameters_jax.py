"""Parameters of JAX: slots of a model or of a pytree, whose arrays are immutable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from amanda.tools.weights._parameters import ParameterError, ParameterStore, StoredParameter, ValueUpdate


class Slots(ParameterStore):
    """Slots of the driver, by class of the model and path."""

    def identity(self, parameter: Any) -> Any:
        """Return the slot, of which there is one object for each path."""
        return parameter

    def slices(self, parameter: Any) -> Sequence[Any]:
        """Return the slots of the slices of a weight stack; () for another slot."""
        return parameter.parts() if hasattr(parameter, "parts") else ()

    def current_slice(self, parameter: Any) -> Any:
        """Return the slot of the slice that is read in a round of a scan, or for a row that is mapped."""
        return parameter.current()

    def read(self, parameter: Any, part: Any) -> Any:
        """Raise ParameterError: an array is in a slot only while a function runs."""
        raise ParameterError(
            f"{parameter!r} has a value only in a call; read it in the model, or in its parameters"
        )

    def write_all(self, model: Any, changes: Sequence[tuple[Any, Any, ValueUpdate]]) -> tuple[Any, int]:
        """Return a model with changed parameters, and the number of changes.

        A module of Flax NNX or a model of Keras is changed in place; another pytree is copied.
        Raises ParameterError if two changes belong to one path.
        """
        import jax

        # The slices of a stack become one change of the stack: each path of the model takes one change, and
        # arrays of JAX are written as a whole.
        changes = _merge_stack_changes(changes)
        # Models of Keras and NNX hold their arrays in variables, and users go on with the same object; other
        # models are pytrees, of which a new one is returned.
        variables = dict(_settable_variables(model))
        if variables:
            return model, self._write_variables(variables, changes)
        leaves, tree = jax.tree_util.tree_flatten_with_path(model)
        paths = [".".join(map(_key_name, path)) for path, _ in leaves]
        updates = _updates_by_path(paths, changes)
        new_leaves = [
            _updated(updates[path], leaf) if path in updates else leaf
            for path, (_, leaf) in zip(paths, leaves, strict=True)
        ]
        return jax.tree_util.tree_unflatten(tree, new_leaves), len(updates)

    def _write_variables(
        self,
        variables: Mapping[str, tuple[Any, Callable[[Any], None]]],
        changes: Sequence[tuple[Any, Any, ValueUpdate]],
    ) -> int:
        """Write changed values into variables, all or none; return their number.

        variables: value and setter by path.
        """
        updates = _updates_by_path(list(variables), changes)
        with self.undone_on_error() as undo:
            for path, update in updates.items():
                value, setter = variables[path]
                new = _updated(update, value)
                undo.append(partial(setter, value))
                setter(new)
        return len(updates)

    def parameters(self, model: Any) -> Iterator[StoredParameter]:
        """Raise ParameterError: paths tell parameters, and `write_all` writes them."""
        raise ParameterError(f"the parameters of {type(model).__name__} are identified by their paths")


def _updated(update: ValueUpdate, value: Any) -> Any:
    """Return the new value of an array, in the array's element type."""
    import jax
    import numpy as np

    # The functions of tools compute in float32 or wider; a model keeps the element type that it had.
    return jax.numpy.asarray(update(np.array(value)), value.dtype)


def _merge_stack_changes(
    changes: Sequence[tuple[Any, Any, ValueUpdate]],
) -> list[tuple[Any, Any, ValueUpdate]]:
    """Return changes in which a change of each stack replaces the changes of its slices."""
    slot_changes: list[tuple[Any, Any, ValueUpdate]] = []
    updates_by_stack: dict[Any, list[tuple[Any, ValueUpdate]]] = {}
    for holder, part, update in changes:
        if hasattr(holder, "stack"):  # the slot of a slice, such as a layer of a scan
            slice_index = holder.place()
            updates_by_stack.setdefault(holder.stack, []).append((slice_index, update))
        else:
            slot_changes.append((holder, part, update))
    for stack, updates in updates_by_stack.items():
        slot_changes.append((stack, None, partial(_update_slices, updates)))
    return slot_changes


def _update_slices(updates: Sequence[tuple[Any, ValueUpdate]], stack: Any) -> Any:
    """Update slices of a stacked array in place, and return the array; updates: with the slice's index."""
    for index, update in updates:
        stack[index] = update(stack[index].copy())
    return stack


def _settable_variables(model: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield path, value and setter of each variable of a mutable model; nothing for another model."""
    # Keras' own attribute instead of an import, which would choose a backend of Keras.
    if hasattr(model, "trainable_variables"):  # Keras
        for variable in model.weights:
            yield variable.path.replace("/", "."), (variable.value, variable.assign)
    # By name of the module, so that flax is imported for models of flax alone.
    elif any(base.__module__.startswith("flax.nnx") for base in type(model).__mro__[:-1]):
        from flax import nnx

        if isinstance(model, nnx.Module):
            for path, variable in nnx.iter_graph(model):
                if isinstance(variable, nnx.Variable):
                    yield ".".join(map(str, path)), (variable[...], variable.set_value)


def _key_name(key: Any) -> str:
    """Return the name, the key or the index of one entry of a leaf's path."""
    return str(next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)))


def _updates_by_path(
    paths: Sequence[str], changes: Sequence[tuple[Any, Any, ValueUpdate]]
) -> dict[str, ValueUpdate]:
    """Return updates by path in the model: the path of the slot, or a path with the same end.

    A slot that no path fits is left out.  Raises ParameterError for a slot or a path of several matches.

    The slot's path begins at the argument of the traced function: "params.dense.kernel" may be "dense.kernel"
    in the pytree that was passed, and "model.params.dense.kernel" in the model around the pytree.
    """
    updates: dict[str, ValueUpdate] = {}
    holders: dict[str, Any] = {}
    for holder, _, update in changes:
        equal_paths = [path for path in paths if path == holder.path]
        paths_with_same_end = [
            path
            for path in paths
            if f".{holder.path}".endswith(f".{path}") or path.endswith(f".{holder.path}")
        ]
        # An equal path decides even if longer paths end alike.
        matching_paths = equal_paths or paths_with_same_end
        if len(matching_paths) > 1:
            raise ParameterError(
                f"{holder!r} may be {' or '.join(matching_paths)}; give the part of the model that it is of"
            )
        for path in matching_paths:
            if path in updates:
                raise ParameterError(
                    f"both {holders[path]!r} and {holder!r} may be {path} of this model; let each model "
                    "have a tool of its own, or give a pytree in which their paths differ"
                )
            updates[path], holders[path] = update, holder
    return updates
