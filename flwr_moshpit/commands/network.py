"""Arguments of the subcommands that run real peers. Imports of what they do wait for their turn."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXIT_INTERRUPTED = 130


def add_commands(commands: Any) -> None:
    """To `commands`, what `add_subparsers` returned."""
    _add_swarm(commands)


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, text: str
) -> Any:
    parser = commands.add_parser(
        name,
        help=help,
        description=text,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _add_training(add: Callable[..., Any]) -> None:
    add("--rounds", type=int, metavar="N", help="stop after N rounds")
    add("--algorithm", metavar="NAME", help="moshpit or rfast")
    add("--group-size", type=int, metavar="M", help="most peers that average together")
    add("--local-steps", type=int, metavar="N", help="optimizer steps between two rounds")
    add("--local-s", type=float, metavar="S", help="or seconds of training between two rounds")
    add("--delayed", action="store_true", help="go on training while a round is under way")
    add("--seed", type=int, metavar="N", help="of the initial model and the batches")
    add("--dtype", metavar="TYPE", help="float32 or float64")
    add("--config", type=Path, metavar="FILE.toml", help="settings, under their names above")


def _settings_of(given: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in given.items()}


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    given = dict(vars(arguments))
    del given["run"]
    return given


def _add_swarm(commands: Any) -> None:
    parser = _add(
        commands,
        "swarm",
        _swarm,
        "train an app's clients as processes of this machine",
        "Train an app's clients as processes of this machine that talk over gRPC and mutual TLS, "
        "each with a trainer in a process of its own. Settings come from where `simulate` takes "
        "them; results go where it puts them.",
    )
    add = parser.add_argument
    add("app", metavar="APP", help="a bundled app (watch, digits) or a path")
    add("--peers", type=int, metavar="N", help="number of clients (8)")
    _add_training(add)
    add("--out", type=Path, metavar="DIR", help="where results go (runs/DATE-N)")
    add("--quiet", action="store_true", help="no progress")


def _swarm(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.swarm import swarm

    given = _given(arguments)
    results = swarm(
        given.pop("app"),
        config=given.pop("config", None),
        out=given.pop("out", None),
        quiet=given.pop("quiet", False),
        flags=_settings_of(given),
    )
    return EXIT_INTERRUPTED if results.interrupted else 0
