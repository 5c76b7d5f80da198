"""The native interceptor survives what processes, collectors and threads do around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import children
import pytest

from amanda import interceptor

native = pytest.mark.xfail(
    not interceptor.NATIVE, reason="never: builtins are not placed without native code", run=False
)
SUPPORT = str(Path(__file__).parent / "support")
HAZARDS = """
sites_are_made_of_anything
types_share_definitions
originals_outlive_their_sites
tables_are_emptied_without_memory
numbered_objects_die_without_memory
slots_are_swapped_all_or_none
threads_end_inside_a_scope
collections_empty_the_arguments
what_is_collected_is_called
arguments_of_the_interceptor_are_wrong
zero_is_no_id
deletions_are_not_intercepted
other_interpreters_are_left_alone
the_interceptor_is_loaded_again
threads_call_while_others_place_and_remove
a_handler_forks
recursion_ends_in_an_error
the_interpreter_ends_with_everything_placed
regions_nest_deep
two_sites_have_one_target
""".split()


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the extension with builtins of every kind is compiled."""
    return tmp_path_factory.mktemp("fuzz")


def run(build: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """A process in which the hazards of these names happen; without names it lists them."""
    # The debugging allocator overwrites what is freed, so that a use of it shows.
    env = {"PYTHONMALLOC": "debug", **os.environ, "AMANDA_FUZZ_BUILD": str(build)}
    env["PYTHONPATH"] = os.pathsep.join([SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "interceptor_fuzz.hazards", *names]
    return children.run(command, env=env, limit=120)


@native
@pytest.mark.parametrize("hazard", HAZARDS)
def test_the_process_survives(hazard: str, build: Path) -> None:
    done = run(build, hazard)
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr}"
    assert done.stdout.endswith("survived\n"), done.stdout


@native
def test_every_hazard_is_run(build: Path) -> None:
    assert run(build).stdout.split() == HAZARDS
