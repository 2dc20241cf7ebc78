"""R-FAST: asynchronous gradient tracking with running sums, and its repair under churn.

Zhu, Tian, Huang, Xu, He, "R-FAST: Robust Fully-Asynchronous Stochastic Gradient Tracking over
General Topology", arXiv 2307.11617. Each peer goes at its own pace and never waits for another.
Models v spread along W, tracked gradients z gather along A as running sums rho, of which the newest
makes all older ones good. Whatever is lost, late, repeated or out of order, at every instant

    sum z + sum over edges (rho - rho_buf)  =  sum of the peers' newest gradients,

so that all peers agree, at rest, on the minimiser of the sum of their losses: neither unequal data
nor unequal speed biases it. `ledger.py` keeps the sums, `leases.py` the edges, `attachment.py` the
tree, `tree_tracking.py` and `graph_tracking.py` the algorithm, `step_size.py` the step size.

Departs from the paper:
- Peers come and go. A dead peer's edges are dropped at both ends, which takes its gradient out of
  the sum exactly; its children attach elsewhere; a dead root is replaced. The paper has none.
- Trees by default, on which only the root descends and everybody else relays.
- Local epochs (`local_steps` above 1) in a corrected form: y <- y - lr (grad(y) - g + h) with h the
  mean gradient at the root and g the peer's own, see `corrections.py`; what is tracked is the mean
  of the gradients met. A plain pseudo-gradient would converge to another point than the minimiser.
- Where training is much faster than the network, peers hold back: the root takes a few steps in the
  time in which a gradient comes back, the others one gradient at each of its models. More steps
  would only be smaller, by the rule for the step size.
- A peer that has done its jobs goes on relaying, with the last gradient that it took. A root in
  that state does not descend any more: the gradients of those who have finished would be stale.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from flwr_moshpit.config import RFast
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol import topology as topologies
from flwr_moshpit.protocol.gradient_jobs import GradientJobs
from flwr_moshpit.protocol.graph_tracking import GraphTracking
from flwr_moshpit.protocol.leases import Leases
from flwr_moshpit.protocol.ledger import CompensatedLedger, Ledger, SumLedger, usable
from flwr_moshpit.protocol.machine import (
    ComputeDone,
    ComputeFailed,
    Effect,
    Event,
    Learned,
    LineBusy,
    LineFree,
    LinkLost,
    PeerId,
    PeerInfo,
    Received,
    Report,
    Start,
    State,
    Stop,
    Vector,
    View,
    ViewChanged,
)
from flwr_moshpit.protocol.messages import (
    Attach,
    Detach,
    Detached,
    Grant,
    Model,
    Push,
    Renew,
    Subtree,
)
from flwr_moshpit.protocol.topology import Topology
from flwr_moshpit.protocol.tracking import Core, Identity, Tracking, nowhere, smoothed
from flwr_moshpit.protocol.tree_tracking import TreeTracking


class RFastPeer:
    """One peer of R-FAST.

        IDLE      before `Start`, and after its last job: serves its neighbours
        TRAINING  one job is out, always: the next one starts as soon as it is answered
        STOPPED   after `Stop`: has sent its children to its parent, and says nothing more

    Who its neighbours are is no part of this state: it trains whether it has any or not.
    """

    def __init__(
        self,
        config: RFast,
        me: PeerInfo,
        params: Vector,
        view: View,
        rng: np.random.Generator,
        incarnation: int = 0,
        schema: bytes = b"",
        state: State | None = None,
        topology: Topology | None = None,
    ) -> None:
        """params: (d,), the common initial model. topology: W and A of one's own, instead of
        `config.topology`; W and A may differ. Raises ConfigError if it is not sound."""
        x = np.array(params if state is None else state["params"], dtype=params.dtype)
        x.setflags(write=False)
        if x.ndim != 1 or x.dtype.char not in "fd":
            raise ConfigError(f"params must be a flat float32 or float64 vector, not {x.dtype}")
        self._info = replace(me, incarnation=incarnation)
        self._effects: list[Effect] = []
        identity = Identity(me.peer, incarnation, len(x), schema, config.lease_s)
        ledger = _ledger(config, topology, x)
        standing = nowhere()
        leases = Leases(incarnation, schema, config.lease_s, ledger, standing, self._effects.append)
        self._core = Core(
            config,
            identity,
            self._with_me(view),
            ledger,
            leases,
            standing,
            self._effects.append,
            x,
        )
        self._tracking = self._track(topology)
        self._due = math.inf
        done = 0
        if state is not None:
            done = int(state["round"])
            self._core.step = int(state["root_step"])
            self._tracking.restore(state["tracking"])
        self._jobs = GradientJobs(self._core, self._tracking, done)
        self._started = self._stopped = False

    def _track(self, topology: Topology | None) -> Tracking:
        config = self._core.config
        if topology is not None:
            topology.check()
            if config.local_steps > 1 or config.optimizer != "sgd":
                raise ConfigError(
                    "with a topology of its own R-FAST takes local-steps = 1 and optimizer = sgd"
                )
            if self._core.identity.me not in topology.push:
                raise ConfigError(f"peer {self._core.identity.me} is not in the topology")
            return GraphTracking(self._core, lambda view: topology)

        def plan(view: View) -> Topology:
            return topologies.by_name(config.topology, view, config.fan_out)

        kind = TreeTracking if config.is_tree else GraphTracking
        return kind(self._core, plan)

    @property
    def deadline(self) -> float | None:
        return None if self._due == math.inf or self._stopped else self._due

    @property
    def params(self) -> Vector:
        """(d,), x."""
        return self._core.x

    @property
    def weight(self) -> float:
        return self._core.weight or 1.0

    @property
    def round(self) -> int:
        """Training jobs done."""
        return self._jobs.round

    @property
    def tracked(self) -> Vector:
        """(d,), z."""
        return self._core.ledger.z

    @property
    def ledger(self) -> Ledger:
        return self._core.ledger

    @property
    def parent(self) -> PeerId | None:
        """On a tree, whom it pushes to."""
        return self._tracking.seat.parent if isinstance(self._tracking, TreeTracking) else None

    @property
    def is_root(self) -> bool:
        return not isinstance(self._tracking, TreeTracking) or self._tracking.seat.is_root

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self._stopped:
            return []
        if self._due <= now:
            # Before anything else: what has lapsed must not be used once more.
            self._look_after(now)
        if isinstance(event, Received):
            handler = _ON_MESSAGE.get(type(event.message))
            if handler is None:
                self._refuse(event.src, "unknown message", type(event.message).__name__)
            else:
                handler(self, event.src, event.message, now)
        else:
            self._on_event(event, now)
        if self._jobs.waits:
            self._jobs.go_on(now)
        self._due = min(self._core.leases.due, self._tracking.due, self._jobs.due)
        effects = self._effects[:]
        self._effects.clear()
        return effects

    def _on_event(self, event: Event, now: float) -> None:
        match event:
            case ComputeDone():
                self._jobs.on_done(event.job_id, event.result, now)
            case ViewChanged():
                self._on_view(event, now)
            case Learned():
                self._tracking.on_record(event.record, now)
            case LineBusy():
                self._core.lines.on_busy(event.peer, now)
            case LineFree():
                self._core.lines.on_free(event.peer, now)
                self._tracking.on_line_free(event.peer, now)
            case LinkLost():
                self._core.lines.forget(event.peer)
                self._tracking.on_line_free(event.peer, now)
                if event.peer in self._core.leases.asks:
                    self._tracking.on_no_answer(event.peer, now)
            case ComputeFailed():
                self._jobs.on_failed(event.job_id, event.error, now)
            case Start():
                if not self._started:
                    self._started = True
                    self._tracking.start(now)
                self._jobs.start(event, now)
            case Stop():
                self._jobs.stop()
                self._tracking.stop()
                self._stopped = True

    def snapshot(self) -> State:
        """Enough to go on as a new incarnation: its edges died with the old one. The sums on them
        are there to look at."""
        core = self._core
        state: State = {
            "incarnation": core.identity.incarnation,
            "round": self._jobs.round,
            "params": core.x,
            "root_step": core.step,
            "tracking": self._tracking.snapshot(),
            "rho": {p: out.rho for p, out in core.ledger.outs.items() if out.rho is not None},
            "rho_buf": {p: held.buf for p, held in core.ledger.ins.items() if held.buf is not None},
            "edges": {
                "root": core.standing.label.root,
                "parents": list(core.ledger.outs),
                "children": list(core.ledger.ins),
                "asked": list(core.leases.asks),
            },
        }
        if core.ledger.gradient is not None:
            state["gradient"] = core.ledger.gradient
        return state

    # Messages.

    def _on_push(self, src: PeerId, message: Push, now: float) -> None:
        core = self._core
        held = core.leases.held(src, message.edge)
        if held is None:
            return
        core.leases.confirm(held, message.echo_s, now)
        if message.counter <= held.counter:
            return
        if not usable(message.rho, core.identity.dim, core.x.dtype):
            self._refuse(src, "not a usable vector", "Push")
        elif not _sound(message.subtree, core.config.weight_max):
            self._refuse(src, "impossible weight", "Push")
        else:
            core.ledger.absorb(held, message.rho)
            held.gap = smoothed(held.gap, message.counter, held.counter)
            held.counter, held.subtree = message.counter, message.subtree
            self._tracking.on_push(src, held, message, now)

    def _on_model(self, src: PeerId, message: Model, now: float) -> None:
        core = self._core
        dim, dtype = core.identity.dim, core.x.dtype
        direction = message.direction
        if not usable(message.v, dim, dtype) or not (
            direction is None or usable(direction, dim, dtype)
        ):
            self._refuse(src, "not a usable vector", "Model")
        elif self._tracking.on_model(src, message, now):
            self._jobs.heard_a_model(now)

    def _on_attach(self, src: PeerId, message: Attach, now: float) -> None:
        self._tracking.on_attach(src, message, now)

    def _on_grant(self, src: PeerId, message: Grant, now: float) -> None:
        leases = self._core.leases
        ask = leases.asks.get(src)
        if ask is not None and ask.edge == message.edge:
            self._tracking.on_grant(src, message, now)
            return
        out = leases.on_grant(src, message, now)
        if out is not None:
            self._tracking.on_news(src, out, message, now)

    def _on_renew(self, src: PeerId, message: Renew, now: float) -> None:
        held = self._core.leases.on_renew(src, message, now)
        if held is not None and message.have < held.model_counter:
            self._tracking.on_behind(src, held, now)

    def _on_detach(self, src: PeerId, message: Detach, now: float) -> None:
        if self._core.leases.on_detach(src, message):
            self._tracking.on_dropped(now)

    def _on_detached(self, src: PeerId, message: Detached, now: float) -> None:
        leases = self._core.leases
        ask = leases.asks.get(src)
        if ask is not None and ask.edge == message.edge:
            self._tracking.on_refused(src, message, now)
        elif leases.on_detached(src, message):
            self._tracking.on_released(src, message, now)

    def _refuse(self, peer: PeerId, reason: str, what: str) -> None:
        self._jobs.refused += 1
        values = {"peer": peer, "reason": reason, "what": what, "count": self._jobs.refused}
        self._core.emit(Report("refused", values))

    # Who is there.

    def _on_view(self, event: ViewChanged, now: float) -> None:
        core = self._core
        core.view = view = self._with_me(event.view)
        leases, ledger = core.leases, core.ledger
        released: list[PeerId] = []
        for peer in event.lost:
            core.lines.forget(peer)
            info = view.peers.get(peer)
            held = ledger.ins.get(peer)
            if held is not None and (info is None or info.incarnation > held.edge.incarnation):
                leases.drop(peer, "lost")
                self._tracking.on_dropped(now)
            out = ledger.outs.get(peer)
            if out is not None:
                if info is None:
                    leases.close(peer)
                elif info.incarnation > out.incarnation:
                    # Another incarnation is there: the one that held our sum is dead for certain.
                    ledger.release_out(peer)
                    released.append(peer)
        self._tracking.on_view(event, now)
        for peer in released:
            self._tracking.on_released(peer, None, now)

    def _with_me(self, view: View) -> View:
        """A view in which others have given us up is no reason to give up ourselves."""
        if self._info.peer in view:
            return view
        return View(dict(sorted({**view.peers, self._info.peer: self._info}.items())))

    def _look_after(self, now: float) -> None:
        if self._core.leases.due <= now:
            lapsed = self._core.leases.look_after(now)
            if lapsed.children:
                self._tracking.on_dropped(now)
            for peer in lapsed.parents:
                self._tracking.on_released(peer, None, now)
            for peer in lapsed.asks:
                self._tracking.on_no_answer(peer, now)
        if self._tracking.due <= now:
            self._tracking.look_after(now)


_ON_MESSAGE: dict[type, Any] = {
    Push: RFastPeer._on_push,
    Model: RFastPeer._on_model,
    Attach: RFastPeer._on_attach,
    Grant: RFastPeer._on_grant,
    Renew: RFastPeer._on_renew,
    Detach: RFastPeer._on_detach,
    Detached: RFastPeer._on_detached,
}


def _ledger(config: RFast, topology: Topology | None, x: Vector) -> Ledger:
    acyclic = config.is_tree if topology is None else topology.acyclic
    return SumLedger(len(x), x.dtype) if acyclic else CompensatedLedger(len(x), x.dtype)


def _sound(subtree: Subtree, weight_max: float) -> bool:
    """Whether what a child says about its subtree is possible."""
    return (
        subtree.contributors >= 0
        and 0 <= subtree.weight <= weight_max * max(1, subtree.contributors)
        and 0 <= subtree.period_s < math.inf
    )
