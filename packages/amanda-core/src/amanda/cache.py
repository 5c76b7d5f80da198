"""The cache of analyses, by an import path of the first Amanda: `amanda.cache.cache_disabled`."""

from amanda.scope.state import cache_disabled, cache_enabled, is_cache_enabled

__all__ = ["cache_disabled", "cache_enabled", "is_cache_enabled"]
