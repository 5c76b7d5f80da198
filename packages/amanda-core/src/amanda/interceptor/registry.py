"""The one registry of code: which frames of a program belong to Amanda, to frameworks, or to the user."""

from pathlib import Path

from amanda import interceptor
from amanda.interceptor.opid import SKIPPED, CodeRegistry

codes = CodeRegistry(lambda: interceptor.forget_code())
"""Kinds of code; drivers mark that of their frameworks."""
_HOME = Path(__file__).parents[1]
codes.add_root(f"{_HOME}/", SKIPPED)
codes.add_root(f"{_HOME / 'testing'}/", 0)  # a program like the user's
codes.add_root(f"{_HOME / 'testing' / '_fake_driver'}/", SKIPPED)
