"""Profile and timeline: the time of each op, forward and backward, and the memory that it allocates.

print(profile(lambda: model(x).sum().backward()))

tool = ProfileTool()
with amanda.apply(tool):
    model(x).sum().backward()
tool.result.save("step.trace.json")
"""

from amanda.tools.profile._records import OpProfile, Peak
from amanda.tools.profile._result import KernelResult, ProfileResult
from amanda.tools.profile._tool import ProfileTool, profile

__all__ = ["KernelResult", "OpProfile", "Peak", "ProfileResult", "ProfileTool", "profile"]
