"""The two graphs of R-FAST: W along which models spread, A along which gradients gather.

Zhu, Tian, Huang, Xu, He, "R-FAST: Robust Fully-Asynchronous Stochastic Gradient Tracking over
General Topology", arXiv 2307.11617. W is row-stochastic: peer i takes v_j with weight w_ij, its
row. A is column-stochastic: peer j pushes the fraction a_ij of its tracked gradient to i, its
column. Needed is one root, from which everybody is reached along W, and along A from everybody.

Departs from the paper: on trees a peer other than the root keeps nothing of its own (w_ii = a_ii =
0 by default, where the theory wants positive diagonals). Its push is then exactly the sum of the
newest gradients known below it, which heals itself after any fault and converges a little faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import PeerId, PeerInfo, View

Weights = Mapping[PeerId, float]
_State = npt.NDArray[np.float64]
_Moves = Sequence[tuple[int, int, float]]
"""(src, dst, weight): this fraction of what is at place `src` goes to place `dst`."""

LINK_UNKNOWN_BYTES_PER_S = 1.25e8
"""A peer that does not know its link is taken to have 1 Gb/s."""


@dataclass(frozen=True)
class Topology:
    """W and A, sparse, by peer: a peer's own row and column take O(degree)."""

    peers: tuple[PeerId, ...]
    """All of them, the root first."""
    pull: Mapping[PeerId, Weights]
    """`pull[i][j]` is w_ij: what i takes from whom, itself included. Sums to 1."""
    push: Mapping[PeerId, Weights]
    """`push[j][i]` is a_ij: what j pushes to whom, itself included. Sums to 1."""

    @property
    def root(self) -> PeerId:
        return self.peers[0]

    def parent(self, peer: PeerId) -> PeerId | None:
        """The first other peer that `peer` pushes to; None if it keeps everything."""
        return next((i for i, a in self.push[peer].items() if i != peer and a > 0), None)

    @cached_property
    def listeners(self) -> Mapping[PeerId, Sequence[PeerId]]:
        """Whoever takes a peer's model into its own, itself apart."""
        return _named_by(self.pull)

    @cached_property
    def sources(self) -> Mapping[PeerId, Sequence[PeerId]]:
        """Whoever pushes to a peer, itself apart."""
        return _named_by(self.push)

    @cached_property
    def acyclic(self) -> bool:
        """Whether what is pushed along A never comes back: then running sums stay bounded."""
        outgoing = {
            j: sum(i != j and a > 0 for i, a in column.items()) for j, column in self.push.items()
        }
        ends = [j for j, count in outgoing.items() if count == 0]
        done = 0
        while ends:
            done += 1
            for j in self.sources.get(ends.pop(), ()):
                outgoing[j] -= 1
                if outgoing[j] == 0:
                    ends.append(j)
        return done == len(self.peers)

    @cached_property
    def hops(self) -> int:
        """Edges from the root to the peer farthest along W, plus those from the farthest along A.

        The graph must have passed `check`.
        """
        down, up = _depths(self.root, self.listeners), _depths(self.root, self.sources)
        return max(down.values()) + max(up.values())

    @cached_property
    def round_trip(self) -> float:
        """Steps until what the peers do comes back to them: to the root and back, or, if that is
        longer, until differences between the peers have faded along W and along A."""
        rows, columns = self._moves
        size = len(self.peers)
        return max(self.hops + 1, _fading(size, rows) + _fading(size, columns))

    @cached_property
    def gain(self) -> float:
        """How far all peers move together, per step size and sum of the gradients.

        sum_i pi_i a_ii omega_i with pi W = pi and A omega = omega, both of sum 1. It is 1 for a
        one-way tree, 1 / (2 n) for a ring of n and 1 / n^2 for a complete graph.
        """
        rows, columns = self._moves
        size = len(self.peers)
        kept = np.array([self.push[peer].get(peer, 0.0) for peer in self.peers])
        return float(_stationary(size, rows) @ (kept * _stationary(size, columns)))

    @cached_property
    def _moves(self) -> tuple[_Moves, _Moves]:
        """W from the left and A from the right, as moves of mass between places in `peers`."""
        place = {peer: k for k, peer in enumerate(self.peers)}
        rows = [(place[i], place[j], w) for i, row in self.pull.items() for j, w in row.items()]
        columns = [(place[j], place[i], a) for j, col in self.push.items() for i, a in col.items()]
        return rows, columns

    def check(self) -> None:
        """Raises ConfigError, which names the peer and what is missing."""
        if not self.peers:
            raise ConfigError("a topology needs at least one peer")
        _check_weights("row", "W", self.peers, self.pull)
        _check_weights("column", "A", self.peers, self.push)
        reached = _depths(self.root, self.listeners)
        for peer in self.peers:
            if peer not in reached:
                raise ConfigError(f"the root {self.root} cannot reach peer {peer} in W")
        reached = _depths(self.root, self.sources)
        for peer in self.peers:
            if peer not in reached:
                raise ConfigError(f"peer {peer} cannot reach the root {self.root} in A")


def _check_weights(
    kind: str, matrix: str, peers: Sequence[PeerId], lines: Mapping[PeerId, Weights]
) -> None:
    known = dict.fromkeys(peers)
    for peer in peers:
        if peer not in lines:
            raise ConfigError(f"peer {peer} has no {kind} in {matrix}")
        for other, weight in lines[peer].items():
            if other not in known:
                raise ConfigError(f"peer {peer}'s {kind} in {matrix} names {other}, who is no peer")
            if not 0 <= weight < math.inf:
                raise ConfigError(
                    f"peer {peer}'s {kind} in {matrix} gives {other} the weight {weight}; "
                    f"weights are finite and not negative"
                )
        total = math.fsum(lines[peer].values())
        if abs(total - 1) > 1e-9:
            raise ConfigError(f"peer {peer}'s {kind} in {matrix} sums to {total:.6g}, not to 1")


def _named_by(lines: Mapping[PeerId, Weights]) -> dict[PeerId, list[PeerId]]:
    """Each peer's other peers whose lines give it a weight."""
    edges: dict[PeerId, list[PeerId]] = {}
    for peer, weights in lines.items():
        for other, weight in weights.items():
            if other != peer and weight > 0:
                edges.setdefault(other, []).append(peer)
    return edges


def _depths(root: PeerId, edges: Mapping[PeerId, Sequence[PeerId]]) -> dict[PeerId, int]:
    """Hops from the root to whomever it reaches along `edges`."""
    depths = {root: 0}
    layer = [root]
    while layer:
        following: list[PeerId] = []
        for peer in layer:
            for other in edges.get(peer, ()):
                if other not in depths:
                    depths[other] = depths[peer] + 1
                    following.append(other)
        layer = following
    return depths


def _stationary(size: int, moves: _Moves) -> _State:
    """The distribution that the moves leave as it is."""
    move = _mover(size, moves)
    state = np.full(size, 1 / size)
    for _ in range(10_000):
        # Half stays where it is: the limit is the same, and periodic graphs converge too.
        moved = move(state)
        if np.abs(moved - state).max() < 1e-13:
            break
        state = (state + moved) / 2
    return state


def _fading(size: int, moves: _Moves) -> float:
    """1 / (1 - r), r the factor by which a slow difference between the places fades in a move.

    The difference is a wave along the order of the peers, on a ring the slowest there is.
    """
    move = _mover(size, moves)
    state = np.cos(2 * np.pi * np.arange(size) / size)
    state -= state.mean()
    norms = [float(np.linalg.norm(state))]
    for _ in range(64):
        state = move(state)
        norms.append(float(np.linalg.norm(state)))
    if norms[-1] <= 1e-12 * max(norms[0], 1e-300):
        return 1.0
    factor = float((norms[-1] / norms[32]) ** (1 / 32))
    return 1 / max(1 - factor, 1 / (4 * size * size))


def _mover(size: int, moves: _Moves) -> Callable[[_State], _State]:
    src = np.array([move[0] for move in moves])
    dst = np.array([move[1] for move in moves])
    weights = np.array([move[2] for move in moves])

    def move(state: _State) -> _State:
        return np.bincount(dst, weights * state[src], size).astype(np.float64)

    return move


# Builders. The first of `peers` becomes the root.


def trees(
    down: Mapping[PeerId, PeerId], up: Mapping[PeerId, PeerId], root: PeerId, stay: float = 0.0
) -> Topology:
    """Two trees, each given as child -> parent: `down` for W and `up` for A. They may differ.

    stay: w_ii and a_ii of everybody but the root.
    """
    peers = (root, *dict.fromkeys([*up, *down]))

    def lines(parents: Mapping[PeerId, PeerId]) -> dict[PeerId, dict[PeerId, float]]:
        own = {root: {root: 1.0}}
        for child, parent in parents.items():
            own[child] = {child: stay, parent: 1 - stay} if stay else {parent: 1.0}
        return own

    return Topology(peers, lines(down), lines(up))


def kary_tree(peers: Sequence[PeerId], fan_out: int, stay: float = 0.0) -> Topology:
    """A complete tree of `fan_out` children a peer, filled level by level in the given order."""
    if fan_out < 1:
        raise ConfigError(f"fan-out must be at least 1, not {fan_out}")
    parents = {peers[k]: peers[(k - 1) // fan_out] for k in range(1, len(peers))}
    return trees(parents, parents, peers[0], stay)


def binary_tree(peers: Sequence[PeerId], stay: float = 0.0) -> Topology:
    return kary_tree(peers, 2, stay)


def line(peers: Sequence[PeerId], stay: float = 0.0) -> Topology:
    """The deepest tree: the worst delay there is."""
    return kary_tree(peers, 1, stay)


def star(peers: Sequence[PeerId], stay: float = 0.0) -> Topology:
    """One level: an asynchronous parameter server that remembers one gradient of each peer."""
    return kary_tree(peers, max(1, len(peers) - 1), stay)


def ring(peers: Sequence[PeerId]) -> Topology:
    """Models and gradients go round in one direction. Every peer is a root."""
    return _circulant(peers, [1])


def exponential(peers: Sequence[PeerId]) -> Topology:
    """Everybody sends to those 1, 2, 4, ... places further. Every peer is a root."""
    return _circulant(peers, [1 << k for k in range((len(peers) - 1).bit_length())])


def complete(peers: Sequence[PeerId]) -> Topology:
    """Everybody sends to everybody."""
    return _circulant(peers, range(1, len(peers)))


def _circulant(peers: Sequence[PeerId], hops: Sequence[int]) -> Topology:
    """Models and gradients go to the peers `hops` places further, uniform weights."""
    size = len(peers)
    places = list(dict.fromkeys([0, *(hop % size for hop in hops)]))
    share = 1 / len(places)
    return Topology(
        tuple(peers),
        {peers[k]: {peers[k - hop]: share for hop in places} for k in range(size)},
        {peers[k]: {peers[(k + hop) % size]: share for hop in places} for k in range(size)},
    )


def fan_out_for(num_peers: int) -> int:
    """Fewest children that keep a tree of `num_peers` shallow.

    Depth costs step size (the limit is on the round trip in root steps), fan-out costs the links
    of the inner peers. So: as few levels as 8 children a peer allow, at most three, and then as few
    children, from 4 up, as these levels need. Above 585 peers three levels need more than 8.
    """
    for depth in (1, 2, 3):
        for fan_out in range(4, 9):
            if _tree_size(fan_out, depth) >= num_peers:
                return fan_out
    fan_out = 9
    while _tree_size(fan_out, 3) < num_peers:
        fan_out += 1
    return fan_out


def _tree_size(fan_out: int, depth: int) -> int:
    return sum(fan_out**level for level in range(depth + 1))


def fitness(info: PeerInfo) -> tuple[bool, float, PeerId]:
    """Sorts the peers that should be near the root first.

    Those who can be dialled; then by training rate times the root of the slower direction of the
    link: a root must step fast, and every inner peer carries a vector each way for every child.
    """
    up = info.uplink_bytes_per_s or LINK_UNKNOWN_BYTES_PER_S
    down = info.downlink_bytes_per_s or LINK_UNKNOWN_BYTES_PER_S
    return not info.dialable, -info.speed * math.sqrt(min(up, down)), info.peer


def fleet_tree(
    infos: Sequence[PeerInfo], fan_out: int | None = None, stay: float = 0.0
) -> Topology:
    """A shallow tree with fast, well-connected peers at and near the root, slow ones as leaves."""
    peers = [info.peer for info in sorted(infos, key=fitness)]
    return kary_tree(peers, fan_out or fan_out_for(len(peers)), stay)


_newest: list[tuple[View, str, int | None, Topology]] = []


def by_name(name: str, view: View, fan_out: int | None = None) -> Topology:
    """The topology called `name`, as in `config.RFast`, over the peers of `view`, fittest first.

    Machines share views, and so the few newest topologies: a thousand peers that start together
    build one. Recognised by identity, since hashing a thousand `PeerInfo` costs what building does.
    """
    for seen, seen_name, seen_fan_out, topology in _newest:
        if seen is view and seen_name == name and seen_fan_out == fan_out:
            return topology
    topology = _build(name, view, fan_out)
    _newest.append((view, name, fan_out, topology))
    del _newest[:-8]
    return topology


def _build(name: str, view: View, fan_out: int | None) -> Topology:
    infos = list(view.peers.values())
    if name == "fleet":
        return fleet_tree(infos, fan_out)
    builders: dict[str, Callable[[Sequence[PeerId]], Topology]] = {
        "binary": binary_tree,
        "star": star,
        "line": line,
        "ring": ring,
        "exponential": exponential,
        "complete": complete,
    }
    return builders[name]([info.peer for info in sorted(infos, key=fitness)])
