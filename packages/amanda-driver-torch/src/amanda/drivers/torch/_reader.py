"""The reader of tensors for native code: C functions of torch's own libraries, where all are found."""

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch
from amanda import interceptor

from ._layout import Functions, layout

logger = logging.getLogger("amanda")

_native: Any = torch._C  # its stubs lack what is used here

_DESCRIBE = ("aoti_torch_get_dtype", "aoti_torch_get_dim", "aoti_torch_get_device_type",
             "aoti_torch_get_device_index")  # fmt: skip
_AUTODIFF = (
    "_ZNK3c1010TensorImpl13requires_gradEv",  # bool c10::TensorImpl::requires_grad() const
    "_ZN2at6native12is_inferenceERKNS_6TensorE",  # bool at::native::is_inference(const at::Tensor &)
    "_ZNK2at10TensorBase8_versionEv",  # int64_t at::TensorBase::_version() const
    "_ZN3c108GradMode10is_enabledEv",  # bool c10::GradMode::is_enabled()
    "_ZN3c108GradMode11set_enabledEb",  # void c10::GradMode::set_enabled(bool)
    "_ZN2at15sequence_number4peekEv",  # uint64_t at::sequence_number::peek()
)
_FUNCTION_MODE = "_ZN2at4impl27torch_function_mode_enabledEv"
_KEY_INCLUDED = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"
_KEYS = ("Python", "FuncTorchDynamicLayerFrontMode", "Tracer")
"""Included where a dispatch mode, a transform of torch.func, or torch.jit.trace is in force."""


_VALUES = (
    "aoti_torch_get_sizes",
    "aoti_torch_get_dim",
    "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE",  # const Tensor &_fw_grad(level, tensor) const
    "_ZNK2at10TensorBase7is_leafEv",  # bool at::TensorBase::is_leaf() const
)


def reader(
    through: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[interceptor.Reader | None, str]:
    """Return a reader of this build of torch, and what it lacks, which a warning says too; "" for nothing.

    Without a reader Python does the same at a multiple of the time; without a layout native code calls
    functions of torch where it would read memory.
    through: gives a value with its gradient's way back to an original.
    """
    try:
        functions = Functions()
        known, lacking = layout(functions)
        mode = functions.address(_FUNCTION_MODE)
        included = functions.address(_KEY_INCLUDED)
        found = interceptor.Reader(
            tensors=(torch.Tensor, torch.nn.Parameter),
            plain=(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
            offset=_offset(),
            describe=functions.addresses(_DESCRIBE),
            extents="shape",
            modes=((mode, 0), *((included, int(_native._parse_dispatch_key(key))) for key in _KEYS)),
            autodiff=functions.addresses(_AUTODIFF),
            values=(*functions.addresses(_VALUES), _memory(), torch.empty(1), through),
            layout=known,
        )
        if _reads(found):
            if lacking:
                logger.warning(_SOME, torch.__version__, lacking)
            return found, lacking
        reason = "its tensors are not as this driver knows them"
    except (AttributeError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = f"it lacks {error}"
    logger.warning(_NONE, torch.__version__, reason)
    return None, reason


_NONE = (
    "native code cannot read the tensors of torch %s, so that routines take a multiple of the time: %s; "
    "a version of amanda-driver-torch for this torch can: pip install --upgrade amanda-driver-torch"
)
_SOME = (
    "native code reads the tensors of torch %s by function calls, so that routines take longer: it lacks %s"
)


def _offset() -> int:
    """Return where in a tensor's object its handle lies: a pointer to what `_cdata` is the address of."""
    samples = [torch.empty(0), torch.nn.Parameter(torch.empty(1)), torch.empty(2, dtype=torch.int8)]
    start, size = object.__basicsize__, torch.Tensor.__basicsize__
    for offset in range(start, size, ctypes.sizeof(ctypes.c_void_p)):
        held = [ctypes.c_void_p.from_address(id(sample) + offset).value for sample in samples]
        if held == [sample._cdata for sample in samples]:
            return offset
    raise LookupError("the handle of a tensor")


def _memory() -> int:
    """Return where in what a handle points to lies the pointer to a tensor's storage."""
    samples = [torch.empty(1), torch.empty(3).view(3, 1), torch.empty(2, dtype=torch.int8)]
    storages = [sample.untyped_storage()._cdata for sample in samples]
    for offset in range(0, 8 * ctypes.sizeof(ctypes.c_void_p), ctypes.sizeof(ctypes.c_void_p)):
        held = [ctypes.c_void_p.from_address(sample._cdata + offset).value for sample in samples]
        if held == storages:
            return offset
    raise LookupError("the storage of a tensor")


def _reads(found: interceptor.Reader) -> bool:
    """Return True if the reader sees what it is there to see."""
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.zeros(2, 3)
        trained = torch.zeros(2, 3, requires_grad=True)
        different = [one.double(), torch.zeros(2), torch.zeros(2, 3, device="meta"), trained]
        key = found.key((one, 1))
        same = key and key == found.key((torch.ones(4, 5), 2))
        apart = all(found.key((other, 1)) not in (0, key) for other in different)
        sized = found.key((one, 1), {}, True)
        apart = apart and sized == found.key((torch.ones(2, 3), 2), {}, True) != 0
        apart = apart and sized != found.key((torch.ones(3, 2), 1), {}, True)
        before = found.version(one)
        one.zero_()
        written = before == 0 and found.version(one) == 1
        with torch.no_grad():
            off = found.key((trained, 1)) == found.key((one, 1)) != key
        with torch.inference_mode():
            inference = found.version(torch.zeros(1)) is None
        view, other = one.view(6), torch.ones(2, 3)
        shared = found.memory(one) == found.memory(view) != found.memory(other) != 0
        fits = found.fits(one, other) and found.fits(trained, other)
        kept = [other.double(), other.t(), trained, other.to_sparse(), torch.zeros(1), None]
        fits = fits and not any(found.fits(one, wrong) for wrong in kept)
    return bool(same and apart and written and off and inference and shared and fits)
