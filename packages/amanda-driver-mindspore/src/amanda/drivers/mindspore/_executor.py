"""Primitives that the executor runs by name, each with a site that is created at its first call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore._c_expression as native
from amanda.backend import Attributes, EagerDriver, Operation
from amanda.interceptor import IMPLEMENTATION, Detour
from mindspore.graph import api

from ._targets import NO_OPERATORS, operator_of

METHODS = ("run_op_async", "real_run_op")


class PrimitiveInterception:
    """Stand-ins for the two methods of the executor that run primitives."""

    def __init__(self, driver: EagerDriver) -> None:
        self._driver = driver
        self._detours: dict[tuple[str, str], Detour] = {}

    def patch(self, attributes: Attributes) -> None:
        """Patch the methods until `attributes` are restored."""
        for method in METHODS:
            attributes.set(api._PyNativeExecutor, method, self._stand_in(method))

    def _stand_in(self, method: str) -> Callable[..., Any]:
        """Stand-in for a method of the executor: runs operators through their detours."""
        detours, original = self._detours, vars(native.PyNativeExecutor_)[method].__func__

        def run(executor: Any, primitive: Any, name: str, args: Any) -> Any:
            if name in NO_OPERATORS:
                return original(executor._executor, primitive, name, args)
            detour = detours.get((method, name))
            if detour is None:
                detour = detours[method, name] = self._detour(original, name)
            return detour(executor._executor, primitive, name, args)

        return run

    def _detour(self, original: Any, name: str) -> Detour:
        key = operator_of(name)
        # The native method serves all primitives, so it gets no stub; the partial makes a callable for each.
        return Detour(self._driver.site(partial(original), Operation(key), key, IMPLEMENTATION))
