"""Steps of a run: when one begins, routines that run at some of them alone, and numbers of executions.

steps = Steps()
window = Window(steps, start=10, end=20)
"""

from amanda.tools.steps._steps import Steps, Window, WindowError, execution_number

__all__ = ["Steps", "Window", "WindowError", "execution_number"]
