"""The first frame of both sides of a link: who is there, and is that somebody to talk to."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.carrier import Pipe
from flwr_moshpit.runtime.frames import Breach, pack, unpack
from flwr_moshpit.runtime.wire import Limits

BUSY = "busy"
"""Instead of a greeting: I am dialling you myself."""
REFUSED = "refused"
"""The other side does not want this link."""
STALE = "stale"
"""A later life of the same peer has been here."""
TASK = "task"
"""It trains something else."""
HONEST = (BUSY, REFUSED, STALE, TASK, "version")
"""What an honest peer can meet with too."""
BREACHES_MAX = 16
"""A peer that breaks the rules so often is banned: nothing honest breaks them once."""
TOLD = 128
"""So many characters of a name that somebody claims are told: it may be long."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What one side says of itself in its first frame. See `Hello` in peer.proto."""

    swarm: str
    src: PeerId
    dst: PeerId
    incarnation: int
    first_sequence: int
    window_bytes: int
    task: str = ""

    def pack(self) -> bytes:
        hello = pb.Hello(
            swarm=self.swarm,
            src=self.src,
            dst=self.dst,
            incarnation=self.incarnation,
            first_sequence=self.first_sequence,
            window_bytes=self.window_bytes,
            task=self.task,
        )
        return pack(pb.Frame(hello=hello))

    @classmethod
    def unpack(cls, raw: bytes, limits: Limits) -> Greeting:
        """Raises `Breach`, with the other side's reason where it says bye instead."""
        frame, data = unpack(raw, limits)
        if frame.WhichOneof("kind") == "bye":
            said = frame.bye.reason[: 4 * TOLD]
            raise Breach(BUSY if said == BUSY else REFUSED, said if said.isprintable() else "")
        if frame.WhichOneof("kind") != "hello" or data or frame.sequence:
            raise Breach("malformed", "no hello")
        hello = frame.hello
        if not hello.window_bytes:
            # Nothing could ever be sent, but questions why.
            raise Breach("malformed", "no window")
        return cls(
            hello.swarm,
            PeerId(hello.src),
            PeerId(hello.dst),
            hello.incarnation,
            hello.first_sequence,
            min(hello.window_bytes, limits.window_bytes),
            hello.task,
        )


class Doorkeeper:
    """Greets for one peer, and lets nobody in but the right peer, in the right swarm, as it is now.

    `refusals` counts what was refused, by reason; `banned` says why somebody is not let in at all.
    """

    def __init__(
        self, swarm: str, me: PeerId, incarnation: int, limits: Limits, task: str = ""
    ) -> None:
        self.refusals: Counter[str] = Counter()
        self.useless: dict[PeerId, str] = {}
        """Why a peer refuses this one, where it will never do otherwise: because this one is
        `STALE`, or they train different things."""
        self.banned: dict[PeerId, str] = {}
        self._swarm = swarm
        self._me = me
        self._incarnation = incarnation
        self._limits = limits
        self._task = task
        self._incarnations: dict[PeerId, int] = {}
        """The highest that each peer has shown since it was last forgotten."""
        self._breaches: Counter[PeerId] = Counter()

    async def call(self, pipe: Pipe, dst: PeerId) -> tuple[Greeting, Greeting]:
        """As the side that has dialled. Raises `Breach` or `ConnectionError`."""
        if dst in self.banned:
            raise Breach("banned")
        mine = self._greeting(dst)
        await pipe.write(mine.pack())
        theirs = await self._read(pipe, dst)
        self._let_in(theirs)
        return mine, theirs

    async def listen(self, pipe: Pipe, authenticated: PeerId | None) -> Greeting:
        """As the side that was dialled: who it is. Raises `Breach` or `ConnectionError`."""
        if authenticated in self.banned:
            raise Breach("banned")
        return await self._read(pipe, authenticated)

    async def answer(self, pipe: Pipe, theirs: Greeting) -> Greeting:
        """Let the other side in. Raises `ConnectionError`."""
        mine = self._greeting(theirs.src)
        await pipe.write(mine.pack())
        self._let_in(theirs)
        return mine

    def _let_in(self, theirs: Greeting) -> None:
        self._incarnations[theirs.src] = theirs.incarnation
        self.useless.pop(theirs.src, None)

    def forget(self, peer: PeerId) -> None:
        """`peer` is dead: it may come back without its state, as if it had never lived."""
        self._incarnations.pop(peer, None)

    def refuse(self, breach: Breach, peer: PeerId | None) -> None:
        """Count what `peer` has done, if it is known for sure who did."""
        if breach.reason not in (BUSY, REFUSED):
            self.refusals[breach.reason] += 1
        kind, _, why = breach.text.partition(": ")
        if peer is not None and breach.reason == REFUSED and kind in (STALE, TASK):
            self.useless[peer] = why
        if peer is not None and breach.reason not in HONEST:
            self._breaches[peer] += 1
            if self._breaches[peer] >= BREACHES_MAX:
                self.banned.setdefault(peer, str(breach))

    def _greeting(self, dst: PeerId) -> Greeting:
        # Where the frames of a new link begin to count is drawn, so that none fits on two links.
        first_sequence = secrets.randbits(62) + 1
        window_bytes = self._limits.window_bytes
        return Greeting(
            self._swarm,
            self._me,
            dst,
            self._incarnation,
            first_sequence,
            window_bytes,
            self._task,
        )

    async def _read(self, pipe: Pipe, expected: PeerId | None) -> Greeting:
        raw = await pipe.read()
        if raw is None:
            raise ConnectionError("it hung up")
        theirs = Greeting.unpack(raw, self._limits)
        src = theirs.src
        if theirs.swarm != self._swarm:
            raise Breach("swarm", repr(theirs.swarm[:TOLD]))
        if src in ("", self._me) or src != (expected or src) or theirs.dst != self._me:
            said = f"{src[:TOLD]!r}, for {theirs.dst[:TOLD]!r}"
            raise Breach("peer", f"{expected!r} says that it is {said}")
        if theirs.incarnation < self._incarnations.get(src, 0):
            raise Breach(STALE, f"a later life of {src} has been here")
        if theirs.task != self._task:
            raise Breach(TASK, f"{src} trains {theirs.task[:TOLD]}, {self._me} {self._task}")
        return theirs
