"""Implements a hook that there is not."""

import pluggy


class Hooks:
    @staticmethod
    @pluggy.HookimplMarker("amanda")
    def amanda_scope_entred() -> None:
        """Never called."""
