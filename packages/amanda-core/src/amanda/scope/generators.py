"""Generators whose every step runs in a context of its own, which their caller does not see."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

Entered = Callable[[], AbstractContextManager[Any]]


def stepping(entered: Entered, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
    """Return a generator function, each of whose steps runs in a context that `entered` makes."""

    @functools.wraps(function)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        resume: Callable[[Any], Any] = generator.send
        given: Any = None
        while True:
            try:
                with entered():
                    value = resume(given)
            except StopIteration as stop:
                return stop.value
            try:
                resume, given = generator.send, (yield value)
            except GeneratorExit:
                with entered():
                    generator.close()
                raise
            except BaseException as error:
                resume, given = generator.throw, error

    return generate


def stepping_async(entered: Entered, function: Callable[..., AsyncGenerator[Any, Any]]) -> Callable[..., Any]:
    """Return an async generator function, each of whose steps runs in a context that `entered` makes."""

    @functools.wraps(function)
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        resume: Callable[[Any], Any] = generator.asend
        given: Any = None
        while True:
            try:
                with entered():
                    value = await resume(given)
            except StopAsyncIteration:
                return
            try:
                given = yield value
                resume = generator.asend
            except GeneratorExit:
                with entered():
                    await generator.aclose()
                raise
            except BaseException as error:
                resume, given = generator.athrow, error

    return generate
