"""R-FAST on any graph, in which everybody descends, at its own pace (arXiv 2307.11617, S1-S4).

    at each new gradient g'     z <- z + g' - g          (and what has come in since, at once)
                                rho_j <- rho_j + a_ji z  for each out-edge i -> j of A
                                z <- a_ii z
                                v <- x - rate z
                                x <- w_ii v + sum_j w_ij v_j, the newest v_j there is

Neighbours follow from the view, each edge of A by a lease:

    wanted out-edge   (none) --ask--> ASKING --Grant--> OPEN --unwanted, dead--> CLOSING --> (none)

Wanted is what the topology over this peer's own view says. Views that differ need no agreement: a
receiver admits whoever asks, and `leases.py` keeps both ends from counting at once. Until an edge
is open its share of the column stays at home, and the weight of a neighbour whose model has not
come goes to the peer's own: rows and columns always sum to 1. On cyclic graphs running sums are
large, and an edge that ends moves them back: x swings for a while when neighbours change.

On acyclic graphs a peer also relays, without descending, what comes between two gradients; on
cyclic ones only a peer that trains no more does, and each relay passes on at most as many times as
there are peers, since a push that goes round would go round for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import inf

import numpy as np

from flwr_moshpit.protocol.ledger import InEdge, OutEdge, usable
from flwr_moshpit.protocol.machine import (
    PeerId,
    Record,
    Report,
    State,
    Vector,
    View,
    ViewChanged,
    refused,
)
from flwr_moshpit.protocol.messages import Attach, Detached, Grant, Model, Push, Subtree
from flwr_moshpit.protocol.step_size import StepSize
from flwr_moshpit.protocol.topology import Topology
from flwr_moshpit.protocol.tracking import IDLE, RELAY, Core


class GraphTracking:
    """See the module. `plan` gives the topology over a view; its peers may be more than live."""

    def __init__(self, core: Core, plan: Callable[[View], Topology]) -> None:
        self._core = core
        self._plan = plan
        self._topology = plan(core.view)
        self._active = False
        self._rewire_due = inf
        self._relay_due = inf
        self._relayed_at = -inf
        self._budget = 0
        """How often what came since the last step may still be passed on."""
        self._models: dict[PeerId, tuple[tuple[int, int], Vector]] = {}
        self._fresh: dict[PeerId, None] = {}
        """Whose model has come since the last step."""
        self._freshness = 1.0
        """How many of the neighbours' models change between two own steps, smoothed."""
        self._steps = StepSize(core.config.learning_rate, self._topology.round_trip)

    @property
    def due(self) -> float:
        return min(self._rewire_due, self._relay_due)

    def start(self, now: float) -> None:
        self._active = True
        self._rewire(now)

    def stop(self) -> None:
        self._active = False
        leases = self._core.leases
        for child in list(self._core.ledger.ins):
            leases.drop(child, "leaving")
        for peer in list(leases.asks):
            leases.give_up(peer)
        for parent in list(self._core.ledger.outs):
            leases.close(parent)

    def step(self, now: float) -> None:
        core = self._core
        self._push(now, hops=len(core.view))
        sources = self._sources()
        if sources:
            share = sum(j in self._fresh for j in sources) / len(sources)
            self._freshness += (share - self._freshness) / 32
        self._fresh.clear()
        self._steps.observe(self._topology.round_trip / max(self._freshness, 0.01))
        z = core.ledger.z
        norm = math.sqrt(float(np.dot(z, z))) / core.weight
        halved = self._steps.watch(norm, len(core.view))
        size = len(self._topology.peers)
        rate = self._steps.rate / (size * self._topology.gain * core.weight)
        v = (core.x - rate * z).astype(core.x.dtype)
        if not usable(v, core.identity.dim, v.dtype):
            self._steps.scale /= 2
            halved, v = True, core.x
        if halved:
            reason = f"halved: the tracked gradient's norm grew to {norm:.3g}; lower learning-rate"
            core.emit(Report("step_size", {"step_size": rate, "reason": reason}))
        core.step += 1
        core.contributors = len(core.view)
        self._mix(v, now)

    def ready_at(self, began_at: float) -> float:
        core = self._core
        if self._fresh or len(core.view) == 1:
            return began_at
        # What is sent to a busy line replaces what waits there: running sums lose nothing by that.
        told = [*self._topology.listeners.get(core.identity.me, ()), *core.ledger.outs]
        if told and all(core.lines.is_busy(peer) for peer in told):
            return inf
        idle_s = IDLE * self._core.identity.lease_s
        # No longer than half of a step: where much is lost, half of all steps come without news.
        return began_at + min(idle_s, self._core.period_s / 2 or idle_s)

    def snapshot(self) -> State:
        return {"scale": self._steps.scale}

    def restore(self, state: State) -> None:
        self._steps.scale = float(state["scale"])

    def look_after(self, now: float) -> None:
        if self._relay_due <= now:
            self._relay_due = inf
            self._relay(now)
        if self._rewire_due <= now:
            self._rewire_due = inf
            self._rewire(now)

    def on_push(self, child: PeerId, held: InEdge, message: Push, now: float) -> None:
        self._pass_on(message.subtree.peers - 1, now)

    def on_dropped(self, now: float) -> None:
        self._pass_on(len(self._core.view), now)

    def _pass_on(self, hops: int, now: float) -> None:
        self._budget = max(self._budget, hops)
        if self._topology.acyclic or (not self._core.training and self._budget > 0):
            self._relay_soon(now)

    def on_model(self, src: PeerId, message: Model, now: float) -> bool:
        stamp = (message.incarnation, message.counter)
        known = self._models.get(src)
        if src not in self._sources() or (known is not None and stamp <= known[0]):
            return False
        self._models[src] = (stamp, message.v)
        self._fresh[src] = None
        if self._topology.acyclic:
            self._relay_soon(now)
        return True

    def on_view(self, event: ViewChanged, now: float) -> None:
        self._topology = self._plan(self._core.view)
        for peer in event.lost:
            self._models.pop(peer, None)
            if peer in self._core.leases.asks:
                self._core.leases.give_up(peer)
        self._rewire(now)

    def on_record(self, record: Record, now: float) -> None:
        pass

    def on_line_free(self, peer: PeerId, now: float) -> None:
        """What is new has been sent, and waits there."""

    def on_attach(self, child: PeerId, message: Attach, now: float) -> None:
        leases, identity = self._core.leases, self._core.identity
        if (message.dim, message.schema) != (identity.dim, identity.schema):
            self._core.emit(refused(child, "Attach", "schema"))
            leases.refuse(child, message.edge, "schema")
        elif not self._active:
            leases.refuse(child, message.edge, "leaving")
        else:
            leases.admit(child, message.edge, now)

    def on_grant(self, parent: PeerId, message: Grant, now: float) -> None:
        self._core.leases.open(parent, message, now)
        if self._topology.acyclic:
            self._relay_soon(now)

    def on_news(self, parent: PeerId, out: OutEdge, message: Grant, now: float) -> None:
        if message.have < out.counter and out.next_push_at <= now:
            # The last push may be lost, and nothing says when there will be another.
            out.next_push_at = now + RELAY * self._core.period_s
            self._core.send_push(parent, out, self._subtree(0))

    def on_behind(self, child: PeerId, held: InEdge, now: float) -> None:
        """Models travel along W, whose edges have no leases."""

    def on_refused(self, parent: PeerId, message: Detached, now: float) -> None:
        del self._core.leases.asks[parent]
        self._rewire_later(now)

    def on_no_answer(self, parent: PeerId, now: float) -> None:
        if parent in self._core.leases.asks:
            self._core.leases.give_up(parent)
        self._rewire_later(now)

    def on_released(self, parent: PeerId, message: Detached | None, now: float) -> None:
        self._rewire_later(now)

    def _sources(self) -> list[PeerId]:
        me, view = self._core.identity.me, self._core.view
        return [j for j, w in self._topology.pull[me].items() if w > 0 and j != me and j in view]

    def _push(self, now: float, hops: int) -> None:
        core = self._core
        column, outs = self._topology.push[core.identity.me], core.ledger.outs
        shares = {i: column[i] for i, out in outs.items() if not out.closing and i in column}
        core.ledger.push(shares)
        for parent in shares:
            outs[parent].next_push_at = now + RELAY * core.period_s
            core.send_push(parent, outs[parent], self._subtree(hops))

    def _mix(self, v: Vector, now: float) -> None:
        """Send v, and take the newest of the neighbours' into x."""
        core, me = self._core, self._core.identity.me
        row = self._topology.pull[me]
        others = {j: row[j] for j in self._sources() if j in self._models}
        own = 1 - sum(others.values())
        v.setflags(write=False)
        core.version += 1
        for peer in self._topology.listeners.get(me, ()):
            if peer in core.view:
                core.send_model(peer, None, core.version, v, core.period_s, self._steps.scale, now)
        x = core.x.dtype.type(own) * v
        for j, weight in others.items():
            x += core.x.dtype.type(weight) * self._models[j][1]
        x.setflags(write=False)
        core.x = x

    def _relay_soon(self, now: float) -> None:
        at = self._relayed_at + RELAY * self._core.period_s
        if at <= now:
            self._relay(now)
        else:
            self._relay_due = min(self._relay_due, at)

    def _relay(self, now: float) -> None:
        """Pass on what came, with the gradient that there is, and without a descent."""
        self._relayed_at = now
        budget, self._budget = self._budget, 0
        self._push(now, hops=budget)
        self._mix(self._core.x, now)

    def _subtree(self, hops: int) -> Subtree:
        core = self._core
        return Subtree(hops, int(core.weight > 0), core.weight, core.seen, core.period_s)

    def _rewire_later(self, now: float) -> None:
        self._rewire_due = min(self._rewire_due, now + self._core.identity.lease_s / 2)

    def _rewire(self, now: float) -> None:
        """Ask for the edges that are wanted and missing, close those that are not wanted."""
        if not self._active:
            return
        core, leases = self._core, self._core.leases
        me, view, outs = core.identity.me, core.view, core.ledger.outs
        wanted = [i for i, a in self._topology.push[me].items() if a > 0 and i != me and i in view]
        for parent in list(outs):
            if parent not in wanted:
                leases.close(parent)
        for parent in wanted:
            if parent not in outs and parent not in leases.asks:
                leases.ask(parent, core.step, insist=True, now=now)
