"""Results that can also be drawn, as SVG, PNG and PDF."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.errors import AmandaError
from amanda.files import write_file
from amanda.tools.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PlottedResult"]

_STYLE: dict[Any, Any] = {
    # Text stays text, and ids are the same each time, so that files can be compared.
    "svg.fonttype": "none", "svg.hashsalt": "amanda", "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


class PlottedResult(Result):
    """A result that can also be saved as .svg, .png or .pdf; that needs matplotlib."""

    _size: ClassVar[tuple[float, float]] = (9, 4)

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Draw into axes of matplotlib."""

    def plot(self) -> Figure:
        """Return the plot as a matplotlib figure, without a window.

        Raises AmandaError where matplotlib is not installed.
        """
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise AmandaError('a picture needs matplotlib: pip install "amanda-tools[plots]"') from error
        with rc_context(_STYLE):
            # Without pyplot, which would keep the figure open and may need a display.
            figure = Figure(figsize=self._size, layout="constrained")
            self.draw(figure.add_subplot())
        return figure

    def to_svg(self) -> str:
        """Return the plot as SVG."""
        from matplotlib import rc_context

        figure, text = self.plot(), StringIO()
        with rc_context(_STYLE):
            figure.savefig(text, format="svg", metadata={"Date": None})
        return text.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write a file in the form that its suffix names, also .png and .pdf; return its path."""
        path = Path(path)
        if path.suffix not in (".png", ".pdf"):
            return super().save(path)
        picture = BytesIO()
        self.plot().savefig(picture, format=path.suffix[1:], dpi=150)
        return write_file(path, picture.getvalue())

    def _forms(self) -> dict[str, Callable[[], str]]:
        return {**super()._forms(), ".svg": self.to_svg}
