"""The driver of the fake framework, written as a third party would write one."""

from amanda.testing._fake_driver._driver import FakeDriver

__all__ = ["FakeDriver"]
