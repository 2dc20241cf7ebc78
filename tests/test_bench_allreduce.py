"""The verdicts of `bench allreduce`, and that what it compares with averages too."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from flwr_moshpit.bench import allreduce
from flwr_moshpit.bench.allreduce import Figures, Times, judge
from flwr_moshpit.bench.bare_sockets import SocketButterfly
from flwr_moshpit.bench.bounds import at_most, show
from flwr_moshpit.bench.idle_swarm import Averaging, IdleSwarm, RoundTimes, is_whole
from flwr_moshpit.bench.split import CHUNK_ELEMS, Split
from flwr_moshpit.cli import main

GOOD = Figures(
    start_s=1.5,
    idle_bytes=120_000_000,
    small=Times(0.04, 0.13, 0.19, 0.02, 6.0),
    large=Times(0.3, 0.7, 0.9, 0.02, 2.9),
    unfilled_match_s=0.02,
    huge_s=8.0,
    huge_alarms=0,
)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"start_s": 2.1}, "start of a peer"),
        ({"idle_bytes": 151_000_000}, "idle peer with its trainer, memory"),
        ({"unfilled_match_s": 0.11}, "matchmaking, 6 peers in groups of 4"),
        ({"huge_alarms": 1}, "suspected meanwhile"),
        ({"large": replace(GOOD.large, reduce_s=0.92)}, "  of the bare one's time"),
        ({"small": replace(GOOD.small, reduce_s=0.2)}, "  of the bare one's time"),
        ({"large": replace(GOOD.large, match_s=0.11)}, "matchmaking, all ready, 10M"),
        ({"small": replace(GOOD.small, match_s=float("nan"))}, "matchmaking, all ready, 1M"),
        ({"large": replace(GOOD.large, peak=3.1)}, "a round's peak, 10M"),
    ],
)
def test_each_bound_can_be_exceeded(change: dict[str, object], what: str) -> None:
    assert all(kept for *_, kept in judge(GOOD))
    bounds = judge(replace(GOOD, **change))  # type: ignore[arg-type]
    assert [name for name, _, _, kept in bounds if not kept] == [what]


def test_a_figure_that_falls_short_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allreduce, "measure", lambda say: GOOD)
    assert main(["bench", "allreduce"]) == 0
    monkeypatch.setattr(allreduce, "measure", lambda say: replace(GOOD, start_s=3.0))
    assert main(["bench", "allreduce"]) == 1
    assert capsys.readouterr().out.count("EXCEEDED") == 1


def test_only_figures_with_a_bound_are_said_to_keep_it() -> None:
    screen = Console(file=io.StringIO(), width=100)
    assert show(screen, [("shown", "1 s", "", True), at_most("bounded", 1.0, 2.0, "s")])
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue().count("kept") == 1


def test_the_times_of_a_round_are_those_of_the_last() -> None:
    early, late = RoundTimes(1.0, 2.5, 6.0, 1.0), RoundTimes(2.0, 3.0, 5.0, 0.5)
    assert Averaging.of([early, late]) == Averaging(match_s=1.0, reduce_s=3.5, coverage=0.5)


def test_a_round_in_which_somebody_did_not_average_says_nothing() -> None:
    good, missed = RoundTimes(1.0, 2.5, 6.0, 1.0), RoundTimes(1.0, 2.5, 2.6, 0.0)
    assert is_whole([[good, good], [good, good]], 2)
    assert not is_whole([], 2)
    assert not is_whole([[good, good], [good]], 2)
    assert not is_whole([[good, missed]], 2)


def test_shares_and_chunks_cover_the_vector() -> None:
    dim = 3 * CHUNK_ELEMS + 5
    chunks = [chunk for owner in range(3) for chunk in Split(0, 3).chunks(owner, dim)]
    assert [begin for begin, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
    assert chunks[-1][1] == dim
    assert max(end - begin for begin, end in chunks) <= CHUNK_ELEMS


def test_sockets_average() -> None:
    dim = 3 * CHUNK_ELEMS + 5

    async def run() -> list[object]:
        crew = [SocketButterfly(Split(index, 3)) for index in range(3)]
        addresses = [await each.listen() for each in crew]
        await asyncio.gather(*[each.connect(addresses) for each in crew])
        vectors = [np.full(dim, index, np.float32) for index in range(3)]
        means = zip(crew, vectors, strict=True)
        done = await asyncio.gather(*[each.average(vector) for each, vector in means])
        for each in crew:
            each.close()
        return list(done)

    for mean in asyncio.run(run()):
        assert np.array_equal(mean, np.ones(dim, np.float32))  # type: ignore[arg-type]


def test_the_gauge_sees_memory_come() -> None:
    """In a process of its own: in this one memory comes and goes for other reasons."""
    program = """
import numpy as np
from flwr_moshpit.bench.gauge import usage
before = usage()
array = np.ones(10_000_000)
after = usage()
print(after.peak_bytes - before.bytes, array.nbytes, after.descriptors)
"""
    said = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    came, array_bytes, descriptors = map(int, said.stdout.split())
    assert 0.9 * array_bytes < came < 1.5 * array_bytes
    assert descriptors > 0


@pytest.mark.slow
def test_a_swarm_averages_when_told_to() -> None:
    with IdleSwarm(3, 10_000, group_size=2) as swarm:
        swarm.train()
        rounds = swarm.average()
        # Three peers in groups of two: two rounds, and one of the peers stands in for a fourth.
        assert len(rounds) == 2
        assert all(each.coverage == 1.0 for each in rounds)
        assert all(each.reduce_s > 0 for each in rounds)
        assert len(swarm.usage()) == 3


@pytest.mark.slow
def test_bare_grpc_averages() -> None:
    from flwr_moshpit.bench.butterfly import GRPC, Crew

    with Crew(GRPC, 3) as crew:
        # Its processes check the mean, and end where it is wrong.
        assert crew.average(1_000_000) > 0
        assert crew.average(7) > 0
