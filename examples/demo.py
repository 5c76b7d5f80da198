"""Watch a training step of ResNet-50 and of BERT, operator by operator, forward and backward.

    python examples/demo.py [--steps N] [--svg FILE]

The models are unmodified and have random weights. The table goes to stdout, progress to stderr.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
from models import bert, resnet50
from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import amanda
from amanda.tools.mapping import StandardMapping

ROWS = 8
SECONDS = 15
"""After so long, three rounds of steps of a model are enough."""
progress = Console(stderr=True)


@dataclass
class Times:
    """What the ops of one type took."""

    forward: int = 0
    backward: int = 0
    seconds: float = 0.0


class OpTimes(amanda.Tool):
    """Counts and times every op by its type, forward and backward."""

    def __init__(self) -> None:
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self.forward_op)
        self.add_inst_for_op(self.backward_op, backward=True)
        self.clear()

    def clear(self) -> None:
        """Start anew; what was analysed stays."""
        self.types: dict[str, Times] = defaultdict(Times)

    def forward_op(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.start, inputs=[])
        context.insert_after_op(self.stop_forward, outputs=[], kind=context["type"])

    def backward_op(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"].removesuffix("_backward")
        if kind == "accumulate_grad":
            return  # where a routine may look at a gradient, torch copies it instead of keeping it
        context.insert_before_backward_op(self.start, grad_outputs=[])
        context.insert_after_backward_op(self.stop_backward, grad_inputs=[], kind=kind)

    def start(self, run: dict[str, float]) -> None:
        run["start"] = time.perf_counter()

    def stop_forward(self, kind: str, run: dict[str, float]) -> None:
        self.types[kind].seconds += time.perf_counter() - run["start"]
        self.types[kind].forward += 1

    def stop_backward(self, kind: str, run: dict[str, float]) -> None:
        self.types[kind].seconds += time.perf_counter() - run["start"]
        self.types[kind].backward += 1


class Looking(amanda.Tool):
    """Looks at every op, and inserts nothing."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: None)
        self.add_inst_for_op(lambda context: None, backward=True)


@dataclass
class Observed:
    """What a few training steps came to.

    Seconds of the fastest step: bare without Amanda, again for another series of those, looking and
    timing with the tools, first for the first step of the latter. types: of the fastest timed step.
    """

    title: str
    types: dict[str, Times]
    bare: float
    looking: float
    again: float
    first: float
    timing: float
    missed: str


def observe(title: str, model: nn.Module, step: Callable[[], Tensor], steps: int) -> Observed:
    """Train without Amanda, with a tool that only looks, and with one that times every op, in turn."""

    def train(under: AbstractContextManager[object]) -> float:
        model.zero_grad()
        start = time.perf_counter()
        with under:
            torch.autograd.backward(step())
        return time.perf_counter() - start

    looking, tool = Looking(), OpTimes()
    started = time.perf_counter()
    with working(f"{title}: analysing every op"):
        train(nullcontext())
        train(amanda.apply(looking))
        train(scope := amanda.apply(tool))
    rounds: list[tuple[float, ...]] = []
    types: dict[str, Times] = {}
    while len(rounds) < steps and not (len(rounds) >= 3 and time.perf_counter() - started > SECONDS):
        tool.clear()
        with working(f"{title}: step {len(rounds) + 1} of {steps}"):
            applied = [amanda.apply(one) for one in (looking, OpTimes(), tool)]
            variants: tuple[AbstractContextManager[object], ...]
            variants = (nullcontext(), applied[0], nullcontext(), *applied[1:])
            rounds.append(tuple(train(under) for under in variants))
        if min(rounds, key=itemgetter(-1)) is rounds[-1]:
            types = dict(tool.types)
    bare, looked, again, first, timed = (min(times) for times in zip(*rounds, strict=True))
    missed = ", ".join(entry.what for entry in scope.report)
    return Observed(title, types, bare, looked, again, first, timed, missed or "none")


def watch_resnet50(steps: int) -> Observed:
    """A training step of ResNet-50 on two images."""
    with working("ResNet-50: building"):
        model = resnet50()
    images = torch.rand(2, 3, 224, 224)
    return observe("ResNet-50", model, lambda: model(images).sum(), steps)


def watch_bert(steps: int) -> Observed:
    """A training step of BERT base on two sentences of 64 tokens."""
    with working("BERT: building"):
        model = bert()
    tokens = torch.randint(0, 30000, (2, 64))
    return observe("BERT", model, lambda: model(tokens)[1].sum(), steps)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Tell on stderr what is being done."""
    if progress.is_terminal:
        with progress.status(text):
            yield
    else:
        progress.print(text, highlight=False)
        yield


def report(observed: Observed, ascii_only: bool) -> Group:
    """The table of one model, and what watching it cost."""
    title = Text.assemble((observed.title, "bold cyan"), ", one training step")
    return Group(title, ops_table(observed.types, ascii_only), Padding(costs(observed), (0, 0, 1, 1)))


def ops_table(types: dict[str, Times], ascii_only: bool) -> Table:
    """A row for each type of op, longest first; the rest in one."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False, padding=(0, 2, 0, 0))
    ordered = sorted(types.items(), key=lambda item: -item[1].seconds)
    everything = total(types.values())
    table.add_column("op", f"{len(types)} types", no_wrap=True)
    table.add_column("forward", str(everything.forward), justify="right")
    table.add_column("backward", str(everything.backward), justify="right")
    table.add_column("ms", f"{everything.seconds * 1e3:.1f}", justify="right")
    table.add_column("share of time", f"{'100%':>17}", no_wrap=True)
    rows = [*ordered[:ROWS], (f"{len(ordered) - ROWS} more", total(times for _, times in ordered[ROWS:]))]
    for kind, times in rows:
        share = times.seconds / everything.seconds
        style = "bold" if share > 0.1 else "dim" if kind.endswith(" more") else ""
        calls = [str(count) if count else "-" for count in (times.forward, times.backward)]
        table.add_row(kind, *calls, f"{times.seconds * 1e3:.1f}", bar(share, ascii_only), style=style)
    return table


def total(times: Iterable[Times]) -> Times:
    """All of these together."""
    listed = list(times)
    return Times(
        sum(one.forward for one in listed),
        sum(one.backward for one in listed),
        sum(one.seconds for one in listed),
    )


def bar(share: float, ascii_only: bool, width: int = 12) -> Text:
    """A share as a bar and a number."""
    full, half = ("#", "") if ascii_only else ("━", "╸")
    halves = round(share * width * 2)
    drawn = full * (halves // 2) + half * (halves % 2)
    return Text.assemble((f"{drawn:<{width}}", "green"), f" {share:4.0%}")


def costs(observed: Observed) -> Table:
    """Time of a step with tools, beside one without."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_row("a step without Amanda", f"{observed.bare * 1e3:.0f} ms")
    for what, seconds in (
        ("the same once more: the noise", observed.again),
        ("with a tool that looks at every op", observed.looking),
        ("with this one, a routine before and after every op", observed.timing),
        ("its first step, in which it analyses every op", observed.first),
    ):
        over = seconds / observed.bare - 1
        style = "green" if over < 0.02 else "yellow" if over < 0.1 else ""
        table.add_row(what, Text(f"{over:+.1%}", style))
    table.add_row("ops that could not be instrumented", observed.missed)
    return table


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=9, help="training steps of each kind")
    options.add_argument("--svg", type=Path, help="also save the tables as a picture")
    chosen = options.parse_args()
    console = Console(record=chosen.svg is not None, highlight=False)
    for watch in (watch_resnet50, watch_bert):
        console.print(report(watch(chosen.steps), console.options.ascii_only))
    if chosen.svg:
        console.save_svg(str(chosen.svg), title="python examples/demo.py")


if __name__ == "__main__":
    main()
