"""The module that pytest loads: the plugin of `amanda.tools.pytest`.

A module of its own at the top, for pytest takes the files of a distribution that has none there for modules
below `amanda/tools`, and warns that `pytest` is imported already.
"""

from amanda.tools.pytest._plugin import amanda_trace, pytest_addoption, pytest_configure

__all__ = ["amanda_trace", "pytest_addoption", "pytest_configure"]
