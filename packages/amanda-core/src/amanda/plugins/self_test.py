"""A driver's self-test: whether it serves a version of its framework that its tests never ran on."""

from __future__ import annotations

from contextvars import Context
from typing import Any, NamedTuple

from amanda.errors import DriverError
from amanda.plan.context import OpContext
from amanda.plugins.requirements import release_numbers
from amanda.scope.driver import Driver, SelfTestProgram, framework_version
from amanda.tool import Tool, apply

# Events that a tool has to see, in the words of the failure.
_FORWARD_EVENTS = _OP, _BEFORE_OP, _AFTER_OP = "its op", "a routine before it", "a routine after it"
_BACKWARD_EVENTS = _BACKWARD_OP, _BEFORE_BACKWARD_OP = "its backward op", "a routine before its backward op"


class Verdict(NamedTuple):
    """Outcome of a self-test: the number of checks that passed, and the failure, "" if there is none."""

    passed: int
    failure: str


def version_note(driver: Driver) -> str:
    """Return a note for the report if the framework is newer than all that was tested; "" otherwise.

    Raises DriverError if the driver fails its self-test there.
    """
    if not driver.newest_tested:
        return ""
    tested_release, version = release_numbers(driver.newest_tested), framework_version(driver.framework)
    # 2.14.1 counts as 2.14.
    is_tested_or_older = release_numbers(version)[: len(tested_release)] <= tested_release
    if is_tested_or_older:
        return ""
    note = f"{version} is newer than the last that was tested ({driver.newest_tested})"
    verdict = self_test(driver)
    if verdict.failure:
        raise DriverError(f"{driver.framework} {note}; its driver fails the self-test: {verdict.failure}")
    return f"{note}; {verdict.passed} checks passed" if verdict.passed else note


def self_test(driver: Driver) -> Verdict:
    """Run an attached driver's program: bare, under a tool that looks, under one that doubles the result.

    The private names that the driver needs count as passed checks; without a program they are all.
    """
    program = driver.self_test_program()
    if program is None:
        return Verdict(driver.private_name_count(), failure="")
    # In an empty context no scope of the program is in force: its tools see nothing of the test.
    passed, failure = Context().run(_run_under_tools, program)
    return Verdict(driver.private_name_count() + passed, failure)


def _run_under_tools(program: SelfTestProgram) -> tuple[int, str]:
    """Run a program bare and under tools; return the number of checks that passed, and "".

    After a failure, also an exception of the program, return 0 and the first failure.
    """
    expected_events = _FORWARD_EVENTS + (_BACKWARD_EVENTS if program.backward_op_type else ())
    try:
        bare_result = list(program.run())
        witness = _Witness(program, factor=1)
        with apply(witness):
            watched_result = list(program.run())
        with apply(_Witness(program, factor=2)):
            doubled_result = list(program.run())
    except Exception as error:
        return 0, f"{program.op_type} raises {error!r}"
    op = program.op_type
    unseen_events = [event for event in expected_events if event not in witness.events]
    if unseen_events:
        return 0, f"of {op} tools did not see {', '.join(unseen_events)}"
    if watched_result != bare_result:
        return 0, f"{op} gives {watched_result} under a tool that changes nothing, {bare_result} without it"
    if doubled_result[0] != 2 * bare_result[0]:
        return 0, f"the result of {op} is {bare_result[0]}; doubled by a tool it is {doubled_result[0]}"
    return len(expected_events) + 2, ""  # with the two comparisons of results


class _Witness(Tool):
    """Records what happens at the op of a program, and multiplies its result by a factor."""

    def __init__(self, program: SelfTestProgram, factor: int) -> None:
        self.program, self.factor = program, factor
        self.events: set[str] = set()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: OpContext) -> None:
        """Insert a routine before and after the op."""
        if context.get_op_type() == self.program.op_type:
            self.events.add(_OP)
            context.insert_before_op(self.before)
            context.insert_after_op(self.after)

    def analyse_backward(self, context: OpContext) -> None:
        """Insert a routine before the backward op."""
        if context.get_forward_op_type() == self.program.backward_op_type:
            self.events.add(_BACKWARD_OP)
            context.insert_before_backward_op(self.before_backward)

    def before(self, *inputs: Any) -> None:
        """Record that the op is about to run."""
        self.events.add(_BEFORE_OP)

    def after(self, output: Any) -> Any:
        """Return the result times the factor, as a new value."""
        self.events.add(_AFTER_OP)
        return output * self.factor

    def before_backward(self, *gradients: Any) -> None:
        """Record that the backward op is about to run."""
        self.events.add(_BEFORE_BACKWARD_OP)
