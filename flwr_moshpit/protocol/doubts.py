"""What one member of a group thinks of the others: who owes answers, and who is lost, and why."""

from __future__ import annotations

from flwr_moshpit.protocol.machine import PeerId

SILENCES_MAX = 3
"""Unanswered questions after which a member counts as lost even if the membership sees it live."""

QUESTIONS_MAX = 64
"""Questions after which a member that has given nothing meanwhile counts as lost, even if each time
it asks for patience."""

CERTAIN = ("dead", "cut off", "silent", "gone", "unusable")
"""Reasons for a loss after which the peer is not asked whether it has finished. One that cannot be
reached, or is accused, may live and may have finished: it is asked again before that. One that sent
me what cannot be averaged would only send it again."""

REDIAL_S = 0.1
CUTS_MAX = 3
"""A peer that cannot be reached is asked so often, with so much time between, before a version is
named without it: a connection that breaks is back by then, a process that died is not."""


class Doubts:
    """It only counts; what follows is for its group to decide."""

    def __init__(self) -> None:
        self.lost: dict[PeerId, str] = {}
        """The reason, by the member."""
        self._silences: dict[PeerId, int] = {}
        self._questions: dict[PeerId, int] = {}
        self._cuts: dict[PeerId, int] = {}
        self._retried: dict[PeerId, None] = {}

    @property
    def longest_silence(self) -> int:
        """Questions in a row that somebody has left unanswered."""
        return max(self._silences.values(), default=0)

    def begin_version(self) -> None:
        self._silences.clear()

    def said(self, peer: PeerId) -> None:
        """Something, be it that it waits itself."""
        self._silences.pop(peer, None)

    def gave(self, peer: PeerId) -> None:
        """What it was asked for, or could have been."""
        self._questions.pop(peer, None)

    def may_ask(self, peer: PeerId) -> bool:
        """Whether to ask it once more; counted. False: often enough in vain."""
        silences = self._silences[peer] = self._silences.get(peer, 0) + 1
        questions = self._questions[peer] = self._questions.get(peer, 0) + 1
        return silences <= SILENCES_MAX and questions <= QUESTIONS_MAX

    def may_redial(self, peer: PeerId) -> bool:
        """Whether to call it once more after its link broke; counted."""
        self._cuts[peer] = self._cuts.get(peer, 0) + 1
        return self._cuts[peer] < CUTS_MAX

    def may_retry(self, peer: PeerId) -> bool:
        """Whether to say again what a broken link has lost: once."""
        is_first = peer not in self._retried
        self._retried[peer] = None
        return is_first

    def lose(self, peer: PeerId, reason: str) -> None:
        """A reason that is certain takes the place of one that is not."""
        if peer not in self.lost or reason in CERTAIN:
            self.lost[peer] = reason
