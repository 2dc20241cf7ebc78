"""Arguments of the subcommands that run real peers. Imports of what they do wait for their turn."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def add_commands(commands: Any) -> None:
    """To `commands`, what `add_subparsers` returned."""
    _add_swarm(commands)
    _add_demo(commands)
    _add_ca(commands)
    _add_peer(commands)
    _add_status(commands)
    _add_stop(commands)
    _add_replay(commands)


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
    add(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="more settings, a line each, as patience = 0.5",
    )


def _settings_of(given: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in given.items()}


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    # gRPC reads it when it is imported. It tells of every broken connection; so do our reports.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
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


def _add_demo(commands: Any) -> None:
    parser = _add(
        commands,
        "demo",
        _demo,
        "real processes train while the ones they lean on are killed",
        "Eight processes train `watch` over gRPC and mutual TLS on this machine; a reducer, a "
        "leader and the contact are killed. Takes about two minutes.",
    )
    add = parser.add_argument
    add("--seconds", type=float, metavar="S", help="of training (100)")
    add("--out", type=Path, metavar="DIR", help="keep events, summary and model there")
    add("--record", type=Path, metavar="FILE.svg", help="draw what is printed")


CA_EXAMPLES = """\
  flwr-moshpit ca our-swarm --swarm home                 makes the authority
  flwr-moshpit ca our-swarm --invite anna ben \\
      --contact anna=192.168.1.20:9100                   invites two peers"""


def _authority_folder(text: str) -> Path:
    if text in ("init", "create", "invite"):
        raise argparse.ArgumentTypeError(
            f"`ca` has no subcommand {text!r}: `flwr-moshpit ca DIR --swarm NAME` makes an "
            "authority in the folder DIR, `flwr-moshpit ca DIR --invite PEER` invites to its swarm "
            f"(write ./{text} for a folder of that name)"
        )
    return Path(text)


def _add_ca(commands: Any) -> None:
    parser = _add(
        commands,
        "ca",
        _ca,
        "make a swarm's authority, and invitations for its peers",
        "Make the authority of a swarm in the folder DIR, if it is not there, and an invitation\n"
        "for each peer that is named. Whoever holds an invitation is that peer.\n\n" + CA_EXAMPLES,
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("folder", metavar="DIR", type=_authority_folder, help="of the authority; made if not there")
    add("--swarm", metavar="NAME", help="the swarm's name, for a new authority")
    add("--invite", metavar="PEER", nargs="+", help="make invitations for these peers")
    add("--contact", action="append", metavar="PEER=HOST:PORT", help="whom they call first; repeat")
    add("--days", type=float, metavar="N", help="how long invitations are valid (365)")


def _add_peer(commands: Any) -> None:
    parser = _add(
        commands,
        "peer",
        _peer,
        "run one peer of a swarm on this device",
        "Run one peer of a swarm on this device. Without Flower a TorchTrainer of the app's "
        "task.py trains.",
    )
    add = parser.add_argument
    add("--invitation", metavar="FILE", type=Path, required=True, help="as made by `ca`")
    add("--app", metavar="APP", required=True, help="a bundled app (watch, digits) or a path")
    add("--client", type=int, metavar="K", required=True, help="whose data: 0 to N - 1")
    add("--peers", type=int, metavar="N", required=True, help="among how many data are divided")
    add("--bind", metavar="HOST:PORT", help="where to listen; port 0 for a free one")
    add("--advertise", metavar="HOST:PORT", help="where others reach it, if that is elsewhere")
    add(
        "--relayed",
        action="store_true",
        help="nobody can dial this device (NAT): be reached through another peer",
    )
    add("--contact", action="append", metavar="PEER=HOST:PORT", help="whom to call first; repeat")
    add("--gather", type=int, metavar="N", help="begin when N peers are there, or after 30 s (2)")
    _add_training(add)
    add("--profile", type=Path, metavar="FILE", help="of this device, by `probe`: settings follow")
    add("--state", type=Path, metavar="DIR", help="checkpoints, to go on from after a restart")
    add("--trace", type=Path, metavar="FILE", help="record all, for `replay`")
    add("--out", type=Path, metavar="DIR", help="write events.jsonl and the model there")


def _add_who(add: Callable[..., Any]) -> None:
    add("--invitation", metavar="FILE", type=Path, help="of any peer of the swarm")
    add("--authority", metavar="DIR", type=Path, help="or the authority's folder")


def _add_status(commands: Any) -> None:
    parser = _add(
        commands,
        "status",
        _status,
        "ask a peer whom it is with, and whom it waits for",
        "Ask the peer at HOST:PORT whom it is with, whom it waits for, for what and since when.",
    )
    parser.add_argument("address", metavar="HOST:PORT")
    _add_who(parser.add_argument)


def _add_stop(commands: Any) -> None:
    parser = _add(
        commands,
        "stop",
        _stop,
        "stop a swarm",
        "Tell the peer at HOST:PORT that the swarm stops, signed by its authority; it tells all.",
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument(
        "--authority", metavar="DIR", type=Path, required=True, help="the authority's folder"
    )


def _add_replay(commands: Any) -> None:
    parser = _add(
        commands,
        "replay",
        _replay,
        "tell a machine again what it was told in the field",
        "Replay a trace that `peer --trace` has written and compare every effect, bit for bit.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)


def _demo(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.demo import DURATION_S, demo

    given = _given(arguments)
    results = demo(
        duration_s=given.get("seconds", DURATION_S),
        out=given.get("out"),
        record=given.get("record"),
    )
    return EXIT_INTERRUPTED if results.interrupted else 0


def _ca(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.ca import ca

    given = _given(arguments)
    ca(given.pop("folder"), contacts=given.pop("contact", ()), **given)
    return 0


def _peer(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.peer import Place, peer

    given = _given(arguments)
    names = {
        "bind": "bind",
        "advertise": "advertised",
        "relayed": "relayed",
        "contact": "contacts",
        "state": "state",
        "trace": "trace",
        "out": "out",
    }
    place = Place(**{ours: given.pop(key) for key, ours in names.items() if key in given})
    interrupted = peer(
        given.pop("app"),
        given.pop("invitation"),
        given.pop("client"),
        place=place,
        config=given.pop("config", None),
        gather_peers=given.pop("gather", 2),
        profile=given.pop("profile", None),
        flags=_settings_of(given),
    )
    return EXIT_INTERRUPTED if interrupted else 0


def _status(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.status import status

    status(**_given(arguments))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.status import stop

    stop(**_given(arguments))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.replay import replay

    return 0 if replay(arguments.file) else EXIT_FAILED


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
