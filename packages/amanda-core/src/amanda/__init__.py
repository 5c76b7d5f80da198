"""Amanda: operator-level instrumentation of neural networks."""

# Other distributions have packages below `amanda` in folders of their own, also in an editable installation.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)

import importlib
import pkgutil

from amanda._api import *  # noqa: F403
from amanda._api import AmandaError
from amanda._api import __all__ as __all__
from amanda.errors import did_you_mean
from amanda.plugins.entries import extra_command, install_command


def _import_submodules_lazily(package: str) -> None:
    """Import modules of a package when they are read, so that `amanda.tools.mapping` needs no import.

    Does nothing if no distribution with the package is installed.
    """
    try:
        namespace_package = importlib.import_module(package)
    except ModuleNotFoundError:
        return

    def import_submodule(name: str) -> object:
        """Return a module of the package; raise AttributeError, with the fix, where it is not installed."""
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            # Something that the module itself imports is missing: that error says more.
            if error.name != f"{package}.{name}":
                raise
            modules = pkgutil.iter_modules(namespace_package.__path__)
            public_names = [module.name for module in modules if module.name[0] != "_"]
            command = install_command(name, "packages") if package == "amanda.tools" else None
            hint = command or did_you_mean(name, public_names)
            raise AttributeError(f"no distribution that is installed has {package}.{name}; {hint}") from None

    # On the namespace package, since no distribution may ship an `__init__` for it.
    namespace_package.__getattr__ = import_submodule  # type: ignore[method-assign]


def load_ipython_extension(shell: object) -> None:
    """Add the magic `%%amanda` to IPython, for `%load_ext amanda`; AmandaError without amanda-tools."""
    try:
        notebook = importlib.import_module("amanda.tools.notebook")
    except ModuleNotFoundError as error:
        if error.name not in ("amanda.tools", "amanda.tools.notebook"):
            raise
        raise AmandaError(f"%load_ext amanda needs amanda-tools: {extra_command('tools')}") from None
    notebook.load_ipython_extension(shell)


_import_submodules_lazily("amanda.tools")
_import_submodules_lazily("amanda.drivers")
