"""Saved results as one page that needs no network: modules, graph, tables, differences.

flops.result.save("flops.json")
Path("flops.view.html").write_text(to_page("trace.json", "flops.json"))

On the command line: `python -m amanda view trace.json flops.json --open`.
"""

from amanda.tools.view._page import main, to_page

__all__ = ["main", "to_page"]
