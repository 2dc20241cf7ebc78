"""Messages of a ServerApp to SuperNodes that are under way: one for each of them at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_moshpit.flower.member import Member
from flwr_moshpit.flower.peer_actions import ask_message

_TTL_S, _RESULT_TTL_S = 900.0, 1800.0
"""A message that expires too soon is asked again while the process for the first one still starts:
on a busy device that would make it busier. The loss of a SuperNode is told by Flower after 60 s."""


class Post:
    """Brings what is asked, and what was answered."""

    def __init__(
        self, grid: Grid, swarm_id: str, pause_s: float, clock: Callable[[], float]
    ) -> None:
        """`pause_s`: how long a member is left in peace after its answer."""
        self._grid = grid
        self._swarm_id = swarm_id
        self._pause_s = pause_s
        self._clock = clock
        self._sent: dict[str, Member] = {}

    def node_ids(self) -> list[int]:
        """Of the SuperNodes that are there."""
        return list(self._grid.get_node_ids())

    def send(self, member: Member, action: str, **asked: Any) -> bool:
        """Whether it is on its way."""
        ttl_s = _RESULT_TTL_S if action == "result" else _TTL_S
        message = ask_message(member.node_id, action, ttl_s, swarm=self._swarm_id, **asked)
        [message_id] = self._grid.push_messages([message])
        if message_id is None:
            # The SuperNode has left in this very moment.
            member.next_at = self._clock() + self._pause_s
            return False
        member.asked = action
        self._sent[message_id] = member
        return True

    def replies(self) -> Iterator[tuple[Member, Message]]:
        """Those that have come."""
        if not self._sent:
            return
        for reply in self._grid.pull_messages(list(self._sent)):
            member = self._sent.pop(reply.metadata.reply_to_message_id, None)
            if member is not None:
                member.asked, member.next_at = "", self._clock() + self._pause_s
                yield member, reply
