"""`pytest --conformance` ends with what the driver fulfils, by rung of the suite."""

from amanda.testing.conformance import *  # noqa: F403
