"""The `flwr-moshpit` command: parses arguments, runs a subcommand, turns errors into exit codes.

0 done; 1 the run failed (the training code raised, a bound fell short); 2 a wrong setting, told in
one line; 130 interrupted, with everything so far written.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flwr_moshpit import __version__
from flwr_moshpit.commands.network import add_commands as add_network_commands
from flwr_moshpit.config import ALGORITHMS
from flwr_moshpit.errors import ConfigError, MoshpitError, SchemaError, TrainerError
from flwr_moshpit.settings import LEARNING_RATES, algorithm_keys

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

CONFIG_EXAMPLE = """\
FILE.toml holds any setting, also those without a flag, a line each:
  compression = "int8"
  faults = ["crash 20% per hour", "slow 10x peer=3"]"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse prints its usage too."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`){_hint(message)}")


def _hint(message: str) -> str:
    """Where a setting belongs that was given as a flag."""
    flag = re.match(r"unrecognized arguments: --([a-z0-9-]+)", message)
    known = {*LEARNING_RATES, *(key for name in ALGORITHMS for key in algorithm_keys(name))}
    if flag is None or flag[1] not in known:
        return ""
    return (
        f": {flag[1]} has no flag of its own here; write a line `{flag[1]} = ...` into a file for "
        "--config FILE.toml or into the app's [tool.flwr.app.config]"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `flwr-moshpit` with `argv`, by default the process's, and return the exit code."""
    _open_streams()
    try:
        parser = _parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        arguments = parser.parse_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, SchemaError) as error:
        return _say(error, EXIT_USAGE)
    except MoshpitError as error:
        return _say(_with_traceback(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader, such as `head`, has what it wants; the interpreter must not flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _open_streams() -> None:
    """A process that was started with its output closed says what it says to nobody."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It stays open as long as the process runs.
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def _say(what: object, code: int) -> int:
    sys.stderr.write(f"flwr-moshpit: {what}\n")
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Without the place in our code where it was raised: a warning is for the app's user."""
    sys.stderr.write(f"flwr-moshpit: warning: {message}\n")


def _with_traceback(error: MoshpitError) -> str:
    """The message and, where the user's code raised, its traceback, which may be in it already."""
    text = str(error)
    is_told = error.__cause__ is None or "Traceback (most recent call last)" in text
    if is_told or not isinstance(error, TrainerError):
        return text
    return f"{text}\n{''.join(traceback.format_exception(error.__cause__)).rstrip()}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flwr-moshpit",
        description="Serverless federated learning: clients average among themselves.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_simulate(commands)
    _add_compare(commands)
    _add_devices(commands)
    _add_probe(commands)
    _add_doctor(commands)
    add_network_commands(commands)
    _add_bench(commands)
    return parser


def _add_simulate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "simulate",
        help="train an app's clients in virtual time",
        description=(
            "Train an app's clients, each on a virtual device, in virtual time. Defaults come\n"
            "from the app's [tool.flwr.app.config], then from --config, then from the flags."
        ),
        epilog=CONFIG_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("app", metavar="APP", help="a bundled app (watch, digits) or a path")
    add = parser.add_argument
    add("--peers", type=int, metavar="N", help="number of clients")
    add("--fleet", metavar="MIX", help="devices, as jetson-nano:0.6,cloud-t4:0.4")
    add("--catalogue", metavar="FILE", help="a TOML file with devices and links of your own")
    add("--rounds", type=int, metavar="N", help="stop after N rounds")
    add("--until", metavar="TIME", help="stop at this virtual time: seconds, or as 90m, 3h")
    add("--algorithm", metavar="NAME", help=f"one of {', '.join(ALGORITHMS)}")
    add("--group-size", type=int, metavar="M", help="most peers that average together")
    add("--local-steps", type=int, metavar="N", help="optimizer steps between two rounds")
    add("--local-s", type=float, metavar="S", help="or seconds of training between two rounds")
    add("--delayed", action="store_true", help="go on training while a round is under way")
    add("--seed", type=int, metavar="N", help="the one seed: same seed, same digest")
    add("--faults", action="append", metavar="FAULT", help='such as "crash 20%% per hour"; repeat')
    add("--cost-as", metavar="MODEL", help="clock and links as for resnet50, albert-large or FILE")
    add("--workers", type=int, metavar="N", help="training processes; 0 trains in this one")
    add("--dtype", metavar="TYPE", help="float32 or float64")
    add("--config", type=Path, metavar="FILE.toml", help="more settings, a line each")
    add("--out", type=Path, metavar="DIR", help="where results go (runs/DATE-N)")
    add("--explain", action="store_true", help="first print what was chosen, and why")
    add("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=_simulate)


def _add_compare(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="several algorithms on one app, under the same conditions",
        description="Train an app's clients under several algorithms, with the same data, fleet, "
        "seeds and faults. All runs end at the same virtual time (--until) or after the same "
        "number of local steps per peer (--rounds times the local steps of a round). Settings come "
        "from where `simulate` takes them; each algorithm takes those that it has.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("app", metavar="APP", help="a bundled app (watch, digits) or a path")
    add = parser.add_argument
    add("--algorithms", metavar="A,B", help="names; times are put in relation to the first's")
    add("--peers", type=int, metavar="N", help="number of clients")
    add("--fleet", metavar="MIX", help="devices, as jetson-nano:0.6,cloud-t4:0.4")
    add("--catalogue", metavar="FILE", help="a TOML file with devices and links of your own")
    add("--rounds", type=int, metavar="N", help="so many rounds' local steps per peer")
    add("--until", metavar="TIME", help="stop at this virtual time: seconds, or as 90m, 3h")
    add("--group-size", type=int, metavar="M", help="most peers that average together")
    add("--local-steps", type=int, metavar="N", help="optimizer steps between two rounds")
    add("--seeds", metavar="N", help="how many, from --seed on, or a list as 3,7,9 (3)")
    add("--seed", type=int, metavar="N", help="the first seed")
    add("--faults", action="append", metavar="FAULT", help='such as "slow 10x peer=3"; repeat')
    add("--cost-as", metavar="MODEL", help="clock and links as for resnet50, albert-large or FILE")
    add("--target", type=float, metavar="X", help="accuracy (or loss) to reach; else derived")
    add("--tune", type=int, metavar="N", help="learning rates that each algorithm may try first")
    add("--workers", type=int, metavar="N", help="runs at once, each in a process; 0: here")
    add("--dtype", metavar="TYPE", help="float32 or float64")
    add("--config", type=Path, metavar="FILE.toml", help="more settings, a line each")
    add("--out", type=Path, metavar="DIR", help="where results go (runs/DATE-N)")
    add("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=_compare)


def _add_devices(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "devices", help="list the devices that a fleet can be made of", allow_abbrev=False
    )
    parser.add_argument("--sources", action="store_true", help="each figure with its source")
    parser.add_argument("--catalogue", metavar="FILE", help="with those of this TOML file")
    parser.set_defaults(run=_devices)


def _add_probe(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "probe",
        help="measure this device, and write its profile",
        description="Measure how fast this device computes, trains and copies, and write a "
        "profile that `simulate --catalogue` takes.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--name", metavar="NAME", help="of the device (this host's)")
    add("--out", type=Path, metavar="FILE", help="where the profile goes (NAME.toml)")
    add("--link", metavar="LINK", help="of the catalogue, where none is measured (fixed-us)")
    add("--to", metavar="HOST:PORT", help="another device that waits: the line to it is measured")
    add("--wait", metavar="HOST:PORT", help="measure nothing, but be that other device")
    add("--power-w", type=float, metavar="W", help="while it trains, where no tool tells")
    add("--idle-w", type=float, metavar="W", help="while it does not")
    parser.set_defaults(run=_probe)


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "doctor", help="what is missing on this device, and the cure", allow_abbrev=False
    )
    parser.add_argument(
        "--bind", default="0.0.0.0:0", metavar="HOST:PORT", help="to be listened on"
    )
    parser.set_defaults(run=_doctor)


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "bench", help="measure this program against its bounds", allow_abbrev=False
    )
    benches = parser.add_subparsers(metavar="WHAT", required=True)
    engine = benches.add_parser("engine", help="the simulation engine", allow_abbrev=False)
    engine.set_defaults(run=_bench_engine)
    allreduce = benches.add_parser(
        "allreduce",
        help="an average of real peers",
        description="Eight real peers average over gRPC and mutual TLS on this machine, in turns "
        "with bare gRPC and plain sockets. Takes a few minutes; wants two idle processors.",
        allow_abbrev=False,
    )
    allreduce.set_defaults(run=_bench_allreduce)
    kill = benches.add_parser(
        "kill",
        help="deaths of real peers",
        description="Eight real peers average on this machine and are killed with SIGKILL at each "
        "stage of a round; then many rounds without deaths, and with deaths and restarts.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    kill.add_argument("--rounds", type=int, metavar="N", help="rounds without deaths (1000)")
    kill.add_argument("--churn-rounds", type=int, metavar="N", help="rounds with deaths (500)")
    kill.set_defaults(run=_bench_kill)


# Subcommands are imported when they run: `--help` should not wait for a framework to load.


def _simulate(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.simulate import simulate

    given = dict(vars(arguments))
    del given["run"]
    ours = {key: given.pop(key, None) for key in ("app", "config", "out", "explain", "quiet")}
    history = simulate(
        ours["app"],
        flags={key.replace("_", "-"): value for key, value in given.items()},
        config=ours["config"],
        out=ours["out"],
        explain=bool(ours["explain"]),
        quiet=bool(ours["quiet"]),
    )
    return EXIT_INTERRUPTED if history.interrupted else 0


def _compare(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.compare import DEFAULT_ALGORITHMS, DEFAULT_SEEDS, compare_app

    given = dict(vars(arguments))
    del given["run"]
    comparison = compare_app(
        given.pop("app"),
        algorithms=given.pop("algorithms", DEFAULT_ALGORITHMS),
        seeds=given.pop("seeds", DEFAULT_SEEDS),
        target=given.pop("target", None),
        tries=given.pop("tune", 1),
        config=given.pop("config", None),
        out=given.pop("out", None),
        quiet=given.pop("quiet", False),
        flags={key.replace("_", "-"): value for key, value in given.items()},
    )
    return EXIT_INTERRUPTED if comparison.interrupted else 0


def _probe(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.probe import probe, wait

    given = dict(vars(arguments))
    del given["run"]
    if "wait" in given:
        wait(given["wait"])
    else:
        probe(**given)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.doctor import doctor

    return 0 if doctor(bind=arguments.bind) else EXIT_FAILED


def _devices(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.commands.devices import devices

    devices(sources=arguments.sources, catalogue=arguments.catalogue)
    return 0


def _bench_engine(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.bench.engine import bench

    return 0 if bench() else EXIT_FAILED


def _bench_allreduce(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.bench.allreduce import bench

    return 0 if bench() else EXIT_FAILED


def _bench_kill(arguments: argparse.Namespace) -> int:
    from flwr_moshpit.bench.kill import bench

    given = dict(vars(arguments))
    del given["run"]
    for key, value in given.items():
        if value < 1:
            raise ConfigError(f"{key.replace('_', '-')} must be at least 1, not {value}")
    return 0 if bench(**given) else EXIT_FAILED
