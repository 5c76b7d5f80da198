"""Torch's own database of operators, with sample calls of each."""

from typing import Any


def op_db() -> list[Any]:
    """Every OpInfo.

    Their samples are made without looking, for each, through the stack for a test of torch's own: where many
    modules are loaded that takes a tenth of a second.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db as found
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        module.extract_test_fn = lambda: None
    return found  # type: ignore[no-any-return]
