"""Flower apps in folders: found by path or by a bundled name, and read as Flower reads them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.modules import AppModules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from flwr_moshpit.flower.client import FlowerTrainer

RunConfig: TypeAlias = Mapping[str, bool | int | float | str]

TRAINER_KEYS = (
    "initial-model",
    "evaluate-fn",
    "exclude",
    "examples-per-step",
    "flops-per-example",
    "lr",
    "learning-rate",
)
"""Keys of the run config that `FlowerTrainer` reads; an app need not have them."""


@dataclass(frozen=True, slots=True)
class App:
    """What `pyproject.toml` says of a Flower app. Its code is imported when it is asked for."""

    name: str
    path: Path
    """The folder with `pyproject.toml`."""
    config: dict[str, bool | int | float | str]
    """`[tool.flwr.app.config]`, flat."""
    client_ref: str
    """The ClientApp, as "module:attribute"."""
    server_ref: str | None

    def load(self, ref: str) -> Any:
        """What "module:attribute" means in this app.

        Modules of the same name in two apps do not clash. Raises ConfigError if there is no such
        thing or an import fails, and TrainerError if the app's module raises.
        """
        return AppModules.of(self.path).load(ref)

    def activate(self) -> None:
        """Make imports find this app's modules, also those that its functions do later."""
        AppModules.of(self.path).activate()

    def trainer(
        self,
        run_config: RunConfig | None = None,
        *,
        exclude: Iterable[str] = (),
        node_config: RunConfig | None = None,
    ) -> FlowerTrainer:
        """A trainer of this app, with `run_config` over its own config; see `FlowerTrainer`."""
        try:
            from flwr_moshpit.flower.client import FlowerTrainer
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("flwr"):
                raise
            raise ConfigError(
                f"app {self.name!r} needs Flower: pip install 'flwr>=1.42', on Python 3.11 or newer"
            ) from error
        return FlowerTrainer(self, run_config, exclude=exclude, node_config=node_config)


def load_app(app: str | Path) -> App:
    """The app in the folder `app`, or the bundled app of that name (`watch`, `digits`).

    A folder wins over a name. Raises ConfigError if there is no such app or its `pyproject.toml`
    lacks what Flower needs.
    """
    path = Path(app)
    if (path / "pyproject.toml").is_file():
        return _read(path.resolve())
    bundled = _bundled()
    if str(app) in bundled:
        return _read(bundled[str(app)])
    if path.is_dir():
        raise ConfigError(f"app {str(app)!r} is a folder without a pyproject.toml")
    raise ConfigError(
        f"app {str(app)!r} does not exist: give the path of a Flower app's folder or one of "
        f"{', '.join(sorted(bundled))}"
    )


def app_folder(file: str) -> Path | None:
    """The nearest folder above a module's `file` with a `pyproject.toml`."""
    folders = Path(file).resolve().parents
    return next((folder for folder in folders if (folder / "pyproject.toml").is_file()), None)


def app_of(client_app: object) -> App | None:
    """The app in a folder whose `pyproject.toml` names this very ClientApp, if it was imported from
    there. Raises ConfigError where that file is no TOML."""
    for module in list(sys.modules.values()):
        # Looked up in its `__dict__`, because some modules answer to every attribute.
        own = getattr(module, "__dict__", {})
        if not any(value is client_app for value in list(own.values())):
            continue
        folder = app_folder(str(own.get("__file__")))
        # A test that imports the ClientApp may lie in a project that is no app.
        if folder is None or not _flower(_document(folder / "pyproject.toml")):
            continue
        app = _read(folder)
        name, _, attribute = app.client_ref.partition(":")
        if vars(sys.modules.get(name, sys)).get(attribute) is client_app:
            return app
    return None


def _bundled() -> dict[str, Path]:
    """The apps that come with this package, by name: from the wheel or from the checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "clients", package.parent / "clients"):
        found = {file.parent.name: file.parent for file in folder.glob("*/pyproject.toml")}
        if found:
            return found
    return {}


def _read(path: Path) -> App:
    file = path / "pyproject.toml"
    document = _document(file)
    flower = _flower(document)
    components = flower.get("components", {})
    if "clientapp" not in components:
        raise ConfigError(f"{file} is no Flower app: [tool.flwr.app.components] has no clientapp")
    return App(
        name=document.get("project", {}).get("name", path.name),
        path=path,
        config=_flat(flower.get("config", {})),
        client_ref=components["clientapp"],
        server_ref=components.get("serverapp"),
    )


def _document(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def _flower(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """`[tool.flwr.app]`, empty where there is none."""
    flower: Mapping[str, Any] = document.get("tool", {}).get("flwr", {}).get("app", {})
    return flower


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys, as Flower flattens them."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
