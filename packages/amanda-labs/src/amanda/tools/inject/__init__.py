"""Error injection: bit flips, stuck values and noise in tensors, gradients and weights of any op.

faults = InjectTool(fault="bit_flip", type="conv2d", seed=7)
with amanda.apply(faults):
    model(x)
print(faults.result)

campaign = Campaign(InjectTool(type="conv2d"), trials=200, compare=top1_changed)
print(campaign.run(lambda: model(x)))
"""

from amanda.tools.inject._campaign import Campaign
from amanda.tools.inject._faults import (
    BitField,
    InjectError,
    Injection,
    InjectResult,
    Site,
    bits_of,
    from_bytes,
    to_bytes,
)
from amanda.tools.inject._outcomes import (
    CampaignResult,
    Compare,
    Outcome,
    Rate,
    Trial,
    differs,
    differs_by,
    top1_changed,
    wilson,
)
from amanda.tools.inject._tool import InjectTool, MemorySnapshot

__all__ = [
    "BitField", "Campaign", "CampaignResult", "Compare", "InjectError", "InjectResult", "InjectTool",
    "Injection", "MemorySnapshot", "Outcome", "Rate", "Site", "Trial", "bits_of", "differs", "differs_by",
    "from_bytes", "to_bytes", "top1_changed", "wilson",
]  # fmt: skip
