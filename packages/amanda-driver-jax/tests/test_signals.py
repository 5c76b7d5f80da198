"""Signals that come while a program calls routines: the exceptions of their handlers are themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import amanda

pytestmark = pytest.mark.usefixtures("attached_driver")

X = jnp.eye(4) / 2


class Late(Exception):
    pass


@pytest.fixture
def handler() -> Iterator[Any]:
    def raise_late(*_: Any) -> None:
        raise Late("time is over")

    before = signal.signal(signal.SIGTERM, raise_late)
    yield raise_late
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("observing", [True, False])
def test_an_exception_of_a_handler_is_itself(handler: Any, observing: bool) -> None:
    calls = []

    def routine(*values: Any) -> None:
        calls.append(values)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_after_op(amanda.observer(routine) if observing else routine)
    )
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda i, x: jnp.tanh(x @ x), x))
    with amanda.apply(tool), pytest.raises(Late, match="time is over"):
        step(X)
    assert len(calls) == 3
    assert signal.getsignal(signal.SIGTERM) is handler
    assert step(X).shape == X.shape


def run_forever(step: Any) -> None:
    while True:
        step(X).block_until_ready()


@pytest.mark.slow
def test_an_exception_of_a_handler_is_itself_whenever_it_comes(handler: Any) -> None:
    before = signal.signal(signal.SIGALRM, handler)
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(amanda.observer(lambda *values: None)))
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda i, x: jnp.tanh(x @ x), x))
    try:
        with amanda.apply(tool):
            step(X)
            for i in range(40):
                signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.0003 * i)
                with pytest.raises(Late):
                    run_forever(step)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
