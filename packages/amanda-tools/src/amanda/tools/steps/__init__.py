"""Steps of a run: when one begins, and routines that run at some of them alone.

steps = Steps()
window = Window(steps, start=10, end=20)
"""

from amanda.tools.steps._steps import Steps
from amanda.tools.steps._window import Window, WindowError

__all__ = ["Steps", "Window", "WindowError"]
