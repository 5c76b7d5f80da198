"""The stages of a plan in PyTorch: run by `torch.distributed.pipelining`, over the processes of a group."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import amanda
from amanda.options import checked
from amanda.tools.kit import RequiredNames
from amanda.tools.partition._cut import PartitionError
from amanda.tools.partition._plan import Plan
from amanda.tools.partition._pytorch_graph import CutGraph
from amanda.tools.partition._pytorch_pipe import pipe
from amanda.tools.partition._pytorch_schedules import summing

_REQUIRED = RequiredNames(
    "amanda.tools.partition",
    "torch",
    "torch.distributed.pipelining:Pipe._from_traced",
    "torch.distributed.pipelining:Pipe._trace_with_export",
    "torch.fx.graph:Graph._target_to_str",
    "torch.fx.graph:_Namespace",
    "torch:ops.aten.add.Tensor._schema",
    "torch.distributed.pipelining._IR:aten_pipe_split_alias",
)


class Pipeline:
    """A model in stages.  pipe: the `torch.distributed.pipelining.Pipe` of it.

    `stage` gives the stage of this process, `schedule` what trains it, and `write_back` brings trained values
    into the model.
    """

    @checked(error=PartitionError)
    def __init__(
        self, plan: Plan, model: Any, mb_args: tuple[Any, ...], mb_kwargs: Mapping[str, Any]
    ) -> None:
        _REQUIRED.check()
        self.plan, self._model = plan, model
        with amanda.disabled(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own, of its trees
            self.pipe = pipe(model, mb_args, dict(mb_kwargs), CutGraph(plan))
        self._stages = [self.pipe.get_stage_module(i) for i in range(plan.stages)]
        self._held = [dict(self._bind(module)) for module in self._stages]
        self._check_parameters()
        self._bind_other_paths()

    def _bind(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Put the model's own parameters and buffers into a stage, and yield them by their paths.

        PyTorch puts copies there of what several stages read, and makes each buffer a part of state dicts.
        """
        paths, persistent = dict(_tensors(self._model)), self._model.state_dict()
        for name, tensor in list(_tensors(module)):
            tensor = paths.get(name, tensor)
            _register(module, name, tensor, name in persistent)
            yield name, tensor

    def _bind_other_paths(self) -> None:
        """Put what a stage holds at its other paths too, what no op reads into the stage of its module."""
        persistent = self._model.state_dict()
        holders = {id(tensor) for held in self._held for tensor in held.values()}
        for name, tensor in _tensors(self._model):
            depths = [_depth(module, name) for module in self._stages]
            for stage, held in enumerate(self._held):
                is_unread = id(tensor) not in holders and stage == depths.index(max(depths))
                if name not in held and (is_unread or any(one is tensor for one in held.values())):
                    _register(self._stages[stage], name, tensor, name in persistent)
                    held[name] = tensor
            holders.add(id(tensor))

    def _check_parameters(self) -> None:
        """Raise PartitionError where a stage holds other parameters than the plan says."""
        paths = dict(_tensors(self._model))
        names = {id(one): name for name, one in self._model.named_parameters()}
        for stage, held in enumerate(self._held):
            planned = {
                names.get(id(paths.get(path)), path)
                for path, stages in self.plan.parameters.items()
                if stage in stages and (path not in paths or id(paths[path]) in names)
            }
            found = {names[id(paths[name])] for name in held if name in paths and id(paths[name]) in names}
            if planned != found:
                raise PartitionError(
                    f"stage {stage} of the plan and of the exported model read other parameters: "
                    f"{sorted(planned - found)[:3]} are the plan's alone, {sorted(found - planned)[:3]} are "
                    "the model's alone; trace the same model, in the same mode, with inputs of the same form"
                )

    @property
    def shared(self) -> Mapping[str, Mapping[int, str]]:
        """Return parameters that several stages hold, by their path: what each of these stages calls it."""
        paths = dict(_tensors(self._model))
        holders = defaultdict[int, dict[int, str]](dict)
        for stage, held in enumerate(self._held):
            for name in held:
                if name in paths:
                    holders[id(paths[name])][stage] = name
        named = ((name, holders[id(one)]) for name, one in self._model.named_parameters())
        return {name: stages for name, stages in named if len(stages) > 1}

    def stage(self, device: Any = "cpu", group: Any = None) -> Any:
        """Return the `PipelineStage` of this process, whose number is its rank in the group.

        Raises PartitionError where the group has not one process for each stage, or where plans differ.
        """
        import torch
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size != self.plan.stages:
            raise PartitionError(
                f"the plan has {self.plan.stages} stages, and the group has {size} processes; start one "
                "process for each stage"
            )
        digests: list[Any] = [None] * size
        dist.all_gather_object(digests, self._digest(), group=group)
        others = [i for i, one in enumerate(digests) if one != digests[0]]
        if others:
            raise PartitionError(
                f"the plans or the models of the ranks {others} and of rank 0 are not the same; let all "
                "ranks load one partition.json"
            )
        return self.pipe.build_stage(rank, torch.device(device), group)

    def _digest(self) -> str:
        forms = [
            [(name, tuple(one.shape), str(one.dtype)) for name, one in held.items()] for held in self._held
        ]
        codes = [one.code for stage in self._stages for one in stage.modules() if hasattr(one, "code")]
        return sha256(repr((self.plan, forms, codes)).encode()).hexdigest()

    def schedule(
        self,
        stage: Any,
        loss_fn: Callable[..., Any] | None = None,
        microbatches: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the schedule of the plan for a stage, a `ScheduleGPipe` or `Schedule1F1B`.

        Its `step` also adds up the gradients of parameters that several stages hold.
        options: those of PyTorch's schedules, such as `scale_grads`.
        """
        count = self.plan.microbatches if microbatches is None else microbatches
        made = summing(self.plan.schedule)(stage, count, loss_fn, **options)
        if loss_fn is not None:
            made.shared = self._shared_of(stage)
        return made

    def _shared_of(self, stage: Any) -> list[tuple[Any, Any]]:
        """Return the parameters of a stage that others hold too, each with the group of these processes."""
        import torch.distributed as dist

        parent: Any = stage.group or dist.group.WORLD
        parameters, groups = dict(_tensors(stage.submod)), dict[tuple[int, ...], Any]()
        found = []
        for held in self.shared.values():
            stages = tuple(sorted(held))
            if stage.stage_index not in stages:
                continue
            if stages not in groups:
                ranks = [dist.get_global_rank(parent, one) for one in stages]
                groups[stages] = dist.new_group(ranks, use_local_synchronization=True)
            found.append((parameters[held[stage.stage_index]], groups[stages]))
        return found

    def write_back(self, stage: Any) -> None:
        """Write the values of all stages, as they are now, into the model of every process of the group."""
        import torch
        import torch.distributed as dist

        parent: Any = stage.group or dist.group.WORLD
        paths = dict(_tensors(self._model))
        own = dict(_tensors(stage.submod))
        with amanda.disabled(), torch.no_grad():
            for number, held in enumerate(self._held):
                source = dist.get_global_rank(parent, number)
                for name in held:
                    if name not in paths:
                        continue
                    target = paths[name]
                    if number == stage.stage_index:
                        value = own[name].detach().contiguous()
                    else:
                        value = torch.empty(target.shape, dtype=target.dtype, device=stage.device)
                    dist.broadcast(value, source, group=parent)
                    target.copy_(value)


def _tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters and buffers by each of their paths."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _depth(module: Any, path: str) -> int:
    """Return how many names of a path lead to modules that a stage has."""
    names = path.split(".")
    for depth, name in enumerate(names):
        module = module._modules.get(name)
        if module is None:
            return depth
    return len(names)


def _register(module: Any, path: str, tensor: Any, is_persistent: bool) -> None:
    """Put a parameter or buffer into a stage, with the modules on its path."""
    from torch import nn

    *names, last = path.split(".")
    for name in names:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module._modules[name]
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor, persistent=is_persistent)
