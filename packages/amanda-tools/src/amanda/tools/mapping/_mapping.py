"""MappingTool, rules that distributions register, and StandardMapping, whose words portable tools read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

from amanda import Namespace, OpContext, Tool
from amanda.errors import AmandaError, ToolError
from amanda.options import Where, checked
from amanda.tools.mapping import _onnxruntime, _pytorch, _tensorflow
from amanda.tools.mapping._products import write_weight_axes

Rewrite = Callable[[OpContext], None]


class RuleError(ToolError, module="amanda.tools.mapping"):
    """A mapping rule is not `[namespace, before]` or `[namespace, before, after]`."""


class MappingRule(NamedTuple):
    """Rules for the contexts of a namespace, before and after the tools that depend on it."""

    namespace: Namespace
    before: Rewrite | None
    after: Rewrite | None = None


Rules: TypeAlias = Annotated[Sequence[Sequence[Any]], Where("a list of [namespace, before, after]")]


class MappingTool(Tool):
    """Rewrite the `OpContext` of ops before the tools that depend on this tool read it (for tool authors).

    rules: `[namespace, before]` or `[namespace, before, after]`; one function may be None.  A rule applies
    to ops whose namespace starts with its tags: "pytorch", "tensorflow/2.21.0"; `*` stands for any tag:
    "*/*/graph".  At each point where a dependent tool has an analysis routine, the `before(context)` of all
    rules run first, in order, then the routines, then the `after(context)` in reverse order.

    Raises RuleError, which names the rule and the mistake.

    >>> def name(context):
    ...     context["op_name"] = context.get_op().__name__
    >>> mapping = MappingTool(rules=[["pytorch", name]])
    """

    purpose = None
    follows_dependents = True

    @checked(error=RuleError)
    def __init__(self, rules: Rules) -> None:
        self.rules = tuple(_read_rule(rule, f"rules[{position}]") for position, rule in enumerate(rules))
        self._matching_rules: tuple[Namespace | None, list[MappingRule]] = (None, [])  # of the last namespace
        # Rules run at each of the points where a dependent tool may have an analysis routine.
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(self._apply_before, backward, require_outputs)
                if any(rule.after for rule in self.rules):
                    self.add_closing_inst_for_op(self._apply_after, backward, require_outputs)

    def _apply_before(self, context: OpContext) -> None:
        for rule in self._rules_for(context.namespace):
            if rule.before is not None:
                rule.before(context)

    def _apply_after(self, context: OpContext) -> None:
        for rule in reversed(self._rules_for(context.namespace)):
            if rule.after is not None:
                rule.after(context)

    def _rules_for(self, namespace: Namespace) -> list[MappingRule]:
        # Four calls for each op, of one namespace as a rule: the op's first execution waits for them.
        last_namespace, rules = self._matching_rules
        if last_namespace is not namespace:
            rules = [rule for rule in self.rules if namespace.matches(rule.namespace)]
            # One tuple, since another thread may be at another namespace.
            self._matching_rules = namespace, rules
        return rules


def _read_rule(rule: Sequence[Any], label: str) -> MappingRule:
    """Return a user's rule; raise RuleError for other forms, which names it by its label, "rules[0]"."""
    expected = "a rule is [namespace, before] or [namespace, before, after]"
    if len(rule) not in (2, 3):
        raise RuleError(f"{label} has {len(rule)} elements; {expected}")
    namespace, *functions = rule
    if not isinstance(namespace, (str, Namespace)):
        raise RuleError(f'the namespace of {label} is {namespace!r}; give tags, as "pytorch" or "*/*/graph"')
    tags = Namespace(str(namespace))
    if not all(tags):
        raise RuleError(f'the namespace of {label} is "{namespace}", with an empty tag; "*" stands for any')
    for name, function in zip(("before", "after"), functions, strict=False):
        if function is not None and not callable(function):
            raise RuleError(f"`{name}` of {label} is {function!r}; give a function of one context, or None")
    if not any(functions):
        raise RuleError(f"{label} has no function; {expected}")
    return MappingRule(tags, *functions)


T = TypeVar("T")


class InstalledEntries:
    """The entry points of one group, each of which serves the framework or library of its name.

    Args:
        group: Name that distributions register under, such as "amanda.mappings".
        role: Noun for the object of an entry, for messages: "mapping rule".
        error: Class of the error for an entry that cannot be used.
    """

    def __init__(self, group: str, role: str, error: type[AmandaError]) -> None:
        self._group, self._role, self._error = group, role, error

    def names(self) -> list[str]:
        """Return the names that entries have."""
        return sorted(name for group, name in _installed_entries(tuple(sys.path)) if group == self._group)

    def load(self, name: str) -> Any:
        """Return the object of the entry of a name; None without one.

        Raises `error`, which names the distribution to upgrade or uninstall, where there are several entries
        or the one cannot be imported.
        """
        entries = self._entries_of(name)
        if not entries:
            return None
        if len(entries) > 1:
            rivals = " and ".join(map(self._entry_text, entries))
            raise self._error(f"{rivals} both serve {name}; uninstall one of them")
        entry = entries[0]
        try:
            return entry.load()
        except Exception as import_error:
            raise self._error(
                f"{self._entry_text(entry)} cannot be imported: {import_error!r}; upgrade or uninstall that "
                "distribution"
            ) from import_error

    def create(self, name: str, base: type[T], path: str) -> T | None:
        """Return an instance of the class that the entry of a name registers; None without an entry.

        Args:
            name: Framework or library, such as "torch".
            base: Class that the registered one has to derive from.
            path: Where users import `base` from, for messages.

        Raises:
            AmandaError: Of the class `error`, as `load` raises it, and for no subclass of `base`.
        """
        entry_class = self.load(name)
        if entry_class is None:
            return None
        if not isinstance(entry_class, type) or not issubclass(entry_class, base):
            raise self._error(f"{self.describe(name)} is {entry_class!r}; it has to be a subclass of {path}")
        return entry_class()

    def describe(self, name: str) -> str:
        """Return a text for messages: role, object and distribution of the first entry of a name."""
        return self._entry_text(self._entries_of(name)[0])

    def _entries_of(self, name: str) -> Sequence[EntryPoint]:
        """Return the entries of a name: several where distributions register the same name, () for none."""
        # By sys.path, so that a distribution that is added while the program runs is found.
        return _installed_entries(tuple(sys.path)).get((self._group, name), ())

    def _entry_text(self, entry: EntryPoint) -> str:
        suffix = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
        return f"the {self._role} {entry.value}{suffix}"


RULES = InstalledEntries("amanda.mappings", "mapping rule", RuleError)
"""Entry points: the name is a namespace, such as "mindspore"; the object a function `standard(context)`."""


def apply_installed_rule(framework: str, context: OpContext) -> None:
    """Call a framework's mapping rule, which is imported at the first op; raise RuleError for no function."""
    rule = RULES.load(framework)
    if not callable(rule):
        raise RuleError(f"{RULES.describe(framework)} is {rule!r}; it has to be a function of one context")
    rule(context)


@lru_cache(1)
def _installed_entries(sys_path: tuple[str, ...]) -> dict[tuple[str, str], list[EntryPoint]]:
    """Return the entry points of all distributions by (group, name); `sys_path` is the key of the cache."""
    installed = entry_points()  # of all groups at once, since a scan takes 50 ms
    # By value: a distribution that is found twice on sys.path is no rival of itself.
    by_value: dict[tuple[str, str], dict[str, EntryPoint]] = {}
    for group in installed.groups:
        for entry in installed.select(group=group):
            by_value.setdefault((entry.group, entry.name), {})[entry.value] = entry
    return {key: [entries[value] for value in sorted(entries)] for key, entries in by_value.items()}


def weight_gradient(context: OpContext) -> Callable[[int, Any], bool]:
    """Return a test, called with a position and a gradient: True if that is the weight's gradient.

    For the routines of a backward op: the analysis of one pass inserts them for all passes, and another pass
    may make no gradient of the weight or, of a broadcast weight, one of another shape.  Of a weight that is
    computed anew for each call the rank alone is compared, of one without a known shape nothing.  Call it in
    a callback without `require_outputs`: in one with it `weight_grad_index` is that of the present pass.
    """
    index, shape = context["weight_grad_index"], context["shape"]
    if index is None:
        return lambda position, gradient: False
    weight_extents, has_fixed_extents = _weight_extents(context)

    def is_weight_gradient(position: int, gradient: Any) -> bool:
        """Return True at the weight's position, for a gradient whose shape may be the weight's."""
        gradient_extents = None if position != index or gradient is None else shape(gradient)
        return gradient_extents is not None and (
            weight_extents is None or _extents_agree(gradient_extents, weight_extents, has_fixed_extents)
        )

    return is_weight_gradient


def drop_absent_weight_gradient(context: OpContext) -> None:
    """Set `weight_grad_index` to None if this pass made no gradient in the weight's shape."""
    index = context.get("weight_grad_index")
    if index is None or not context.is_after():  # before the backward op its gradients are not known
        return
    grads = context.get_grad_inputs() or []
    gradient = grads[index] if index < len(grads) else None
    gradient_extents = context["shape"](gradient)
    weight_extents, _ = _weight_extents(context)
    is_of_other_shape = (
        gradient_extents is not None
        and weight_extents is not None
        and not _extents_agree(gradient_extents, weight_extents, compares_extents=True)
    )
    if gradient is None or is_of_other_shape:
        context["weight_grad_index"] = None


def _weight_extents(context: OpContext) -> tuple[Sequence[int | None] | None, bool]:
    """Return the weight's extents, None if not known, and True if all calls have these: it is a variable."""
    index = context["weight_index"]
    if index is None:
        return None, False
    try:
        extents = context["shape"](context.get_inputs()[index])
        return extents, context.get_variable(index) is not None
    except AmandaError:
        return None, False


def _extents_agree(first: Sequence[int | None], second: Sequence[int | None], compares_extents: bool) -> bool:
    """Return True if two shapes have one rank and, if `compares_extents`, no extents known to differ."""
    if len(first) != len(second):
        return False
    return not compares_extents or all(
        None in pair or pair[0] == pair[1] for pair in zip(first, second, strict=True)
    )


UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize",
     "Empty", "ParallelConcatStart"}
)  # fmt: skip
"""Types of ops whose outputs are what was in memory before."""

CALLING_OPS = frozenset("""
    Case For If Loop MapDefun PartitionedCall RemoteCall Scan SequenceMap StatefulPartitionedCall
    StatelessCase StatelessIf StatelessWhile SymbolicGradient While closed_call cond core_call
    custom_jvp_call custom_vjp_call jit pjit remat scan shard_map while""".split())  # fmt: skip
"""Types of ops that compute nothing themselves: they run functions or bodies, whose ops are seen."""

_SHARED = """
    add sub rsub mul div floor_divide remainder pow neg abs matmul addmm linear eq ne lt le gt ge bitwise_not
    bitwise_and bitwise_or reshape transpose permute getitem setitem cat clamp conv1d conv2d conv3d
    conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d batch_norm layer_norm group_norm embedding relu
    sigmoid softmax log_softmax cross_entropy nll_loss dropout scaled_dot_product_attention rnn_tanh lstm gru
    to item
""".split()

_TABLES = (_pytorch.WORDS, _tensorflow.WORDS, _onnxruntime.WORDS)

VOCABULARY = frozenset((*_SHARED, *(word for table in _TABLES for word in table.values())))
"""Words that mean the same in every framework; what is in no list keeps the framework's own name."""


class StandardMapping(MappingTool):
    """Write op type, shapes, weight and layout into contexts, alike for all frameworks (for tool authors).

    Keys of the context, and their values:
    type: what the op computes: "add" for `a + b`, "conv2d", "linear", "matmul"; the framework's own name
        if docs/vocabulary.md has none.
    in_place: whether the op writes its result into its first input.
    phase: "forward", "backward", "optimizer" in the step of a PyTorch optimizer, or "construction" in
        constructors and initializers of modules and layers.
    backward_type: what the backward op computes, e.g. "conv2d_backward"; None in the forward pass.
    weight_index: position of the weight among the inputs; None without one.
    weight_grad_index: position of the weight's gradient among `get_grad_inputs()`; None in the forward pass
        and if no gradient has the shape of the weight.
    layout: axes of the data input, e.g. "NCHW", "NHWC", "NCW"; None where they have no fixed meaning.
    weight_layout: axes of the weight, e.g. "OIHW", "HWIO", "OI"; None where they have no fixed meaning.
    weight_groups: number of groups of a convolution; 1 of other ops.
    shape: function that returns the shape of a tensor, with None for an unknown extent; None for non-tensors.
    dtype: function that returns a tensor's element type, e.g. "float32"; None for non-tensors.

    rules: option: mapping rules, as of MappingTool, that run after the standard rules.
    """

    @checked
    def __init__(self, rules: Rules = ()) -> None:
        # A framework's half is a module of its own: a function `standard(context)` that writes
        # every key above; of `weight_grad_index` the position alone.  It may leave out `weight_groups`, and
        # `weight_layout` where the table of `_weight_axes` has that.
        super().__init__([
            ["pytorch", _pytorch.standard], ["tensorflow", _tensorflow.standard],
            ["onnxruntime", _onnxruntime.standard],
            # Deferred, since importing a driver's rule imports its framework.
            *([framework, partial(apply_installed_rule, framework)] for framework in RULES.names()),
            ["*", write_weight_axes], ["*", drop_absent_weight_gradient], *rules,
        ])  # fmt: skip
        self._is_plain = not rules

    def stands_for(self) -> Hashable:
        """Return a key that lets one StandardMapping without further rules serve all tools of a scope."""
        return StandardMapping if type(self) is StandardMapping and self._is_plain else None
