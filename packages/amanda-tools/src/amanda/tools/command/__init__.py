"""`amanda run`: an unmodified program under tools.

amanda run -t flops -t "nan:stop,module=encoder" -- train.py --epochs 1
"""

from amanda.tools.command._merge import merge
from amanda.tools.command._options import Option, options_of
from amanda.tools.command._run import run
from amanda.tools.command._spec import SpecError, Tooling, ToolSpec

__all__ = ["Option", "SpecError", "ToolSpec", "Tooling", "merge", "options_of", "run"]
