"""Swarms in pytest; see `Swarm` and the `swarm` fixture of the plugin."""

from flwr_moshpit.testing.stages import LeaderOf, Trigger
from flwr_moshpit.testing.swarm import Rule, Swarm, SwarmHistory, SwarmStalled

__all__ = ["LeaderOf", "Rule", "Swarm", "SwarmHistory", "SwarmStalled", "Trigger"]
