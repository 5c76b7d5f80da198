"""A profile and a timeline: how long each op takes, forward and backward, and what memory it makes.

profile = ProfileTool()
with amanda.apply(profile):
    model(x).sum().backward()
print(profile.result.by("module"))
profile.result.save("step.trace.json")
"""

from amanda.tools.profile._kernels import KernelResult
from amanda.tools.profile._memory import Peak
from amanda.tools.profile._modules import ModuleResult
from amanda.tools.profile._op import OpProfile
from amanda.tools.profile._result import ProfileResult
from amanda.tools.profile._tool import ProfileTool

__all__ = ["KernelResult", "ModuleResult", "OpProfile", "Peak", "ProfileResult", "ProfileTool"]
