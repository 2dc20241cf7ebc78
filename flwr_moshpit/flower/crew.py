"""The peers of one swarm as their ServerApp sees them: asked through Flower, never leaned on.

A SuperNode answers a message in seconds, or not at all; its peer trains on either way. So every
member has at most one message under way, nobody waits for anybody, and what is lost is noted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_moshpit.errors import ConfigError, MoshpitError
from flwr_moshpit.flower.compat import NOBODY_ANSWERED, log
from flwr_moshpit.flower.dialling import LOOKERS, Look
from flwr_moshpit.flower.member import Member, progress
from flwr_moshpit.flower.peer_actions import answer_of
from flwr_moshpit.flower.post import Post
from flwr_moshpit.flower.swarm import Swarm
from flwr_moshpit.protocol.machine import PeerId

POLL_S = 0.5
NODES_S = 3.0
"""Between two looks for new SuperNodes."""
JOINING_S = 60.0
"""How long the others may take to join once enough have."""
LIVES_MAX = 5
"""How often a peer that has died is started again."""
CONTACTS_MAX = 16


class Crew:
    """Brings peers together, listens to them, and lets them go."""

    def __init__(
        self,
        grid: Grid,
        swarm: Swarm,
        *,
        min_members: int,
        log_every_s: float,
        start: Mapping[str, Any],
        rounds: int | None,
        write: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`start`: what every peer is told beside its certificate and contacts. `write` takes the
        lines that peers report."""
        self._clock = clock
        self._sleep = sleep
        self.members: dict[int, Member] = {}
        self._post = Post(grid, swarm.id, log_every_s, clock)
        self._swarm = swarm
        self._min_members = min_members
        self._log_every_s = log_every_s
        self._start = start
        self._rounds = rounds
        self._write = write
        self._nodes_at = 0.0
        self._log_at = 0.0
        self._logged = ""
        self._enough_since: float | None = None
        self._look: Look | None = None
        self._began = swarm.is_resumed
        self.began_at = clock()
        """When the first peers were started, or, of a swarm that is resumed, looked for."""

    def run(self) -> None:
        """Until every peer that can be heard has finished. Raises MoshpitError if none is left."""
        while not self._is_over():
            self._step()

    def ask(self, member: Member, action: str, **asked: Any) -> Message | None:
        """Ask one member and wait for its reply; None if there is none."""
        while member.asked:
            self._step()
        self._post.send(member, action, **asked)
        while member.asked:
            for other, reply in self._post.replies():
                if other is member:
                    return None if reply.has_error() else reply
                self._take(other, reply)
            self._sleep(POLL_S)
        return None

    def stop(self) -> None:
        """Let all peers end whose SuperNodes answer."""
        reachable = [m for m in self.members.values() if m.peer and not m.is_silent]
        while any(member.asked for member in reachable):
            self._step()
        for member in reachable:
            self._post.send(member, "stop", peer=member.peer)
        while any(member.asked for member in reachable):
            for member, reply in self._post.replies():
                if not reply.has_error():
                    member.end = answer_of(reply)["end"] or member.end
            self._sleep(POLL_S)

    # One step

    def _step(self) -> None:
        now = self._clock()
        if now >= self._nodes_at:
            self._nodes_at = now + NODES_S
            for node_id in self._post.node_ids():
                if node_id not in self.members:
                    self.members[node_id] = Member(node_id)
        for member in self.members.values():
            if not member.asked and now >= member.next_at:
                self._ask_next(member, now)
        self._look_around()
        for member, reply in self._post.replies():
            self._take(member, reply)
        if now >= self._log_at:
            self._log_at = now + self._log_every_s
            self._log_new_state()
        self._sleep(POLL_S)

    def _ask_next(self, member: Member, now: float) -> None:
        match member.state:
            case "new":
                self._post.send(member, "join")
            case "joined" if self._may_begin(now) and member.dialable is not None:
                self._post.send(member, "start", **self._orders(member))
            case "running" | "finished":
                self._post.send(member, "status", peer=member.peer, offset=member.offset)

    def _take(self, member: Member, reply: Message) -> None:
        action = reply.metadata.message_type.partition(".")[2]
        try:
            answer = answer_of(reply)
        except ConfigError as error:
            if action == "dial":
                self._dialled(member, None)
                return
            gone = reply.has_error() and reply.error.code in NOBODY_ANSWERED
            self._fail(member, action, str(error), gone)
            return
        if member.is_silent:
            member.is_silent = False
            log().info("the SuperNode of %s answers again", member.name)
        if action == "join":
            self._joined(member, answer)
        elif action == "dial":
            self._dialled(member, answer["failures"])
        elif action == "start":
            member.state = "running"
            if member.dialable:
                assert member.peer is not None
                self._swarm.note(member.peer, member.address)
        elif action == "status":
            self._told(member, answer)

    def _fail(self, member: Member, action: str, reason: str, gone: bool) -> None:
        if member.state == "new" and gone:
            # It may be back under the same id: it is asked again and again.
            if not member.is_silent:
                log().warning("SuperNode %d does not answer (%s)", member.node_id, reason)
            member.is_silent = True
        elif member.state == "new":
            member.state = "refused"
            log().error("SuperNode %d cannot join: %s", member.node_id, reason)
        elif member.state == "joined":
            member.state = "new"
            log().warning("%s cannot start: %s", member.name, reason)
        elif not member.is_silent:
            member.is_silent = True
            log().warning(
                "the SuperNode of %s does not answer; its peer may go on without it (%s)",
                member.name,
                reason,
            )

    # What members answer

    def _joined(self, member: Member, answer: Mapping[str, Any]) -> None:
        peer = PeerId(answer["peer"])
        for other in self.members.values():
            if other is not member and other.peer == peer:
                if other.is_silent or other.state == "lost":
                    # The SuperNode came back under another id.
                    del self.members[other.node_id]
                    break
                raise ConfigError(
                    f"two SuperNodes say that they are {peer}: give each a partition-id of its own "
                    "in --node-config"
                )
        member.peer, member.address = peer, answer["address"]
        member.public_pem, member.dialable = answer["public-key"], answer["dialable"]
        member.client, member.num_clients = answer["client"], answer["num-clients"]
        member.lives += 1
        member.state = "running" if answer["started"] else "joined"
        member.next_at = 0.0
        where = f"listens on {member.address}" if member.dialable is not False else "is relayed"
        log().info("%s on %s %s", peer, answer["host"], where)

    def _look_around(self) -> None:
        """Let SuperNodes dial the newcomers, before these begin."""
        newcomers = [m for m in self.members.values() if m.state == "joined" and m.dialable is None]
        if self._look is not None or not self._began or not newcomers:
            return
        lookers = [
            m for m in self.members.values() if m.state in ("joined", "running") and not m.is_silent
        ]
        free = [m for m in lookers if not m.asked]
        if len(free) < min(LOOKERS, len(lookers)):
            return
        self._look = look = Look.at(newcomers)
        for member in free[:LOOKERS]:
            if addresses := look.orders(member.peer):
                look.num_lookers += self._post.send(member, "dial", addresses=addresses)
        self._end_look(look)

    def _dialled(self, looker: Member, failures: Mapping[str, str] | None) -> None:
        looker.next_at = 0.0
        if self._look is not None:
            self._look.take(looker.name, failures)
            self._end_look(self._look)

    def _end_look(self, look: Look) -> None:
        if look.num_lookers:
            return
        self._look = None
        for member in self.members.values():
            if member.peer not in look.addresses or member.state != "joined":
                continue
            member.dialable = look.can_dial(member.peer)
            if not member.dialable:
                log().warning(
                    "others cannot dial %s at %s (%s): it is reached through another peer, and "
                    "reduces nothing; to change that, give its SuperNode an address that they "
                    "reach, in --node-config 'peer-address=\"HOST:PORT\"'",
                    member.name,
                    member.address,
                    "; ".join(look.failures[member.peer]),
                )
        present = [m for m in self.members.values() if m.state in ("joined", "running")]
        if present and all(member.dialable is False for member in present):
            raise MoshpitError(
                "no peer can be dialled by another, and one must be: see above, or remove "
                "peer-relayed from a --node-config"
            )

    def _told(self, member: Member, answer: Mapping[str, Any]) -> None:
        member.offset = answer["offset"]
        for line in answer["reports"].splitlines():
            self._write(line + "\n")
            member.note(json.loads(line))
        member.end = answer["end"] or member.end
        end = answer["end"]
        if end is not None and end.get("finished") and member.state != "finished":
            member.state = "finished"
            log().info("%s has finished", member.name)
        elif end is not None and "error" in end:
            member.state = "lost"
            log().error("%s has ended: %s", member.name, end["error"])
        elif not answer["alive"] and not (end or {}).get("finished"):
            self._revive(member)
        if answer["reports"]:
            # There may be more than one answer holds.
            member.next_at = min(member.next_at, self._clock() + self._log_every_s)

    def _revive(self, member: Member) -> None:
        if member.lives >= LIVES_MAX:
            member.state = "lost"
            log().error("%s has died %d times: it is not started again", member.name, member.lives)
            return
        log().warning("%s has died: it is started again from its last checkpoint", member.name)
        member.state, member.next_at = "new", 0.0

    # Beginning and end

    def _may_begin(self, now: float) -> bool:
        if self._began:
            return True
        joined = [m for m in self.members.values() if m.state == "joined"]
        if len(joined) < self._min_members:
            return False
        if self._enough_since is None:
            self._enough_since = now
        coming = any(member.state == "new" for member in self.members.values())
        if coming and now < self._enough_since + JOINING_S:
            return False
        self._began = True
        self.began_at = now
        log().info("swarm %s: %d peers begin", self._swarm.id, len(joined))
        return True

    def _orders(self, member: Member) -> dict[str, Any]:
        others = [m for m in self.members.values() if m is not member and m.address]
        others = [m for m in others if m.dialable is not False]
        members = [m for m in self.members.values() if m.state in ("joined", "running")]
        clients = [m.num_clients for m in self.members.values() if m.num_clients is not None]
        client = member.client
        if client is None:
            client = list(self.members).index(member.node_id)
        assert member.peer is not None
        certificate = self._swarm.authority.sign(member.public_pem.encode(), member.peer)
        return {
            **self._start,
            "peer": member.peer,
            "certificate": certificate.decode(),
            "authority": self._swarm.authority.certificate_pem.decode(),
            "dialable": member.dialable is not False,
            "contacts": {m.peer: m.address for m in others[:CONTACTS_MAX]},
            "client": client,
            "num-clients": max([*clients, len(members), client + 1]),
            "gather": len(members),
        }

    def _is_over(self) -> bool:
        if not self._began:
            states = [member.state for member in self.members.values()]
            if states and all(state == "refused" for state in states):
                raise MoshpitError("no SuperNode can join: see above")
            return False
        heard = [m for m in self.members.values() if not m.is_silent and m.state != "refused"]
        if heard and all(member.state == "lost" for member in heard):
            raise MoshpitError("no peer is left: see above")
        left = [member for member in heard if member.state != "lost"]
        return bool(left) and all(member.state == "finished" for member in left)

    def _log_new_state(self) -> None:
        state = progress(self.members.values(), self._min_members, self._rounds)
        if state != self._logged:
            self._logged = state
            log().info("%s", state)
