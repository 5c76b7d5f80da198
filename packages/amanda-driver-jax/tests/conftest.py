"""`--conformance` ends the run with what the driver fulfils, by meaning."""

from amanda.testing.conformance import *  # noqa: F403
