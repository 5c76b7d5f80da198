"""torch.compile in scopes: a backend instruments the graphs of dynamo, then the user's compiles them."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch._dynamo.eval_frame as eval_frame
from amanda import interceptor
from amanda.backend import State
from amanda.graph import ValueHistory
from torch._C._dynamo.eval_frame import set_eval_frame_isolate_recompiles_id
from torch._dynamo import external_utils
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch.utils._pytree import tree_flatten

from .._compiled_callables import (
    WatchedLeaf,
    describe_callable,
    instruments_compiled_code,
    note_watched_leaves,
)
from .._modules import ParameterPaths, module_path, modules_among, plain_module_calls
from .._patches import TorchPatches
from ._dynamo import SKIP_ONCE, guard_by_identity, guard_by_lifetime, guard_by_reads, skip_result
from ._graph_copy import inline_bodies
from ._instrument import namespace
from ._instrumented import InstrumentedCall
from ._memory import SharedMemory
from ._node_runs import sequence_number, uninstrumented
from ._observers import LateObservers
from ._ops import GraphProgram
from ._rewrite import FxRewriting
from ._routine_inputs import TorchReads
from ._symbols import GraphSymbols

if TYPE_CHECKING:
    from torch.fx import GraphModule

RECOMPILE_LIMIT = 1 << 16
"""Limit on compilations of a code object: tools come and go, and each model has graphs of its own."""

ROUNDED_OTHERWISE = (
    "it keeps values for tools' routines, so that its numbers may be rounded otherwise than without tools: "
    "amanda.drivers.torch.graph.control compares them"
)


class GraphGeneration:
    """Graphs that were compiled for a stack of tools, until its plans are forgotten.

    The stack owns the generation, and the generation owns the graphs.  Dynamo's cache lives as long as the
    user's function and refers to both weakly, so that graphs end with the last reference to their tools.

    converters: by dynamo's callback.  region: number of a region of dynamo, so that graphs compiled here do
    not count against the limit on the user's graphs.
    histories: of what routines read, by the code that was compiled.
    state_by_autodiff: the state that was last in force, by whether autodiff is on.
    """

    _regions = count(1 << 20)

    def __init__(self) -> None:
        self.state_by_autodiff: dict[bool, State] = {}
        self.graphs: list[CompiledGraph] = []
        self.entries = _CacheEntries()
        # Dynamo drops entries as their guarded object dies. It may be walking through its cache just now,
        # so the object outlives the generation until dynamo next asks for a callback.
        finalize(self, _ended_entries.append, self.entries).atexit = False
        self.converters: WeakKeyDictionary[Any, dict[bool, InstrumentingConverter]] = WeakKeyDictionary()
        limit = torch._dynamo.config.recompile_limit  # the user's, as it is outside of compilation
        self.histories: defaultdict[CodeType | None, ValueHistory] = defaultdict(
            lambda: ValueHistory(TorchReads, limit)
        )
        self.region = next(self._regions)


class _CacheEntries:
    """Stands for a generation in guards: dynamo drops the entries of its cache when this object ends."""


_ended_entries: list[_CacheEntries] = []
"""Entries of generations that have ended; kept for a while, as dynamo may be walking through a cache."""


def choose_callback(callback: Any, choose_by_stance: Callable[[Any], Any]) -> Any:
    """Return dynamo's callback for the frames of a compiled callable: one that instruments if a scope asks.

    Else the callback that `choose_by_stance` returns, or, where tools are disabled, `callback` itself.
    May switch dynamo to the generation's region, and frees ended entries.  A callback that captures no graph
    is reported.
    """
    if isinstance(callback, InstrumentingConverter):
        return callback
    activation = interceptor.ACTIVATION.get(None)
    state = activation.state if activation is not None else None
    if not instruments_compiled_code(state) or not TorchPatches.leaves_stance_to_scopes(eval_frame._stance):
        return choose_by_stance(callback)
    if interceptor.active() is None:  # a routine or an op runs, or tools are disabled
        return choose_by_stance(callback) if state.intercepts else callback
    if not isinstance(callback, CatchErrorsWrapper):
        state.report("a compiled callable", f"dynamo's {type(callback).__name__} captures no graph")
        return choose_by_stance(callback)
    _ended_entries.clear()  # now, as dynamo looks for an entry only once it has the callback
    converter = _converter_of(state, callback)
    if converter.backend.has_own_region:
        set_eval_frame_isolate_recompiles_id(converter.generation.region)
    return converter


def _converter_of(state: State, callback: Any) -> InstrumentingConverter:
    """Return the converter of a callback for the tools of a state, made when it is first needed.

    The state becomes the last in force.  Without caching each call makes a converter and a generation.
    """
    stack = state.stack
    assert stack is not None
    # Without caching nothing is shared with another call: each has a generation of its own.
    generation = stack.rewrites.get(GraphGeneration) if state.cache else GraphGeneration()
    if generation is None:
        generation = stack.rewrites[GraphGeneration] = GraphGeneration()
    generation.state_by_autodiff[state.autodiff] = state
    converter_by_autodiff = generation.converters.setdefault(callback, {})
    if state.autodiff not in converter_by_autodiff:
        # The frame is dynamo's, three calls out: it holds the compiled callable as `fn`.
        function = sys._getframe(3).f_locals.get("fn")
        # In the user's region dynamo would find the code that it has compiled without tools.
        needs_own_region = _was_compiled_by(unwrapped_backend(callback), function)
        backend = InstrumentingBackend(callback, state.autodiff, generation, needs_own_region)
        converter_by_autodiff[state.autodiff] = InstrumentingConverter(callback, backend, generation)
    return converter_by_autodiff[state.autodiff]


def _was_compiled_by(backend: Any, function: Any) -> bool:
    """Return True if the user's backend has compiled a callable before, in a scope or outside."""
    entries = [
        entry for code in _codes_of(function) for entry in eval_frame._debug_get_cache_entry_list(code)
    ]
    return any(_is_for_backend(entry.backend, backend) for entry in entries)


def _codes_of(function: Any) -> Iterator[CodeType]:
    """Yield the code objects of a callable, of a module's `forward`, and of the functions that they wrap."""
    while function is not None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            function = type(owner).forward
        if isinstance(getattr(function, "__code__", None), CodeType):
            yield function.__code__
        function = getattr(function, "__wrapped__", None)


def _is_for_backend(entry_backend: Any, backend: Any) -> bool:
    """Return True if compiled code is of the user's backend, or instrumented for it in the user's region.

    entry_backend: backend of the compiled code, as dynamo's cache has it.
    """
    if isinstance(entry_backend, InstrumentingBackend):
        return not entry_backend.has_own_region and bool(entry_backend.original == backend)
    return bool(entry_backend == backend)


def instrumenting_state() -> State | None:
    """Return the state in force if compiled callables are to be instrumented in it, else None."""
    activation = interceptor.active()
    if activation is None or type(activation.state) is not State:
        return None
    return activation.state if instruments_compiled_code(activation.state) else None


def unwrapped_backend(backend: Any) -> Any:
    """Return the user's backend within dynamo's wrappers; dynamo's cache compares backends by it."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


class _ConvertedFrame(threading.local):
    """Facts of the frame that dynamo converts on this thread.

    function_name: name of the user's function.  prefix: path of the module whose code it runs.
    model_ordinal: ordinal of the module, 0 for a function.  path_of: finds paths of parameters in the
    modules around it.
    """

    code: CodeType | None = None
    function_name = ""
    prefix = ""
    model_ordinal = 0
    path_of = ParameterPaths(())

    @contextmanager
    def describing(self, frame: Any) -> Iterator[None]:
        """Hold the facts of a frame within the context, and then again those of the frame around it."""
        outer_facts = dict(self.__dict__)
        # The first argument is the module in a `forward`; its ordinal tells models of one class apart.
        receiver = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""), None)
        modules = modules_among(interceptor.subjects())
        self.code, self.function_name = frame.f_code, _function_name(frame)
        self.prefix, self.path_of = module_path(modules), ParameterPaths(modules)
        self.model_ordinal = interceptor.ordinal(receiver) if isinstance(receiver, torch.nn.Module) else 0
        try:
            yield
        finally:
            self.__dict__.clear()
            self.__dict__.update(outer_facts)


_frame = _ConvertedFrame()


class InstrumentingConverter:
    """Stand-in for dynamo's callback: converts frames with a backend that instruments graphs."""

    def __init__(self, callback: Any, backend: InstrumentingBackend, generation: GraphGeneration) -> None:
        """Clone dynamo's converter for the instrumenting backend, with a higher limit on compilations."""
        # Dynamo's own way to convert frames for another backend; the hooks are the user's.
        clone = callback._torchdynamo_orig_backend._clone_with_backend(backend)
        clone._recompile_limit = RECOMPILE_LIMIT
        if hasattr(clone, "_inner_convert"):
            clone._inner_convert._recompile_limit = RECOMPILE_LIMIT
        self._convert = CatchErrorsWrapper(clone, callback.hooks)
        self._torchdynamo_orig_backend = clone
        self.backend, self.generation = backend, generation
        self._op_by_op: dict[CodeType, SharedMemory] = {}

    def __call__(self, frame: Any, *args: Any) -> Any:
        """Return dynamo's result for a frame: skipped if it is not the user's or is to run op by op.

        An error of instrumenting is raised as itself; SharedMemory makes the frame run op by op.
        """
        skip_of_frame = skip_result(frame)
        if skip_of_frame is not None:
            return skip_of_frame
        if frame.f_code in self._op_by_op:
            self._report_op_by_op(frame)
            return SKIP_ONCE
        try:
            with (
                _frame.describing(frame),
                uninstrumented(),
                plain_module_calls(),
                self.backend.static_sizes(),
            ):
                result = self._convert(frame, *args)
        except BaseException:
            # Dynamo wraps or swallows errors of a backend: the one noted there is raised as itself.
            failure = self.backend.take_failure()
            if failure is None:
                raise
            if not isinstance(failure, SharedMemory):
                raise failure from failure.__cause__
            self._op_by_op[frame.f_code] = failure
            self._report_op_by_op(frame)
            return SKIP_ONCE
        failure = self.backend.take_failure()
        if failure is not None:
            raise failure from failure.__cause__
        return result

    def _report_op_by_op(self, frame: Any) -> None:
        """Report that a compiled frame runs op by op, with the error for which it does."""
        failure = self._op_by_op[frame.f_code]
        subject = f"the compiled graph of {_function_name(frame)}"
        self.backend.state.report(subject, f"it runs op by op: {failure}", failure.where)


class InstrumentingBackend:
    """Backend that instruments a graph, then has the user's backend compile it.

    shared: whether compiled code serves outside of scopes too.  There the backend equals the user's backend,
    until a graph has routines in it, so that dynamo compiles the same code once.
    has_own_region: whether the code is in a region of dynamo's cache of its own.
    """

    def __init__(
        self, callback: Any, autodiff: bool, generation: GraphGeneration, has_own_region: bool
    ) -> None:
        """Hold the user's backend, within dynamo's wrappers and without; the generation is held weakly."""
        self._compile = callback._torchdynamo_orig_backend._torchdynamo_orig_backend
        self.original = unwrapped_backend(callback)
        self._autodiff = autodiff
        self._generation = ref(generation)
        self.has_own_region = has_own_region
        self.shared = not has_own_region
        self.__name__ = "amanda"
        self._failures = threading.local()  # dynamo compiles on whichever thread calls first

    def __eq__(self, other: object) -> bool:
        """Return True if dynamo may run, for this backend, what the other has compiled."""
        if self is other:
            return True
        # Dynamo reuses compiled code if the backends are equal: this decides which tools share graphs.
        if isinstance(other, InstrumentingBackend):
            generation = self._generation()
            if generation is None or generation is not other._generation():
                return False
            has_same_settings = (
                self.has_own_region is other.has_own_region and self._autodiff is other._autodiff
            )
            return has_same_settings and bool(self.original == other.original)
        return self.shared and instrumenting_state() is None and bool(self.original == other)

    def __hash__(self) -> int:
        return hash(type(self))  # equality depends on the scope in force, which a hash must not

    @property
    def generation(self) -> GraphGeneration:
        """Return the generation, which lives while its converter is called."""
        generation = self._generation()
        assert generation is not None
        return generation

    @property
    def state(self) -> State:
        """Return the state that was last in force."""
        return self.generation.state_by_autodiff[self._autodiff]

    def static_sizes(self) -> AbstractContextManager[Any]:
        """Return a context in which each size gets a graph of its own, if tools decide by shapes."""
        stack = self.state.stack
        if stack is None or not stack.guards:
            return nullcontext()
        static_context: AbstractContextManager[Any] = torch._dynamo.config.patch(
            assume_static_by_default=True, automatic_dynamic_shapes=False
        )
        return static_context

    def take_failure(self) -> BaseException | None:
        """Return and forget the error of instrumenting a graph on this thread; dynamo would wrap it."""
        error: BaseException | None = getattr(self._failures, "error", None)
        self._failures.error = None
        return error

    def __call__(self, module: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Have the user's backend compile a graph, with routines if tools insert any.

        The generation gets the graph, and guards watch what its routines read and that the tools live.  An
        error of instrumenting is noted for the converter too, since dynamo would wrap it.
        """
        program = GraphProgram(self.state)
        late_observers = LateObservers(program) if _uses_aot_autograd(self.original) else None
        try:
            instrumented = self._instrument(module, inputs, program, late_observers)
        except BaseException as error:
            self._failures.error = error
            raise
        targets = [] if instrumented is None else [node.target for node in instrumented.graph.nodes]
        if instrumented is not None:
            self.shared = False
            self._report_differences(program, instrumented)
        # A graph without routines goes to the backend as it is, so that it stays the user's to the bit.
        compiled = self._compile(module if instrumented is None else instrumented, inputs, **options)
        _drop_from_inductor_cache(targets)  # targets from before: a backend may change the graph
        if program.traced:
            guard_by_reads(program, self.generation.histories[_frame.code])
        graph = CompiledGraph(program, compiled, late_observers)
        self.generation.graphs.append(graph)
        if instrumented is None:
            return _weak_runner(graph, compiled)
        guard_by_lifetime(self.generation.entries)
        return _weak_runner(graph)

    def _report_differences(self, program: GraphProgram, instrumented: GraphModule) -> None:
        """Report in what a graph with routines may differ from the user's, by the backend."""
        user_backend = getattr(self.original, "compiler_fn", self.original)  # as torch.compile wraps it
        if not _is_from_torch(user_backend):
            program.report(*_replaced_nodes_entry(user_backend, instrumented))
        if program.gathers_observers and _backend_name(self.original).startswith("inductor"):
            program.report(f"compiled graph of {_frame.function_name}", ROUNDED_OTHERWISE)

    def _instrument(
        self, module: GraphModule, inputs: Sequence[Any], program: GraphProgram,
        late_observers: LateObservers | None,
    ) -> GraphModule | None:  # fmt: skip
        """Return the frame's graph with routines in it, None if there are none; guard it by parameters."""
        module = inline_bodies(module) or module
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        parameter_nodes, is_weight_by_input = [], []
        for node, value in zip(placeholders, inputs, strict=True):
            is_parameter = isinstance(value, torch.nn.Parameter)
            if is_parameter:
                parameter_nodes.append(node)
            # Dynamo marks inputs that are the same tensor in each run, such as buffers.
            is_static = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
            is_weight_by_input.append(is_parameter or is_static)
        guard_by_identity(parameter_nodes)
        examples = [node.meta.get("example_value") for node in placeholders]
        symbols = GraphSymbols(module, inputs, examples, is_weight_by_input)
        rewriting = FxRewriting(
            module, symbols, program, namespace(), _frame.prefix, _frame.model_ordinal,
            history=self.generation.histories[_frame.code], path_of=_frame.path_of,
            late_observers=late_observers,
        )  # fmt: skip
        return rewriting.rewrite()


def _is_from_torch(backend: Any) -> bool:
    """Return True for a backend of torch's, with which compiled routines are tested."""
    module = getattr(backend, "__module__", None) or type(backend).__module__
    return str(module).partition(".")[0] == "torch"


def _uses_aot_autograd(backend: Any) -> bool:
    """Return True for a backend of torch's that compiles by AOTAutograd."""
    is_from_torch = _is_from_torch(getattr(backend, "compiler_fn", backend))
    return is_from_torch and _backend_name(backend).startswith(("inductor", "aot_", "cudagraphs"))


def _backend_name(backend: Any) -> str:
    # Of a backend that torch.compile wraps, the name that the user gave.
    user_backend = getattr(backend, "compiler_fn", backend)
    return str(getattr(backend, "compiler_name", getattr(user_backend, "__name__", "")))


def _function_name(frame: Any) -> str:
    """Return the name of the user's function that a frame runs, or calls where the frame is dynamo's own."""
    code = frame.f_code
    if code.co_filename == external_utils.__file__:  # it calls what has no frame to convert, such as a layer
        _, name, _ = describe_callable(frame.f_locals.get("fn"))
        return name or "a function"
    return str(getattr(code, "co_qualname", code.co_name))


def _replaced_nodes_entry(backend: Any, graph: GraphModule) -> tuple[str, str, str]:
    """Return a report's entry on nodes that patterns of a user's backend cannot match, as they call tools."""
    replaced_nodes = [node for node in graph.graph.nodes if isinstance(node.target, InstrumentedCall)]
    code = getattr(backend, "__code__", None)
    return (
        f"graph given to the backend {getattr(backend, '__name__', type(backend).__name__)}",
        f"{len(replaced_nodes)} of its nodes are calls of tools around an op, "
        "which patterns over ops do not match",
        f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "",
    )


def _drop_from_inductor_cache(targets: Sequence[Any]) -> None:
    """Drop tools' calls among targets from a cache of inductor's that would hold the tools for ever."""
    patterns = sys.modules.get("torch._inductor.fx_passes.misc_patterns")  # absent if inductor has not run
    cache = getattr(getattr(patterns, "numpy_compat_normalization", None), "cache", {})
    for target in targets:
        if isinstance(target, InstrumentedCall):
            cache.pop(target, None)


class CompiledGraph:
    """A compiled graph with the reports, late observers and leaves that belong to each run."""

    def __init__(
        self, program: GraphProgram, compiled: Callable[..., Any], late_observers: LateObservers | None
    ) -> None:
        self._program, self._compiled, self._late_observers = program, compiled, late_observers

    def __call__(self, *args: Any) -> Any:
        """Run the graph; in scopes that instrument graphs, report, call late observers, and note leaves."""
        state, program = instrumenting_state(), self._program
        if state is None:
            return self._compiled(*args)
        for entry in program.reports:  # again in each scope that runs the graph; a report drops repeats
            state.report(*entry)
        start = sequence_number()
        if self._late_observers:
            outputs = self._late_observers.run(self._compiled, args)
        else:
            with interceptor.Suspension():
                outputs = self._compiled(*args)
        if program.leaves and torch.is_grad_enabled():
            leaves = [
                WatchedLeaf(args[place] if isinstance(place, int) else place, name, tools)
                for place, name, tools in program.leaves
            ]
            note_watched_leaves(tree_flatten((outputs, args))[0], start, leaves)
        return outputs


def _weak_runner(graph: CompiledGraph, fallback: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that runs a graph and holds it weakly, since dynamo keeps the function.

    fallback: runs instead once the graph's tools have ended.
    """
    graph_reference = ref(graph)

    def run(*args: Any) -> Any:
        """Run the graph, or the fallback once the graph is gone."""
        run_graph = graph_reference() or fallback
        # Once the tools have ended, the backend equals no other: dynamo does not take this code for it.
        assert run_graph is not None
        return run_graph(*args)

    return run
