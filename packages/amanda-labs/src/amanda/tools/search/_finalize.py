"""Finalized models: which ops are replaced, and the error for a choice that is no module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from amanda.tools.search._candidates import Candidate, Keep
from amanda.tools.search._errors import SearchError

if TYPE_CHECKING:
    from amanda.tools.search._site import Site


def changed(sites: Iterable[Site]) -> list[tuple[Site, Candidate]]:
    """Return the sites whose op is replaced, with the candidates; raise where two are of one module."""
    found = [(site, site.candidates[site.chosen]) for site in sites]
    seen: dict[tuple[str, str], Site] = {}
    for site, chosen in found:
        other = seen.setdefault((site.module, site.type), site)
        if other.chosen != site.chosen:
            raise lost(
                site, chosen, f"{other.name} at the same path has {other.chosen}, of this or of another model"
            )
    return [(site, chosen) for site, chosen in found if not isinstance(chosen, Keep)]


def lost(site: Site, chosen: Candidate, reason: str) -> SearchError:
    return SearchError(
        f"SearchTool.finalize: {chosen.label!r} of {site.name} at {site.source} is no module: {reason}; "
        "run the model in a scope of the tool instead"
    )
