"""A framework."""


def op(x: float) -> float:
    return x
