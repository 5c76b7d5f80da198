"""Public functions of JAX and optax, each with arguments that it accepts, found by trial."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

_NAMES = "norm beta gamma t poisson logistic laplace cauchy expon uniform chi2 pareto bernoulli"
MODULES = (
    *(f"jax.{name}" for name in "numpy numpy.linalg numpy.fft scipy.signal scipy.special".split()),
    "jax.scipy.linalg",
    *(f"jax.scipy.{name}" for name in "ndimage fft integrate cluster.vq stats.multivariate_normal".split()),
    *(f"jax.scipy.stats.{name}" for name in _NAMES.split()),
    *(f"jax.{name}" for name in "nn nn.initializers lax lax.linalg random image ops".split()),
    "optax", "optax.losses",
)  # fmt: skip
LEFT = frozenset(
    f"jax.{name}"
    for name in (
        "numpy.save numpy.savez numpy.load numpy.fromfile numpy.set_printoptions numpy.printoptions "
        "numpy.get_printoptions numpy.array_repr numpy.array_str numpy.from_dlpack numpy.frombuffer "
        "numpy.fromstring numpy.empty numpy.empty_like lax.infeed lax.outfeed lax.create_token lax.empty"
    ).split()
)
"""Functions of files, of text, or of memory that nothing has written."""


class Sample(NamedTuple):
    """One call of a public function.  name: with its module."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


_random = np.random.default_rng(0)
_F = _random.uniform(0.1, 0.9, (3, 4)).astype(np.float32)
_G = _random.uniform(0.2, 0.8, (3, 4)).astype(np.float32)
_S = (_F @ _F.T + 2 * np.eye(3)).astype(np.float32)
_V = _random.uniform(0.1, 0.9, 4).astype(np.float32)
_IMAGE = _random.uniform(0, 1, (1, 2, 6, 6)).astype(np.float32)
_KERNEL = _random.uniform(-1, 1, (4, 2, 3, 3)).astype(np.float32)
_I = _random.integers(1, 5, (3, 4)).astype(np.int32)
_B = _F > 0.5


def _arrays(value: Any) -> Any:
    return jax.tree_util.tree_map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, value
    )


def _pool() -> Iterator[tuple[Any, ...]]:
    """Yield arguments for any function, common ones first."""
    key = jax.random.key(0)
    yield ()
    singles = (_F, _S, _V, _I, _B, 3, (3, 4), [_F, _G], _V[0], _F.astype(np.complex64), _IMAGE, "ij->ji")
    yield from ((first,) for first in singles)
    firsts, seconds = (
        (_F, _S, _V, _I, _B, _F[0, 0]),
        (_G, _S, _V, _V[:3], _I, _B, 1, 2.0, 0, (0, 1), (4, 3), None),
    )
    yield from product(firsts, seconds)
    yield from ((key, first) for first in ((3, 4), _V, 3, _F, 0.5))
    yield from (
        (key, first, second) for first in (_V, (3, 4), 0.5, 3) for second in (_V, (2,), 1.0, (3, 4), 0.5)
    )
    yield from product(((3, 4), 3), (_F, 1.0, np.float32))
    yield from product(
        (_F, _V, _I, _S, _B), (_G, _V, 0, _I, 1, (0, 0)), (_F, _V, 1, 0, 2, _I, (2, 2), (1, 1))
    )
    yield (_F, (6, 8), "linear")
    yield (_IMAGE, _KERNEL, (1, 1), "SAME")
    yield (_IMAGE, _KERNEL)
    yield (_I[0, :3], _F[:, 0], 5)
    yield from product((_F, _I), (_G, 0), (_F, 1), (_G, 2, 0.5))
    yield ("ij,kj->ik", _F, _G)
    yield ([_F, _G, _F],)
    yield (lambda x: x * 2.0, _F)
    yield (lambda c, x: (c + x, c * x), _V, _F)
    yield (lambda x, y: x + y, _F)
    yield (True, lambda x: x * 2.0, lambda x: x + 1.0, _F)
    yield (1, [lambda x: x * 2.0, lambda x: x + 1.0], _F)
    yield (0, 3, lambda i, x: x * 2.0, _F)
    yield (lambda x: x.sum() < 100.0, lambda x: x * 2.0, _F)
    yield (_F, np.float32(0), jax.lax.add, (2, 2), (1, 1), "VALID")
    yield (_F, np.float32(0), jax.lax.add, (0,))
    q = np.stack([np.stack([_F, _G], 1)])
    yield (q, q, q)


_TABLE: dict[str, tuple[Any, ...]] = {
    "jax.lax.fft": (_F.astype(np.complex64), "fft", (4,)),
    "jax.random.randint": (jax.random.key(0), (3, 4), 0, 9),
    "jax.scipy.linalg.cho_solve": ((np.linalg.cholesky(_S), True), _F),
    "optax.cosine_onecycle_schedule": (10, 0.1),
    "jax.numpy.apply_along_axis": (lambda x: x * 2.0, 0, _F),
    "jax.lax.dot_general": (_F, _G, (((1,), (1,)), ((), ()))),
    "jax.lax.broadcast_in_dim": (_V, (3, 4), (1,)),
    "jax.lax.conv_general_dilated": (_IMAGE, _KERNEL, (1, 1), "SAME"),
    "jax.lax.conv_transpose": (_IMAGE.transpose(0, 2, 3, 1), _KERNEL.transpose(2, 3, 1, 0), (2, 2), "SAME"),
    "jax.lax.pad": (_F, np.float32(0), ((1, 0, 0), (0, 1, 0))),
    "jax.lax.slice": (_F, (0, 1), (2, 4)),
    "jax.lax.dynamic_slice": (_F, (1, 1), (2, 2)),
    "jax.lax.dynamic_update_slice": (_F, _G[:2, :2], (1, 1)),
    "jax.lax.select": (_B, _F, _G),
    "jax.lax.clamp": (np.float32(0.2), _F, np.float32(0.6)),
    "jax.lax.reduce_precision": (_F, 5, 10),
    "jax.lax.transpose": (_F, (1, 0)),
    "jax.lax.concatenate": ([_F, _G], 0),
    "jax.lax.split": (_F, (1, 2)),
    "jax.lax.top_k": (_F, 2),
    "jax.lax.iota": (np.float32, 5),
    "jax.lax.reshape": (_F, (4, 3)),
    "jax.nn.dot_product_attention": (np.stack([np.stack([_F, _G], 1)]),) * 3,
    "jax.nn.one_hot": (_I[0], 6),
    "jax.image.resize": (_F, (6, 8), "linear"),
    "jax.image.scale_and_translate": (_F, (6, 8), (0, 1), _V[:2], _V[2:], "linear"),
}  # fmt: skip
"""Arguments of functions that accept none of the pool's."""


def functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions by name; each once."""
    functions_by_name: dict[str, Callable[..., Any]] = {}
    for path in MODULES:
        module = import_module(path)
        for name in sorted(vars(module)):
            function = getattr(module, name)
            if (
                name.startswith("_")
                or name.endswith("_p")
                or inspect.isclass(function)
                or not callable(function)
            ):
                continue
            full = f"{path}.{name}"
            if full not in LEFT and not any(function is listed for listed in functions_by_name.values()):
                functions_by_name[full] = function
    return functions_by_name


def _results_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs what another returns: a schedule, an initializer, an optimizer's update."""

    def run(*args: Any) -> Any:
        result = function(*args)
        if isinstance(result, optax.GradientTransformation):
            params, gradients = ({"w": jnp.asarray(value), "b": jnp.asarray(_V)} for value in (_F, _G))
            return result.update(gradients, result.init(params), params)
        if not callable(result):
            return result
        for more in ((jnp.asarray(2),), (jax.random.key(0), (3, 4)), (jnp.asarray(_F),)):
            with suppress(TypeError, ValueError, IndexError):
                return result(*more)
        return result

    return run


@cache
def samples(name: str, limit: int = 2) -> tuple[Sample, ...]:
    """Return the calls of a function that succeed, of different types of arguments."""
    function, created, kinds = _results_of(functions()[name]), [], set()
    tried = [_TABLE[name]] if name in _TABLE else _pool()
    for raw in tried:
        args = _arrays(raw)
        kind = next((str(getattr(value, "dtype", type(value).__name__)) for value in args), "")
        if kind in kinds:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = [
                    value for value in jax.tree_util.tree_leaves(function(*args)) if not callable(value)
                ]
        except Exception:
            continue
        if results and all(
            isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)) for value in results
        ):
            kinds.add(kind)
            created.append(Sample(name, function, args))
        if len(created) == limit:
            break
    return tuple(created)
