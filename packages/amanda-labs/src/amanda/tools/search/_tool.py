"""The tool: ops of an unmodified model are computed by one of several candidates, or by a mixture of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import amanda
from amanda.files import write_file
from amanda.options import File, Name, NonNegativeFloat, Seed, checked
from amanda.tools.dataflow import Dataflow, DataflowNode
from amanda.tools.kit import leaves
from amanda.tools.mapping import StandardMapping
from amanda.tools.results import Column, Result, parsing, read_json, shortened, to_json
from amanda.tools.search._candidates import Choice, Original, SearchError
from amanda.tools.search._costs import ArchitectureCosts, settle_architecture
from amanda.tools.search._libraries import SearchLibrary, library_rules
from amanda.tools.search._site import Decision, InPlaceWriter, Site, find_residual_block
from amanda.tools.select import as_remarks

_VIEWS = {"view", "reshape", "flatten", "transpose", "permute", "squeeze", "unsqueeze", "getitem"}


class SearchTool(amanda.Tool):
    """Replace ops of a model by alternatives, such as other kernel sizes, activations or bit widths.

    Parameters of candidates, and mixture weights, are created when an op first runs, or by `prepare`, and are
    among `parameters()`.

    Args:
        choices: `Choice`s, or strings such as "conv2d@features=keep|conv5"; the first that selects an op
            counts.
        mixture: True if ops compute the sum of their candidates, weighted by a softmax of `alphas` (Liu et
            al. 2019), which an optimizer trains; `settle` then picks the candidates with the largest weights.
        architecture: A file that `save` wrote.
        seed: Of the initial mixture weights.

    Raises:
        SearchError: For invalid choices.

    >>> search = SearchTool(["conv2d=keep|conv5", "sigmoid=keep|relu"])
    """

    purpose = "change"
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
        choice_list = [choices] if isinstance(choices, (str, Choice)) else choices
        self.choices = [choice if isinstance(choice, Choice) else Choice.of(choice) for choice in choice_list]
        self.mixture, self._seed = mixture, seed
        # Remembered: `settle` turns the mixture off, and the weights are still to be read.
        self._has_alphas = mixture
        # Names count equal ops of one module; each framework's mode counts from the start.
        self._namers: dict[str, amanda.Tool] = {}
        self._flow = Dataflow()
        self._nodes: dict[int, DataflowNode] = {}  # of ops whose outputs are not recorded yet, by op id
        self._sites: dict[str, Site] = {}
        self._decisions: dict[str, Decision] = {}
        self._refused_names: set[str] = set()
        # Reasons of rejected candidates by label, by the name of the decision or op.
        self._obstacles: dict[str, Mapping[str, str]] = {}
        self._untrained_reason = ""
        # Labels that were assigned before their ops were met.
        self._requested: dict[str, str] = {}
        self.costs = ArchitectureCosts()
        # The model, held weakly, and the example of `prepare`: a copy is prepared with copies of them.
        self._model_and_example: tuple[Callable[[], Any], tuple[Any, ...], dict[str, Any]] | None = None
        if architecture is not None:
            self.load(Path(architecture))
        self.depends_on(StandardMapping(), library_rules())
        # The plan depends on what is read: a convolution's candidates may depend on shapes.
        self.add_inst_for_op(self._instrument_op, guard="read")
        self.add_inst_for_op(self._record_outputs, require_outputs=True)

    @property
    def sites(self) -> Sequence[Site]:
        """The ops with a choice, in the order in which they were met."""
        return list(self._sites.values())

    @property
    def space(self) -> dict[str, tuple[str, ...]]:
        """The labels of the candidates of each op, or of all ops that share a choice, by name."""
        return {decision.name: decision.labels for decision in self._decisions.values()}

    @property
    def architecture(self) -> dict[str, str]:
        """The label of the candidate that is chosen at each op, or at all that share a choice.

        Assign one, of all names or some; compiled programs are then traced again.  Raises SearchError for a
        name or a candidate that there is not; what is assigned before any op was met is checked when the op
        is.
        """
        return {decision.name: decision.label for decision in self._decisions.values()}

    @architecture.setter
    def architecture(self, labels: Mapping[str, str]) -> None:
        """Choose candidates by name, also at ops that are met later; trace compiled programs again."""
        # Remembered also for names that no op has yet, which look their label up when they are met.
        self._check_architecture("architecture", labels)
        self._requested.update(labels)
        for name, label in labels.items():
            if name in self._decisions:
                self._decisions[name].label = label
        # Eager plans read the decision at each execution.
        self._retrace_programs()

    def prepare(self, model: Callable[..., Any], *example: Any, **kwargs: Any) -> Any:
        """Run `model` once on an example, so that its ops, their candidates and their costs are known.

        A copy of the tool, as pickle and copy make it, is prepared with copies of the model and the example.

        Args:
            model: Model, or a function that runs it.
            *example: Positional inputs of the model.
            **kwargs: Inputs by name.

        Returns:
            The value that the model returns.
        """
        try:
            self._model_and_example = weakref.ref(model), example, kwargs
        except TypeError:  # an object with slots
            self._model_and_example = None
        return super().prepare(model, *example, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Describe a tool that was prepared by what prepares a copy; another one as Tool does.

        Raises ToolError for a tool that was used and cannot be prepared again: without a model, or with
        restrictions.
        """
        model, example, kwargs = self._model_and_example or (lambda: None, (), {})
        core = self._amanda
        if type(self) is not SearchTool or model() is None or core.admissions or core.wrappers:
            return super().__reduce_ex__(protocol)
        options = self.choices, self.mixture, self._seed
        return _prepare_copy, (
            options, self.state_dict(), self.architecture, core.logged, model(), example, kwargs
        )  # fmt: skip

    def alphas(self) -> Iterator[Any]:
        """Yield the mixture weights ahead of softmax, of each choice, for an optimizer of their own."""
        yield from (decision.alpha for decision in self._decisions.values() if decision.alpha is not None)

    def weights(self) -> Iterator[Any]:
        """Yield the parameters of candidates, which are trained with the model's."""
        for site in self._sites.values():
            yield from site.weights()

    def gradients(self, parameters: Iterable[Any]) -> list[Any]:
        """Return the gradients of parameters that JAX and functions of TensorFlow computed, and reset them.

        Args:
            parameters: Some of `weights()` and `alphas()`.  Each gradient is a sum over the steps since the
                last call; None if there was none, as in eager PyTorch and TensorFlow, where a tape leads to
                the parameters.

        Raises:
            SearchError: For another object.
        """
        owners = [(site, name) for site in self._sites.values() for name in site.parameters]
        gradients = []
        for parameter in parameters:
            # By identity: parameters compare element by element.
            owner = next(((site, name) for site, name in owners if site.state(name) is parameter), None)
            if owner is None:
                raise SearchError(
                    f"SearchTool.gradients: {parameter!r} is no parameter; give those of weights() or "
                    "alphas()"
                )
            site, name = owner
            gradients.append(site.take_gradient(name))
        return gradients

    @checked(error=SearchError)
    def settle(
        self, limits: Mapping[Literal["flops", "size"], NonNegativeFloat] | None = None
    ) -> dict[str, str]:
        """Choose the candidate with the largest mixture weight at each op, and end the mixture.

        Args:
            limits: For `flops` or `size`.  While the architecture is above a limit, an op changes to a
                cheaper candidate: the change that loses the least log probability for each unit saved.  No
                change breaks an earlier limit.

        Returns:
            The architecture, which the tool has from now on.

        Raises:
            SearchError: If no such change remains.
        """
        measures = {"flops": self.flops, "size": self.size}
        probabilities = {name: decision.probabilities() for name, decision in self._decisions.items()}
        shares = {name: weights for name, weights in probabilities.items() if weights}
        architecture = settle_architecture(shares, self.architecture, limits or {}, measures)
        # First, as the assignment below traces programs again.
        self.mixture = False
        self.architecture = architecture
        return self.architecture

    def flops(self, architecture: Mapping[str, str] | None = None) -> float:
        """Return FLOPs of the forward pass of `prepare` in an architecture.

        FlopsTool counts them; ops of skipped blocks are left out, and other kernel sizes, groups and masked
        channels scale the FLOPs by their share of the weight.  Raises SearchError before `prepare`.

        Args:
            architecture: Label of each op; None for the current one.
        """
        return self.costs.flops_of(self.sites, self._complete_architecture("flops", architecture))

    def size(self, architecture: Mapping[str, str] | None = None) -> float:
        """Return bytes of the parameters that the ops of `prepare` read in an architecture.

        Raises SearchError before `prepare`.

        Args:
            architecture: Label of each op; None for the current one.
        """
        return self.costs.size_of(self.sites, self._complete_architecture("size", architecture))

    def finalize(self, model: Any) -> Any:
        """Return a copy of a model with the chosen candidates as modules or layers of its framework.

        PyTorch: modules of torch.nn take the places of convolutions, Linear and activations; Keras: layers of
        a clone.
        Raises SearchError, which names the op, for a candidate that is not a module, as a skipped addition.

        Args:
            model: The model that ran with the tool, which stays as it is.
        """
        if self.mixture:
            raise SearchError("SearchTool.finalize: the candidates are mixed; call settle() first")
        if not self._sites:
            raise SearchError(
                "SearchTool.finalize: no op with a choice was met; call prepare(model, x) first"
            )
        return self.sites[0].library.finalize(model, self.sites)

    @checked(error=SearchError)
    def save(self, path: str | Path) -> Path:
        """Write the architecture as JSON, which the option `architecture` reads.

        Args:
            path: File to write.

        Returns:
            The path of the file.

        Raises:
            FileError: Where the file cannot be written.
        """
        return write_file(path, to_json(self.architecture, indent=1) + "\n")

    @checked(error=SearchError)
    def load(self, path: str | Path) -> None:
        """Load the architecture of a file.

        Args:
            path: File that `save` wrote.

        Raises:
            SearchError: For another file.
            FileError: Where the file cannot be read.
        """
        with parsing(path, "architecture, which `save` writes,", SearchError):
            self.architecture = read_json(path, "architecture", _read_architecture)

    @property
    def result(self) -> ChoicesResult:
        """Each op with a choice: its candidates, their mixture weights, and the current candidate."""
        result = ChoicesResult(self.sites)
        unfit_remarks = [
            f"there is no {label} at {name}: {reason}"
            for name, reasons in self._obstacles.items() for label, reason in reasons.items()
        ]  # fmt: skip
        untrained_remarks = [self._untrained_reason] if self._untrained_reason else []
        result.remarks = as_remarks([*self.unmatched(), *unfit_remarks, *untrained_remarks])
        return result

    def clear(self) -> None:
        """Reset the counts of executions."""
        for site in self._sites.values():
            site.executions.clear()

    def unmatched(self) -> list[str]:
        """Return remarks on choices that select no op, and on names of an architecture without an op."""
        names_without_op = [
            f"the architecture chooses {label} at {name}, which is no op with a choice"
            for name, label in self._requested.items() if name not in self._decisions
        ]  # fmt: skip
        selection_remarks = (text for choice in self.choices for text in choice.selection.unmatched())
        return [*super().unmatched(), *selection_remarks, *names_without_op]

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load parameters of candidates that `state_dict` returned; ops are met anew, the architecture stays.

        Args:
            state: A result of `state_dict`.
            strict: As in `amanda.Tool.load_state_dict`.
        """
        self._requested |= self.architecture
        self._sites, self._decisions, self._obstacles, self._namers = {}, {}, {}, {}
        self._refused_names = set()
        super().load_state_dict(state, strict)

    def calibrating(self) -> AbstractContextManager[Any]:
        """Return a scope that measures the costs of each op anew; `prepare` enters it."""
        self.costs = ArchitectureCosts()
        return amanda.apply(self.costs)

    def _check_architecture(self, method: str, architecture: Any) -> None:
        """Raise SearchError for an object that is not an architecture; names count once there are ops."""
        is_dict = isinstance(architecture, Mapping)
        if not is_dict or not all(isinstance(text, str) for pair in architecture.items() for text in pair):
            advice = "give a dict from names of ops to labels of candidates"
            raise SearchError(f"SearchTool.{method}: the architecture is {architecture!r}; {advice}")
        decisions = self._decisions
        for name, label in architecture.items() if decisions else ():
            if name not in decisions:
                # Some name in any case: the user sees how names are written.
                near_names = get_close_matches(name, decisions, n=3, cutoff=0) or list(decisions)[:3]
                raise SearchError(
                    f"SearchTool: {name!r} is no op with a choice; such are {', '.join(near_names)}"
                )
            decisions[name].check(label)

    def _retrace_programs(self) -> None:
        """Retrace compiled programs, which contain the earlier candidates."""
        if any(site.library.is_traced for site in self._sites.values()):
            self.analyse_again()

    def _complete_architecture(self, method: str, architecture: Mapping[str, str] | None) -> dict[str, str]:
        """Return an architecture of all decisions; the current label where the architecture has none."""
        self._check_architecture(method, {} if architecture is None else architecture)
        return self.architecture | dict(architecture or {})

    def _instrument_op(self, context: amanda.OpContext) -> None:
        """Record a forward op; replace an op of a choice by its candidates, and count its executions.

        Ops of other phases, and ops without two fitting candidates, stay as they are.  The result gets a
        remark if autodiff does not reach the parameters of candidates.
        """
        if context["phase"] != "forward":
            return
        node = self._nodes[context.get_op_id()] = self._flow.node(context)
        if context["in_place"]:
            self._record_write(context, node)
        choice = next((choice for choice in self.choices if choice.selection(context)), None)
        if choice is None:
            return
        # A tool numbers places of one name; one for each namespace, so that all modes have the same names.
        namer = self._namers.setdefault(str(context.namespace), amanda.Tool())
        name = namer.place(context)
        # Refused ops are not tried again at each analysis.
        if name not in self._sites and name not in self._refused_names:
            self._add_site(context, name, choice, node)
        site = self._sites.get(name)
        if site is None:
            return
        site.op_ids.add(context.get_op_id())
        library: SearchLibrary = context["search"]
        if library.no_gradient_reason and site.parameters:
            self._untrained_reason = library.no_gradient_reason
        # A tally counts natively.
        context.insert_before_op(site.executions, inputs=[])
        context.replace_op(self._compute_site, site=site.within(library.for_op(context)))

    def _add_site(self, context: amanda.OpContext, name: str, choice: Choice, node: DataflowNode) -> None:
        """Add an op with a choice to its decision, or record why fewer than two candidates fit.

        The decision gets mixture weights if the tool mixes, and the label that was assigned to its name;
        raises SearchError for a label that it cannot have.
        """

        # A site creates state of its candidates, and does not hold the context.
        def keep(label: str, make: Callable[[], Any], **options: Any) -> Any:
            return self.keep(context, label, make, **options)

        site = Site(context, name, choice.candidates, find_residual_block(self._flow, node), keep)
        decision_name = choice.name if choice.shared else name
        decision = self._decisions.get(decision_name) or Decision(decision_name, choice.shared)
        if decision.admit(site):
            self._sites[name] = site
            self._decisions[decision_name] = site.decision = decision
            self._obstacles[decision_name] = decision.rejected
            if self._has_alphas:
                decision.start_mixture(self._seed)
            if decision_name in self._requested:
                decision.check(self._requested[decision_name])
                decision.label = self._requested[decision_name]
        else:
            self._refused_names.add(name)
            too_few = f"only {', '.join(site.candidates) or 'none'} of the candidates fit"
            self._obstacles[name] = site.rejected or {decision_name: too_few}
        site.close()

    def _record_write(self, context: amanda.OpContext, node: DataflowNode) -> None:
        """Record an op in place at the op with a choice to whose output it writes, also through views."""
        producer = self._flow.maker(node.data)
        # A write through a view reaches the tensor that it is a view of.
        while producer is not None and producer.type in _VIEWS:
            producer = self._flow.maker(producer.data)
        for site in self._sites.values():
            if producer is not None and producer.op_id in site.op_ids:
                writer = InPlaceWriter(context["type"], context.get_scope(), context.get_source())
                site.writers[context.get_op_id()] = writer

    def _record_outputs(self, context: amanda.OpContext) -> None:
        """Record the outputs of a forward op that has run; no effect for other ops."""
        node = self._nodes.pop(context.get_op_id(), None)
        if node is not None:
            self._flow.made(node, leaves(context.get_outputs() or []))

    @amanda.differentiable
    def _compute_site(self, *inputs: Any, site: Site, original: Original) -> Any:
        return site.compute(inputs, original, self.mixture)


def _prepare_copy(
    options: tuple[Any, ...], state: Mapping[str, Any], architecture: Mapping[str, str], logged: set[str],
    model: Callable[..., Any], example: Sequence[Any], kwargs: Mapping[str, Any],
) -> SearchTool:  # fmt: skip
    """Return a tool with the options, state and architecture of another, prepared with a model."""
    choices, mixture, seed = options
    tool = SearchTool(choices, mixture, seed=seed)
    tool.load_state_dict(state)
    tool.architecture = architecture
    # The preparation logs no warning that the other tool has logged.
    tool._amanda.logged |= logged
    tool.prepare(model, *example, **kwargs)
    return tool


def _read_architecture(content: Any) -> dict[str, str]:
    """Return the architecture in the content of a file; raise ValueError for other content."""
    if not isinstance(content, Mapping) or not all(isinstance(label, str) for label in content.values()):
        raise ValueError("it holds no object of labels by the names of ops")
    return dict(content)


class ChoicesResult(Result):
    """A row for each op with a choice: its candidates, and the current one."""

    name: ClassVar[str] = "search_choices"
    title = "Choices"
    columns: ClassVar[Sequence[Column]] = (
        *(Column(key, show=partial(shortened, width=36)) for key in ("phase", "type", "module", "source")),
        Column("op"), Column("choice"), Column("candidates"), Column("chosen"), Column("mixture"),
        Column("calls", show="{:,}".format, total=True),
    )  # fmt: skip

    def __init__(self, sites: Sequence[Site]) -> None:
        self._rows = [
            ("forward", site.type, site.module, site.source, site.name, site.decision.name,
             " ".join(site.labels), site.chosen,
             " ".join(map("{:.3f}".format, site.decision.probabilities().values())),
             site.executions.calls)
            for site in sites
        ]  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return the ops in the order in which they first ran."""
        return self._rows
