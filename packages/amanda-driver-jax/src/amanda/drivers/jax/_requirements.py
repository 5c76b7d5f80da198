"""Private names of JAX that the driver needs, and the consequence if one is absent."""

import logging
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
from amanda.backend import Patches, missing_names

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
logger = logging.getLogger("amanda")

NEWEST_TESTED = "0.12"

# JAX keeps these names below `jax._src`, and changes them between minor versions without notice.
_ESSENTIAL = {
    "callback": "_callback_op_sharding",
    "config": "config_ext.unset jax_jit_cpp_cache_obj._obj.set_local jax_jit_cpp_cache_obj._obj.swap_local",
    "core": "eval_trace trace_ctx trace_state_clean",
    "dispatch": "runtime_tokens.block_until_ready",
    "effects": "control_flow_allowed_effects custom_derivatives_allowed_effects lowerable_effects "
    "ordered_effects partial_eval_kept_effects remat_allowed_effects shardable_ordered_effects",
    "interpreters.ad": "JVPTrace JVPTracer LinearizeTrace LinearizeTracer Zero backward_pass3 "
    "get_primitive_transpose instantiate_zeros is_undefined_primal linear_transpose2 primitive_jvps "
    "primitive_transposes",
    "interpreters.batching": "BatchTracer bdim_at_front moveaxis primitive_batchers",
    "interpreters.partial_eval": "DynamicJaxprTrace.new_const DynamicJaxprTracer JaxprTrace JaxprTracer "
    "separate_consts",
    "interpreters.pxla": "ExecuteReplicated.__call__",
    "pjit": "UNSPECIFIED _infer_params _run_python_pjit make_jit_cpp_cache",
    "util": "weakref_cache_key_types",
}
"""Names below a module of `jax._src`; without one of these nothing is instrumented."""


def first_present(*names: str) -> str:
    """Return the first of several names below `jax._src` that JAX has; the first of all if it has none."""
    return next((name for name in names if not missing_names([f"jax._src.{name}"])), names[0])


FLATTENING = first_present(
    "flattree:flatten_static_argnums_argnames",  # since 0.11
    "tree_util:FlatTree.flatten_static_argnums_argnames",
)
"""The function that flattens the arguments of a jitted function."""
PRIVATE_NAMES = (
    *(f"jax._src.{module}:{name}" for module, names in _ESSENTIAL.items() for name in names.split()),
    f"jax._src.{FLATTENING}",
)

FUNCTIONS_OF_OPS = {
    "lax.lax:_reduction_jaxpr": "functions of scatter, reduce_window and select_and_scatter",
    "lax.lax:_trace_composite_to_jaxpr": "decompositions of lax.composite",
    "lax.lax:_variadic_reduction_jaxpr": "functions of lax.reduce",
    "pallas.pallas_call:_trace_kernel_to_jaxpr": "Pallas kernels",
}
"""Functions of JAX that trace parts of an op, whose ops are not the program's."""
OPTIONAL = {
    "custom_partitioning:custom_partitioning.__call__": "functions with a partitioning are not reported",
    "export._export:Exported.call": "exported programs are not reported",
    **{name: f"ops inside of {part} are seen" for name, part in FUNCTIONS_OF_OPS.items()},
    "stages:Compiled.__call__": "executables that were compiled ahead of time are not reported",
    "stages:Traced.lower": "functions with loops cannot be lowered by hand in a scope",
}
"""Consequences of the absence of optional names, which the log states."""


def flatten_arguments(args: Any, kwargs: Any, static_argnums: Any, static_argnames: Any) -> Any:
    """Return the leaves of the arguments of a jitted function, in a `FlatTree` of JAX's."""
    module, _, path = FLATTENING.partition(":")
    flatten = attrgetter(path)(sys.modules[f"jax._src.{module}"])
    return flatten(args, kwargs, static_argnums, static_argnames)


def wrap_optional(patches: Patches, name: str, wrap: Wrapper) -> None:
    """Patch a name of OPTIONAL by `wrap(original)` once JAX has imported its module; warn if it lacks it."""
    module, _, path = f"jax._src.{name}".partition(":")

    def patch_name() -> None:
        """Patch the name, or warn that this JAX lacks it."""
        if missing_names([f"{module}:{path}"]):
            logger.warning("JAX %s lacks %s.%s: %s", jax.__version__, module, path, OPTIONAL[name])
            return
        owner, _, attribute = path.rpartition(".")
        holder = attrgetter(owner)(sys.modules[module]) if owner else sys.modules[module]
        patches.set(holder, attribute, wrap(getattr(holder, attribute)))

    patches.when_imported(module, patch_name)  # `jax.export` and Pallas are imported late, or never
