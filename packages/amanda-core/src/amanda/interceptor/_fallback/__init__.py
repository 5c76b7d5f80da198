"""The interceptor in pure Python: the same names, by replacing attributes.

Its limits: a callable that was imported by name before a scope opened is not intercepted, and
a call costs microseconds where the native interceptor takes nanoseconds.
"""

# `__all__` of `amanda.interceptor` says which names are public; others are private to these modules.
from amanda.interceptor._fallback._activations import *  # noqa: F403
from amanda.interceptor._fallback._clocks import *  # noqa: F403
from amanda.interceptor._fallback._graphs import *  # noqa: F403
from amanda.interceptor._fallback._places import *  # noqa: F403
from amanda.interceptor._fallback._programs import *  # noqa: F403
from amanda.interceptor._fallback._records import *  # noqa: F403
from amanda.interceptor._fallback._sites import *  # noqa: F403
from amanda.interceptor._fallback._storages import *  # noqa: F403
