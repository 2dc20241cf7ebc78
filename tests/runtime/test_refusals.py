"""All refusals are counted, and so few are told that nobody's log can be filled by them."""

from __future__ import annotations

from flwr_moshpit.protocol.machine import PeerId, Report, Round, expired, refused
from flwr_moshpit.protocol.messages import Announce, GroupKey, PlanId
from flwr_moshpit.runtime.refusals import Refusals

ME, LIAR = PeerId("me"), PeerId("liar")


def test_of_refusals_alike_few_are_told_and_all_are_counted() -> None:
    refusals = Refusals(ME)
    told = [refusals.told(refused(LIAR, "part", "NaN")) for _ in range(5000)]
    assert [t.values["times"] for t in told if t is not None] == [1, 10, 100, 1000]
    assert told[0] == Report("refused", {"peer": LIAR, "what": "part", "reason": "NaN", "times": 1})
    assert refusals.told(refused(LIAR, "average", "NaN")) is not None
    assert refusals.told(refused(PeerId("another"), "part", "NaN")) is not None
    assert refusals.counts == {"NaN": 5002}


def test_a_reason_that_quotes_its_sender_fills_nothing() -> None:
    refusals = Refusals(ME)
    told = [refusals.told(refused(LIAR, "arrive", f"weight {k}")) for k in range(10_000)]
    assert sum(t is not None for t in told) < 2 * Refusals.MAX_KINDS
    assert len(refusals.counts) <= Refusals.MAX_KINDS + 1
    assert refusals.counts.total() == 10_000


def test_makers_of_records_who_do_not_exist_fill_nothing() -> None:
    refusals = Refusals(ME)
    makers = [ME, *(PeerId(f"nobody {k}") for k in range(10_000))]
    told = [refusals.told(refused(maker, "plan", "impossible")) for maker in makers]
    assert told[0] is not None
    assert sum(t is not None for t in told) < 2 * Refusals.MAX_PEERS
    assert refusals.counts == {"impossible": 10_001}


def test_the_late_are_counted_as_such_and_what_is_no_refusal_passes() -> None:
    refusals = Refusals(ME)
    late = Announce(GroupKey(PlanId(1, PeerId("a")), Round(1), 0, 0), 1.0, 1.0)
    assert refusals.told(expired(LIAR, late)) == Report(
        "expired", {"peer": LIAR, "what": "announce", "times": 1}
    )
    assert refusals.counts == {"expired round": 1}
    own = Report("refused", {"peer": ME, "what": "training", "reason": "NaN", "count": 7})
    for report in (own, own, Report("round", {"round": 1})):
        assert refusals.told(report) is report
    assert refusals.counts == {"expired round": 1}
