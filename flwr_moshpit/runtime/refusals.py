"""What one peer has refused from the others: all of it is counted, and little of it is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from flwr_moshpit.protocol.machine import PeerId, Report


class Refusals:
    """Counts the reports of refused messages.

    Of those alike, from the same peer for the same reason, the 1st, 10th, 100th and so on are told:
    whoever sends what is refused, late or in malice, must not fill the disks of others.
    """

    MAX_KINDS = 32
    """For which one peer's messages are told apart; a reason may quote what the peer has sent."""
    MAX_PEERS = 1024
    """That are told apart: who is named as the maker of a record may not exist."""

    def __init__(self, me: PeerId) -> None:
        self.counts: Counter[str] = Counter()
        """By reason."""
        self._me = me
        self._alike: dict[PeerId | None, Counter[tuple[str, str]]] = {}
        """By peer; None stands for all beyond `MAX_PEERS`."""

    def told(self, report: Report) -> Report | None:
        """The report as observers are to see it, with the number so far as `times`, or None if they
        are not. One about this peer's own training is not of a message: it stays as it is."""
        peer, what = report.values.get("peer"), str(report.values.get("what", ""))
        of_mine = peer == self._me and what == "training"
        if report.name not in ("refused", "expired") or of_mine:
            return report
        reason = str(report.values.get("reason", "expired round"))
        if peer not in self._alike and len(self._alike) >= self.MAX_PEERS:
            peer = None
        alike = self._alike.setdefault(peer, Counter())
        if (what, reason) not in alike and len(alike) >= self.MAX_KINDS:
            what, reason = "", "yet another reason"
        alike[what, reason] += 1
        self.counts[reason] += 1
        times = alike[what, reason]
        if str(times).strip("0") != "1":
            return None
        return replace(report, values={**report.values, "times": times})
