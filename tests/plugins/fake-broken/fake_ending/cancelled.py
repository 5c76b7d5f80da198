"""Raises an exception that `except Exception` does not catch."""


class Cancelled(BaseException):
    """Of its own."""


raise Cancelled("not now")
