"""The tool: ops of an unmodified model are computed by one of several candidates, or by a mixture of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from math import log
from pathlib import Path
from typing import Any, Literal

import amanda
from amanda.tools.kit import Dataflow, DataflowNode, check_one_of, leaves
from amanda.tools.mapping import StandardMapping
from amanda.tools.search._candidates import Candidate, Original, SearchError, candidate
from amanda.tools.search._costs import Costs
from amanda.tools.search._result import ChoicesResult
from amanda.tools.search._rules import frameworks
from amanda.tools.search._site import Site
from amanda.tools.select import Selection, as_remarks

_AROUND = 1000
"""Tensors among which the input of a residual block is looked for."""


class Choice:
    """Candidates for the ops of a selection; the first is in force as long as no other is chosen.

    candidates: "keep", the op itself; "skip", its input, or of an addition that ends a residual block the
        input of the block; an activation, such as "gelu"; "conv5", another kernel size, and "conv3g2", other
        groups too; "width0.5", the half of the output channels, the others masked; "bits4", the weight
        quantised; or a function that gets the op's inputs and gives its output.
    type, module: words of `amanda.tools.select`.

    Raises SearchError for what is no candidate, and SelectionError.

    >>> choice = Choice(["keep", "conv5", "conv3g2"], type="conv2d", module="features")
    """

    def __init__(
        self,
        candidates: Sequence[str | Callable[..., Any]],
        type: str | Sequence[str] = (),
        module: str | Sequence[str] = (),
    ) -> None:
        self.selection = Selection(type, module)
        where = f"the choice at {self.selection}"
        if isinstance(candidates, str) or len(candidates) < 2:
            raise SearchError(
                f"SearchTool: {where} has candidates {candidates!r}; give a list of two or more"
            )
        self.candidates = [candidate(one, where) for one in candidates]
        labels = [one.label for one in self.candidates]
        twice = {label for label in labels if labels.count(label) > 1}
        if twice:
            raise SearchError(f"SearchTool: {where} has {', '.join(sorted(twice))} twice; name each once")

    @classmethod
    def of(cls, text: str) -> Choice:
        """Return the choice that a text describes: "conv2d@features=keep|conv5|conv3g2".

        Raises SearchError for another text.
        """
        selection, found, candidates = text.partition("=")
        type, _, module = selection.partition("@")
        if not found or not (type or module):
            raise SearchError(f"SearchTool: a choice is {text!r}; write type@module=candidate|candidate")
        return cls(candidates.split("|"), type=[type] if type else (), module=[module] if module else ())


class SearchTool(amanda.Tool):
    """Computes ops by the candidates that an architecture names, or by mixtures of all of them.

    choices: `Choice`s, or texts such as "conv2d@features=keep|conv5"; the first that selects an op counts.
    mixture: whether ops compute the sum of their candidates, weighted by a softmax of `alphas` (Liu et al.
        2019), which an optimizer learns; `settle` then chooses the heaviest.
    architecture: a file that `save` wrote.  seed: of the mixture weights at the start.

    Parameters of candidates, and mixture weights, are made when an op is met, or beforehand by `prepare`,
    and are among `parameters()`.  Raises SearchError for choices that cannot be.

    >>> search = SearchTool(["conv2d=keep|conv5", "sigmoid=keep|relu"])
    """

    def __init__(
        self,
        choices: Sequence[Choice | str] | Choice | str = (),
        mixture: bool = False,
        architecture: Path | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        listed = [choices] if isinstance(choices, (str, Choice)) else list(choices)
        self.choices = [one if isinstance(one, Choice) else Choice.of(one) for one in listed]
        self.mixture, self._seed = mixture, seed
        self._has_alphas = mixture
        self._namers: dict[str, amanda.Tool] = {}
        self._flow = Dataflow()
        self._nodes: dict[int, DataflowNode] = {}
        self._sites: dict[str, Site] = {}
        self._unfit: dict[str, Mapping[str, str]] = {}
        self._untrained = ""
        self._wanted: dict[str, str] = {}
        self.costs = Costs()
        if architecture is not None:
            self.load(architecture)
        self.depends_on(StandardMapping(), frameworks())
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._note_outputs, require_outputs=True)

    @property
    def sites(self) -> Sequence[Site]:
        """The ops with a choice, in the order in which they were met."""
        return list(self._sites.values())

    @property
    def space(self) -> dict[str, tuple[str, ...]]:
        """The labels of the candidates of each op, by its name."""
        return {site.name: site.labels for site in self._sites.values()}

    @property
    def architecture(self) -> dict[str, str]:
        """The label of the candidate that is chosen at each op.

        Assign one, of all ops or some.  Raises SearchError for an op or a candidate that there is not; what
        is assigned before any op was met is checked when the op is.
        """
        return {site.name: site.chosen for site in self._sites.values()}

    @architecture.setter
    def architecture(self, chosen: Mapping[str, str]) -> None:
        for name, label in chosen.items():
            if self._sites and name not in self._sites:
                near = get_close_matches(name, self._sites, n=3, cutoff=0) or list(self._sites)[:3]
                raise SearchError(f"SearchTool: {name!r} is no op with a choice; such are {', '.join(near)}")
            if self._sites:
                _check(self._sites[name], label)
        self._wanted.update(chosen)
        for name, label in chosen.items():
            if name in self._sites:
                self._sites[name].chosen = label

    def alphas(self) -> Iterator[Any]:
        """Yield the mixture weights ahead of softmax, of each op, for an optimizer of their own."""
        yield from (site.alpha for site in self._sites.values() if site.alpha is not None)

    def weights(self) -> Iterator[Any]:
        """Yield the parameters of candidates, which are trained with the model's."""
        for site in self._sites.values():
            yield from site.weights()

    def settle(self, limits: Mapping[Literal["flops", "size"], float] | None = None) -> dict[str, str]:
        """Choose the candidate with the largest mixture weight at each op; return the architecture.

        limits: the most of `flops` or `size`.  As long as an architecture is above a limit, one op changes to
        a cheaper candidate: the op that loses least of the product of probabilities for each unit saved.  No
        change breaks an earlier limit.  Raises SearchError where no such change is left.
        """
        shares = {site.name: site.probabilities() for site in self._sites.values() if site.probabilities()}
        found = self.architecture | {name: max(one, key=one.__getitem__) for name, one in shares.items()}
        measures = {"flops": self.flops, "size": self.size}
        for cost in limits or ():
            check_one_of("SearchTool.settle: a limit", cost, tuple(measures), SearchError)
        kept: list[tuple[Callable[[Mapping[str, str]], float], float]] = []
        for cost, most in (limits or {}).items():
            measure = measures[cost]
            while (present := measure(found)) > most:
                steps = []
                for name, one in shares.items():
                    for label, share in one.items():
                        changed = found | {name: label}
                        saved = present - measure(changed)
                        if saved > 0 and all(other(changed) <= bound for other, bound in kept):
                            steps.append((log(one[found[name]] / share) / saved, name, label))
                if not steps:
                    raise SearchError(f"SearchTool.settle: {cost} are {present:g} at least, above {most:g}")
                found |= [min(steps)[1:]]
            kept.append((measure, most))
        self.mixture = False
        self.architecture = found
        return self.architecture

    def flops(self, architecture: Mapping[str, str] | None = None) -> float:
        """Return FLOPs of the forward pass of `prepare` in an architecture, the present one if None is given.

        They are those of FlopsTool, without ops of blocks that are skipped; of other kernel sizes and groups,
        and masked channels, by their share of the weight.  Raises SearchError before `prepare`.
        """
        return self.costs.flops(self.sites, self.architecture | dict(architecture or {}))

    def size(self, architecture: Mapping[str, str] | None = None) -> float:
        """Return bytes of the parameters that the ops of `prepare` read in an architecture; see `flops`."""
        return self.costs.size(self.sites, self.architecture | dict(architecture or {}))

    def finalize(self, model: Any) -> Any:
        """Return a copy of a model with the chosen candidates as modules or layers of its framework.

        PyTorch: modules of torch.nn take the places of convolutions, Linear and activations; Keras: layers of
        a clone.
        Raises SearchError, which names the op, where a choice is no module, such as a skipped addition.
        """
        if self.mixture:
            raise SearchError("SearchTool.finalize: the candidates are mixed; call settle() first")
        if not self._sites:
            raise SearchError(
                "SearchTool.finalize: no op with a choice was met; call prepare(model, x) first"
            )
        return self.sites[0].library.finalized(model, self.sites)

    def save(self, path: str | Path) -> Path:
        """Write the architecture as JSON, which the option `architecture` reads."""
        path = Path(path)
        path.write_text(json.dumps(self.architecture, indent=1) + "\n", encoding="utf-8")
        return path

    def load(self, path: str | Path) -> None:
        """Take the architecture of a file; raise SearchError for a file that has none."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            self.architecture = {str(name): str(label) for name, label in found.items()}
        except (OSError, ValueError, AttributeError) as error:
            if isinstance(error, SearchError):
                raise
            raise SearchError(
                f"SearchTool: {path} holds no architecture, which `save` writes: {error}"
            ) from error

    @property
    def result(self) -> ChoicesResult:
        """Each op with a choice: its candidates, their mixture weights, and the one that is chosen."""
        result = ChoicesResult(self.sites)
        left = [
            f"there is no {label} at {name}: {reason}"
            for name, reasons in self._unfit.items() for label, reason in reasons.items()
        ]  # fmt: skip
        result.remarks = as_remarks(
            [*self.unmatched(), *left, *([self._untrained] if self._untrained else [])]
        )
        return result

    def clear(self) -> None:
        """Count executions anew."""
        for site in self._sites.values():
            site.calls = 0

    def unmatched(self) -> list[str]:
        """Return which choices no op fitted, with the nearest names, and which names of an architecture."""
        unmet = [
            f"the architecture chooses {label} at {name}, which is no op with a choice"
            for name, label in self._wanted.items() if name not in self._sites
        ]  # fmt: skip
        selected = (text for one in self.choices for text in one.selection.unmatched())
        return [*super().unmatched(), *selected, *unmet]

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take parameters of candidates that `state_dict` gave; the architecture stays."""
        self._wanted |= self.architecture
        self._sites, self._unfit, self._namers = {}, {}, {}
        super().load_state_dict(state, strict)

    def preparing(self) -> AbstractContextManager[Any]:
        """Return a scope that measures what each op costs."""
        self.costs = Costs()
        return amanda.apply(self.costs)

    def _analyse(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        node = self._nodes[context.get_op_id()] = self._flow.node(context)
        choice = next((one for one in self.choices if one.selection(context)), None)
        if choice is None:
            return
        namer = self._namers.setdefault(str(context.namespace), amanda.Tool())
        name = namer.place(context)
        if name not in self._sites and name not in self._unfit:
            self._meet(context, name, choice.candidates, node)
        site = self._sites.get(name)
        if site is None:
            return
        site.op_ids.add(context.get_op_id())
        library = context["search"]
        if library.trains and site.parameters:
            self._untrained = library.trains
        context.replace_op(self._compute, site=site)

    def _meet(
        self, context: amanda.OpContext, name: str, candidates: Sequence[Candidate], node: DataflowNode
    ) -> None:
        def keep(label: str, make: Callable[[], Any], **options: Any) -> Any:
            return self.keep(context, label, make, **options)

        site = Site(context, name, candidates, self._seed, _residual(self._flow, node), keep)
        self._unfit[name] = site.left
        if len(site.candidates) > 1:
            if self._has_alphas:
                site.keep_mixture()
            self._sites[name] = site
            if name in self._wanted:
                _check(site, self._wanted[name])
                site.chosen = self._wanted[name]
        site.close()

    def _note_outputs(self, context: amanda.OpContext) -> None:
        node = self._nodes.pop(context.get_op_id(), None)
        if node is not None:
            self._flow.made(node, leaves(context.get_outputs() or []))

    @amanda.differentiable
    def _compute(self, *inputs: Any, site: Site, original: Original) -> Any:
        return site.compute(inputs, original, self.mixture)


def _check(site: Site, label: str) -> None:
    """Raise SearchError for a label that is none of an op's candidates."""
    if label not in site.candidates:
        reason = f", since {site.left[label]}" if label in site.left else ""
        raise SearchError(
            f"SearchTool: {label!r} is no candidate of {site.name}{reason}; it has {', '.join(site.labels)}"
        )


def _residual(flow: Dataflow, node: DataflowNode) -> tuple[int, frozenset[int]] | None:
    """Return where an addition reads the input of its other summand, and the ids of the ops in between."""
    if node.type != "add" or len(node.inputs) < 2 or None in node.inputs[:2]:
        return None
    for shortcut in (0, 1):
        start, branch = node.inputs[shortcut], node.inputs[1 - shortcut]
        seen, ops = _behind(flow, branch, start)
        if start in seen and ops and node.shapes[0] == node.shapes[1]:
            return shortcut, frozenset(ops - _behind(flow, start)[1])
    return None


def _behind(flow: Dataflow, number: int | None, until: int | None = None) -> tuple[set[int | None], set[int]]:
    """Return the tensors that one was made of, back to another, and the ids of the ops that made them."""
    waiting, seen, ops = [number], set[int | None](), set[int]()
    while waiting and len(seen) < _AROUND:
        one = waiting.pop()
        maker = None if one in seen or one == until else flow.maker(one)
        seen.add(one)
        if maker is not None:
            ops.add(maker.op_id)
            waiting.extend(maker.reads)
    return seen, ops
