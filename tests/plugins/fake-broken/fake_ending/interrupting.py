"""Raises what Ctrl-C raises."""

raise KeyboardInterrupt
