"""The tables of names for authors of drivers hold every name, and are those of the classes as they are."""

from __future__ import annotations

import pytest

from amanda.testing._ladder import member_summary
from amanda.testing._suite import RUNGS
from amanda_docs.drivers import HANDED, OVERRIDDEN, PAGE, public_names, written


def test_the_page_for_authors_of_drivers_has_the_tables_of_the_classes() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m amanda_docs.drivers, with website/ on the path"


@pytest.mark.parametrize("kind", [*(kind for kind, _ in OVERRIDDEN.values()), *HANDED.values()])
def test_every_public_name_of_a_class_has_words(kind: type) -> None:
    for name in public_names(kind):
        assert member_summary(kind, name), f"neither {kind.__name__}.{name} nor its class says what it is"


def test_every_required_name_is_on_a_rung() -> None:
    on_rungs = {name for rung in RUNGS for name in rung.implement}
    for kind, prefix in OVERRIDDEN.values():
        for name in getattr(kind, "__abstractmethods__", ()):
            assert prefix + name in on_rungs, f"no rung of the conformance suite names {prefix}{name}"
