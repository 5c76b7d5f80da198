"""Arithmetic on tensors and state in them, in the same words for every library, and the names it leans on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.backend import missing_names
from amanda.errors import AmandaError, ToolError
from amanda.tools.libraries import do, get_dtype_name, ml_dtypes, to_numpy
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import InstalledEntries, backend_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RequiredNames:
    """Undocumented names of one framework that a tool leans on.

    Args:
        tool: Import path of the tool, for the error.
        framework: Import name of the framework.
        *names: Names as "module:attribute", such as "torch:Tensor._base".

    >>> required = RequiredNames("amanda.tools.example", "math", "math:tau", "math:pie")
    >>> required.check()
    Traceback (most recent call last):
    amanda.errors.ToolError: math of an unknown version lacks math.pie, which amanda...
    """

    def __init__(self, tool: str, framework: str, *names: str) -> None:
        self.tool, self.framework, self.names = tool, framework, names
        self._is_complete = False

    def check(self) -> None:
        """Raise ToolError, which says what is missing, where the framework lacks a name."""
        # Checked once: the names of a framework do not change while it is loaded.
        if self._is_complete:
            return
        # All at once, so that the message names every one that is missing.
        absent = [name.replace(":", ".") for name in missing_names(self.names)]
        if absent:
            version = getattr(sys.modules.get(self.framework), "__version__", "of an unknown version")
            raise ToolError(
                f"{self.framework} {version} lacks {', '.join(absent)}, which {self.tool} leans on; install "
                f"another version of {self.framework}, or upgrade the distribution of {self.tool}"
            )
        self._is_complete = True


Array = Any
"""An array of NumPy, or a tensor of PyTorch: what tools compute masks and statistics with."""

Save = Callable[[], Callable[[], None]]
"""Copies the content of memory and returns a function that restores every byte of it."""


class TensorsError(AmandaError, module="amanda.tools.kit"):
    """An entry point of `amanda.tensors` is not a class of tensors, or two have one name."""


class Samples:
    """The values of all samples of a tensor that function transforms have wrapped, such as vmap and grad.

    levels: of the vmaps that the tensor has a batch of, the outermost first.  sizes: numbers of samples.
    data: a plain tensor without autograd, with an axis for each batch in front.
    """

    levels: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Any

    @property
    def first(self) -> Any:
        """The data of the first sample of each batch."""
        return self.data[(0,) * len(self.sizes)]

    @property
    def total(self) -> Any:
        """The sum of the data of all samples."""
        return self.data.sum(tuple(range(len(self.sizes)))) if self.sizes else self.data

    def outside(self) -> AbstractContextManager[None]:
        """Return a context outside of all transforms, where state can be computed of `data`."""
        raise NotImplementedError

    def wrapped(self, data: Any) -> Any:
        """Return data with axes of samples in front as one value under the transforms, without a gradient."""
        raise NotImplementedError


def shape_text(extents: Sequence[int], batches: int = 0) -> str:
    """Return a shape as text.

    Args:
        extents: Number of elements along each axis.
        batches: Number of axes in front that are the batches of a vmap.

    >>> shape_text((3, 4)), shape_text(()), shape_text((8, 3, 4), batches=1)
    ('[3,4]', '[]', '[vmap 8,3,4]')
    """
    axes = [f"vmap {extent}" if i < batches else str(extent) for i, extent in enumerate(extents)]
    return f"[{','.join(axes)}]"


def place_text(type: str, module: str, phase: str = "", source: str = "") -> str:
    """Return the place of an op in words.

    Args:
        type: Word or name of the op.
        module: Path of its module; "" outside of modules.
        phase: Part of the program; "" to leave that out.
        source: Line that calls it; "" to leave that out.

    >>> place_text("softmax", "encoder.0", "forward", "model.py:12")
    'softmax in encoder.0 (forward), model.py:12'
    """
    op_text = " in ".join(filter(None, (type, module))) + f" ({phase})" * bool(phase)
    return ", ".join(filter(None, (op_text, source)))


class Tensors:
    """Operations on tensors of one library; this class serves every library that autoray converts.

    What is computed here is an array of NumPy: a tensor becomes one by `plain`, and `cast` makes a tensor.
    """

    cached_block: ClassVar[int] = 1 << 15
    """Number of elements to work on at once, as many as stay in a processor's cache."""

    device_block: ClassVar[int] = 1 << 22
    """Number of elements to work on at once, as many as keep a device busy."""

    def library(self, *values: Any) -> Any:
        """Return a module with NumPy's names of functions that computes with some values."""
        return np

    @staticmethod
    def numpy_type(dtype: str) -> np.dtype[Any]:
        """Return the element type of a name in NumPy or ml_dtypes; raise AmandaError where there is none."""
        try:
            return np.dtype(getattr(ml_dtypes, dtype, dtype))
        except TypeError as error:
            raise AmandaError(f"{dtype!r} is no element type that numpy or ml_dtypes knows") from error

    def is_parameter(self, x: Any) -> bool:
        """Return False for an autograd leaf that a program made, True for another variable of an op."""
        return True

    def is_strided(self, x: Any) -> bool:
        """Return True for a tensor of the library's own class whose elements lie in memory by strides."""
        return isinstance(x, np.ndarray)

    def plain(self, x: Any) -> Array:
        """Return a tensor as an array to compute with: without autograd, in float32 or wider."""
        array = self.to_numpy(x)
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)

    def to_numpy(self, x: Any) -> NDArray[Any]:
        """Return an array of NumPy with the same values; in float32 where NumPy lacks the element type."""
        return np.asarray(to_numpy(x))

    def exact(self, x: Any) -> NDArray[Any]:
        """Return a copy in the same type of NumPy or ml_dtypes; raise AmandaError where neither has it."""
        # A copy: the memory of the tensor may be written by the next op.
        return np.array(to_numpy(x), order="C")

    def copy(self, array: Any) -> Array:
        """Return a copy to be written into later."""
        return np.array(to_numpy(array))

    def duplicate(self, x: Any) -> Any:
        """Return a copy, which later writes into the tensor spare; x itself where no op writes tensors."""
        return x

    def kind(self, x: Any) -> tuple[Hashable, Hashable]:
        """Return keys of the element type and the device of a tensor, to compare with those of others."""
        return get_dtype_name(x), str(getattr(x, "device", ""))

    def extents(self, x: Any) -> tuple[int, ...]:
        """Return the shape of the part that this process holds; (number of elements,) of a nested tensor."""
        return tuple(map(int, x.shape))

    def unread(self, x: Any) -> str | None:
        """Return why the elements of a tensor cannot be read; None where they can be."""
        return None

    def samples(self, x: Any) -> Samples | None:
        """Return the samples of a tensor that a transform has wrapped; None of any other tensor."""
        return None

    def dense(self, x: Any) -> Any:
        """Return a tensor that stores each of its elements; None where elements do not lie in one array."""
        return x

    def at(self, x: Any, positions: Sequence[int]) -> Any:
        """Return some elements of a tensor, in one row.

        Args:
            x: A dense tensor.
            positions: Numbers of the elements, counted in the order of indexing.
        """
        return self.to_numpy(x).reshape(-1)[positions]

    def stored_values(self, x: Any, widen: bool = False) -> Array | None:
        """Return the elements that a tensor stores; None without elements, as on PyTorch's meta device.

        Args:
            x: Tensor of any layout; of complex elements, magnitudes are returned.
            widen: Convert to an element type that every function takes, and that no magnitude overflows.
        """
        array = self.to_numpy(x)
        if not np.iscomplexobj(array):
            return array
        # The magnitude of a complex64 may be larger than any float32.
        return np.abs(array.astype(np.complex128) if widen else array)

    def unstored(self, x: Any, numbers: Array) -> int:
        """Return how many elements of a tensor are zeros that are not stored.

        Args:
            x: Tensor of any layout.
            numbers: Its `stored_values`.
        """
        return 0

    def blocks(self, numbers: Array) -> Iterator[Array]:
        """Yield stored values in flat pieces of float64, or the device's widest; on the host in NumPy."""
        flat = numbers.reshape(-1)
        for start in range(0, flat.shape[0], self.cached_block):
            # Memory that nobody wrote to may have signalling NaNs, of which NumPy would warn.
            with np.errstate(invalid="ignore"):
                block = flat[start : start + self.cached_block].astype(np.float64)
            yield block

    def leading_bits(self, block: Array, bits: int) -> tuple[Array, int]:
        """Return exponents and first bits of mantissas of magnitudes, as integers, and those of the number 1.

        Args:
            block: Numbers in float64, or float32 on some devices.
            bits: Number of bits of the mantissa.
        """
        # The bits of a float are ordered like its magnitude, so a shift gives bins without a logarithm.
        return np.abs(block).view(np.int64) >> (52 - bits), 1023 << bits

    def counts(self, indices: Array, total: int) -> Array:
        """Return how often each index occurs.

        Args:
            indices: Integers in one row, from 0 on and below `total`.
            total: Number of counts, also of absent indices.
        """
        return np.bincount(indices, minlength=total)

    def total(self, numbers: Array) -> Any:
        """Return the sum of all elements in float32 or wider; it is finite only if each element is."""
        with np.errstate(all="ignore"):
            # float16 adds up to infinity at 65,504, although each element is finite.
            return numbers.sum(dtype=None if numbers.dtype.itemsize >= 4 else np.float32)

    def checksum(self, x: Any) -> float:
        """Return a number that is finite only if each stored element is; 0 for a tensor without elements."""
        numbers = self.stored_values(x, widen=True)
        return 0.0 if numbers is None else float(self.total(numbers))

    def bytes_at(self, x: Any, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the bytes of elements, a row for each.

        Args:
            x: Tensor of any layout.
            positions: Numbers of the elements in the flattened tensor.
        """
        return _rows(np.asarray(to_numpy(x)))[positions]

    def with_bytes(self, x: Any, positions: NDArray[np.int64], rows: NDArray[np.uint8]) -> Any:
        """Return a copy of a tensor with other bytes in some elements.

        Args:
            x: Tensor of any layout, which stays as it is.
            positions: Numbers of the elements in the flattened tensor.
            rows: New bytes of each element, as `bytes_at` returns them.
        """
        array = np.array(to_numpy(x), order="C")
        _rows(array)[positions] = rows
        return do("asarray", array, like=x)

    def memory(self, x: Any) -> tuple[Hashable, Save] | None:
        """Return a key of a tensor's memory and a function that saves it; None where no op writes memory."""
        return None

    def cast(self, value: Any, like: Any) -> Any:
        """Return a value as a tensor like another one.

        Args:
            value: A number, an array or a tensor.
            like: Has the element type and the device of the result.
        """
        return do("asarray", np.asarray(value, np.float32), like=like).astype(like.dtype)

    def beside(self, array: Any, neighbour: Array) -> Array:
        """Return an array on the device of another one.

        Args:
            array: Its element type stays.
            neighbour: On the device of the result.
        """
        return np.asarray(array)

    def flat(self, arrays: Sequence[Array]) -> Array:
        """Return the elements of arrays one after another in one row, on the device of the first array."""
        return np.concatenate([array.reshape(-1) for array in arrays])

    def keep_mask_of_highest(self, scores: Array, count: int) -> Array:
        """Return False for the lowest of scores, else True; of equal ones the first go.

        Args:
            scores: In one row.
            count: Number of the scores to drop.
        """
        mask = np.ones(len(scores), bool)
        if count:
            # A partition finds the threshold in linear time, a sort would not.
            threshold = np.partition(scores, count - 1)[count - 1]
            is_below = scores < threshold
            mask[is_below] = False
            # Of scores that equal the threshold, only as many are dropped as are still missing.
            mask[np.flatnonzero(scores == threshold)[: count - int(is_below.sum())]] = False
        return mask

    def ranks(self, values: Array) -> Array:
        """Return the rank of each value along the last axis, 0 for the lowest; equal ones in order."""
        # The rank of a value is its place in the order: the inverse of the permutation that sorts.
        return np.argsort(np.argsort(values, -1, kind="stable"), -1)

    def detach(self, x: Any) -> Any:
        """Return a tensor through which no gradient goes."""
        return x

    def wide(self, x: Any) -> Any:
        """Return a tensor in float32, or in its own type if that is wider."""
        # An object with `astype` may be no array: a tracer records what is computed with it.
        array = x if hasattr(x, "astype") else np.asarray(x)
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)

    def round(self, x: Any) -> Any:
        """Return the nearest integers, half to even."""
        return self.library(x).rint(x)

    def floor(self, x: Any) -> Any:
        """Return the nearest integers that are not larger."""
        return self.library(x).floor(x)

    def absolute(self, x: Any) -> Any:
        """Return magnitudes."""
        return self.library(x).abs(x)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Return elements of one tensor where a condition holds, else of another.

        Args:
            condition: Flags of the elements.
            x: Elements for True.
            y: Elements for False.
        """
        return self.library(condition, x, y).where(condition, x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        """Return the smaller of each pair.

        Args:
            x: First of each pair.
            y: Second of each pair, or one number for all.
        """
        return self.library(x, y).minimum(x, y)

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the larger of each pair.

        Args:
            x: First of each pair.
            y: Second of each pair, or one number for all.
        """
        return self.library(x, y).maximum(x, y)

    def within(self, value: Any, x: Any, low: float, high: float) -> Any:
        """Return elements of `value` where x lies between two bounds, exclusively; 0 for the others.

        Args:
            value: Elements to return, such as a gradient.
            x: Elements that are compared.
            low: Bound that these have to exceed.
            high: Bound that these have to stay below.
        """
        return self.where((x <= low) | (x >= high), value * 0, value)

    def sum(self, x: Any, axes: Sequence[int]) -> Any:
        """Return the sum over axes.

        Args:
            x: Numbers of any type.
            axes: Axes that the result lacks; without any, it is the tensor itself.
        """
        return self.library(x).sum(x, axis=tuple(axes))

    def extent(self, x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
        """Return the least and the largest elements over axes, without autograd.

        Args:
            x: Real numbers.
            axes: Axes that the results lack.
        """
        library = self.library(x)
        return library.min(x, axis=tuple(axes)), library.max(x, axis=tuple(axes))

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """Return the same elements in another shape.

        Args:
            x: Elements in the order of indexing.
            shape: New extents, one of which may be -1: it follows from the others.
        """
        return self.library(x).reshape(x, tuple(shape))

    def is_dense(self, x: Any) -> bool:
        """Return True for a tensor that has elements and stores each of them."""
        return bool(np.asarray(x).size)

    def shared(self, x: Any) -> NDArray[Any] | None:
        """Return an array that shares the memory of a tensor; None where NumPy has no such array."""
        return x if isinstance(x, np.ndarray) else None

    def borrowed(self, x: Any) -> NDArray[Any] | None:
        """Return an array over a tensor's memory, to be read at once and not kept; None without one."""
        return self.shared(x)

    def buffers(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return an object for each tensor that exports its memory, to be read at once; None without one."""
        return tuple([self.borrowed(x) for x in values])

    def is_in_host_memory(self, x: Any) -> bool:
        """Return True for a tensor that NumPy reads without a copy."""
        return isinstance(x, np.ndarray)

    def with_gradient(
        self, forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Any],
        collect: Callable[..., None] | None = None,
    ) -> Any:  # fmt: skip
        """Return the result of a function whose gradients another function computes.

        Args:
            forward: Returns the result of the tensors.
            backward: Returns a gradient for each tensor; called with that of the result and the tensors.
            tensors: Inputs, to which the gradients go.
            collect: Called with all gradients but the first, in a graph where no tape leads to them; or None.
        """
        return forward(*tensors)

    def state(self, value: Any, like: Any, trained: bool, dtype: str = "float32") -> Any:
        """Return new state of a tool.

        Args:
            value: A number, an array or a tensor.
            like: On the device of the state.
            trained: True if an optimizer may train it.
            dtype: Element type by NumPy's name.
        """
        return np.array(tensors_of(value).to_numpy(value), dtype)

    def reference(self, value: Any) -> Any:
        """Return an array in memory that a program which is traced may read and write."""
        return np.array(value)

    def update(self, former: Any, value: Any) -> Any:
        """Write values into state that an optimizer holds; return it, or the values if they do not fit.

        Args:
            former: State to write into.
            value: Values of the same shape and element type; others do not fit.
        """
        if former.shape != value.shape or former.dtype != value.dtype:
            return value
        # In place, since the optimizer holds this array.
        former[...] = value
        return former

    def assign(self, state: Any, value: Any) -> None:
        """Write new values into state.

        Args:
            state: What `state` returned.
            value: As many numbers as the state has.
        """
        state[...] = np.asarray(value, np.float32).reshape(state.shape)

    def read(self, state: Any) -> Any:
        """Return state as a tensor to compute with."""
        return state


class NumpyTensorLibrary(Tensors):
    """Arrays of NumPy, which routines are given in ONNX Runtime."""

    def cast(self, value: Any, like: Any) -> Any:
        """Return a number or an array in the element type of an array."""
        dtype = like.dtype if hasattr(like, "dtype") else np.asarray(like).dtype
        return value.astype(dtype) if hasattr(value, "astype") else np.asarray(value, dtype)


def _rows(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array, a row for each element; a view if the array is contiguous."""
    return np.ascontiguousarray(array.reshape(-1, 1)).view(np.uint8)


def tensors_of(x: Any) -> Tensors:
    """Return operations on a library's tensors, NumPy's for numbers; raise TensorsError for a broken one."""
    return _tensors(backend_of(x))


# Entry points: the name is that of a library, as autoray has it; the object a subclass of `Tensors`.
_INSTALLED = InstalledEntries("amanda.tensors", "class of tensors", TensorsError)


# Cached, so that each tensor costs a look-up by the name of its library.
@cache
def _tensors(library: str) -> Tensors:
    return _INSTALLED.create(library, Tensors, "amanda.tools.kit.Tensors") or Tensors()
