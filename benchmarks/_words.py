"""What the page says between its tables; a paragraph each, wrapped here, one line there."""


def words(name: str) -> list[str]:
    """A paragraph of the page and the empty line after it."""
    return [" ".join(PARAGRAPHS[name].split()), ""]


PARAGRAPHS = {
    "introduction": """
        Bare and instrumented runs take turns, in an order that changes each round, and "bare again" is
        the bare program once more: what it seems to add is noise. Numbers are medians; in brackets is the
        interval that holds 95 of 100 medians of resampled rounds. Every routine, hook and patch does
        nothing, so what is measured is the way to it. The monkey-patch calls a function before and one
        after each native function of torch; module hooks are a forward pre-hook and a forward hook on
        every leaf module.
    """,
    "ops": """
        Processor time of one op on 4 x 4 tensors, in nanoseconds: of the bare op, then what each adds to
        it, with its interval. A module's call is a part of `nn.ReLU()(x)` and `nn.Linear(4, 4)(x)`. The
        tools with routines for backward ops are here for what they cost in the forward pass.
    """,
    "steps": """
        What is added to a step, in percent. The first number is free of the step's noise: what is added
        to a step of the model's narrow twin (the same operators with little to compute, processor time),
        over the bare step of the model, its fastest on all cores (or on one, where others kept the cores
        busy). The second is the median of paired steps of the model itself on one core, processor time,
        with its interval; what a routine makes torch compute or copy is in that one alone. A routine at a
        leaf is such a case: torch copies each gradient that a hook may have kept, instead of handing it
        to the parameter. "hooks by hand" walks the graph in Python and puts a hook before and one after
        each backward op, which are called in the backward pass and do nothing: what torch itself takes
        for that, with nothing in the forward pass. The figures above are for Amanda's own part: what the
        monkey-patch and the hooks by hand take is taken off, since routines that do nothing cost that
        much however they are called.
    """,
    "backward": """
        Processor time of a backward pass over its number of nodes, in nanoseconds: bare, then what each
        adds. "routines at one node" is what it takes to walk the graph and know each node's op; "hooks by
        hand" walks it in Python and puts a hook before and one after each node, for good: Amanda takes
        its own away after the pass.
    """,
    "analysis": """
        What an op's first execution takes more than later ones, in microseconds of processor time per op,
        in a training step with every op at a place of its own:
    """,
    "profile": """
        Where the time of a first execution goes under an empty routine (shares of a profile of the Python
        parts, which makes small functions look larger than they are):
    """,
    "cache": """
        A tool that prunes by magnitude ([examples/pruning.py](../examples/pruning.py); for BERT the same
        for `linear`), in milliseconds of processor time of a step on one core:
    """,
    "graphs": """
        TensorFlow on one core, processor time of the whole process: `tf_keras` models in a session,
        Keras 3 models in a tf.function. A tool that looks at every op inserts nothing, so the user's own
        graph runs; one native routine is enough for an instrumented copy to run instead. An observer is
        Python, called with the values of every execution.
    """,
    "hits": """
        Microseconds of a call of a graph of ten operators: bare, then what each adds.
    """,
    "rewrites": """
        What the first call under a new tool takes more than its second, in seconds: analysis of every op,
        the copy of the graph with a Python routine before and after each, and TensorFlow's own work on
        that copy; "TensorFlow's own" is what the program's first call takes more than its second without a
        tool: tracing and optimizing the graph as it is. Chains are of one operator after the other.
    """,
    "graph cache": """
        The paper's tasks with the cache on and off, in milliseconds of a step: without it, every call
        analyses the graph and makes the copy anew. How much that is of a step depends on how long the step
        is by itself, which on one core of a processor is much longer than on an accelerator; steps of small
        examples stand for those.
    """,
    "sessions": """
        ONNX Runtime on one core with one thread, processor time: a residual network, its nodes fused as ONNX
        Runtime does by default, and as they are (`session_options`). A tool that looks at every op inserts
        nothing, so the user's own session runs. Observers are extra outputs of one session; a routine that
        may change what each convolution gives cuts the model there. Of each run its share of the bare one.
    """,
    "first sessions": """
        What a tool's first run takes more than its second, in seconds: analysis of every op, and the copy's
        sessions, which ONNX Runtime makes.
    """,
    "memory": """
        Bytes in use by all allocators, in MiB, more than without Amanda: after the import, after the
        first scope, between the forward and the backward pass of a third training step (all before it
        included), and after that step. The peak is what a bare step has resident at most, less what the
        process had before the model; with one image, or one sequence, it is as low as it gets, and what
        Amanda holds does not grow with the batch.
    """,
    "growth": """
        Training of a small model: bytes in use, more than after a tenth of the iterations. What the bare
        program gathers is the measurement's own.
    """,
    "instructions": """
        Instructions that one op executes, counted by callgrind, less those of memory allocators, whose
        paths depend on the heap's history; "torch alone" is counted twice, before Amanda is imported. A
        few instructions more or less are the interpreter's own: its caches are indexed by addresses.
    """,
    "routines": """
        Where the instructions go that a Python routine before and one after an op add. The interpreter's
        are the two routines themselves: a call of a bound method that takes `*values` and returns None,
        twice. Torch's are its answers to what is asked of each tensor: dtype, rank and device (a plan is
        made for these), whether it needs a gradient, its version before and after a routine (a value may
        not be written into), and autograd switched off and on again. What finds the op's place in the
        program and its plan is the interceptor's. A fifth of the mode's cost, which is what the figure
        allows, is about what the two routines take alone.
    """,
    "profiling": """
        A training step under the profile tool and under torch.profiler. At once: both look at the same
        executions, and the times of each op that takes more than 100 us are compared. One after the
        other: each looks at steps of its own, and the sums by op are put in order; rank correlation is
        Spearman's. A backward op's time is what its node and the engine's work on its gradients take.
    """,
    "profiling cost": """
        Processor time that each adds to the step, of the step and for each executed op, forward and
        backward.
    """,
    "tools": """
        Steps on one core under tools as they come, processor time, in percent of the bare step. What a tool
        adds to the model's step; of that, the time in its own routines, which a clock around each takes,
        with what they make the framework compute, and in the gradients that autograd computes of them; and
        what is left to Amanda, without the step's noise: what the tool adds to a step of the model's narrow
        twin (the same operators with little to compute) less the time in its routines and their gradients
        there, over the bare step of the model.
    """,
    "tools' cache": """
        The same tools with the cache off over on: without it every op is analysed at each execution, masks
        and scales are found anew each time.
    """,
    "compiled": """
        Steps on one core of models that torch.compile compiled with inductor, processor time over the
        compiled step without tools. An empty tool inserts nothing. Observers are calls of Python; the
        masks of the prune tool are tensor code, which inductor compiles with the graph, as it does those
        that `torch.nn.utils.parametrize` multiplies the weights by.
    """,
    "remat": """
        Training steps on one core under the remat tool, processor time, by the share of what the model's ops
        make and save without a budget. The peak is to be compared with the share: what draws random numbers
        or is written in place cannot be evicted, and below that no budget is held.
    """,
    "again": """
        Nothing else should run meanwhile. Where valgrind and its headers are installed, instructions are
        counted.
    """,
    "distributed": """
        Processor time of the first rank's step, over the bare step. Ranks are processes that exchange
        gradients by gloo; tools are applied in every rank.
    """,
}
