"""A rank: trains bare and under tools, gathers what they found, runs the example; tells in files."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.profile import ProfileTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.results import gather
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import ddp

KINDS = {"ddp": DistributedDataParallel, "fsdp2": fully_shard}

CHANGING = {
    "prune": lambda: PruneTool(0.5),
    "quantize": lambda: QuantizeTool(method="dynamic"),
    "qat": lambda: QuantizeTool(method="qat"),
}


def trained(wrap, *tools, steps=3):
    """Bits of losses and parameters."""
    model = wrap(ddp.network())
    with amanda.apply(*tools):
        losses = ddp.train(model, ddp.batches(dist.get_rank(), dist.get_world_size(), steps))
    with torch.no_grad():
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [losses, [p.tolist() for p in whole]]


def tensor_parallel():
    """Rows of layers shared out; what each computes, and the labels of what is not yet reduced."""
    plan, mesh = {"0": ColwiseParallel(), "2": RowwiseParallel()}, init_device_mesh("cpu", (2,))
    model = parallelize_module(ddp.network(), mesh, plan)
    flops, stats = FlopsTool(), StatsTool(bins=0)
    with amanda.apply(flops, stats, NanTool()):
        ddp.train(model, ddp.batches(0, 1, 1))
    merged = gather(flops.result)
    layers = [place for place in merged.ops if place.type.startswith("linear")]
    macs = {
        phase: sum(one.macs * one.calls for one in layers if one.phase == phase)
        for phase in ("forward", "backward")
    }
    return {"macs": macs, "tensors": [one.tensor for one in stats.result]}


def collectives():
    """Ops of process groups under tools that look at every value."""
    tools = TraceTool(), ProfileTool(), StatsTool(), NanTool(), FlopsTool()
    parts, own = [torch.zeros(3) for _ in range(2)], torch.zeros(3)
    with amanda.apply(*tools):
        for _ in range(2):
            dist.all_gather(parts, torch.full((3,), 1.0 + dist.get_rank()))
            dist.scatter(own, parts if dist.get_rank() == 0 else None, src=0)
    return [parts[1].tolist(), own.tolist(), tools[-1].result.unsupported]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, told = dist.get_rank(), {}
    for kind, wrap in KINDS.items():
        bare, flops, stats = trained(wrap), FlopsTool(), StatsTool()
        told[kind] = {"same": trained(wrap, flops, stats, NanTool()) == bare}
        flops.clear(), stats.clear()
        trained(wrap, flops, stats, steps=1)
        for tool in (flops, stats):
            merged = gather(tool.result)
            told[kind][merged.name] = merged.to_dict()["rows"]
            if rank == 0:
                merged.save(folder / f"{kind}.{merged.name}.json")
        trace = TraceTool()
        trained(wrap, trace, steps=1)
        told[kind]["by rank"] = [row[0] for row in gather(trace.result).rows()]
        told[kind]["to the second"] = gather(flops.result, to=1) is not None
        for name, make in CHANGING.items():
            told[kind][name] = trained(wrap, make())[1]
    told["tensor parallel"], told["collectives"] = tensor_parallel(), collectives()
    ddp.run(sharded=True)
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Threads of PyTorch's gloo that still hold tensors abort a process whose interpreter is torn down.
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)
