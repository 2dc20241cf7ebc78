"""The settings of one run, gathered from the app, a TOML file and the command line.

The app's `[tool.flwr.app.config]` gives the defaults, `--config FILE.toml` overrides it, flags
override both. A key belongs to the run (`RUN_KEYS`), to the algorithm (its fields in `config.py`)
or to the app (whatever else its own config holds); a key of nobody is refused. In the app's config
an empty text stands for a setting that is not made: Flower's `-c` overrides only keys that exist.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr_moshpit.config import ALGORITHMS, algorithm_from_config
from flwr_moshpit.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_FLEET = "jetson-orin-nano"
DEFAULT_PEERS = 10
DEFAULT_ROUNDS = 10
SEED_MAX = (1 << 63) - 1

RUN_KEYS: dict[str, tuple[type, ...]] = {
    "algorithm": (str,),
    "peers": (int,),
    "fleet": (str,),
    "catalogue": (str,),
    "rounds": (int,),
    "until": (str, int, float),
    "seed": (int,),
    "faults": (str, list),
    "workers": (int,),
    "cost-as": (str,),
    "dtype": (str,),
}

# Settings that say the same thing in two ways: one given later takes the place of the other.
_EXCLUSIVE = (("local-steps", "local-s"), ("rounds", "until"))

LEARNING_RATES = ("learning-rate", "lr")
"""The app's training has one, under either name, whatever algorithm runs it; R-FAST steps by it."""


FLOWERS_ROUNDS = "num-server-rounds"
"""Flower's usual key in an app's config, which stands for `rounds` where nobody sets an end."""
FLOWERS_FRACTIONS = ("fraction-train", "fraction-fit", "fraction-evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What `flwr-moshpit simulate` runs, checked."""

    algorithm: Any
    peers: int = DEFAULT_PEERS
    fleet: str = DEFAULT_FLEET
    catalogue: str | None = None
    """A TOML file with devices and links of the user's own."""
    rounds: int | None = None
    until: str | float | None = None
    """Virtual time, in seconds or as "3h"."""
    seed: int = 0
    faults: tuple[str, ...] = ()
    workers: int = 0
    cost_as: str | None = None
    dtype: str | None = None
    app: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """The app's own settings: its `context.run_config`."""

    remarks: tuple[str, ...] = ()
    """What became of Flower's usual keys in the app's config, a line each for people."""

    def __post_init__(self) -> None:
        if self.peers < 1:
            raise ConfigError(f"peers must be at least 1, not {self.peers}")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, not {self.rounds}")
        if self.workers < 0:
            raise ConfigError(f"workers must be 0 (in this process) or more, not {self.workers}")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, not {self.seed}")
        if self.seed > SEED_MAX:
            raise ConfigError(f"seed must be at most 2^63 - 1, not {self.seed}")


def read_toml(path: Path) -> dict[str, Any]:
    """The flat settings in a TOML file. Raises ConfigError if there is no such file or no TOML."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} is not TOML: {error}") from error
    for key, value in settings.items():
        if isinstance(value, dict):
            raise ConfigError(f"config {str(path)!r}: settings are flat, but {key!r} is a table")
    return settings


def gather(
    app: Mapping[str, Any], file: Mapping[str, Any], flags: Mapping[str, Any]
) -> RunSettings:
    """Merge the three sources, each with kebab-case keys, later ones over earlier ones.

    Raises ConfigError for a key that nobody knows and for a value that cannot be.
    """
    given: dict[str, Any] = {}
    of_any = {key for kind in ALGORITHMS for key in algorithm_keys(kind)}
    made = {k: v for k, v in app.items() if v != "" or not (k in RUN_KEYS or k in of_any)}
    for source in (made, file, flags):
        for pair in _EXCLUSIVE:
            if any(key in source for key in pair):
                for key in pair:
                    given.pop(key, None)
        given.update(source)

    name = _checked("algorithm", given.get("algorithm", "moshpit"))
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm {name!r} is unknown; there are: {', '.join(ALGORITHMS)}")
    asked = {**file, **flags}
    for key in file:
        if key not in RUN_KEYS and key not in of_any and key not in app:
            raise ConfigError(_unknown(key, [*RUN_KEYS, *algorithm_keys(name), *app]))

    # An app may hold settings of several algorithms; those of the others are left alone. Asked for
    # by the user, they are the algorithm's to refuse.
    of_this = algorithm_keys(name)
    of_app = [key for key in LEARNING_RATES if key in app]
    algorithm = {
        key: value
        for key, value in given.items()
        if key in of_any and (key in of_this or (key in asked and key not in of_app))
    }
    if "learning-rate" in of_this and "learning-rate" not in algorithm and of_app:
        algorithm["learning-rate"] = given[of_app[0]]
    run = {key: _checked(key, given[key]) for key in RUN_KEYS if key in given}
    remarks = []
    if "rounds" not in run and "until" not in run:
        run["rounds"] = DEFAULT_ROUNDS
        if type(given.get(FLOWERS_ROUNDS)) is int:
            run["rounds"] = given[FLOWERS_ROUNDS]
            remarks.append(f"rounds = {run['rounds']}, as the app's {FLOWERS_ROUNDS} says")
    fractions = [key for key in FLOWERS_FRACTIONS if given.get(key, "") not in ("", 1)]
    if fractions:
        remarks.append(f"not used here: {', '.join(fractions)} (all peers train in every round)")
    run["algorithm"] = algorithm_from_config(name, algorithm)
    faults = run.get("faults", ())
    run["faults"] = (faults,) if isinstance(faults, str) else tuple(faults)
    return RunSettings(
        **{key.replace("-", "_"): value for key, value in run.items()},
        app={key: given.get(key, value) for key, value in app.items()},
        remarks=tuple(remarks),
    )


def algorithm_keys(name: str) -> list[str]:
    """The kebab-case settings of the algorithm called `name`."""
    return [field.name.replace("_", "-") for field in dataclasses.fields(ALGORITHMS[name])]


def _checked(key: str, value: Any) -> Any:
    types = RUN_KEYS[key]
    items = value if isinstance(value, list) else [value]
    wrong_item = key == "faults" and not all(isinstance(item, str) for item in items)
    if type(value) not in types or wrong_item:
        wanted = " or ".join("list of str" if kind is list else kind.__name__ for kind in types)
        raise ConfigError(f"{key} must be of type {wanted}, not {value!r}")
    return value


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(set(known)))}"
    return f"setting {key!r} is unknown; {hint}"
