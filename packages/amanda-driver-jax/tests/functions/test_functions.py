"""Public functions of JAX and optax compute under tools that change nothing what they compute alone.

A sample runs with the tests, all of it by `nox -s opdb_jax`.
"""

from collections.abc import Callable

import jax
import pytest

from ._oracle import differences
from ._samples import functions, samples

SAMPLE = (
    "jax.numpy.einsum", "jax.numpy.clip", "jax.numpy.histogram", "jax.nn.dot_product_attention",
    "jax.lax.top_k", "jax.random.categorical",
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # what JAX says of functions that it is about to remove


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate a test for each function, where they are not deselected anyhow."""
    if "name" in metafunc.fixturenames:
        is_full_run = metafunc.config.getoption("markexpr") == "opdb"
        metafunc.parametrize("name", list(functions()) if is_full_run else ["every function"])


@pytest.mark.slow
@pytest.mark.parametrize("sampled", SAMPLE)
def test_functions_of_the_sample_compute_the_same(sampled: str) -> None:
    counts: dict[str, int] = {}
    messages = [str(difference) for sample in samples(sampled) for difference in differences(sample, counts)]
    assert messages == []
    assert counts["eager look"]


@pytest.mark.opdb
def test_functions_compute_the_same(name: str, record_property: Callable[[str, int], None]) -> None:
    counts: dict[str, int] = {}
    messages = [str(difference) for sample in samples(name) for difference in differences(sample, counts)]
    other_bits = sum(count for subject, count in counts.items() if subject.endswith("other bits"))
    record_property("functions with samples", int(bool(counts)))
    record_property("calls", sum(counts.values()) - other_bits)
    record_property("of other last digits under routines", other_bits)
    jax.clear_caches()  # hours of programs would fill the memory
    assert messages == []
