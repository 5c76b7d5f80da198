"""The reader by which native code reads tensors: addresses of C functions and offsets in this torch."""

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch
from amanda import interceptor

from ._layout import Libraries, find_layout
from ._levels import call_with_wrappers, layers

logger = logging.getLogger("amanda")

_native: Any = torch._C  # its stubs lack what is used here

_DESCRIBING_FUNCTIONS = ("aoti_torch_get_dtype", "aoti_torch_get_dim", "aoti_torch_get_device_type",
             "aoti_torch_get_device_index")  # fmt: skip
_AUTODIFF_FUNCTIONS = (
    "_ZNK3c1010TensorImpl13requires_gradEv",  # bool c10::TensorImpl::requires_grad() const
    "_ZN2at6native12is_inferenceERKNS_6TensorE",  # bool at::native::is_inference(const at::Tensor &)
    "_ZNK2at10TensorBase8_versionEv",  # int64_t at::TensorBase::_version() const
    "_ZN3c108GradMode10is_enabledEv",  # bool c10::GradMode::is_enabled()
    "_ZN3c108GradMode11set_enabledEb",  # void c10::GradMode::set_enabled(bool)
    "_ZN2at15sequence_number4peekEv",  # uint64_t at::sequence_number::peek()
)
_FUNCTION_MODE = "_ZN2at4impl27torch_function_mode_enabledEv"
_KEY_INCLUDED = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"
_TRANSFORM = "FuncTorchDynamicLayerFrontMode"
_MODE_KEYS = ("Python", _TRANSFORM, "Tracer")
"""Included where a dispatch mode, a transform of torch.func, or torch.jit.trace is in force."""


_VALUE_FUNCTIONS = (
    "aoti_torch_get_sizes",
    "aoti_torch_get_dim",
    "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE",  # const Tensor &_fw_grad(level, tensor) const
    "_ZNK2at10TensorBase7is_leafEv",  # bool at::TensorBase::is_leaf() const
)


def make_reader(
    straight_through: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[interceptor.Reader | None, str]:
    """Return a reader of this build of torch, or None, and what the reader lacks, or ""; warn of a lack.

    Without a reader Python does the same work at a multiple of the time. Without a layout native code calls
    functions of torch instead of reading memory.
    straight_through: returns a value whose gradient goes to an original.
    """
    try:
        libraries = Libraries()
        tensor_layout, lacking = find_layout(libraries)
        # In these modes native code hands calls to Python, which knows how to leave and enter them.
        mode_is_enabled = libraries.address(_FUNCTION_MODE)
        key_is_included = libraries.address(_KEY_INCLUDED)
        reader = interceptor.Reader(
            tensors=(torch.Tensor, torch.nn.Parameter),
            plain=(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
            offset=_handle_offset(),
            describe=libraries.addresses(_DESCRIBING_FUNCTIONS),
            extents="shape",
            modes=(
                (mode_is_enabled, 0),
                *((key_is_included, int(_native._parse_dispatch_key(key))) for key in _MODE_KEYS),
            ),
            autodiff=libraries.addresses(_AUTODIFF_FUNCTIONS),
            values=(
                *libraries.addresses(_VALUE_FUNCTIONS),
                _storage_offset(),
                torch.empty(1),
                straight_through,
            ),
            layout=tensor_layout,
            wrappers=_wrapper_layout(),
        )
        # Symbols may exist and mean something else in another build: a trial on samples decides.
        if _reads_correctly(reader):
            if lacking:
                logger.warning(_READS_SLOWLY, torch.__version__, lacking)
            return reader, lacking
        reason = "its tensors are not as this driver knows them"
    except (AttributeError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = f"it lacks {error}"
    logger.warning(_READS_NOTHING, torch.__version__, reason)
    return None, reason


_READS_NOTHING = (
    "native code cannot read the tensors of torch %s, so routines are several times slower: %s; "
    "a version of amanda-driver-torch for this torch can: pip install --upgrade amanda-driver-torch"
)
_READS_SLOWLY = (
    "native code reads the tensors of torch %s by function calls, so that routines take longer: it lacks %s"
)


def _handle_offset() -> int:
    """Return the offset, in a tensor's Python object, of the pointer to its TensorImpl (`_cdata`)."""
    samples = [torch.empty(0), torch.nn.Parameter(torch.empty(1)), torch.empty(2, dtype=torch.int8)]
    start, size = object.__basicsize__, torch.Tensor.__basicsize__
    for offset in range(start, size, ctypes.sizeof(ctypes.c_void_p)):
        pointers = [ctypes.c_void_p.from_address(id(sample) + offset).value for sample in samples]
        if pointers == [sample._cdata for sample in samples]:
            return offset
    raise LookupError("the handle of a tensor")


def _wrapper_layout() -> tuple[int, int, tuple[torch.Tensor, ...]]:
    """Return the index of transforms among the modes, the offset of what a wrapper wraps, and wrappers."""
    # The wrappers are read within the transforms, which unwrap their results.
    offset, *samples = call_with_wrappers(
        lambda *wrappers: (_content_offset(wrappers), *wrappers), torch.empty(2)
    )
    mode_index = 1 + _MODE_KEYS.index(_TRANSFORM)  # the function mode comes before these
    return mode_index, offset, tuple(samples)


def _content_offset(samples: tuple[torch.Tensor, ...]) -> int:
    """Return the offset, in wrappers of transforms, of the pointer to the tensor that they wrap."""
    contents = [list(layers(sample))[1]._cdata for sample in samples]  # of the layer in the outermost
    for offset in range(0, _WRAPPER_SIZE, ctypes.sizeof(ctypes.c_void_p)):
        pointers = [ctypes.c_void_p.from_address(sample._cdata + offset).value for sample in samples]
        if pointers == contents:
            return offset
    raise LookupError("the tensor within a wrapper of torch.func")


_WRAPPER_SIZE = 256
"""Bytes of a wrapper in which the pointer to its tensor is looked for; wrappers have more."""


def _storage_offset() -> int:
    """Return the offset, in a TensorImpl, of the pointer to the tensor's storage."""
    samples = [torch.empty(1), torch.empty(3).view(3, 1), torch.empty(2, dtype=torch.int8)]
    storages = [sample.untyped_storage()._cdata for sample in samples]
    for offset in range(0, 8 * ctypes.sizeof(ctypes.c_void_p), ctypes.sizeof(ctypes.c_void_p)):
        pointers = [ctypes.c_void_p.from_address(sample._cdata + offset).value for sample in samples]
        if pointers == storages:
            return offset
    raise LookupError("the storage of a tensor")


def _reads_correctly(reader: interceptor.Reader) -> bool:
    """Return True if the reader reads keys, versions, memory and forms of sample tensors as they are."""
    with torch.inference_mode(False), torch.enable_grad():
        plain, trained = torch.zeros(2, 3), torch.zeros(2, 3, requires_grad=True)
        return (
            _reads_keys(reader, plain, trained)
            and _reads_sizes(reader, plain)
            and _reads_versions(reader)
            and _reads_memory(reader, plain)
            and _finds_substitutes(reader, plain, trained)
            and _reads_layers(reader, plain, trained)
        )


def _reads_keys(reader: interceptor.Reader, plain: torch.Tensor, trained: torch.Tensor) -> bool:
    """Return True if keys tell dtype, rank, device and need of a gradient, and nothing else."""
    key = reader.key((plain, 1))
    has_equal_keys = key != 0 and key == reader.key((torch.ones(4, 5), 2))
    different = [plain.double(), torch.zeros(2), torch.zeros(2, 3, device="meta"), trained]
    has_distinct_keys = all(reader.key((tensor, 1)) not in (0, key) for tensor in different)
    with torch.no_grad():
        ignores_gradients = reader.key((trained, 1)) == reader.key((plain, 1)) != key
    return has_equal_keys and has_distinct_keys and ignores_gradients


def _reads_sizes(reader: interceptor.Reader, plain: torch.Tensor) -> bool:
    """Return True if keys that are to tell sizes tell them."""
    with_sizes = True
    key = reader.key((plain, 1), {}, with_sizes)
    is_equal = key == reader.key((torch.ones(2, 3), 2), {}, with_sizes) != 0
    return is_equal and key != reader.key((torch.ones(3, 2), 1), {}, with_sizes)


def _reads_versions(reader: interceptor.Reader) -> bool:
    """Return True if versions count the writes into a tensor, and an inference tensor has none."""
    tensor = torch.zeros(2, 3)
    first_version = reader.version(tensor)
    tensor.zero_()
    with torch.inference_mode():
        has_no_version = reader.version(torch.zeros(1)) is None
    return first_version == 0 and reader.version(tensor) == 1 and has_no_version


def _reads_memory(reader: interceptor.Reader, plain: torch.Tensor) -> bool:
    """Return True if the memory of a view is that of its base, and of no equal tensor."""
    view, equal = plain.view(6), torch.ones(2, 3)
    return reader.memory(plain) == reader.memory(view) != reader.memory(equal) != 0


def _finds_substitutes(reader: interceptor.Reader, plain: torch.Tensor, trained: torch.Tensor) -> bool:
    """Return True if a tensor of the same form can stand for another, and no other value can."""
    equal = torch.ones(2, 3)
    misfits = [equal.double(), equal.t(), trained, equal.to_sparse(), torch.zeros(1), None]
    fits = reader.can_substitute(plain, equal) and reader.can_substitute(trained, equal)
    return fits and not any(reader.can_substitute(plain, misfit) for misfit in misfits)


def _reads_layers(reader: interceptor.Reader, *tensors: torch.Tensor) -> bool:
    """Return True if keys under transforms tell which layers of a tensor need a gradient."""

    def layer_keys(batched: torch.Tensor, tracked: torch.Tensor) -> list[int]:
        samples = *tensors, batched, tracked, tracked.detach()
        return [reader.key((sample,)) for sample in samples]

    keys = call_with_wrappers(layer_keys, tensors[0])
    return 0 not in keys and len({*keys}) == len(keys)
