"""The stages of a plan in PyTorch: run by torch.distributed.pipelining, over the processes of a group."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from hashlib import sha256
from inspect import signature
from typing import Any

import amanda
from amanda.options import checked
from amanda.tools.kit import RequiredNames
from amanda.tools.partition._cut import PartitionError, Plan
from amanda.tools.partition._pytorch_graph import CutGraph

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
    """A model in stages, each for a process of a group; `pipe` is its `torch.distributed.pipelining.Pipe`.

    The constructor exports the model, for which its ops run once.  `stage` returns the stage of this process,
    `schedule` its training schedule, and `write_back` copies trained values into the model.

    Args:
        plan: The cut, by the ops of a trace.
        model: A module of PyTorch, whose parameters and buffers the stages share.
        mb_args: Example of the positional inputs, of the size of one micro-batch.
        mb_kwargs: Example of the inputs by name.
    """

    @checked(error=PartitionError)
    def __init__(
        self, plan: Plan, model: Any, mb_args: tuple[Any, ...], mb_kwargs: Mapping[str, Any]
    ) -> None:
        _REQUIRED.check()
        self.plan, self._model = plan, model
        # The export runs the model's ops once, which no tool should count.
        with amanda.disabled(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own, of its trees
            self.pipe = export_pipe(model, mb_args, dict(mb_kwargs), CutGraph(plan))
        self._stages = [self.pipe.get_stage_module(i) for i in range(plan.stages)]
        self._stage_tensors = [dict(self._share_model_tensors(module)) for module in self._stages]
        self._check_parameters()
        self._register_remaining_paths()

    def _share_model_tensors(self, stage_module: Any) -> Iterator[tuple[str, Any]]:
        """Put the model's parameters and buffers into a stage instead of copies, and yield them by path.

        PyTorch copies a tensor that several stages read, and makes each buffer persistent.
        """
        model_tensors, persistent_paths = dict(_tensors_by_name(self._model)), self._model.state_dict().keys()
        for path, stage_tensor in list(_tensors_by_name(stage_module)):
            # Constants that the export has lifted have no path in the model.
            tensor = model_tensors.get(path, stage_tensor)
            _register_tensor(stage_module, path, tensor, path in persistent_paths)
            yield path, tensor

    def _register_remaining_paths(self) -> None:
        """Register tied tensors of a stage at all their paths, and unread ones in the stage of their module.

        State dicts of the stages then have together the keys of the model's.
        """
        persistent_paths = self._model.state_dict().keys()
        registered_ids = {id(tensor) for tensors in self._stage_tensors for tensor in tensors.values()}
        for path, tensor in _tensors_by_name(self._model):
            # The stage that has most of the modules on the path is nearest to the tensor's own.
            depths = [_existing_module_count(module, path) for module in self._stages]
            nearest_stage = depths.index(max(depths))
            is_unread = id(tensor) not in registered_ids
            for stage, tensors in enumerate(self._stage_tensors):
                is_tied_here = any(value is tensor for value in tensors.values())
                if path not in tensors and ((is_unread and stage == nearest_stage) or is_tied_here):
                    _register_tensor(self._stages[stage], path, tensor, path in persistent_paths)
                    tensors[path] = tensor
            registered_ids.add(id(tensor))

    def _check_parameters(self) -> None:
        """Raise PartitionError for a stage whose parameters differ from the plan's."""
        # Compared by the first path of a parameter, as a tied one has several.
        first_path_by_id = {id(parameter): path for path, parameter in self._model.named_parameters()}
        # Buffers, which have None here, are not compared.
        first_path_of = {
            path: first_path_by_id.get(id(value)) for path, value in _tensors_by_name(self._model)
        }
        for stage, tensors in enumerate(self._stage_tensors):
            planned_paths = [path for path, stages in self.plan.parameters.items() if stage in stages]
            # A path that the model lacks stays, and shows the difference.
            planned_names = {
                name for path in planned_paths if (name := first_path_of.get(path, path)) is not None
            }
            stage_names = {name for path in tensors if (name := first_path_of.get(path)) is not None}
            if planned_names != stage_names:
                raise PartitionError(
                    f"stage {stage} of the plan and of the exported model read other parameters: "
                    f"{sorted(planned_names - stage_names)[:3]} are the plan's alone, "
                    f"{sorted(stage_names - planned_names)[:3]} are the model's alone; trace the same model, "
                    "in the same mode, with inputs of the same form"
                )

    @property
    def shared(self) -> Mapping[str, Mapping[int, str]]:
        """Return for each parameter that several stages hold, by path, its path in each of these stages."""
        model_tensors = dict(_tensors_by_name(self._model))
        # By id of the tensor: a tied parameter has several paths in the model.
        paths_by_id = defaultdict[int, dict[int, str]](dict)
        for stage, tensors in enumerate(self._stage_tensors):
            for path in tensors:
                if path in model_tensors:
                    paths_by_id[id(model_tensors[path])][stage] = path
        return {
            path: paths_by_id[id(parameter)] for path, parameter in self._model.named_parameters()
            if len(paths_by_id[id(parameter)]) > 1
        }  # fmt: skip

    def stage(self, device: Any = "cpu", group: Any = None) -> Any:
        """Return the `PipelineStage` of this process, whose number is its rank in the group.

        All processes of the group have to call this: they compare their plans.

        Args:
            device: Device of the stage.
            group: Group of `torch.distributed` with one process for each stage; None for all processes.

        Raises:
            PartitionError: If the group has not one process for each stage, or if the ranks' plans differ.
        """
        import torch
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size != self.plan.stages:
            raise PartitionError(
                f"the plan has {self.plan.stages} stages, and the group has {size} processes; start one "
                "process for each stage"
            )
        # A hash instead of the plan: ranks exchange a few bytes.
        digests: list[Any] = [None] * size
        # Ranks with different cuts would wait for each other without end.
        dist.all_gather_object(digests, self._digest(), group=group)
        differing_ranks = [i for i, digest in enumerate(digests) if digest != digests[0]]
        if differing_ranks:
            raise PartitionError(
                f"the plans or the models of the ranks {differing_ranks} and of rank 0 are not the same; let "
                "all ranks load one partition.json"
            )
        return self.pipe.build_stage(rank, torch.device(device), group)

    def _digest(self) -> str:
        """Return a hash of the plan, and of the code, the tensors' shapes and element types of all stages."""
        headers = [
            [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
            for tensors in self._stage_tensors
        ]
        module_codes = [
            module.code for stage in self._stages for module in stage.modules() if hasattr(module, "code")
        ]
        return sha256(repr((self.plan, headers, module_codes)).encode()).hexdigest()

    def schedule(
        self,
        stage: Any,
        loss_fn: Callable[..., Any] | None = None,
        microbatches: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the schedule of the plan for a stage, a `ScheduleGPipe` or `Schedule1F1B`.

        Its `step` also adds up the gradients of parameters that several stages hold.  With a loss, all
        processes that hold these have to call this, which creates their groups.

        Args:
            stage: The result of `stage`.
            loss_fn: Function of the output and the target; None to compute no gradients.
            microbatches: Number of micro-batches of a step; None for that of the plan.
            **options: Those of PyTorch's schedules, such as `scale_grads`.
        """
        count = self.plan.microbatches if microbatches is None else microbatches
        pipeline_schedule = schedule_class(self.plan.schedule)(stage, count, loss_fn, **options)
        # Without a loss no gradients are computed.
        if loss_fn is not None:
            pipeline_schedule.shared = self._shared_parameters(stage)
        return pipeline_schedule

    def _shared_parameters(self, stage: Any) -> list[tuple[Any, Any]]:
        """Return the parameters of a stage that other stages hold too, each with the group of its holders.

        Creates the groups, for which the processes of all holders have to come here.
        """
        import torch.distributed as dist

        all_stages: Any = stage.group or dist.group.WORLD
        stage_tensors, group_by_holders = dict(_tensors_by_name(stage.submod)), dict[tuple[int, ...], Any]()
        parameters_and_groups = []
        for path_by_stage in self.shared.values():
            # Sorted: all holders create the same group.
            holders = tuple(sorted(path_by_stage))
            if stage.stage_index not in holders:
                continue
            if holders not in group_by_holders:
                ranks = [dist.get_global_rank(all_stages, holder) for holder in holders]
                # Only the holders create the group; without this option all processes would have to.
                group_by_holders[holders] = dist.new_group(ranks, use_local_synchronization=True)
            parameter = stage_tensors[path_by_stage[stage.stage_index]]
            parameters_and_groups.append((parameter, group_by_holders[holders]))
        return parameters_and_groups

    def write_back(self, stage: Any) -> None:
        """Write the values of all stages, as they are now, into the model of every process of the group.

        All of these processes have to call this.

        Args:
            stage: The result of `stage`.
        """
        import torch
        import torch.distributed as dist

        all_stages: Any = stage.group or dist.group.WORLD
        model_tensors = dict(_tensors_by_name(self._model))
        stage_tensors = dict(_tensors_by_name(stage.submod))
        with amanda.disabled(), torch.no_grad():
            # In the same order on all ranks, as broadcasts pair up by order.
            for stage_number, tensors in enumerate(self._stage_tensors):
                source_rank = dist.get_global_rank(all_stages, stage_number)
                for path in tensors:
                    if path not in model_tensors:
                        continue
                    target = model_tensors[path]
                    if stage_number == stage.stage_index:
                        value = stage_tensors[path].detach().contiguous()
                    else:
                        # A buffer to receive into: the model's own tensor may lie on another device.
                        value = torch.empty(target.shape, dtype=target.dtype, device=stage.device)
                    dist.broadcast(value, source_rank, group=all_stages)
                    target.copy_(value)


def _tensors_by_name(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters and buffers by each of their paths."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _existing_module_count(module: Any, path: str) -> int:
    """Return the number of leading names of a path that are modules of a stage."""
    names = path.split(".")
    for depth, name in enumerate(names):
        module = module._modules.get(name)
        if module is None:
            return depth
    return len(names)


def _register_tensor(module: Any, path: str, tensor: Any, is_persistent: bool) -> None:
    """Register a parameter or buffer in a stage, and add the modules on its path that are missing."""
    from torch import nn

    *module_names, tensor_name = path.split(".")
    for name in module_names:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module._modules[name]
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(tensor_name, tensor)
    else:
        module.register_buffer(tensor_name, tensor, persistent=is_persistent)


def export_pipe(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: CutGraph) -> Any:
    """Export a model, and return the Pipe of its graph as a policy cuts it.

    PyTorch's `pipeline` looks up a tied parameter by any of its paths, in the order of a set, also by paths
    that no op reads and by modules that a stage lacks, and then fails; so its steps are called here, with a
    module that has each tensor at one path.
    """
    from torch.distributed.pipelining import Pipe

    program = Pipe._trace_with_export(model, args, dict(kwargs))
    cut_model = Pipe._from_traced(_copy_tensors_to_module(program), program, split_policy=policy)
    _accept_keywords(cut_model, program.module())
    return cut_model


def _copy_tensors_to_module(program: Any) -> Any:
    """Return a module with the parameters and buffers of a program, each at the path by which it is read."""
    from torch import nn

    root, program_module = nn.Module(), program.module()
    for node in program_module.graph.find_nodes(op="get_attr"):
        # An unread tensor would give the first stage a parameter that it does not use.
        if not node.users:
            continue
        *module_names, tensor_name = node.target.split(".")
        source: Any = program_module
        target: Any = root
        for name in module_names:
            source = getattr(source, name)
            if name not in target._modules:
                target.add_module(name, nn.Module())
            target = target._modules[name]
        buffers = dict(source.named_buffers(recurse=False, remove_duplicate=False))
        if tensor_name in source._parameters:
            target.register_parameter(tensor_name, source._parameters[tensor_name])
        elif tensor_name in buffers:
            target.register_buffer(tensor_name, buffers[tensor_name])
        else:  # such as a constant that the export has lifted
            setattr(target, tensor_name, getattr(source, tensor_name))
    return root


def _accept_keywords(pipe: Any, traced: Any) -> None:
    """Set the first stage's signature to the model's, keyword arguments too, as PyTorch's `pipeline` does.

    A stage with another number of parameters keeps its own signature.
    """
    first_stage = pipe.get_stage_module(0)
    if len(signature(first_stage.forward).parameters) == len(signature(traced.forward).parameters):
        first_stage.graph._codegen = deepcopy(traced.graph._codegen)
        codegen = first_stage.graph._codegen
        # The first stage has outputs of its own.
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=None)
        first_stage.recompile()


class _SharedGradientSums:
    """Mixin for schedules: adds up the gradients of shared parameters over their stages, after each step.

    shared: parameters that several stages hold, each with the group of the processes that hold it.
    """

    shared: Sequence[tuple[Any, Any]] = ()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the schedule, add up gradients, and return what the schedule returns."""
        import torch
        import torch.distributed as dist

        trained = [
            (parameter, group) for parameter, group in self.shared
            if torch.is_grad_enabled() and parameter.requires_grad
        ]  # fmt: skip
        earlier_gradients = [parameter.grad for parameter, _ in trained]
        for parameter, _ in trained:  # earlier gradients are sums already, and are added once at the end
            parameter.grad = None
        step_output = super().step(*args, **kwargs)  # type: ignore[misc]
        for (parameter, group), earlier_gradient in zip(trained, earlier_gradients, strict=True):
            # A stage without a gradient takes part with zeros: the others would wait for it.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient if earlier_gradient is None else earlier_gradient + gradient
        return step_output


@cache
def schedule_class(name: str) -> Any:
    """Return a schedule class of PyTorch whose steps also add up the gradients of shared parameters."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    # Under PyTorch's name, which messages and profiles show.
    return type(schedule.__name__, (_SharedGradientSums, schedule), {})
