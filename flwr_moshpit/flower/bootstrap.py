"""`bootstrap_app()`: the ServerApp of a serverless app, built from its run config."""

from __future__ import annotations

import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_moshpit.errors import ConfigError, MoshpitError
from flwr_moshpit.flower.app import App, app_folder, load_app
from flwr_moshpit.flower.compat import is_simulated, log


class BootstrapApp(ServerApp):
    """What `bootstrap_app` makes. It sends no model of its own at first."""


def bootstrap_app(app: str | Path | None = None) -> BootstrapApp:
    """A ServerApp that lets the clients train among themselves, and looks on.

    In Flower's simulation it hosts virtual devices and networks, whose clients' training is done by
    Flower's actors; on SuperNodes it brings their peers together. The settings are those of the
    app's `[tool.flwr.app.config]`; the README lists them.

    Parameters
    ----------
    app : str or Path, optional
        The app's folder; by default the nearest one above the calling module with a
        `pyproject.toml`.
    """
    folder = Path(app) if app is not None else _folder_of(sys._getframe(1).f_globals)
    server_app = BootstrapApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        found = load_app(folder)
        try:
            _run(found, grid, context)
        except MoshpitError as error:
            log().error("%s", error)
            raise

    return server_app


def _run(app: App, grid: Grid, context: Context) -> None:
    if is_simulated(grid):
        from flwr_moshpit.flower.simulation import simulate_on_grid

        simulate_on_grid(app, grid, context.run_config)
        return
    from flwr_moshpit.flower.deployment import train_on_supernodes

    train_on_supernodes(app, grid, context.run_config)


def _folder_of(module: dict[str, object]) -> Path:
    file = module.get("__file__")
    folder = app_folder(file) if isinstance(file, str) else None
    if folder is not None:
        return folder
    raise ConfigError(
        "bootstrap_app() is called from no Flower app: give it the folder with its pyproject.toml"
    )
