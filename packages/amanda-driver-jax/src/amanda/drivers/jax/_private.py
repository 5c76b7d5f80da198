"""Private names of JAX that the driver leans on, checked before anything is changed."""

from importlib import import_module

from amanda.errors import DriverError

NAMES = (
    ("core", "Primitive.bind"),
    ("core", "trace_ctx"),
    ("core", "eval_trace"),
    ("config", "jax_jit_cpp_cache_obj"),
    ("config", "jax_jit_cpp_cache_obj._obj.swap_local"),
    ("pjit", "make_jit_cpp_cache"),
    ("pjit", "_infer_params"),
    ("pjit", "_trace_for_jit"),
    ("pjit", "_run_python_pjit"),
    ("pjit", "_get_fastpath_data"),
    ("interpreters.ad", "backward_pass3"),
    ("interpreters.ad", "LinearizeTracer"),
    ("interpreters.ad", "JVPTracer"),
    ("interpreters.batching", "BatchTracer"),
    ("interpreters.partial_eval", "DynamicJaxprTracer"),
    ("interpreters.partial_eval", "JaxprTracer"),
    ("interpreters.pxla", "ExecuteReplicated.__call__"),
    ("effects", "remat_allowed_effects._effect_types"),
    ("effects", "custom_derivatives_allowed_effects._effect_types"),
    ("callback", "IOEffect"),
    ("source_info_util", "current_name_stack"),
    ("custom_derivatives", "custom_jvp_call_p"),
    ("custom_derivatives", "custom_vjp_call_p"),
    ("stages", "Lowered.compile"),
)
"""Module below `jax._src`, and a path of attributes in it."""


def check() -> None:
    """Raise DriverError that names what the running JAX lacks."""
    lacking = [f"jax._src.{module}.{path}" for module, path in NAMES if not _has(module, path)]
    if lacking:
        import jax

        raise DriverError(
            f"JAX {jax.__version__} lacks {', '.join(lacking)}, on which amanda-driver-jax leans; it is "
            "written for JAX 0.10.2: install that, or a newer amanda-driver-jax"
        )


def _has(module: str, path: str) -> bool:
    try:
        found = import_module(f"jax._src.{module}")
    except ImportError:
        return False
    for name in path.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True
