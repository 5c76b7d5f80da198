"""Magics of IPython and Jupyter: `%load_ext amanda`, then `%%amanda flops` above a cell."""

from amanda.tools.notebook._magics import load_ipython_extension

__all__ = ["load_ipython_extension"]
