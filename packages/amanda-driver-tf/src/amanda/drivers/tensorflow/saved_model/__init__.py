"""SavedModels: folders that are instrumented without being run."""

from ._folder import SavedModelFolder

__all__ = ["SavedModelFolder"]
