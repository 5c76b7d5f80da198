"""Generators whose every step runs in a context of its own, which their caller does not see."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

EnterContext = Callable[[], AbstractContextManager[Any]]


def stepping(enter: EnterContext, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
    """Return a generator function, each of whose steps runs in a context that `enter` makes."""

    @functools.wraps(function)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        resume: Callable[[Any], Any] = generator.send
        sent: Any = None
        while True:
            try:
                with enter():
                    value = resume(sent)
            except StopIteration as stop:
                return stop.value
            try:
                resume, sent = generator.send, (yield value)
            except GeneratorExit:
                with enter():
                    generator.close()
                raise
            except BaseException as error:
                resume, sent = generator.throw, error

    return generate


def stepping_async(
    enter: EnterContext, function: Callable[..., AsyncGenerator[Any, Any]]
) -> Callable[..., Any]:
    """Return an async generator function, each of whose steps runs in a context that `enter` makes."""

    @functools.wraps(function)
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        resume: Callable[[Any], Any] = generator.asend
        sent: Any = None
        while True:
            try:
                with enter():
                    value = await resume(sent)
            except StopAsyncIteration:
                return
            try:
                sent = yield value
                resume = generator.asend
            except GeneratorExit:
                with enter():
                    await generator.aclose()
                raise
            except BaseException as error:
                resume, sent = generator.athrow, error

    return generate
