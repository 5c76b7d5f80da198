"""torch.compile in a scope: dynamo captures the same graphs, and another backend instruments them first."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch._dynamo.eval_frame as eval_frame
from amanda import interceptor
from amanda.backend import State
from amanda.graph import History
from torch._C._dynamo.eval_frame import set_eval_frame_isolate_recompiles_id
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalStateSource
from torch.utils._pytree import tree_flatten

from .._asked import asks_for_graphs
from .._leaves import Leaf, note
from .._modules import Paths, module_path, plain_module_calls
from .._surroundings import Surroundings
from ._frames import ONCE, left_to_python
from ._instrument import namespace
from ._instrumented import Inlet
from ._memory import SharedMemory
from ._ops import Program
from ._reads import TorchReads
from ._record import sequence, uninstrumented
from ._rewrite import Rewriting
from ._symbols import Symbols
from ._whole import Whole

if TYPE_CHECKING:
    from torch.fx import GraphModule

LIMIT = 1 << 16
"""Of compilations of one code object: scopes and tools come and go, and each model has its own graphs."""


KEEPS = (
    "it keeps values for tools' routines, so that its numbers may be rounded otherwise than without tools: "
    "amanda.drivers.torch.graph.control compares them"
)


class Generation:
    """Graphs that were compiled for a stack of tools, until its plans are forgotten.

    The stack owns it, and it owns the graphs.  Dynamo, whose cache is as old as the user's function, refers
    to both weakly, so that tools which nobody has any more take their graphs along.

    converters: by dynamo's callback.  It is a region of dynamo's own: what is compiled here does not count
    against the limit that the user's own graphs have.
    histories: of what routines read, by the code that was compiled.
    states: the state that was last in force, by whether autodiff is on.
    """

    _regions = count(1 << 20)

    def __init__(self) -> None:
        self.states: dict[bool, State] = {}
        self.graphs: list[CompiledGraph] = []
        self.entries = _CacheEntries()
        finalize(self, _ENDED.append, self.entries).atexit = False
        self.converters: WeakKeyDictionary[Any, dict[bool, Converter]] = WeakKeyDictionary()
        limit = torch._dynamo.config.recompile_limit  # the user's, as it is outside of compilation
        self.histories: defaultdict[CodeType | None, History] = defaultdict(
            lambda: History(TorchReads, limit)
        )
        self.region = next(self._regions)


class _CacheEntries:
    """Stands for a generation in guards: dynamo drops the entries of its cache when this object ends."""


_ENDED: list[_CacheEntries] = []
"""Of generations that have ended, which may be while dynamo walks through the entries of a cache."""


def chosen(callback: Any, otherwise: Callable[[Any], Any]) -> Any:
    """Return what dynamo is to call for frames of a compiled callable, whose own callback this is."""
    activation = interceptor.ACTIVATION.get(None)
    state = activation.state if activation is not None else None
    if not asks_for_graphs(state) or isinstance(callback, Converter):
        return callback if isinstance(callback, Converter) else otherwise(callback)
    if not Surroundings.leaves_stance(eval_frame._stance):
        return otherwise(callback)
    if interceptor.active() is None:
        return otherwise(callback) if state.intercepts else callback
    if not isinstance(callback, CatchErrorsWrapper):
        state.report("a compiled callable", f"dynamo's {type(callback).__name__} captures no graph")
        return otherwise(callback)
    _ENDED.clear()  # dynamo looks for an entry only once it has the callback
    found = _converter(state, callback)
    if found.backend.apart:
        set_eval_frame_isolate_recompiles_id(found.generation.region)
    return found


def _converter(state: State, callback: Any) -> Converter:
    stack = state.stack
    assert stack is not None
    generation = stack.rewrites.get(Generation) if state.cache else Generation()
    if generation is None:
        generation = stack.rewrites[Generation] = Generation()
    generation.states[state.autodiff] = state
    converters = generation.converters.setdefault(callback, {})
    if state.autodiff not in converters:
        apart = _has_compiled(underlying(callback), sys._getframe(3).f_locals.get("fn"))
        backend = Backend(callback, state.autodiff, generation, apart)
        converters[state.autodiff] = Converter(callback, backend, generation)
    return converters[state.autodiff]


def _has_compiled(backend: Any, function: Any) -> bool:
    """Return True if the user's backend has compiled a callable before, in a scope or outside."""
    entries = [entry for code in _codes(function) for entry in eval_frame._debug_get_cache_entry_list(code)]
    return any(_serves(entry.backend, backend) for entry in entries)


def _codes(function: Any) -> Iterator[CodeType]:
    while function is not None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            function = type(owner).forward
        if isinstance(getattr(function, "__code__", None), CodeType):
            yield function.__code__
        function = getattr(function, "__wrapped__", None)


def _serves(known: Any, backend: Any) -> bool:
    if isinstance(known, Backend):
        return not known.apart and bool(known.original == backend)
    return bool(known == backend)


def instrumenting() -> State | None:
    """The state in force, where compiled callables are to be instrumented."""
    activation = interceptor.active()
    if activation is None or type(activation.state) is not State:
        return None
    return activation.state if asks_for_graphs(activation.state) else None


def underlying(backend: Any) -> Any:
    """The backend that dynamo tells compiled code by."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


class _Frame(threading.local):
    """The frame that dynamo converts on this thread."""

    code: CodeType | None = None
    prefix = ""
    instance = 0
    path_of = Paths(())


_frame = _Frame()


class Converter:
    """Stands in for dynamo's callback."""

    def __init__(self, callback: Any, backend: Backend, generation: Generation) -> None:
        clone = callback._torchdynamo_orig_backend._clone_with_backend(backend)
        clone._recompile_limit = LIMIT
        if hasattr(clone, "_inner_convert"):
            clone._inner_convert._recompile_limit = LIMIT
        self._convert = CatchErrorsWrapper(clone, callback.hooks)
        self._torchdynamo_orig_backend = clone
        self.backend, self.generation = backend, generation
        self._op_by_op: dict[CodeType, SharedMemory] = {}

    def __call__(self, frame: Any, *args: Any) -> Any:
        left = left_to_python(frame)
        if left is not None:
            return left
        if frame.f_code in self._op_by_op:
            self._tell(frame)
            return ONCE
        own = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""), None)
        before = _frame.code, _frame.prefix, _frame.instance, _frame.path_of
        _frame.code = frame.f_code
        subjects = interceptor.subjects()
        _frame.prefix, _frame.path_of = module_path(subjects), Paths(subjects)
        _frame.instance = interceptor.ordinal(own) if isinstance(own, torch.nn.Module) else 0
        try:
            with uninstrumented(), plain_module_calls(), self.backend.sizes():
                result = self._convert(frame, *args)
        except BaseException:
            failure = self.backend.failure()
            if isinstance(failure, SharedMemory):
                self._op_by_op[frame.f_code] = failure
                self._tell(frame)
                return ONCE
            if failure is not None:
                raise failure from failure.__cause__
            raise
        finally:
            _frame.code, _frame.prefix, _frame.instance, _frame.path_of = before
        failure = self.backend.failure()
        if failure is not None:
            raise failure from failure.__cause__
        return result

    def _tell(self, frame: Any) -> None:
        """Report that a compiled frame runs op by op."""
        failure = self._op_by_op[frame.f_code]
        self.backend.state.report(
            f"the compiled graph of {_named(frame.f_code)}",
            f"it runs op by op: {failure}",
            failure.where,
        )


class Backend:
    """Instruments a graph, then has the user's backend compile it.

    shared: whether the code serves outside of scopes too, where dynamo takes what was compiled here for what
    the user's backend compiled: until a graph has routines in it.
    apart: whether the code is in a region of dynamo's own.
    """

    def __init__(self, callback: Any, autodiff: bool, generation: Generation, apart: bool) -> None:
        self._compile = callback._torchdynamo_orig_backend._torchdynamo_orig_backend
        self.original = underlying(callback)
        self._autodiff = autodiff
        self._generation = ref(generation)
        self.apart = apart
        self.shared = not apart
        self.__name__ = "amanda"
        self._failures = threading.local()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Backend):
            generation = self._generation()
            same = generation is not None and generation is other._generation() and self.apart == other.apart
            return same and self._autodiff == other._autodiff and self.original == other.original
        return self.shared and instrumenting() is None and bool(self.original == other)

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def generation(self) -> Generation:
        """Return the generation, which the converter at work owns."""
        generation = self._generation()
        assert generation is not None
        return generation

    @property
    def state(self) -> State:
        """Return the state that was last in force."""
        return self.generation.states[self._autodiff]

    def sizes(self) -> AbstractContextManager[Any]:
        """Context in which each size has a graph of its own, where tools decide by sizes."""
        stack = self.state.stack
        if stack is None or not stack.guards:
            return nullcontext()
        fixed: AbstractContextManager[Any] = torch._dynamo.config.patch(
            assume_static_by_default=True, automatic_dynamic_shapes=False
        )
        return fixed

    def failure(self) -> BaseException | None:
        """Take what was raised while a graph was instrumented, which dynamo wraps."""
        error: BaseException | None = getattr(self._failures, "error", None)
        self._failures.error = None
        return error

    def __call__(self, module: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        program = Program(self.state)
        whole = Whole(program) if _is_by_autograd(self.original) else None
        try:
            instrumented = self._instrumented(module, inputs, program, whole)
        except BaseException as error:
            self._failures.error = error
            raise
        users = getattr(self.original, "compiler_fn", self.original)  # as torch.compile wraps it
        if instrumented is not None and not _is_torchs(users):
            program.report(*_altered(users, instrumented))
        if instrumented is not None:
            self.shared = False
            if program.gathering and _name(self.original).startswith("inductor"):
                program.report(f"compiled graph of {_named(_frame.code)}", KEEPS)
        targets = [] if instrumented is None else [node.target for node in instrumented.graph.nodes]
        compiled = self._compile(module if instrumented is None else instrumented, inputs, **options)
        _forget(targets)
        if program.traced:
            _guard_by_reads(program, self.generation.histories[_frame.code])
        graph = CompiledGraph(program, compiled, whole)
        self.generation.graphs.append(graph)
        if instrumented is None:
            return _weakly(graph, compiled)
        _end_with(self.generation)
        return _weakly(graph)

    def _instrumented(
        self, module: GraphModule, inputs: Sequence[Any], program: Program, whole: Whole | None
    ) -> GraphModule | None:
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        weights = ["_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {}) for node in places]
        weights = [
            weight or isinstance(one, torch.nn.Parameter) for weight, one in zip(weights, inputs, strict=True)
        ]
        _guard_by_identity([node for node, one in zip(places, inputs, strict=True)
                            if isinstance(one, torch.nn.Parameter)])  # fmt: skip
        symbols = Symbols(module, inputs, [node.meta.get("example_value") for node in places], weights)
        rewriting = Rewriting(
            module, symbols, program, namespace(), _frame.prefix, _frame.instance,
            history=self.generation.histories[_frame.code], path_of=_frame.path_of, whole=whole,
        )  # fmt: skip
        return rewriting.rewritten()


def _is_torchs(backend: Any) -> bool:
    """Return True for a backend of torch's own, whose compilation of tools' routines is tested."""
    module = getattr(backend, "__module__", None) or type(backend).__module__
    return str(module).partition(".")[0] == "torch"


def _is_by_autograd(backend: Any) -> bool:
    """Return True for a backend of torch's own that compiles by AOTAutograd."""
    own = _is_torchs(getattr(backend, "compiler_fn", backend))
    return own and _name(backend).startswith(("inductor", "aot_", "cudagraphs"))


def _name(backend: Any) -> str:
    users = getattr(backend, "compiler_fn", backend)
    return str(getattr(backend, "compiler_name", getattr(users, "__name__", "")))


def _named(code: CodeType | None) -> str:
    """Return the name of a function by its code."""
    return str(getattr(code, "co_qualname", getattr(code, "co_name", "a function")))


def _altered(backend: Any, graph: GraphModule) -> tuple[str, str, str]:
    """Entry of a report on a graph whose nodes a backend of the user's cannot all match by their targets."""
    altered = [node for node in graph.graph.nodes if isinstance(node.target, Inlet)]
    code = getattr(backend, "__code__", None)
    return (
        f"graph given to the backend {getattr(backend, '__name__', type(backend).__name__)}",
        f"{len(altered)} of its nodes are calls of tools around an op, which patterns over ops do not match",
        f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "",
    )


def _guard_by_identity(places: Sequence[Any]) -> None:
    """Compile graphs of their own for another model's parameters."""
    for node in places:
        source = node._dynamo_source
        if source is not None:
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _guard_by_reads(program: Program, history: History) -> None:
    """Guard the graph by what its routines read, so that changes retrace it; report what guards miss."""
    reads = program.reads
    reads.settle()
    for entry in reads.unfollowed(program.traced, "a compiled graph"):
        program.report(*entry)
    history.take(reads)
    reference = ref(reads)

    def is_as_it_was(_: Any) -> bool:
        activation = interceptor.ACTIVATION.get(None)
        state = None if activation is None else activation.state
        if not (asks_for_graphs(state) and state.enabled):
            return True
        reads = reference()
        return reads is not None and reads.hold()

    def guard(builder: Any, made: Any) -> None:
        said = ["what traceable routines of Amanda's tools read is as it was"]
        builder.guard_manager.root.add_lambda_guard(is_as_it_was, said, made.user_stack)

    install_guard(GlobalStateSource().make_guard(guard))


def _end_with(generation: Generation) -> None:
    """Have dynamo drop the entry that it is about to make once the generation has ended."""

    def guard(builder: Any, made: Any) -> None:
        builder.id_ref(generation.entries, "tools of a scope")

    install_guard(GlobalStateSource().make_guard(guard))


def _forget(targets: Sequence[Any]) -> None:
    """Take targets of nodes out of a cache of inductor's, by what they are called with, which never ends."""
    patterns = sys.modules.get("torch._inductor.fx_passes.misc_patterns")
    cache = getattr(getattr(patterns, "numpy_compat_normalization", None), "cache", {})
    for target in targets:
        if isinstance(target, Inlet):
            cache.pop(target, None)


class CompiledGraph:
    """A graph as it was compiled, with what tools are told when it runs."""

    def __init__(self, program: Program, compiled: Callable[..., Any], whole: Whole | None) -> None:
        self._program, self._compiled, self._whole = program, compiled, whole

    def __call__(self, *args: Any) -> Any:
        """Run the graph; tools are told in scopes alone."""
        state, program = instrumenting(), self._program
        if state is None:
            return self._compiled(*args)
        for entry in program.reports:
            state.report(*entry)
        start = sequence()
        if self._whole:
            outputs = self._whole.run(self._compiled, args)
        else:
            with interceptor.Suspension():
                outputs = self._compiled(*args)
        if program.leaves and torch.is_grad_enabled():
            leaves = [
                Leaf(args[place] if isinstance(place, int) else place, name, tools)
                for place, name, tools in program.leaves
            ]
            note(tree_flatten((outputs, args))[0], start, leaves)
        return outputs


def _weakly(graph: CompiledGraph, otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return what dynamo calls for a graph; otherwise: what runs once the tools have ended, if anything."""
    reference = ref(graph)

    def run(*args: Any) -> Any:
        call = reference() or otherwise
        assert call is not None  # dynamo asks the backend, which is no other's once its tools have ended
        return call(*args)

    return run
