"""PyTorch's switches by which it chooses the kernel of an op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_NAMES = (
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
)


class Switches:
    """Those that a version of PyTorch has, as `sdpa_kernel` and `torch.backends.*.flags` turn them."""

    def __init__(self, torch: Any) -> None:
        known = [pair for pair in _NAMES if all(hasattr(torch._C, name) for name in pair)]
        self._getters = [getattr(torch._C, getter) for getter, _ in known]
        self._setters = [getattr(torch._C, setter) for _, setter in known]

    def read(self) -> list[Any]:
        """Return the present states."""
        return [get() for get in self._getters]

    @contextmanager
    def standing(self, wanted: Sequence[Any]) -> Iterator[None]:
        """Context in which they stand as they did when they were read."""
        before = self.read()
        self._turn(before, wanted)
        try:
            yield
        finally:
            self._turn(wanted, before)

    def _turn(self, present: Sequence[Any], wanted: Sequence[Any]) -> None:
        for turn, now, then in zip(self._setters, present, wanted, strict=True):
            if now != then:
                turn(then)
