"""A small network in virtual time for tests of R-FAST, which keeps books.

Messages are lost, late, repeated and out of order; peers are fast and slow, crash, come back, and
are told late, each at its own time, who is there. After every event `check` compares what the
machines say they track with books kept from trainer calls and wire messages alone, which are those
that the `swarm` fixture keeps too.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from flwr_moshpit.config import RFast
from flwr_moshpit.protocol.machine import (
    Cancel,
    Compute,
    ComputeDone,
    CorrectedSteps,
    Delivery,
    Event,
    Finish,
    GradientResult,
    JobId,
    Learned,
    LinkLost,
    Message,
    PeerId,
    PeerInfo,
    Publish,
    Received,
    Record,
    Report,
    Send,
    Start,
    Stop,
    TimerFired,
    Vector,
    View,
    ViewChanged,
)
from flwr_moshpit.protocol.rfast import RFastPeer
from flwr_moshpit.protocol.topology import Topology
from flwr_moshpit.testing.books import Books


class Problem(Protocol):
    """Every peer's loss, by its number."""

    dim: int

    def gradient(self, peer: int, x: Vector) -> Vector: ...


@dataclass
class LeastSquares:
    """f_k(x) = |A_k x - b_k|^2 / 2, quite different from peer to peer."""

    a: np.ndarray
    b: np.ndarray

    @classmethod
    def drawn(cls, num_peers: int, dim: int = 10, rows: int = 12, seed: int = 0) -> LeastSquares:
        rng = np.random.default_rng(seed)
        a = rng.normal(size=(num_peers, rows, dim)) / math.sqrt(rows) * np.linspace(1, 1.6, dim)
        b = np.einsum("krd,kd->kr", a, 1 + rng.normal(size=(num_peers, dim)))
        return cls(a, b)

    @property
    def dim(self) -> int:
        return self.a.shape[2]

    def gradient(self, peer: int, x: Vector) -> Vector:
        return self.a[peer].T @ (self.a[peer] @ x - self.b[peer])

    def hessian(self, peers: Sequence[int]) -> np.ndarray:
        return np.einsum("krd,kre->de", self.a[peers], self.a[peers])

    def optimum(self, peers: Sequence[int], weights: Sequence[float] | None = None) -> Vector:
        """The minimiser of the (weighted) sum of these peers' losses."""
        w = np.ones(len(peers)) if weights is None else np.asarray(weights)
        h = np.einsum("k,krd,kre->de", w, self.a[peers], self.a[peers])
        return np.linalg.solve(h, np.einsum("k,krd,kr->d", w, self.a[peers], self.b[peers]))

    def learning_rate(self) -> float:
        """1 / L of the mean loss."""
        peers = range(len(self.a))
        return len(self.a) / float(np.linalg.eigvalsh(self.hessian(list(peers)))[-1])


@dataclass
class Logistic:
    """One class a peer: logistic regression on Gaussian clouds, with a ridge."""

    x: np.ndarray
    y: np.ndarray
    ridge: float

    @classmethod
    def drawn(cls, num_peers: int, dim: int = 8, rows: int = 40, seed: int = 0) -> Logistic:
        rng = np.random.default_rng(seed)
        side = np.where(np.arange(num_peers) % 2, 1.0, -1.0)
        centre = rng.normal(size=(num_peers, 1, dim)) + 0.7 * side[:, None, None]
        return cls(centre + rng.normal(size=(num_peers, rows, dim)), side, 0.05)

    @property
    def dim(self) -> int:
        return self.x.shape[2]

    def gradient(self, peer: int, x: Vector) -> Vector:
        rows, side = self.x[peer], self.y[peer]
        slope = -side / (1 + np.exp(side * (rows @ x)))
        return slope @ rows / len(rows) + self.ridge * x

    def optimum(self, peers: Sequence[int]) -> Vector:
        """By Newton's method."""
        x = np.zeros(self.dim)
        for _ in range(50):
            gradient = sum(self.gradient(k, x) for k in peers)
            x = x - np.linalg.solve(self._hessian(peers, x), gradient)
        return x

    def learning_rate(self) -> float:
        peers = range(len(self.x))
        hessian = self._hessian(peers, np.zeros(self.dim))
        return len(self.x) / float(np.linalg.eigvalsh(hessian)[-1])

    def _hessian(self, peers: Sequence[int], x: Vector) -> np.ndarray:
        total = len(peers) * self.ridge * np.eye(self.dim)
        for k in peers:
            p = 1 / (1 + np.exp(-self.x[k] @ x))
            total += (self.x[k].T * (p * (1 - p))) @ self.x[k] / len(self.x[k])
        return total


class Machine(Protocol):
    deadline: float | None
    params: Vector

    def handle(self, event: Event, now: float) -> list[Any]: ...


@dataclass(eq=False)
class Host:
    """One peer and its machine."""

    number: int
    info: PeerInfo
    machine: Any
    books: Books
    view: View
    step_s: float
    alive: bool = True
    started: bool = False
    paused: bool = False
    job: JobId | None = None
    timer: float = math.inf
    finished: Vector | None = None


class Net:
    """`hosts` by id. Time is in mean step times unless `step_s` says otherwise."""

    def __init__(
        self,
        problem: Problem,
        num_peers: int,
        config: RFast,
        *,
        seed: int = 0,
        loss: float = 0.0,
        delay_s: float = 0.3,
        duplicate: float = 0.0,
        slow: dict[int, float] | None = None,
        detect_s: tuple[float, float] = (2.0, 6.0),
        record_s: tuple[float, float] = (0.05, 1.0),
        dtype: str = "float64",
        jitter: float = 0.3,
        topology: Topology | None = None,
        make: Callable[..., Any] = RFastPeer,
        until_round: int | None = None,
        books: bool = True,
        infos: Sequence[PeerInfo] | None = None,
        examples: Sequence[int] | None = None,
        local_rate: float | None = None,
    ) -> None:
        self.problem = problem
        self.config = config
        self.now = 0.0
        self.hosts: dict[PeerId, Host] = {}
        self.reports: list[tuple[float, PeerId, Report]] = []
        self.counts = {"steps": 0, "messages": 0, "lost": 0}
        self.books = books
        self.loss, self.delay_s, self.duplicate = loss, delay_s, duplicate
        self._slow = slow or {}
        self._detect_s, self._record_s = detect_s, record_s
        self._dtype = dtype
        self._jitter = jitter
        self._topology = topology
        self._make = make
        self._until_round = until_round
        self._examples = examples
        self._rng = np.random.default_rng(seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._counter = itertools.count()
        self._cut: dict[frozenset[PeerId], None] = {}
        self._side: dict[PeerId, int] = {}
        self._suspected: dict[tuple[PeerId, PeerId], None] = {}
        self._records: dict[PeerId, dict[tuple[str, ...], Record]] = {}
        self._ordered: dict[tuple[PeerId, PeerId], float] = {}
        self._balances: dict[PeerId, np.ndarray] = {}
        self._scale = 1.0
        self.worst = 0.0
        """Largest error of the books so far."""
        given = infos or [PeerInfo(PeerId(f"p{k:03}")) for k in range(num_peers)]
        view = View({info.peer: info for info in given})
        for k, info in enumerate(given):
            self._boot(k, info, view)
        for host in list(self.hosts.values()):
            self._tell(host, Start(self._until_round))

    # Faults.

    def ids(self) -> list[PeerId]:
        return list(self.hosts)

    def living(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.alive]

    def crash(self, peer: PeerId) -> None:
        self.hosts[peer].alive = False
        self._spread_views()

    def leave(self, peer: PeerId) -> None:
        """Gracefully."""
        self._tell(self.hosts[peer], Stop())
        self.crash(peer)

    def join(self, number: int) -> PeerId:
        info = PeerInfo(PeerId(f"p{number:03}"))
        return self._enter(number, info, None)

    def restart(self, peer: PeerId, state: dict[str, Any] | None = None) -> None:
        host = self.hosts[peer]
        if host.alive:
            self.crash(peer)
        info = replace(host.info, incarnation=host.info.incarnation + 1)
        self._enter(host.number, info, state)

    def cut(self, one: PeerId, other: PeerId) -> None:
        """The link between two peers; nobody is told."""
        self._cut[frozenset((one, other))] = None

    def partition(self, side: Sequence[PeerId]) -> None:
        self._side = dict.fromkeys(side, 1)
        self._spread_views()

    def suspect(self, one: PeerId, other: PeerId) -> None:
        """`one` is told that `other` is dead, which is not true."""
        self._suspected[one, other] = None
        self._spread_views()

    def heal(self) -> None:
        self._cut, self._side, self._suspected = {}, {}, {}
        self._spread_views()
        for host in self.living():
            for records in list(self._records.values()):
                for record in records.values():
                    self._after(self._uniform(self._record_s), self._learn, host, record)

    def pause(self, peer: PeerId) -> None:
        """SIGSTOP: what happens meanwhile reaches it after `resume`, if that is not a call."""
        self.hosts[peer].paused = True

    def resume(self, peer: PeerId, event: Event) -> None:
        """SIGCONT, with the first event that it then handles."""
        self.hosts[peer].paused = False
        self._tell(self.hosts[peer], event)

    def slow_down(self, peer: PeerId, factor: float) -> None:
        self.hosts[peer].step_s *= factor

    # Running.

    def run(self, until: float, each: Callable[[], None] | None = None) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(self._heap)
            action(*arguments)
            if each is not None:
                each()
        self.now = until

    def run_until(self, done: Callable[[], bool], limit: float, every: float = 1.0) -> float:
        """The time at which `done` first holds, looked at now and then; `inf` if not by `limit`."""
        while self.now < limit:
            self.run(self.now + every)
            if done():
                return self.now
        return math.inf

    def error(self, optimum: Vector) -> float:
        """max over the living peers of |x - x*| / |x*|."""
        return max(
            float(np.linalg.norm(host.machine.params - optimum) / np.linalg.norm(optimum))
            for host in self.living()
        )

    def numbers(self) -> list[int]:
        return [host.number for host in self.living()]

    def roots(self) -> list[PeerId]:
        return [host.info.peer for host in self.living() if host.machine.is_root]

    # The books.

    def check(self, changed: Host | None = None, tolerance: float = 1e-9) -> None:
        """sum z + sum (rho - rho_buf) = sum g; nothing counted twice; no cycle; nobody waits.

        changed: the one peer that anything has happened to since the last check; None for all.
        """
        living = self.living()
        for host in living if changed is None else [changed]:
            # What it has of its own and from others, less what it tracks and has sent on: zero.
            self._balances[host.info.peer] = host.books.mass - host.books.gradient
            if host.started and not host.paused and host.job is None and host.finished is None:
                # It has a time of its own at which it goes on, whatever the others do: that of a
                # step of the root that it last heard of.
                wait_s = host.machine._jobs.due - self.now
                assert wait_s <= 60, f"{host.info.peer} waits for {wait_s}"
            self._check_held(host)
            self._check_cycle(host)
        total = sum(self._balances[host.info.peer] for host in living)
        self.worst = max(self.worst, float(np.abs(total).max() / self._scale))
        assert self.worst <= tolerance, f"t={self.now}: the books are out by {total}"

    def _check_held(self, changed: Host) -> None:
        """What a parent holds of a living child, that child must count as sent."""
        me = changed.info.peer
        pairs = [(other, me) for other in self.living()]
        for parent, child in [*pairs, *((changed, child) for child in changed.machine.ledger.ins)]:
            held, host = parent.machine.ledger.ins.get(child), self.hosts[child]
            if held is None or held.buf is None or parent.paused or not host.alive or host.paused:
                continue
            if host.info.incarnation == held.edge.incarnation:
                out = host.machine.ledger.outs.get(parent.info.peer)
                is_sent = out is not None and out.edge == held.edge
                where = f"t={self.now}: {parent.info.peer} holds {held.edge}"
                assert is_sent, f"{where}, and {child} counts that mass too"

    def _check_cycle(self, host: Host) -> None:
        seen: dict[PeerId, None] = {}
        peer: PeerId | None = host.info.peer
        while peer is not None and self.hosts[peer].alive:
            assert peer not in seen, f"t={self.now}: a cycle, {list(seen)}"
            seen[peer] = None
            machine = self.hosts[peer].machine
            peer = machine.parent
            out = None if peer is None else machine.ledger.outs.get(peer)
            if out is None or out.incarnation != self.hosts[peer].info.incarnation:
                # The parent that it hangs on is dead.
                break

    def unrest(self) -> str | None:
        """Why something is still under way; None once both ends of every edge agree and none is
        about to change. Where messages are late leases lapse now and then, at rest too: then a
        peer looks for another parent, and its mass is with neither until it has found one."""
        for host in self.living():
            me, machine = host.info.peer, host.machine
            if self.config.is_tree and not machine.is_root and not machine.ledger.outs:
                return f"{me} has no parent"
            for parent, out in machine.ledger.outs.items():
                edge = f"{me} -> {parent}"
                held = self.hosts[parent].machine.ledger.ins.get(me)
                if not self.hosts[parent].alive:
                    return f"{edge}, who is dead"
                if out.closing or out.dirty:
                    return f"{edge} is closing" if out.closing else f"{edge} has more to push"
                if held is None:
                    return f"{edge} is half open"
                if (held.edge, held.counter) != (out.edge, out.counter):
                    return f"{edge}: {held.edge} {held.counter}, {out.edge} {out.counter}"
            for child in machine.ledger.ins:
                if not self.hosts[child].alive:
                    return f"{me} holds what {child} pushed, who is dead"
                if me not in self.hosts[child].machine.ledger.outs:
                    return f"{child} -> {me} is half open"
        return None

    def check_at_rest(self, tolerance: float = 1e-9) -> None:
        """Nothing is under way, and both ends of every edge count the same."""
        self.check(tolerance=tolerance)
        assert self.unrest() is None, self.unrest()
        for host in self.living():
            for parent, out in host.machine.ledger.outs.items():
                held = self.hosts[parent].machine.ledger.ins[host.info.peer]
                np.testing.assert_array_equal(held.buf, out.rho)

    def check_tree_at_rest(self, tolerance: float = 1e-9) -> None:
        """And the whole mass is at the one root."""
        self.check_at_rest(tolerance)
        (root,) = self.roots()
        total = sum(host.books.gradient for host in self.living())
        np.testing.assert_allclose(self.hosts[root].machine.tracked, total, atol=tolerance)

    # Inside.

    def _boot(self, number: int, info: PeerInfo, view: View, state: Any = None) -> Host:
        machine = self._make(
            self.config,
            info,
            np.zeros(self.problem.dim, self._dtype),
            view,
            np.random.default_rng(number),
            incarnation=info.incarnation,
            state=state,
            **({} if self._topology is None else {"topology": self._topology}),
        )
        books = Books(machine, self.config)
        host = Host(number, info, machine, books, view, self._slow.get(number, 1.0))
        self.hosts[info.peer] = host
        self._balances[info.peer] = np.zeros(self.problem.dim)
        self._records.setdefault(info.peer, {})
        return host

    def _enter(self, number: int, info: PeerInfo, state: Any) -> PeerId:
        infos = {host.info.peer: host.info for host in self.living()}
        infos[info.peer] = info
        known = {record.key: record for r in self._records.values() for record in r.values()}
        self._records[info.peer] = {}
        host = self._boot(number, info, View(dict(sorted(infos.items()))), state)
        self._tell(host, Start(self._until_round))
        for record in known.values():
            self._after(self._uniform(self._record_s), self._learn, host, record)
        self._spread_views()
        return info.peer

    def _tell(self, host: Host, event: Event) -> None:
        if not host.alive:
            return
        if host.paused:
            self._after(1.0, self._tell, host, event)
            return
        host.started = not isinstance(event, Stop)
        if isinstance(event, ComputeDone):
            host.job = None
        effects = host.machine.handle(event, self.now)
        if self.books:
            host.books.note(event, effects)
            self._scale = max(self._scale, float(np.abs(host.books.gradient).max()))
        for effect in effects:
            self._carry_out(host, effect)
        due = host.machine.deadline
        if due is not None and due < host.timer:
            host.timer = due
            self._at(max(due, self.now), self._fire, host, due)
        if self.books:
            self.check(host)

    def _fire(self, host: Host, due: float) -> None:
        if host.timer == due and self.hosts[host.info.peer] is host:
            host.timer = math.inf
            self._tell(host, TimerFired())

    def _carry_out(self, host: Host, effect: Any) -> None:
        match effect:
            case Send(dst, message):
                self._send(host, dst, message)
            case Compute(job_id, job):
                host.job = job_id
                self.counts["steps"] += 1
                took = host.step_s * float(np.exp(self._jitter * self._rng.normal()))
                self._after(took, self._finish_job, host, job_id, job)
            case Cancel():
                host.job = None
            case Publish(record):
                self._publish(host, record)
            case Report():
                self.reports.append((self.now, host.info.peer, effect))
            case Finish(params):
                host.finished = params

    def _finish_job(self, host: Host, job_id: JobId, job: Any) -> None:
        if host.job != job_id or not host.alive:
            return
        self._tell(host, ComputeDone(job_id, self.result(host, job)))

    def result(self, host: Host, job: Any) -> Any:
        examples = 1 if self._examples is None else self._examples[host.number]
        if not isinstance(job, CorrectedSteps):
            gradient = self.problem.gradient(host.number, job.params.astype(float))
            return GradientResult(gradient.astype(self._dtype), examples)
        y, total = job.params.astype(float), np.zeros(self.problem.dim)
        for _ in range(job.num_steps):
            gradient = self.problem.gradient(host.number, y)
            total += gradient
            y = y - job.learning_rate * (gradient + job.correction)
        return GradientResult((total / job.num_steps).astype(self._dtype), examples)

    def _send(self, host: Host, dst: PeerId, message: Message) -> None:
        self.counts["messages"] += 1
        src = host.info.peer
        late = self._rng.exponential(self.delay_s)
        if message.delivery is Delivery.STREAM:
            while self._rng.random() < self.loss:
                late += 2 * self.delay_s
            at = max(self.now + late, self._ordered.get((src, dst), 0.0))
            self._ordered[src, dst] = at
            self._at(at, self._deliver, host, dst, message)
            return
        if self._rng.random() < self.loss:
            self.counts["lost"] += 1
        else:
            self._after(late, self._deliver, host, dst, message)
        if self._rng.random() < self.duplicate:
            again = self._rng.exponential(5 * self.delay_s)
            self._after(again, self._deliver, host, dst, message)

    def _deliver(self, sender: Host, dst: PeerId, message: Message) -> None:
        src, host = sender.info.peer, self.hosts.get(dst)
        if host is not None and host.alive and self._linked(src, dst):
            self._tell(host, Received(src, message))
        elif message.delivery is Delivery.STREAM and self.hosts[src] is sender:
            self._tell(sender, LinkLost(dst))

    def _linked(self, one: PeerId, other: PeerId) -> bool:
        if frozenset((one, other)) in self._cut:
            return False
        return self._side.get(one, 0) == self._side.get(other, 0)

    def _spread_views(self) -> None:
        for host in self.living():
            self._after(self._uniform(self._detect_s), self._see, host)

    def _see(self, host: Host) -> None:
        me = host.info.peer
        infos = {
            other.info.peer: other.info
            for other in self.living()
            if self._side.get(other.info.peer, 0) == self._side.get(me, 0)
            and (me, other.info.peer) not in self._suspected
        }
        infos = dict(sorted(infos.items()))
        old = host.view.peers
        joined = tuple(p for p, info in infos.items() if old.get(p) != info)
        lost = tuple(p for p, info in old.items() if infos.get(p) != info)
        if host.alive and (joined or lost):
            host.view = View(infos)
            self._tell(host, ViewChanged(host.view, joined, lost))

    def _publish(self, host: Host, record: Record) -> None:
        for other in self.living():
            if self._side.get(other.info.peer, 0) == self._side.get(host.info.peer, 0):
                late = 0.0 if other is host else self._uniform(self._record_s)
                self._after(late, self._learn, other, record)

    def _learn(self, host: Host, record: Record) -> None:
        known = self._records[host.info.peer].get(record.key)
        if host.alive and (known is None or known.rank < record.rank):
            self._records[host.info.peer][record.key] = record
            self._tell(host, Learned(record))

    def _uniform(self, bounds: tuple[float, float]) -> float:
        return float(self._rng.uniform(*bounds))

    def _after(self, late: float, action: Callable[..., None], *arguments: Any) -> None:
        self._at(self.now + late, action, *arguments)

    def _at(self, at: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (at, next(self._counter), action, arguments))
