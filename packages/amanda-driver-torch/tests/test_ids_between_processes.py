"""Two processes that run the same program have the same ids, native or not, whatever strings hash to."""

import os
import sys
from pathlib import Path

import children
import pytest

from amanda.interceptor import NATIVE

PROGRAM = """
import amanda, torch
from programs import PROGRAMS

class Ids(amanda.Tool):
    def __init__(self):
        self.ids = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)
    def forward(self, context):
        op_id = context.get_op_id()
        context.insert_before_op(lambda: self.ids.append(op_id), inputs=[])
    def backward(self, context):
        op_id = context.get_backward_op_id()
        context.insert_before_backward_op(lambda *_: self.ids.append(op_id))

tool, steps = Ids(), [program() for program in PROGRAMS if program.__name__ not in LEFT_OUT]
with amanda.apply(tool):
    for _ in range(2):
        for step in steps:
            step()
print(len({*tool.ids}), *tool.ids)
"""


def ids(seed: int, native: bool = NATIVE, left_out: tuple[str, ...] = ()) -> list[str]:
    place = str(Path(__file__).parent / "support")
    env = {"PYTHONHASHSEED": str(seed), "AMANDA_NATIVE": "1" if native else "0", "PYTHONPATH": place}
    program = PROGRAM.replace("LEFT_OUT", repr(left_out))
    done = children.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, env={**os.environ, **env},
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.slow
def test_the_ids_of_models_are_those_of_another_process() -> None:
    first = ids(1)
    assert int(first[0]) > 100
    assert ids(2) == first


@pytest.mark.long
def test_the_ids_of_models_are_those_of_the_pure_python_interceptor() -> None:
    # It does not see what torch's own methods reach through a closure (`a ** 2`) or super() (`unflatten`).
    left_out = ("functional", "transformer")
    assert ids(3, native=False, left_out=left_out) == ids(4, left_out=left_out)
