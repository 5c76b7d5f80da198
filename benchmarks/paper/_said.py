"""What the page says between its tables; a paragraph each, wrapped here, one line there."""


def said(name: str) -> list[str]:
    """A paragraph of the page and the empty line after it."""
    return [" ".join(PARAGRAPHS[name].split()), ""]


PARAGRAPHS = {
    "introduction": """
        The evaluation of Amanda's paper (Guan et al., ASPLOS 2024, section 6,
        [doi](https://doi.org/10.1145/3617232.3624864)) done with this Amanda: the same models and use
        cases, what the paper's text says of each figure beside what is measured here. The paper shows its
        figures as bars without numbers; what its text does not say in numbers cannot be compared. Tables 3
        and 4, of use cases and lines, are on [a page of their own](paper-tables.md).
    """,
    "numbers": """
        Bare and instrumented steps take turns, in an order that changes each round; numbers are medians of
        paired steps and in brackets is the interval that holds 95 of 100 medians of resampled rounds. "bare
        again" is the bare step once more: what it seems to add is noise.
    """,
    "8": """
        In the paper an Amanda tool reads CUPTI around each operator of ResNet-50 on a GPU. There was none
        to measure on; the [profile tool](tools/profile.md) does that where there is one. Here a tool of
        forty lines does the same one floor up, with oneDNN's account of its kernels on a processor, in a
        training step: processor time of operators, with the tool's own reading in it, and by the clock of
        oneDNN that of kernels. What no kernel of oneDNN took is PyTorch's own code and that of its BLAS.
    """,
    "9": """
        Executions in one forward and backward pass in evaluation mode, as the [coverage
        tool](tools/coverage.md) counts them; hooks are at leaf modules, and see an operator if it is all
        that the call of one consists of. BERT computes its attention in steps, as at the time of the paper.
    """,
    "9 differs": """
        Of VGG19 hooks miss the flattening between its two parts, a function; the other two are the sum that
        stands for a loss, and the gradient that the backward pass begins with. Of backward operators hooks
        see one only if it is alone in its module's call, which is the strictest way to count: where a
        module has several, the first has its incoming gradients and the last its outgoing ones in sight.
    """,
    "10": """
        What is added to a training step (forward and backward), in percent of the bare step: first all of
        it, with the use case's own computation; then Amanda's own part. The latter is measured on a narrow
        twin of the model, which has the same operators and little to compute, so that the step's noise does
        not hide it: in PyTorch what is added beside the time in the tool's routines and in the gradients
        that autograd computes of them; in a session, where routines become operators of the graph, what is
        added by routines at the same places that do nothing. Paths are extracted when they are asked for,
        not in the step.
    """,
    "11": """
        Of the time that Amanda and a use case take, the part that is Amanda's, in percent. In PyTorch the
        use case's part is the time in its routines and their gradients in the model's step; in a session it
        is what is left of all that is added, and a dash stands where that is less than the noise. The paper
        counts the tracing of the graph, which the effective path needs, to Amanda; here it counts to the
        use case.
    """,
    "12": """
        A training step without the cache over one with it. Without it PyTorch's operators are analysed at
        each execution, and masks and scales found anew; a session's graph is rewritten for each run. The
        mean depends on how long the bare step is: on one core of a processor a step takes many times as
        long as on a GPU, which makes the quotient smaller by as much where what the cache saves is the work
        of a processor in any case. [Benchmarks](benchmarks.md) has the same for functions of TensorFlow,
        and for short steps.
    """,
    "13": """
        Bytes that are held in a training step more than in a bare one, in percent of what the bare step has
        resident at most beside what the process had before the model: Amanda's own, then with the use
        case's. In PyTorch at the end of the forward pass, in a session after the step. All that is
        allocated is counted; TensorFlow runs without oneDNN, which takes memory in large regions. The import
        and the first use of a tool in a process are left out: the column "once" has them, in MiB.
    """,
    "peak": """
        With a small batch the peak is that of weights and gradients; what Amanda holds does not depend on
        the batch, so its share falls, as in the paper.
    """,
    "again": """
        Nothing else should run meanwhile. A figure that was measured is kept if a later one fails, and
        `--missing` goes on from there.
    """,
}

DIFFERS = (
    ("machine", "GPUs; which, the paper does not say", "a processor, {processor}; one core of it"),
    ("frameworks", "PyTorch and TensorFlow, versions not said", "PyTorch {torch}, TensorFlow {tf}"),
    (
        "models",
        "VGG19, ResNet-50, Inception-v3, BERT",
        "those of torchvision, transformers and Keras, and a BERT of Keras' layers; weights are random",
    ),
    ("batches", "not said but for figure 13", "1 image, or 1 sequence of 128 tokens; figure 13: 1 to 8"),
    ("graph mode", "sessions of TensorFlow", "sessions of TensorFlow 2, models of `tf_keras`"),
    (
        "tools",
        "five, written for the paper",
        "`trace`, `flops`, `effective_path`, `prune` (half of each weight), `quantize` (`qat`), as they come",
    ),
    ("times", "not said how they were taken", "of the processor: medians of paired training steps"),
)
