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

pytest.register_assert_rewrite("amanda.testing._suite", "amanda.testing._traceable")

from amanda.testing._attached import attached  # noqa: E402
from amanda.testing._fake_driver import FakeDriver  # noqa: E402
from amanda.testing._harmless import Fresh, Silent, Unchanged  # noqa: E402
from amanda.testing._held import Scaling  # noqa: E402
from amanda.testing._markers import never, notimpl, notyet  # noqa: E402
from amanda.testing._sample import Sample  # noqa: E402
from amanda.testing._suite import DriverTests  # noqa: E402
from amanda.testing._traceable import GraphSample, TraceableTests  # noqa: E402

__all__ = [
    "DriverTests",
    "FakeDriver",
    "Fresh",
    "GraphSample",
    "Sample",
    "Scaling",
    "Silent",
    "TraceableTests",
    "Unchanged",
    "attached",
    "never",
    "notimpl",
    "notyet",
]
