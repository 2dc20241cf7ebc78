"""Importing apps side by side, though each calls its modules `task` and `client_app`."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from flwr_moshpit.errors import ConfigError, TrainerError


class AppModules:
    """The modules of one app's folder.

    One app is active at a time: its folder is first on `sys.path` and its modules are in
    `sys.modules`. Another one that becomes active puts them aside, where their functions go on
    working, and its own in their place. Foreign modules with an app's names wait meanwhile.
    """

    _known: ClassVar[dict[Path, AppModules]] = {}
    _active: ClassVar[AppModules | None] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own: dict[str, ModuleType] = {}
        self._foreign: dict[str, ModuleType] = {}

    @classmethod
    def of(cls, path: Path) -> AppModules:
        """The one object for `path`, an absolute one: an app is imported once per process."""
        with cls._lock:
            return cls._known.setdefault(path, cls(path))

    def activate(self) -> None:
        """Make imports find this app's modules. Nothing happens if they already do."""
        if AppModules._active is self:
            return
        with self._lock:
            if AppModules._active is not None:
                AppModules._active._put_aside()
            names = self._top_level_names()
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] in names and not self._owns(module):
                    self._foreign[name] = sys.modules.pop(name)
            sys.modules.update(self._own)
            sys.path.insert(0, str(self._path))
            importlib.invalidate_caches()
            AppModules._active = self

    def load(self, ref: str) -> Any:
        """What "module:attribute" means in this app; the attribute may be dotted."""
        module_name, _, attribute = ref.partition(":")
        if not module_name or not attribute:
            raise ConfigError(f"{ref!r} must be written as module:attribute")
        self.activate()
        try:
            found: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise ConfigError(
                f"{module_name!r} of the app in {self._path} cannot be imported: {error}"
            ) from error
        except Exception as error:
            trace = traceback.format_exc().rstrip()
            raise TrainerError(
                f"importing {module_name!r} of the app in {self._path} raised "
                f"{type(error).__name__}: {error}\n{trace}"
            ) from error
        for name in attribute.split("."):
            if not hasattr(found, name):
                raise ConfigError(f"{ref!r}: there is no {name!r} in the app in {self._path}")
            found = getattr(found, name)
        return found

    def _put_aside(self) -> None:
        self._own = {name: module for name, module in sys.modules.items() if self._owns(module)}
        for name in self._own:
            del sys.modules[name]
        sys.modules.update(self._foreign)
        self._foreign = {}
        if str(self._path) in sys.path:
            sys.path.remove(str(self._path))

    def _owns(self, module: ModuleType) -> bool:
        # Looked up in its `__dict__`, because some modules answer to every attribute.
        own = getattr(module, "__dict__", {})
        places = [own.get("__file__"), *own.get("__path__", ())]
        inside = str(self._path) + os.sep
        return any(isinstance(place, str) and place.startswith(inside) for place in places)

    def _top_level_names(self) -> frozenset[str]:
        """The names that an import finds in the app's folder.

        Tests are left out: theirs are common names that no app imports, and pytest may have
        modules of these names in use.
        """
        modules = {file.stem for file in self._path.glob("*.py")}
        packages = {file.parent.name for file in self._path.glob("*/*.py")}
        names = modules | packages
        return frozenset(name for name in names if not name.startswith(("test", "conftest")))
