"""Profile and timeline: the time of each op, forward and backward, and the memory that it allocates.

profile = ProfileTool()
with amanda.apply(profile):
    model(x).sum().backward()
print(profile.result.by("module"))
profile.result.save("step.trace.json")
"""

from amanda.tools.profile._records import OpProfile, Peak
from amanda.tools.profile._result import KernelResult, ModuleResult, ProfileResult
from amanda.tools.profile._tool import ProfileTool

__all__ = ["KernelResult", "ModuleResult", "OpProfile", "Peak", "ProfileResult", "ProfileTool"]
