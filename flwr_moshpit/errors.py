"""Every exception that this package raises on purpose.

    MoshpitError
    ├── ConfigError              a wrong setting; the message names it and the cure
    ├── SchemaError              two models have other arrays; names the first that differs
    ├── TrainerError             the user's training code raised; names the client and the step
    ├── ProtocolError
    │   ├── LocalProtocolError   this program called a machine out of order: a bug of ours
    │   └── RemoteProtocolError  a peer sent something impossible: drop it, count it, go on
    └── TransportError           could not bind or serve (a lost peer is not an error)

A lost, slow or lying peer never raises out of a driver: it becomes a missing message, a deadline
or a `Report`.
"""

from __future__ import annotations


class MoshpitError(Exception):
    """Base of all errors raised on purpose by flwr-moshpit."""


class ConfigError(MoshpitError, ValueError):
    """A setting is wrong. The message names the setting, the value and what would be accepted."""


class SchemaError(MoshpitError, ValueError):
    """Two models do not have the same arrays. The message names the first one that differs."""


class TrainerError(MoshpitError, RuntimeError):
    """The user's training code raised. The message names the client and the step."""


class ProtocolError(MoshpitError):
    """A rule of a protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This program called a machine out of order: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something impossible: the message is dropped and counted."""


class TransportError(MoshpitError, OSError):
    """Could not bind or serve. A lost peer is not an error."""
