"""Options of tools and functions: annotations say which values are right; former names work and warn.

In: the annotations of a constructor or function, and the arguments of a call.  Out: the arguments, with
numbers of NumPy as Python's own, or an error that names option, value and what is right; words for pages.
Called by constructors of tools and public functions, at each call; the command line reads texts by it.

>>> import amanda
>>> from amanda.options import Share, checked
>>> class SampledTool(amanda.Tool):
...     @checked
...     def __init__(self, share: Share = 0.1) -> None: ...
>>> SampledTool(share=2)
Traceback (most recent call last):
amanda.errors.OptionError: SampledTool: share is 2; give a number from 0 to 1
"""

from amanda.options.checking import (
    REQUIRED,
    Option,
    checked,
    deprecated,
    mistake,
    options_of,
    renamed,
    warn_deprecated,
)
from amanda.options.kinds import Kind, Mismatch, kind_of, shown, words_of
from amanda.options.ranges import (
    AnyFloat,
    File,
    Folder,
    Length,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    NotEmpty,
    OutputFile,
    OutputFolder,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    Seed,
    Share,
    Where,
)

__all__ = [
    "REQUIRED", "AnyFloat", "File", "Folder", "Kind", "Length", "Mismatch", "Name", "NonNegativeFloat",
    "NonNegativeInt", "NotEmpty", "Option", "OutputFile", "OutputFolder", "PositiveFloat", "PositiveInt",
    "PositiveShare", "Range", "Seed", "Share", "Where", "checked", "deprecated", "kind_of", "mistake",
    "options_of", "renamed", "shown", "warn_deprecated", "words_of",
]  # fmt: skip
