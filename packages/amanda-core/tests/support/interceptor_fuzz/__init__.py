"""Harnesses that look for crashes, leaks and differences in the native interceptor.

They use its Python face alone. `kinds` has the callables, `programs` turns bytes into programs that
call them in and out of scopes, `allocation` makes allocations fail, `surroundings` has what a process
lives with; `python -m interceptor_fuzz` runs them until the time is up.
"""
