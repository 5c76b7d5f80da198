"""Backward passes of a loss that a GradScaler has scaled, whose steps it skips where gradients overflow."""

from __future__ import annotations

from amanda.tools.nan._result import Entered, Finding


class Scaled:
    """Findings that wait until the scaler has looked at the gradients.

    pending: where NaN or Inf began in the backward pass and a scale that is too large explains it.
    skipped: how many steps with such ops the scaler has skipped.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.pending: list[Finding | Entered] = []
        self.skipped = 0

    def takes(self, finding: Finding | Entered) -> bool:
        """Keep a finding back if an overflow explains it; return whether that was so.

        Where gradients are added up, opposite Infs become NaN between two ops.
        """
        if not self.is_open or finding.phase != "backward":
            return False
        overflow = (
            isinstance(finding, Entered)
            or not finding.makes_nan
            or any(one.inf for one in finding.inputs.values())
        )
        if overflow:
            self.pending.append(finding)
        return overflow

    def end(self, is_skipped: bool) -> list[Finding | Entered]:
        """Return what the overflow of a skipped step does not explain."""
        left, self.pending, self.is_open = self.pending, [], False
        if is_skipped and left:
            self.skipped += 1
        return [] if is_skipped else left
