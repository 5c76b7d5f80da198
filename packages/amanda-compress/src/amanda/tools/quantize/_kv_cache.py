"""Quantisation of cached keys and values during generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import amanda
from amanda.options import NonNegativeInt, PositiveInt, Range, checked
from amanda.tools.mapping import StandardMapping
from amanda.tools.quantize._fake_quantize import QuantizeError
from amanda.tools.quantize._result import sqnr
from amanda.tools.results import Column, Result, shortened
from amanda.tools.select import Globs, Selection, as_remarks

if TYPE_CHECKING:
    from torch import Tensor

CacheAxis = Literal["token", "channel"]
"""Numbers that share a scale: channels of one token, or one channel of consecutive tokens."""

_NONE_MET = (
    "no op was met that makes a cache grow, as torch.cat does in transformers' DynamicCache: generate with "
    'use_cache=True and without cache_implementation="static" within the scope'
)


class KVCacheTool(amanda.Tool):
    """Quantise the cached keys and values of a PyTorch model during generation.

    A cache is a tensor (batch, heads, tokens, channels) that torch.cat extends by the keys or values of new
    tokens, beginning with an empty tensor.  All ops read quantised tokens, also attention over the prompt.

    Gradients pass rounding straight through.

    Source: Liu et al. 2024 (KIVI), sec. 3.

    Args:
        bits: 2 to 8, of unsigned integers that span the range of each group.
        group_size: Number of consecutive numbers that share a scale.
        keys: "token" for groups of channels of a token; "channel" for groups of consecutive tokens of a
            channel, which are quantised once a group is complete.
        values: See `keys`.
        residual: Number of the newest tokens that stay unquantised.
        module: Globs of module paths to quantise, and to skip; a path includes its submodules.
        exclude: See `module`.

    Raises:
        QuantizeError: For invalid options, and for channels that are not a multiple of `group_size`.

    >>> cache = KVCacheTool(bits=2, keys="channel", residual=32)
    """

    @checked(error=QuantizeError)
    def __init__(
        self,
        bits: Annotated[int, Range(2, 8)] = 4,
        group_size: PositiveInt = 32,
        keys: CacheAxis = "token",
        values: CacheAxis = "token",
        residual: NonNegativeInt = 128,
        module: Globs = None,
        exclude: Globs = None,
    ) -> None:
        super().__init__()
        self._selection = Selection(module=module, exclude=exclude)
        self.bits, self.group_size, self.residual = bits, group_size, residual
        self.axes: tuple[CacheAxis, CacheAxis] = (keys, values)
        self._caches: dict[str, CachedStates] = {}
        self._skip_reasons: dict[str, str] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._analyse)

    @property
    def result(self) -> KVCacheResult:
        """Bytes and noise of the cached keys and values of each layer."""
        return KVCacheResult(self)

    @property
    def caches(self) -> Sequence[CachedStates]:
        """Return the cached keys and values, in the order of their first use."""
        return tuple(self._caches.values())

    @property
    def left(self) -> Mapping[str, str]:
        """Return reasons why ops that seem to write a cache are not quantised, by op."""
        return self._skip_reasons

    def unmatched(self) -> list[str]:
        """Return sentences on globs that matched nothing, else one if no cache was met."""
        unmatched = [*super().unmatched(), *self._selection.unmatched()]
        return [*unmatched, *([] if self._caches or unmatched else [_NONE_MET])]

    def clear(self) -> None:
        """Forget caches and their noise."""
        self._caches, self._skip_reasons = {}, {}

    def _analyse(self, context: amanda.OpContext) -> None:
        """Replace torch.cat by a routine that quantises growing caches; give fixed caches a skip reason."""
        if context.namespace[0] != "pytorch" or context["phase"] != "forward":
            return
        # transformers' DynamicCache grows by torch.cat alone; a static cache writes by index_copy_.
        is_cat = context["type"] == "cat" and context.get_input_names() == ("tensors", "dim")
        is_write = context.get_op_type() == "index_copy_" and context.get_inputs()[0].dim() == 4
        if not (is_cat or is_write) or not self._selection.fits(context):
            return
        place, module = self.place(context), context.get_scope()
        if is_cat:
            context.replace_op(partial(self._concatenate_and_quantise, place, module))
        else:
            self._skip_reasons[place] = "it writes into a cache of fixed size; give generate a DynamicCache"

    def _concatenate_and_quantise(
        self, place: str, module: str, tensors: Sequence[Tensor], dim: int, original: Any
    ) -> Tensor:
        """Run torch.cat; quantise the tokens that leave the residual window, if a cache grows.

        Other concatenations stay unchanged.  So do caches that began outside of the scope, which become skip
        reasons.
        Raises QuantizeError where a module has a third cache and the axes of keys and values differ.
        """
        states: Tensor = original(tensors, dim)
        # The form of a cache: other concatenations of the model look otherwise.
        if len(tensors) != 2 or states.dim() != 4 or dim not in (-2, 2) or not states.is_floating_point():
            return states
        cached_tokens = states.shape[-2] - tensors[1].shape[-2]
        seen_tokens = self._caches[place].longest if place in self._caches else 0
        # The older tokens were never quantised, so that figures would be wrong.
        if cached_tokens > seen_tokens:
            self._skip_reasons[place] = (
                f"it continues {cached_tokens} tokens that the tool has not seen; begin a cache in the scope"
            )
            return states
        if place not in self._caches:
            # A layer concatenates its keys first, then its values.
            number = sum(cache.module == module for cache in self._caches.values())
            is_third = number > 1
            if is_third and len(set(self.axes)) > 1:
                raise QuantizeError(
                    f"{module} caches more than keys and values, or is a path in two models: let `keys` and "
                    "`values` be the same, or give each model a tool"
                )
            self._skip_reasons.pop(place, None)
            self._caches[place] = CachedStates(self, module, number)
        return self._caches[place].quantise(states, cached_tokens)


class CachedStates:
    """Keys or values of one attention, whose older tokens are quantised.

    number: of the tensor among those that the module caches: 0 for keys, 1 for values.
    shape: (batch, heads, tokens, channels) at the last step.  quantised_tokens: number of quantised tokens.
    longest: largest number of tokens of a step.
    itemsize: bytes of a number that is not quantised.
    """

    def __init__(self, tool: KVCacheTool, module: str, number: int) -> None:
        self.module, self.tensor = module, ("keys", "values")[number] if number < 2 else f"states {number}"
        self.axis = tool.axes[min(number, 1)]
        self._tool = tool
        self._signal: Any = 0.0  # tensors where the states are: a step does not wait for the device
        self._noise: Any = 0.0
        self.shape: tuple[int, ...] = ()
        self.quantised_tokens = self.longest = self.itemsize = 0

    def quantise(self, states: Tensor, cached_tokens: int) -> Tensor:
        """Quantise in place the tokens that left the residual window in this step; return the states.

        A group of tokens is quantised once it is complete.  Adds to the sums of the error, and stores the
        extents.  cached_tokens: number of tokens cached before the step.
        Raises QuantizeError with groups of channels if the channels are not a multiple of the group size, and
        with groups of tokens for a cache that was cut since the last step.
        """
        import torch

        tool, tokens = self._tool, states.shape[-2]
        self._check_groups(states, cached_tokens)
        begin, end = self._quantised_count(cached_tokens), self._quantised_count(tokens)
        self.shape, self.quantised_tokens, self.itemsize = tuple(states.shape), end, states.element_size()
        self.longest = max(self.longest, tokens)
        if begin == end:
            return states
        # Written in place without autograd, which then sees torch.cat alone: a straight-through gradient.
        with torch.no_grad():
            leaving_states = states[..., begin:end, :]
            rounded = quantized_states(leaving_states, tool.bits, tool.group_size, self.axis)
            # Before `copy_`, which overwrites it.
            exact = leaving_states.double()
            self._signal += exact.square().sum()
            self._noise += (rounded - exact).square().sum()
            leaving_states.copy_(rounded)
        return states

    def _check_groups(self, states: Tensor, cached_tokens: int) -> None:
        """Raise QuantizeError for states that groups do not fit, see `quantise`."""
        if self.axis == "token" and states.shape[-1] % self._tool.group_size:
            raise QuantizeError(
                f"{self.tensor} of {self.module} have {states.shape[-1]} channels, which are no multiple of "
                f"group_size {self._tool.group_size}"
            )
        # A cache that was cut, as where generation takes tokens back: its last group may hold tokens that are
        # gone.
        if self.axis == "channel" and 0 < cached_tokens < self.shape[-2]:
            raise QuantizeError(
                f"{self.tensor} of {self.module} had {self.shape[-2]} tokens, and have "
                f"{cached_tokens} of them now: groups of tokens are for caches that only grow; let the axis "
                'be "token"'
            )

    def _quantised_count(self, tokens: int) -> int:
        """Return how many tokens of a cache with this number of tokens are quantised."""
        count = max(tokens - self._tool.residual, 0)
        if self.axis == "token":
            return count
        complete_groups = count // self._tool.group_size
        return complete_groups * self._tool.group_size

    @property
    def before(self) -> int:
        """Return the bytes of the cache without quantisation."""
        batch, heads, tokens, channels = self.shape
        return batch * heads * tokens * channels * self.itemsize

    @property
    def after(self) -> int:
        """Return the bytes of a quantised cache: integers, scale and least number by group, other tokens."""
        batch, heads, tokens, channels = self.shape
        integer_count = batch * heads * channels * self.quantised_tokens
        group_count = integer_count // self._tool.group_size
        integer_bytes = -(-integer_count * self._tool.bits // 8)  # rounded up
        other_bytes = batch * heads * channels * (tokens - self.quantised_tokens) * self.itemsize
        return integer_bytes + 2 * group_count * self.itemsize + other_bytes

    @property
    def sqnr(self) -> float | None:
        """Signal-to-quantisation-noise ratio in dB of the quantised tokens; None before there are some.

        Waits for the device.
        """
        signal, noise = float(self._signal), float(self._noise)
        return sqnr(signal, noise) if signal or noise else None


def quantized_states(states: Tensor, bits: int, group_size: int, axis: CacheAxis) -> Tensor:
    """Return keys or values rounded to integers of so many bits, in their own dtype.

    Source: Liu et al. 2024 (KIVI), sec. 3.1, and Frantar et al. 2022 for groups.

    Args:
        states: (..., tokens, channels).
        bits: Bits of each integer.
        group_size: Channels or tokens that share a scale.
        axis: "token" for groups of channels, "channel" for groups of tokens, of which both have to be a
            multiple of `group_size`.  A number x of a group becomes round((x - least) / scale) * scale +
            least, scale being (most - least) / (2^bits - 1); scale and least are kept in the dtype of the
            states.
    """
    import torch

    if axis == "channel":
        return quantized_states(states.transpose(-1, -2), bits, group_size, "token").transpose(-1, -2)
    wide_dtype = torch.promote_types(states.dtype, torch.float32)
    groups = states.to(wide_dtype).reshape(*states.shape[:-1], -1, group_size)
    levels = 2**bits - 1
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    # Rounded as they would be stored, beside the integers.
    scale, least = (tensor.to(states.dtype).to(wide_dtype) for tensor in ((most - least) / levels, least))
    # Equal numbers have the scale 0, and each is the least. The clamp is for scales that were rounded down.
    steps = ((groups - least) / scale.where(scale > 0, 1)).round().clamp(0, levels)
    rounded: Tensor = (steps * scale + least).flatten(-2).to(states.dtype)
    return rounded


class KVCacheResult(Result):
    """A row for the keys and for the values of each layer, with bytes as after the last step.

    before, after: bytes of all of them without and with quantisation.
    left: reasons why ops that seem to write a cache are not quantised, by op.
    """

    name: ClassVar[str] = "kv_cache"
    title = "Quantised caches"
    columns: ClassVar[Sequence[Column]] = (
        Column("module", show=partial(shortened, width=44)), Column("tensor"), Column("axis"),
        Column("bits", number=True), Column("group_size", number=True), Column("tokens", number=True),
        Column("quantised", number=True), Column("before", show="{:,}".format, total=True, unit="B"),
        Column("after", show="{:,}".format, total=True, unit="B"),
        Column("SQNR", show="{:.1f}".format, number=True, unit="dB"),
    )  # fmt: skip

    def __init__(self, tool: KVCacheTool) -> None:
        self._rows = [
            (cache.module, cache.tensor, cache.axis, tool.bits, tool.group_size, cache.shape[-2],
             cache.quantised_tokens, cache.before, cache.after, cache.sqnr)
            for cache in tool.caches
        ]  # fmt: skip
        self.before, self.after = (
            sum(getattr(cache, name) for cache in tool.caches) for name in ("before", "after")
        )
        self.left = dict(tool.left)
        self.remarks = as_remarks(tool.unmatched())

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for the keys and for the values of each layer."""
        return self._rows

    def _facts(self) -> Mapping[str, Any]:
        """Return the bytes of all caches, and reasons for skipped ops."""
        return {"before": self.before, "after": self.after, "left": self.left}

    def notes(self) -> Sequence[str]:
        """Return the bytes of all caches, and reasons for skipped ops."""
        totals = (
            [f"The caches would have {self.after:,} bytes, and have {self.before:,}."] if self._rows else []
        )
        return [*totals, *(f"Skipped {place}: {why}." for place, why in self.left.items())]
