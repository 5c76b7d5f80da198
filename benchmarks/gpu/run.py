"""Check and measure Amanda on a GPU, with the packages that the machine has and without a package index.

    python benchmarks/gpu/run.py [STAGE ...] [--quick] [--device cpu] [--again] [--out FOLDER]
    python benchmarks/gpu/run.py --wheels
    python benchmarks/gpu/run.py --publish FOLDER ...

Results go into gpu.json of FOLDER, of $OUT where that is set, or of build/gpu, after every case; a stage that
was stopped goes on from there.  Amanda runs from its sources.  --wheels downloads what such a machine may
lack into build/gpu-wheels, from where the other calls take it.  --publish puts results into docs/.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from _prepare import ROOT, download, environment, publish

STAGES = {
    "facts": (30, "the machine, the versions, and what is missing"),
    "conformance": (90, "the conformance suites of the PyTorch driver, eager and compiled"),
    "operators": (100, "operators of torch's database, under tools that change nothing"),
    "families": (90, "30 models of timm and transformers train under tools as without"),
    "streams": (45, "side streams, synchronisation, CUDA graphs"),
    "precision": (120, "mixed precision, compiled models, attention, quantised layers, memory"),
    "profiled": (45, "kernels and memory of each op, beside what torch says: figure 8 of the paper"),
    "figures": (120, "figures 10 to 13 of the paper"),
    "costs": (120, "cost per op; a language model of 1.2 billion parameters under tools"),
}
"""Seconds after which a stage begins no further case, and what it shows."""
GRACE = 45
"""Seconds that a stage is given to end its last case."""
RESTARTS = 8


def main() -> int:
    """Run stages, each in a process of its own; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--quick", action="store_true", help="few cases and small models: does it run?")
    parser.add_argument("--device", default="cuda", help="cuda; cpu for a rehearsal")
    parser.add_argument("--again", action="store_true", help="do not keep earlier results of these stages")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build/gpu"))
    parser.add_argument("--wheels", action="store_true", help="download packages, and run nothing")
    parser.add_argument("--publish", nargs="+", type=Path, metavar="FOLDER", help="make the pages of docs/")
    options = parser.parse_args()
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    if options.wheels or options.publish:
        return download() if options.wheels else publish(options.publish)
    options.out.mkdir(parents=True, exist_ok=True)
    file, chosen = options.out.resolve() / "gpu.json", options.stages or list(STAGES)
    if options.again and file.exists():
        results = json.loads(file.read_text())
        results["stages"] = {name: one for name, one in results["stages"].items() if name not in chosen}
        file.write_text(json.dumps(results))
    around = environment(options.device, options.quick)
    passed = [run(name, file, around) for name in chosen]
    return int(not all(passed))


def run(name: str, file: Path, around: dict[str, str]) -> bool:
    """Run a stage, again after each process that a case has ended; return True if all of it passed."""
    seconds, title = STAGES[name]
    print(f"{name}: {title}, at most {seconds + GRACE} s", flush=True)
    end, code = time.monotonic() + seconds, None
    command = [sys.executable, str(Path(__file__).with_name("_stage.py")), name, str(file)]
    for _ in range(RESTARTS):
        left = max(end - time.monotonic(), 1)
        try:
            code = subprocess.run(
                [*command, str(left)], env=around, cwd=ROOT, timeout=left + GRACE
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {seconds + GRACE} s", flush=True)
            break
        if code in (0, 2):
            break
        print(f"{name}: its process ended with {code}, a new one goes on", flush=True)
    results = json.loads(file.read_text()) if file.exists() else {"stages": {}}
    stage = results["stages"].get(name, {"cases": {}})
    failed = {case: one["failed"] for case, one in stage["cases"].items() if "failed" in one}
    counts = f"{len(stage['cases'])} cases, {len(failed)} failed, {stage.get('left', 0)} not reached"
    print(f"{name}: {counts}, {stage.get('took', 0)} s", flush=True)
    for case, said in list(failed.items())[:20]:
        print(f"  {case}: {said.strip().splitlines()[-1][:300]}", flush=True)
    return code == 0 and not failed


if __name__ == "__main__":
    sys.exit(main())
