"""Results with a picture."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.errors import AmandaError
from amanda.files import write_file
from amanda.tools.results._result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "amanda", "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


class PlottedResult(Result):
    """A result that can also be saved as .svg, .png or .pdf; that needs matplotlib."""

    size: ClassVar[tuple[float, float]] = (9, 4)

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Draw into axes of matplotlib."""

    def plot(self) -> Figure:
        """The picture as a figure of its own, which no window shows.

        Raises AmandaError where matplotlib is not installed.
        """
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise AmandaError('a picture needs matplotlib: pip install "amanda-tools[plots]"') from error
        with rc_context(_STYLE):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure.add_subplot())
        return figure

    def to_svg(self) -> str:
        """The picture as SVG."""
        from matplotlib import rc_context

        figure, text = self.plot(), StringIO()
        with rc_context(_STYLE):
            figure.savefig(text, format="svg", metadata={"Date": None})
        return text.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write a file in the form that its suffix names, also .png and .pdf."""
        path = Path(path)
        if path.suffix not in (".png", ".pdf"):
            return super().save(path)
        picture = BytesIO()
        self.plot().savefig(picture, format=path.suffix[1:], dpi=150)
        return write_file(path, picture.getvalue())

    def _forms(self) -> dict[str, Callable[[], str]]:
        return {**super()._forms(), ".svg": self.to_svg}
