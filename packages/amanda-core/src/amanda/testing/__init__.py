"""For authors of drivers: the conformance suite, its fake driver, and the marks of gaps.

from amanda.testing import DriverTests, Sample, notyet

class TestMyDriver(DriverTests):
    gaps = {"test_ids_tell_loops_apart": notyet("the framework unrolls loops")}

    @pytest.fixture
    def sample(self):
        return MySample()
"""

try:
    import pytest
except ModuleNotFoundError as error:
    if error.name != "pytest":
        raise
    raise ModuleNotFoundError(
        'amanda.testing needs pytest: pip install "amanda-core[testing]"', name="pytest"
    ) from None

pytest.register_assert_rewrite(
    "amanda.testing._suite", "amanda.testing._graph_suite", "amanda.testing._views"
)

from amanda.testing._fake_driver import FakeDriver  # noqa: E402
from amanda.testing._fake_graph_driver import FakeGraphDriver  # noqa: E402
from amanda.testing._graph_suite import GraphDriverTests, GraphSample  # noqa: E402
from amanda.testing._ladder import never, notimpl, notyet  # noqa: E402
from amanda.testing._sample import Sample, attached  # noqa: E402
from amanda.testing._suite import DriverTests  # noqa: E402
from amanda.testing._tools import (  # noqa: E402
    EqualCopies,
    Scaling,
    Silent,
    Unchanged,
)
from amanda.testing._views import ViewSample, ViewTests  # noqa: E402

__all__ = [
    "DriverTests",
    "EqualCopies",
    "FakeDriver",
    "FakeGraphDriver",
    "GraphDriverTests",
    "GraphSample",
    "Sample",
    "Scaling",
    "Silent",
    "Unchanged",
    "ViewSample",
    "ViewTests",
    "attached",
    "never",
    "notimpl",
    "notyet",
]
