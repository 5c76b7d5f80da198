"""Weights of JAX: slots of a model or of a pytree, whose arrays nobody writes into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from amanda.tools.weights._parameters import Changed, ParameterError, ParameterStore, StoredParameter


class Slots(ParameterStore):
    """Slots, by class of the model and path, as the driver tells them."""

    def identity(self, parameter: Any) -> Any:
        """Return the slot, of which there is one object for each path."""
        return parameter

    def locate(self, parameter: Any, weight: Any) -> tuple[Any, None]:
        """Return the slot, of which a weight is all, if in another element type."""
        return parameter, None

    def slices(self, parameter: Any) -> Sequence[Any]:
        """Return the slots of the slices of a stack; none of another slot."""
        return parameter.parts() if hasattr(parameter, "parts") else ()

    def current_slice(self, parameter: Any) -> Any:
        """Return the slot of the slice that is read in a round of a scan, or for a row that is mapped."""
        return parameter.current()

    def read(self, parameter: Any, part: Any) -> Any:
        """Raise ParameterError: an array is in a slot only while a function runs."""
        raise ParameterError(
            f"{parameter!r} has a value only in a call; read it in the model, or in its parameters"
        )

    def write_all(self, model: Any, changes: Sequence[tuple[Any, Any, Changed]]) -> tuple[Any, int]:
        """Return a model with other weights, and how many there are.

        A module of Flax NNX or a model of Keras is written into; another pytree is returned anew.
        Raises ParameterError where two weights would go to one place.
        """
        import jax
        import numpy as np

        changes = _by_slot(changes)
        setters = dict(_setters(model))
        if setters:
            found = _placed(list(setters), changes)
            with self.undone_on_error() as undo:
                for path, changed in found.items():
                    value, put = setters[path]
                    new = jax.numpy.asarray(changed(np.array(value)), value.dtype)
                    undo.append(partial(put, value))
                    put(new)
            return model, len(found)
        leaves, tree = jax.tree_util.tree_flatten_with_path(model)
        paths = [".".join(map(_word, path)) for path, _ in leaves]
        found = _placed(paths, changes)
        new = [leaf if path not in found else jax.numpy.asarray(found[path](np.array(leaf)), leaf.dtype)
               for path, (_, leaf) in zip(paths, leaves, strict=True)]  # fmt: skip
        return jax.tree_util.tree_unflatten(tree, new), len(found)

    def parameters(self, model: Any) -> Iterator[StoredParameter]:
        """Raise ParameterError: paths tell parameters, and `write_all` writes them."""
        raise ParameterError(f"the parameters of {type(model).__name__} are told by their paths")


def _by_slot(changes: Sequence[tuple[Any, Any, Changed]]) -> list[tuple[Any, Any, Changed]]:
    """Return changes, with one of a whole stack for those of its slices."""
    slices: dict[Any, list[tuple[Any, Changed]]] = {}
    for holder, _, changed in changes:
        if hasattr(holder, "stack"):
            slices.setdefault(holder.stack, []).append((holder.place(), changed))
    others = [one for one in changes if not hasattr(one[0], "stack")]
    return [*others, *((stack, None, partial(_sliced, one)) for stack, one in slices.items())]


def _sliced(changes: Sequence[tuple[Any, Changed]], value: Any) -> Any:
    """Return an array with other slices."""
    for place, changed in changes:
        value[place] = changed(value[place].copy())
    return value


def _setters(model: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the path of each variable of a mutable model, with its value and what sets it."""
    if hasattr(model, "trainable_variables"):  # Keras
        for one in model.weights:
            yield one.path.replace("/", "."), (one.value, one.assign)
    elif any(kind.__module__.startswith("flax.nnx") for kind in type(model).__mro__[:-1]):
        from flax import nnx

        if isinstance(model, nnx.Module):
            for path, one in nnx.iter_graph(model):
                if isinstance(one, nnx.Variable):
                    yield ".".join(map(str, path)), (one[...], one.set_value)


def _word(key: Any) -> str:
    """Return the name, the key or the index of one step to a leaf."""
    return str(next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)))


def _placed(paths: Sequence[str], changes: Sequence[tuple[Any, Any, Changed]]) -> dict[str, Changed]:
    """Return which path each change goes to: its own, or the one that ends as its own does.

    Functions name their arguments as they like: the weight "params.dense.kernel" of one is "dense.kernel" of
    what it was given, and "model.params.dense.kernel" of what that was taken out of.
    """
    found: dict[str, Changed] = {}
    owners: dict[str, Any] = {}
    for holder, _, changed in changes:
        own = [path for path in paths if path == holder.path] or [
            path
            for path in paths
            if f".{holder.path}".endswith(f".{path}") or path.endswith(f".{holder.path}")
        ]
        if len(own) > 1:
            raise ParameterError(
                f"{holder!r} may be {' or '.join(own)}; give the part of the model that it is of"
            )
        for path in own:
            if path in found:
                raise ParameterError(
                    f"both {owners[path]!r} and {holder!r} may be {path} of this model; let each model "
                    "have a tool of its own, or give a pytree in which their paths differ"
                )
            found[path], owners[path] = changed, holder
    return found
