"""R-FAST on a tree: models go down it, gradients come up, only the root descends.

With w_ii = a_ii = 0 off the root the algorithm (arXiv 2307.11617, steps S1-S4) is, at each peer:

    root        z = g + sum rho_buf        x <- x - rate * direction(z / weight)        sends v = x
    others      rho = g + sum rho_buf      x <- v of the parent                         send v = x

where g is the peer's own newest gradient, times its weight. What a peer hears it passes on at once,
whether its own gradient is ready or not, but no more than four times a step of whoever uses it, and
no faster than its line carries it: the next message leaves when the one before has left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from math import inf

import numpy as np

from flwr_moshpit.protocol.attachment import TreeSeat
from flwr_moshpit.protocol.ledger import InEdge, OutEdge, usable
from flwr_moshpit.protocol.machine import PeerId, Record, Report, State, View, ViewChanged
from flwr_moshpit.protocol.messages import Attach, Detached, Grant, Model, Push, Subtree
from flwr_moshpit.protocol.step_size import Optimizer, StepSize
from flwr_moshpit.protocol.topology import Topology
from flwr_moshpit.protocol.tracking import IDLE, Core, copies, smoothed, spacing

_STEPS_REMEMBERED = 64
_STEPS_A_LOOP = 6
_DELAY_MARGIN = 1.5


class TreeTracking:
    """See the module. `TreeSeat` finds the parent."""

    def __init__(self, core: Core, plan: Callable[[View], Topology]) -> None:
        self.seat = TreeSeat(core, plan, self._census)
        self._core = core
        self._plan = plan
        self._relay_due = inf
        self._root_period_s = 0.0
        self._step_times: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._loop_s = 0.0
        """From a step of the root until half of the peers' gradients are newer: the least of late,
        so that loss does not slow down the sending that makes up for it."""
        self._scale = 1.0
        self._steps: StepSize | None = None
        self._optimizer = Optimizer(core.config.optimizer, core.config.momentum)

    @property
    def due(self) -> float:
        return min(self._relay_due, self.seat.due)

    def start(self, now: float) -> None:
        self.seat.start(now)

    def stop(self) -> None:
        self.seat.stop()

    def step(self, now: float) -> None:
        if self.seat.is_root:
            self._descend(now)
            self._spread(now)
        else:
            self._push(now)

    def ready_at(self, began_at: float) -> float:
        core = self._core
        if self.seat.is_root:
            children = core.ledger.ins
            if 2 * sum(core.lines.is_busy(child) for child in children) > len(children):
                # One more step would only be merged with the one that waits to leave.
                return inf
            if core.contributors <= 1 < len(core.view):
                return began_at + IDLE * core.identity.lease_s
            # More than a few steps in the time that a gradient takes to come back only make each
            # one smaller, by the rule for the step size.
            return began_at + self._loop_s / _STEPS_A_LOOP
        if core.version != core.trained_version:
            return began_at
        wait_s = self._root_period_s or IDLE * core.identity.lease_s
        out, parent = self._open(), self.seat.parent
        if out is not None and parent is not None:
            if core.lines.is_busy(parent):
                return inf
            took_s = core.lines.took_s(parent)
            if took_s:
                # A gradient at a model of before would be in the way of the next one.
                wait_s = max(wait_s, 2 * out.model_period_s, 2 * took_s)
        return began_at + wait_s

    def snapshot(self) -> State:
        return {"scale": self._scale, "optimizer": self._optimizer.snapshot()}

    def restore(self, state: State) -> None:
        self._scale = float(state["scale"])
        self._optimizer.restore(state["optimizer"])

    def look_after(self, now: float) -> None:
        if self._relay_due <= now:
            self._relay_due = inf
            self._spread(now)
            self._push_waiting(now)
        if self.seat.due <= now:
            self.seat.look_after(now)

    def on_push(self, child: PeerId, held: InEdge, message: Push, now: float) -> None:
        self.on_dropped(now)

    def on_dropped(self, now: float) -> None:
        out = self._open()
        if out is not None:
            out.dirty = True
            self._push_waiting(now)

    def on_model(self, src: PeerId, message: Model, now: float) -> bool:
        core = self._core
        out = core.ledger.outs.get(src)
        if out is None or out.edge != message.edge or out.closing:
            return False
        core.leases.hear(out, message.clock_s, now)
        if message.counter <= out.model_counter:
            return False
        out.gap = smoothed(out.gap, message.counter, out.model_counter)
        out.model_counter = message.counter
        if out.model_at > -inf:
            period_s = now - out.model_at
            out.model_period_s += (period_s - out.model_period_s) / (8 if out.model_period_s else 1)
        out.model_at = now
        core.x, core.direction = message.v, message.direction
        core.step, core.contributors = message.step, message.contributors
        self._root_period_s, self._scale = message.period_s, message.scale
        core.corrections.heard(message.taken)
        core.version += 1
        self.seat.follow(message.label, (src, *message.path), now)
        self._spread(now)
        return True

    def on_view(self, event: ViewChanged, now: float) -> None:
        self.seat.on_view(event, now)

    def on_record(self, record: Record, now: float) -> None:
        if record.key[0] == "root":
            self.seat.on_claim(PeerId(record.key[1]), record, now)

    def on_line_free(self, peer: PeerId, now: float) -> None:
        self._push_waiting(now)
        self._spread(now)

    def on_attach(self, child: PeerId, message: Attach, now: float) -> None:
        self.seat.on_attach(child, message, now)
        self._spread(now)

    def on_grant(self, parent: PeerId, message: Grant, now: float) -> None:
        if self.seat.on_grant(parent, message, now):
            self._core.corrections.forget_pushes()
            self._steps = None
            self._optimizer = Optimizer(self._core.config.optimizer, self._core.config.momentum)
            self._spread(now)
            self._push(now)

    def on_news(self, parent: PeerId, out: OutEdge, message: Grant, now: float) -> None:
        self.seat.follow(message.label, (parent, *message.path), now)
        self._spread(now)
        has_arrived = self._core.lines.arrives_by(parent) <= now
        if message.have < out.counter and out.next_push_at <= now and has_arrived:
            self._push(now)

    def on_behind(self, child: PeerId, held: InEdge, now: float) -> None:
        if self._core.lines.arrives_by(child) <= now:
            held.version = -1
            self._spread(now)

    def on_refused(self, parent: PeerId, message: Detached, now: float) -> None:
        self.seat.on_refused(parent, message, now)

    def on_no_answer(self, parent: PeerId, now: float) -> None:
        self.seat.on_no_answer(parent, now)

    def on_released(self, parent: PeerId, message: Detached | None, now: float) -> None:
        self.seat.on_released(parent, message, now)

    def _open(self) -> OutEdge | None:
        """The edge to the parent, if we may push on it."""
        parent = self.seat.parent
        out = None if parent is None else self._core.ledger.outs.get(parent)
        return None if out is None or out.closing else out

    def _push_waiting(self, now: float) -> None:
        """Push what has come from below, or once more what may be lost, if that is not too soon."""
        out, parent = self._open(), self.seat.parent
        if out is None or parent is None or not (out.dirty or out.copies):
            return
        lines = self._core.lines
        if lines.is_busy(parent):
            return
        due = out.next_push_at if out.dirty else max(out.next_push_at, lines.arrives_by(parent))
        if due > now:
            self._relay_due = min(self._relay_due, due)
        else:
            copies_left = copies(out.gap) if out.dirty else out.copies - 1
            self._push(now)
            out.copies = copies_left

    def _push(self, now: float) -> None:
        out, parent = self._open(), self.seat.parent
        if out is None or parent is None:
            return
        if self._core.lines.is_busy(parent):
            out.dirty = True
            return
        self._core.ledger.push({parent: 1.0})
        if self._core.config.local_steps > 1:
            self._core.corrections.pushed(out.counter, self._core.ledger.ins)
        out.dirty = False
        out.copies = copies(out.gap)
        out.next_push_at = now + spacing(out.gap) * self._root_period_s
        if out.copies:
            self._relay_due = min(self._relay_due, out.next_push_at)
        self._core.send_push(parent, out, self._subtree())

    def _spread(self, now: float) -> None:
        """Send our model to the children that have not got it, if that is not too soon."""
        core = self._core
        if not core.ledger.ins:
            return
        if not self.seat.is_root:
            out = self._open()
            if out is None or out.model_counter < 0:
                # Ours may be far behind: a newcomer's children wait for its parent's model too.
                return
        period_s = core.period_s if self.seat.is_root else self._root_period_s
        for child, held in core.ledger.ins.items():
            if held.version >= core.version and not held.copies:
                continue
            if core.lines.is_busy(child):
                continue
            due = held.next_model_at
            if held.version >= core.version:
                due = max(due, core.lines.arrives_by(child))
            if due > now:
                self._relay_due = min(self._relay_due, due)
                continue
            held.copies = copies(held.gap) if held.version < core.version else held.copies - 1
            held.version = core.version
            held.model_counter += 1
            if held.subtree is not None:
                held.next_model_at = now + spacing(held.gap) * held.subtree.period_s
                if held.copies:
                    self._relay_due = min(self._relay_due, held.next_model_at)
            core.send_model(
                child, held.edge, held.model_counter, core.x, period_s, self._scale, now
            )

    def _descend(self, now: float) -> None:
        core, config = self._core, self._core.config
        below = self._subtree()
        # Peers that are not in the sum yet count as gradients of zero: the first ones to be in it
        # must not lead the model astray.
        missing = max(1.0, len(core.view) / below.contributors)
        mean = core.ledger.z / core.x.dtype.type(below.weight * missing)
        if self._steps is None:
            self._steps = StepSize(config.learning_rate, self._plan(core.view).hops + 1)
            self._steps.scale = self._scale
        steps = self._steps
        with np.errstate(over="ignore"):
            norm = math.sqrt(float(np.dot(mean, mean)))
        halved = steps.watch(norm, below.contributors)
        if norm > steps.norm_max:
            mean = mean * mean.dtype.type(steps.norm_max / norm)
        typical = self._typical_age()
        steps.observe(1 + max(typical, (core.step - below.seen) / _DELAY_MARGIN))
        self._observe_loop(typical, below.contributors, now)
        rate = steps.rate * config.local_steps
        x = core.x - core.x.dtype.type(rate) * self._optimizer.direction(mean)
        if not usable(x, core.identity.dim, core.x.dtype):
            steps.scale /= 2
            halved = True
        else:
            x.setflags(write=False)
            core.x = x
        if halved:
            reason = f"halved: the mean gradient's norm grew to {norm:.3g}; lower learning-rate"
            core.emit(Report("step_size", {"step_size": steps.rate, "reason": reason}))
        if config.local_steps > 1:
            mean.setflags(write=False)
            core.direction = mean
            core.corrections.descended(core.ledger.ins)
        self._scale = steps.scale
        core.contributors = below.contributors
        core.step += 1
        core.version += 1
        self.seat.beat(now)

    def _observe_loop(self, age: int, contributors: int, now: float) -> None:
        """age: the typical gradient was taken at the model of so many steps ago."""
        times = self._step_times
        if times and contributors > 1:
            # The first one cannot have taken longer than since the first step.
            back_s = now - times[max(0, len(times) - 1 - age) if self._loop_s else 0]
            self._loop_s = min(back_s, 1.05 * self._loop_s) if self._loop_s else back_s
        times.append(now)

    def _subtree(self) -> Subtree:
        """Ourselves and all below, as far as their pushes have come."""
        core = self._core
        peers, contributors, weight = 1, int(core.weight > 0), core.weight
        period_s = core.period_s if core.training else inf
        behind = weight * self._age()
        for held in core.ledger.ins.values():
            below = held.subtree
            if below is None:
                continue
            peers += below.peers
            if below.contributors:
                contributors += below.contributors
                weight += below.weight
                behind += below.weight * (core.step - below.seen)
            if 0 < below.period_s < period_s:
                period_s = below.period_s
        mean = core.step - round(behind / weight) if weight else core.step
        return Subtree(peers, contributors, weight, mean, 0.0 if period_s == inf else period_s)

    def _age(self) -> int:
        """Of our gradient, in the root's steps, but no more than is usual for this peer: one whose
        trainer hangs, or that trains no more, must not slow down the others."""
        return min(self._core.step - self._core.seen, 2 * self._core.lag + 1)

    def _typical_age(self) -> int:
        """The median over ourselves and our children, each a child's subtree on average."""
        core = self._core
        ages = [(self._age(), 1)] if core.weight else []
        below = [held.subtree for held in core.ledger.ins.values() if held.subtree is not None]
        ages += [(core.step - each.seen, each.contributors) for each in below if each.contributors]
        return max(0, _median(ages))

    def _census(self) -> tuple[int, float]:
        below = self._subtree()
        return below.peers, below.weight


def _median(values: list[tuple[int, int]]) -> int:
    """The upper weighted median of (value, weight) pairs."""
    values.sort(reverse=True)
    total, passed = sum(weight for _, weight in values), 0
    for value, weight in values:
        passed += weight
        if 2 * passed >= total:
            return value
    return values[-1][0]
