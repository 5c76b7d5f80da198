"""Cases of a stage: each is written when it is done, and one that fails stops no other."""

import datetime
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _device import DEVICE, ON_GPU, synchronize
from _machine import machine, versions
from _measure import QUICK, rounded

SCHEMA = 1
BROKEN = 75
"""Exit status after which a new process goes on with the stage: the GPU does not answer this one."""
AROUND = "what is around the cases"


class Skip(Exception):
    """Why a case cannot run here."""


def bare(program: Callable[..., Any], *args: Any) -> Any:
    """Return what a program gives without a tool.

    Raises Skip where it fails: what does not run here alone says nothing of a tool.
    """
    try:
        return program(*args)
    except Exception as error:
        raise Skip(f"without a tool: {type(error).__name__}: {error}") from error


class Cases:
    """Results of a stage by case, in a file with those of other stages; cases that are in there do not run.

    Results of another device, or of a quick run where this is none, are dropped.
    A case has "value", "failed" (a traceback, or what is amiss) or "skipped" (a reason).
    seconds: after which no case begins.
    """

    def __init__(self, stage: str, file: Path, seconds: float) -> None:
        self._file, self._begun = file, time.monotonic()
        self._end = self._begun + seconds
        self._all = json.loads(file.read_text()) if file.exists() else {"schema": SCHEMA, "stages": {}}
        device = torch.cuda.get_device_name() if ON_GPU else DEVICE.type
        before = self._all["stages"].get(stage, {})
        if (before.get("device"), before.get("quick")) != (device, QUICK):
            before = {"took": 0, "cases": {}}
        self._stage: dict[str, Any] = before
        self._all["stages"][stage] = before
        self._before = before["took"]
        self._stage |= {
            "command": os.environ.get("AMANDA_GPU_COMMAND", ""), "device": device, "quick": QUICK,
            "machine": {**machine(), "accelerator": device}, "versions": versions(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "load": [round(os.getloadavg()[0], 2)], "left": 0,
        }  # fmt: skip
        self.found: dict[str, Any] = self._stage["cases"]
        self.found.pop(AROUND, None)
        if crashed := self._stage.pop("running", None):
            self.found[crashed] = {"failed": "the process ended, or was stopped, in this case"}
        self._write()

    def __call__(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Run a case, unless it is known or the time is over.

        A value may have a list "amiss", of what is not as it has to be: with one that is not empty it failed.
        """
        if not self.begins(name):
            return
        begun = time.monotonic()
        try:
            value = rounded(function(*args))
        except Skip as reason:
            self.ends(name, begun, skipped=str(reason))
        except Exception:
            self.ends(name, begun, failed=traceback.format_exc())
        else:
            amiss = "\n".join(value.get("amiss", ()))
            self.ends(name, begun, value=value, **({"failed": amiss} if amiss else {}))

    def begins(self, name: str) -> bool:
        """Note that a case runs from now on; return False if it is known, or if the time is over."""
        if name in self.found:
            return False
        if time.monotonic() > self._end:
            self._stage["left"] += 1
            self._write()
            return False
        self._stage["running"] = name
        self._write()
        return True

    def ends(self, name: str, begun: float, **result: Any) -> None:
        """Write a result, and print it unless it is quick and ok; end the process if the GPU is broken."""
        broken = gpu_failure()
        result |= {"failed": result.get("failed", broken)} if broken else {}
        self.found[name] = {**result, "seconds": round(time.monotonic() - begun, 2)}
        self._stage.pop("running", None)
        self._write()
        said = next((one for one in ("failed", "skipped") if one in result), "ok")
        if said != "ok" or self.found[name]["seconds"] > 1:
            print(f"  {name}: {said}, {self.found[name]['seconds']} s", flush=True)
        if broken:
            os._exit(BROKEN)

    def skip(self, name: str, reason: str) -> None:
        """Write why a case does not run here."""
        if name not in self.found:
            self.ends(name, time.monotonic(), skipped=reason)

    def _write(self) -> None:
        """Write the results of all stages, in one step."""
        self._stage["took"] = self._before + round(time.monotonic() - self._begun)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._all))
        part.replace(self._file)


def gpu_failure() -> str:
    """Return what CUDA says if it is out of order, as after a failed assertion of a kernel."""
    try:
        synchronize()
    except RuntimeError as error:
        return f"the GPU is out of order: {error}"
    return ""
