"""What the simulation tells peers of each other: views and records."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.protocol.machine import (
    Learned,
    PeerId,
    Publish,
    Record,
    Start,
    View,
    ViewChanged,
)
from flwr_moshpit.simulation.membership import Delays
from tests.simulation.recorder import started


def record(rank: int, key: str = "plan") -> Record:
    return Record((key,), (rank,), f"value {rank}")


class TestViews:
    def test_peers_start_with_one_view_that_they_share(self) -> None:
        swarm = started(3)
        assert list(swarm[0].view) == swarm.peers
        assert swarm[0].view is swarm[1].view is swarm[2].view
        swarm.run()
        assert swarm[0].events(ViewChanged) == []

    def test_a_death_is_noticed_by_each_at_its_own_time(self) -> None:
        swarm = started(20)
        swarm.at(5.0, swarm.engine.crash, swarm.peers[3])
        swarm.run()
        others = [swarm[k] for k in range(20) if k != 3]
        times = [now for machine in others for now in machine.times(ViewChanged)]
        assert len(times) == len(dict.fromkeys(times)) == 19
        assert all(6.0 <= now <= 8.0 for now in times)
        (event,) = others[0].events(ViewChanged)
        assert (event.joined, event.lost) == ((), (swarm.peers[3],))
        assert list(event.view) == [peer for peer in swarm.peers if peer != swarm.peers[3]]
        assert all(machine.events(ViewChanged)[0].view is event.view for machine in others)

    def test_a_return_is_noticed_sooner_and_the_delays_can_be_set(self) -> None:
        swarm = started(5, delays=Delays(loss_s=(7.0, 8.0), join_s=(0.3, 0.4)))
        swarm.engine.crash(swarm.peers[0])
        swarm.run(20.0)
        swarm.engine.restart(swarm.peers[0])
        swarm.run()
        for k in range(1, 5):
            lost_s, joined_s = swarm[k].times(ViewChanged)
            assert 7.0 <= lost_s <= 8.0
            assert 20.3 <= joined_s <= 20.4
            assert swarm[k].events(ViewChanged)[1].joined == (swarm.peers[0],)

    def test_who_is_back_before_it_was_missed_is_lost_and_joined_at_once(self) -> None:
        swarm = started(2)
        swarm.engine.crash(swarm.peers[0])
        swarm.run(0.2)
        swarm.engine.restart(swarm.peers[0])
        swarm.run()
        (event,) = swarm[1].events(ViewChanged)
        assert event.lost == event.joined == (swarm.peers[0],)
        assert event.view.peers[swarm.peers[0]].incarnation == 1
        assert 1.0 <= swarm[1].times(ViewChanged)[0] <= 3.0

    def test_deaths_at_one_instant_make_one_view(self) -> None:
        swarm = started(10)
        for peer in swarm.peers[:4]:
            swarm.engine.crash(peer)
        swarm.run()
        (event,) = swarm[9].events(ViewChanged)
        assert event.lost == tuple(swarm.peers[:4])

    def test_each_side_of_a_partition_loses_the_other_and_finds_it_again(self) -> None:
        swarm = started(6)
        left, right = swarm.peers[:2], swarm.peers[2:]
        swarm.engine.partition([left])
        swarm.run(10.0)
        swarm.engine.heal()
        swarm.run()
        for k in range(6):
            here, there = (left, right) if k < 2 else (right, left)
            cut, healed = swarm[k].events(ViewChanged)
            assert (list(cut.view), cut.lost, cut.joined) == (here, tuple(there), ())
            assert (list(healed.view), healed.lost) == (swarm.peers, ())
            assert healed.joined == tuple(there)
            cut_s, healed_s = swarm[k].times(ViewChanged)
            assert 1.0 <= cut_s <= 3.0
            assert 10.1 <= healed_s <= 10.5

    def test_a_partition_that_nobody_noticed_was_none(self) -> None:
        swarm = started(4)
        swarm.engine.partition([swarm.peers[:2]])
        swarm.run(0.5)
        swarm.engine.heal()
        swarm.run()
        assert all(swarm[k].events(ViewChanged) == [] for k in range(4))

    def test_who_restarts_in_a_partition_sees_its_own_side(self) -> None:
        swarm = started(4)
        swarm.engine.crash(swarm.peers[0])
        swarm.engine.partition([swarm.peers[:2]])
        swarm.run(10.0)
        swarm.engine.restart(swarm.peers[0])
        swarm.run()
        assert list(swarm[0].view) == swarm.peers[:2]
        assert swarm[2].events(ViewChanged)[-1].lost == tuple(swarm.peers[:2])


class TestRecords:
    def test_everybody_learns_its_publisher_at_once(self) -> None:
        swarm = started(10)
        swarm.run(1.0)
        swarm.do(0, Publish(record(1)))
        swarm.run()
        for k in range(10):
            assert swarm[k].events(Learned) == [Learned(record(1))]
        assert swarm[0].times(Learned) == [1.0]
        assert all(1.05 <= swarm[k].times(Learned)[0] <= 1.5 for k in range(1, 10))

    def test_the_higher_rank_wins_and_nobody_goes_back(self) -> None:
        swarm = started(10)
        swarm.do(0, Publish(record(2)), Publish(record(5)), Publish(record(3)))
        swarm.do(1, Publish(record(4)), Publish(record(5)), Publish(record(1, "stop")))
        swarm.run()
        for k in range(10):
            learned = [event.record for event in swarm[k].events(Learned)]
            ranks = [each.rank[0] for each in learned if each.key == ("plan",)]
            assert ranks == sorted(dict.fromkeys(ranks))
            assert ranks[-1] == 5
            assert record(1, "stop") in learned

    def test_a_newcomer_learns_all_right_after_its_start(self) -> None:
        swarm = started(2)
        swarm.do(0, Publish(record(1)), Publish(record(2)), Publish(record(1, "stop")))
        swarm.engine.crash(swarm.peers[1])
        swarm.run(10.0)
        swarm.engine.restart(swarm.peers[1])
        swarm.run()
        assert swarm[1].log == [
            (10.0, Start()),
            (10.0, Learned(record(2))),
            (10.0, Learned(record(1, "stop"))),
        ]

    def test_sides_of_a_partition_exchange_records_when_it_heals(self) -> None:
        swarm = started(4)
        swarm.do(0, Publish(record(1)))
        swarm.run(5.0)
        swarm.engine.partition([swarm.peers[:2]])
        swarm.do(0, Publish(record(2)), Publish(record(1, "stop")))
        swarm.do(2, Publish(record(3)))
        swarm.run(15.0)
        assert swarm[1].events(Learned)[-1].record in (record(2), record(1, "stop"))
        assert swarm[3].events(Learned)[-1].record == record(3)
        swarm.engine.heal()
        swarm.run()
        for k in range(4):
            known = {event.record.key: event.record for event in swarm[k].events(Learned)}
            assert known == {("plan",): record(3), ("stop",): record(1, "stop")}
            assert swarm[k].times(Learned)[-1] <= 15.5


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_views_come_in_order_and_end_at_the_truth(data: st.DataObject) -> None:
    """After any faults: joined and lost lead from each view to the next, the last is the truth."""
    swarm = started(5, seed=data.draw(st.integers(0, 99)))
    engine = swarm.engine
    cut: list[PeerId] = []

    def partition(peers: list[PeerId]) -> None:
        cut[:] = peers
        engine.partition([peers])

    for _ in range(data.draw(st.integers(1, 12))):
        at_s = data.draw(st.integers(0, 60)) / 10
        kind = data.draw(st.sampled_from(["crash", "restart", "cut", "heal"]))
        peers = data.draw(st.lists(st.sampled_from(swarm.peers), unique=True))
        if kind in ("cut", "heal"):
            swarm.at(at_s, partition, peers if kind == "cut" else [])
        else:
            for peer in peers:
                swarm.at(at_s, getattr(engine, kind), peer)
    swarm.run()

    for k, peer in enumerate(swarm.peers):
        for machine in swarm.lives[peer]:
            view = machine.view
            for event in machine.events(ViewChanged):
                _check_step(view, event)
                view = event.view
        if engine.is_alive(peer):
            reachable = [
                other
                for other in swarm.peers
                if engine.is_alive(other) and (other in cut) == (peer in cut)
            ]
            assert list(view) == reachable
            for other in reachable:
                assert view.peers[other].incarnation == swarm.lives[other][-1].incarnation
        assert swarm[k] is machine


def _check_step(view: View, event: ViewChanged) -> None:
    before = {peer: info.incarnation for peer, info in view.peers.items()}
    after = {peer: info.incarnation for peer, info in event.view.peers.items()}
    assert list(after) == sorted(after)
    assert event.lost == tuple(p for p in before if after.get(p) != before[p])
    assert event.joined == tuple(p for p in after if before.get(p) != after[p])
    assert event.lost or event.joined
