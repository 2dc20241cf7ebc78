"""What ends a process that has children, and what they hear of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flwr_moshpit.signals import deaf_children, ends_as_interrupt

IS_DEAF = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """Whoever runs these tests in the background may ignore signals, which they inherit."""
    handlers: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def is_deaf() -> bool:
    said = subprocess.run([sys.executable, "-c", IS_DEAF], check=True, stdout=subprocess.PIPE)
    return said.stdout.strip() == b"True"


def test_children_do_not_hear_ctrl_c_and_their_parent_does() -> None:
    with deaf_children():
        assert is_deaf()
    assert not is_deaf()

    def interrupt() -> None:
        with deaf_children():
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_by_a_service_manager_is_wound_up_like_ctrl_c(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def end() -> None:
        with ends_as_interrupt():
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        end()
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_presses_ctrl_c_twice_loses_nothing(again: signal.Signals) -> None:
    written: list[str] = []

    def end() -> None:
        with ends_as_interrupt():
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                signal.raise_signal(again)
                written.append("results")

    end()
    assert written == ["results"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_as_interrupt():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_than_the_main_one_changes_nothing() -> None:
    done: list[bool] = []

    def run() -> None:
        with ends_as_interrupt():
            done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True]
