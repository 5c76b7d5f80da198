"""`--conformance` ends the run with what the driver fulfils, by rung."""

from amanda.testing.conformance import *  # noqa: F403
