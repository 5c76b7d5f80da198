"""Tools written into files: a model is read, its ops are analysed, and routines become part of it.

In: a path, whose suffix names the `Artefact` of a driver, and tools.  Out: a new file, whole or not at all,
and an `Instrumented` that says what was inlined and what could not be.
Called by `amanda.instrument`.
"""
