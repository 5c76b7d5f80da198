"""The tool: ops of an unmodified model are computed by one of several candidates, or by a mixture of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import amanda
from amanda.files import write_file
from amanda.options import File, Name, NonNegativeFloat, Seed, checked
from amanda.tools.kit import Dataflow, DataflowNode, leaves
from amanda.tools.mapping import StandardMapping
from amanda.tools.results import parsing, read_json, to_json
from amanda.tools.search._candidates import Original
from amanda.tools.search._choice import Choice
from amanda.tools.search._costs import Costs
from amanda.tools.search._decision import Decision
from amanda.tools.search._errors import SearchError
from amanda.tools.search._libraries import Library, frameworks
from amanda.tools.search._residual import residual
from amanda.tools.search._result import ChoicesResult
from amanda.tools.search._settle import settled
from amanda.tools.search._site import Site, Writer
from amanda.tools.select import as_remarks

_VIEWS = {"view", "reshape", "flatten", "transpose", "permute", "squeeze", "unsqueeze", "getitem"}


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

    calibrates_when_prepared = True
    is_copied_when_used = False

    @checked(error=SearchError)
    def __init__(
        self,
        choices: Sequence[Choice | Name] | Choice | Name = (),
        mixture: bool = False,
        architecture: File | None = None,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        listed = [choices] if isinstance(choices, (str, Choice)) else choices
        self.choices = [one if isinstance(one, Choice) else Choice.of(one) for one in listed]
        self.mixture, self._seed = mixture, seed
        self._has_alphas = mixture
        self._namers: dict[str, amanda.Tool] = {}
        self._flow = Dataflow()
        self._nodes: dict[int, DataflowNode] = {}
        self._sites: dict[str, Site] = {}
        self._decisions: dict[str, Decision] = {}
        self._refused: set[str] = set()
        self._unfit: dict[str, Mapping[str, str]] = {}
        self._untrained = ""
        self._wanted: dict[str, str] = {}
        self.costs = Costs()
        if architecture is not None:
            self.load(Path(architecture))
        self.depends_on(StandardMapping(), frameworks())
        self.add_inst_for_op(self._analyse, guard="read")
        self.add_inst_for_op(self._note_outputs, require_outputs=True)

    @property
    def sites(self) -> Sequence[Site]:
        """The ops with a choice, in the order in which they were met."""
        return list(self._sites.values())

    @property
    def space(self) -> dict[str, tuple[str, ...]]:
        """The labels of the candidates of each op, or of all ops that share a choice, by name."""
        return {one.name: one.labels for one in self._decisions.values()}

    @property
    def architecture(self) -> dict[str, str]:
        """The label of the candidate that is chosen at each op, or at all that share a choice.

        Assign one, of all names or some.  Raises SearchError for a name or a candidate that there is not;
        what is assigned before any op was met is checked when the op is.
        """
        return {one.name: one.chosen for one in self._decisions.values()}

    @architecture.setter
    def architecture(self, chosen: Mapping[str, str]) -> None:
        self._check("architecture", chosen)
        self._wanted.update(chosen)
        for name, label in chosen.items():
            if name in self._decisions:
                self._decisions[name].chosen = label
        self._trace_again()

    def alphas(self) -> Iterator[Any]:
        """Yield the mixture weights ahead of softmax, of each choice, for an optimizer of their own."""
        yield from (one.alpha for one in self._decisions.values() if one.alpha is not None)

    def weights(self) -> Iterator[Any]:
        """Yield the parameters of candidates, which are trained with the model's."""
        for site in self._sites.values():
            yield from site.weights()

    def gradients(self, parameters: Iterable[Any]) -> list[Any]:
        """Return the gradients of parameters that JAX, and functions of TensorFlow, computed since then.

        parameters: some of `weights()` and `alphas()`.  Each gradient is a sum over the steps since it was
        taken; None where there was none, as in eager PyTorch and TensorFlow, where a tape leads to the
        parameters.  Raises SearchError for what is no parameter of the tool.
        """
        owners = [(site, name) for site in self._sites.values() for name in site.parameters]
        found = []
        for one in parameters:
            owner = next((pair for pair in owners if pair[0].state(pair[1]) is one), None)
            if owner is None:
                raise SearchError(
                    f"SearchTool.gradients: {one!r} is no parameter; give those of weights() or alphas()"
                )
            found.append(owner[0].take_gradient(owner[1]))
        return found

    @checked(error=SearchError)
    def settle(
        self, limits: Mapping[Literal["flops", "size"], NonNegativeFloat] | None = None
    ) -> dict[str, str]:
        """Choose the candidate with the largest mixture weight at each op; return the architecture.

        limits: the most of `flops` or `size`.  As long as an architecture is above a limit, one op changes to
        a cheaper candidate: the op that loses least of the product of probabilities for each unit saved.  No
        change breaks an earlier limit.  Raises SearchError where no such change is left.
        """
        measures = {"flops": self.flops, "size": self.size}
        found = {name: one.probabilities() for name, one in self._decisions.items()}
        shares = {name: one for name, one in found.items() if one}
        architecture = settled(shares, self.architecture, limits or {}, measures)
        self.mixture = False
        self.architecture = architecture
        return self.architecture

    def flops(self, architecture: Mapping[str, str] | None = None) -> float:
        """Return FLOPs of the forward pass of `prepare` in an architecture, the present one if None is given.

        They are those of FlopsTool, without ops of blocks that are skipped; of other kernel sizes and groups,
        and masked channels, by their share of the weight.  Raises SearchError before `prepare`.
        """
        return self.costs.flops_of(self.sites, self._completed("flops", architecture))

    def size(self, architecture: Mapping[str, str] | None = None) -> float:
        """Return bytes of the parameters that the ops of `prepare` read in an architecture; see `flops`."""
        return self.costs.size_of(self.sites, self._completed("size", architecture))

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

    @checked(error=SearchError)
    def save(self, path: str | Path) -> Path:
        """Write the architecture as JSON, which the option `architecture` reads. Raises FileError."""
        return write_file(path, to_json(self.architecture, indent=1) + "\n")

    @checked(error=SearchError)
    def load(self, path: str | Path) -> None:
        """Take the architecture of a file; raise SearchError for one that has none, FileError without one."""
        with parsing(path, "architecture, which `save` writes,", SearchError):
            self.architecture = read_json(path, "architecture", _architecture)

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
            site.executions.clear()

    def unmatched(self) -> list[str]:
        """Return which choices no op fitted, with the nearest names, and which names of an architecture."""
        unmet = [
            f"the architecture chooses {label} at {name}, which is no op with a choice"
            for name, label in self._wanted.items() if name not in self._decisions
        ]  # fmt: skip
        selected = (text for one in self.choices for text in one.selection.unmatched())
        return [*super().unmatched(), *selected, *unmet]

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take parameters of candidates that `state_dict` gave; the architecture stays."""
        self._wanted |= self.architecture
        self._sites, self._decisions, self._unfit, self._namers = {}, {}, {}, {}
        self._refused = set()
        super().load_state_dict(state, strict)

    def calibrating(self) -> AbstractContextManager[Any]:
        """Return a scope that measures what each op costs; `prepare` opens it."""
        self.costs = Costs()
        return amanda.apply(self.costs)

    def _check(self, what: str, architecture: Any) -> None:
        """Raise SearchError for what is no architecture of the ops that were met."""
        is_dict = isinstance(architecture, Mapping)
        if not is_dict or not all(isinstance(one, str) for pair in architecture.items() for one in pair):
            told = "give a dict from names of ops to labels of candidates"
            raise SearchError(f"SearchTool.{what}: the architecture is {architecture!r}; {told}")
        known = self._decisions
        for name, label in architecture.items() if known else ():
            if name not in known:
                near = get_close_matches(name, known, n=3, cutoff=0) or list(known)[:3]
                raise SearchError(f"SearchTool: {name!r} is no op with a choice; such are {', '.join(near)}")
            known[name].check(label)

    def _trace_again(self) -> None:
        """Have programs made anew that have the former candidates in them."""
        if any(site.library.is_traced for site in self._sites.values()):
            self.analyse_again()

    def _completed(self, what: str, architecture: Mapping[str, str] | None) -> dict[str, str]:
        """Return an architecture of all choices, the present one where it names none."""
        self._check(what, {} if architecture is None else architecture)
        return self.architecture | dict(architecture or {})

    def _analyse(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        node = self._nodes[context.get_op_id()] = self._flow.node(context)
        if context["in_place"]:
            self._note_write(context, node)
        choice = next((one for one in self.choices if one.selection(context)), None)
        if choice is None:
            return
        namer = self._namers.setdefault(str(context.namespace), amanda.Tool())
        name = namer.place(context)
        if name not in self._sites and name not in self._refused:
            self._meet(context, name, choice, node)
        site = self._sites.get(name)
        if site is None:
            return
        site.op_ids.add(context.get_op_id())
        library: Library = context["search"]
        if library.trains and site.parameters:
            self._untrained = library.trains
        context.insert_before_op(site.executions, inputs=[])
        context.replace_op(self._compute, site=site.within(library.at(context)))

    def _meet(self, context: amanda.OpContext, name: str, choice: Choice, node: DataflowNode) -> None:
        def keep(label: str, make: Callable[[], Any], **options: Any) -> Any:
            return self.keep(context, label, make, **options)

        site = Site(context, name, choice.candidates, residual(self._flow, node), keep)
        called = choice.name if choice.shared else name
        decision = self._decisions.get(called) or Decision(called, choice.shared)
        if decision.admit(site):
            self._sites[name], self._decisions[called], site.decision = site, decision, decision
            self._unfit[called] = decision.left
            if self._has_alphas:
                decision.keep_mixture(self._seed)
            if called in self._wanted:
                decision.check(self._wanted[called])
                decision.chosen = self._wanted[called]
        else:
            self._refused.add(name)
            shares = f"only {', '.join(site.candidates) or 'none'} of the candidates fit"
            self._unfit[name] = site.left or {called: shares}
        site.close()

    def _note_write(self, context: amanda.OpContext, node: DataflowNode) -> None:
        """Record an op in place at the op with a choice to whose output it writes, also through views."""
        maker = self._flow.maker(node.data)
        while maker is not None and maker.type in _VIEWS:
            maker = self._flow.maker(maker.data)
        for site in self._sites.values():
            if maker is not None and maker.op_id in site.op_ids:
                writer = Writer(context["type"], context.get_scope(), context.get_source())
                site.writers[context.get_op_id()] = writer

    def _note_outputs(self, context: amanda.OpContext) -> None:
        node = self._nodes.pop(context.get_op_id(), None)
        if node is not None:
            self._flow.made(node, leaves(context.get_outputs() or []))

    @amanda.differentiable
    def _compute(self, *inputs: Any, site: Site, original: Original) -> Any:
        return site.compute(inputs, original, self.mixture)


def _architecture(found: Any) -> dict[str, str]:
    if not isinstance(found, Mapping) or not all(isinstance(label, str) for label in found.values()):
        raise ValueError("it holds no object of labels by the names of ops")
    return dict(found)
