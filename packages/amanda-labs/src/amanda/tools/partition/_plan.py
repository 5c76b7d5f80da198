"""The plan of a cut, as files keep it: the stage of each op, by which the stages of a model are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from amanda.tools.partition._cut import PartitionError, Schedule
from amanda.tools.results import read_json

if TYPE_CHECKING:
    from amanda.tools.partition._pytorch_pipeline import Pipeline


class PlannedOp(NamedTuple):
    """A forward op in the order of execution, and its stage."""

    type: str
    module: str
    stage: int


@dataclass(frozen=True)
class Plan:
    """Stages of a model, to be run.  parameters: the stages that read each parameter or buffer, by its path.

    `PartitionResult.plan` makes a plan, `PartitionResult.save("partition.json")` writes it with the result,
    and `load` reads it from there.
    """

    stages: int
    schedule: Schedule
    microbatches: int
    ops: Sequence[PlannedOp]
    parameters: Mapping[str, Sequence[int]]

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return the plan in a file that a result was saved to; raise PartitionError for another file."""
        return read_json(path, "file that partition saved, partition.json", cls._of, PartitionError)

    @classmethod
    def _of(cls, told: Any) -> Plan:
        if not isinstance(told, dict) or told.get("schema") != "amanda.partition" or "parameters" not in told:
            schema = told.get("schema") if isinstance(told, dict) else type(told).__name__
            raise ValueError(f"it holds {schema!r}")
        ops = [
            PlannedOp(str(one["type"]), str(one["module"]), int(one["stage"]))
            for one in told["ops"]
            if one["phase"] == "forward"
        ]
        parameters = {str(name): [int(one) for one in stages] for name, stages in told["parameters"].items()}
        if told["schedule"] not in get_args(Schedule):
            raise ValueError(f"its schedule is {told['schedule']!r}")
        return cls(len(told["rows"]), told["schedule"], int(told["microbatches"]), ops, parameters)

    def pipeline(
        self, model: Any, mb_args: tuple[Any, ...], mb_kwargs: Mapping[str, Any] | None = None
    ) -> Pipeline:
        """Return the model of PyTorch, cut into the stages of this plan.

        mb_args, mb_kwargs: an example of the model's inputs, of the size of one micro-batch.
        Raises PartitionError for a model that is not the one that was traced, or that cannot be cut so.
        """
        from amanda.tools.partition._pytorch_pipeline import Pipeline

        return Pipeline(self, model, mb_args, dict(mb_kwargs or {}))
