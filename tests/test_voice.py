"""Saying something never waits for somebody to read it."""

from __future__ import annotations

import io
import os

from flwr_moshpit.observe.voice import LINES_MAX, Voice


def test_a_reader_that_sleeps_holds_nobody_up() -> None:
    read, write = os.pipe()
    line = "x" * 1_000
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "w") as stream:
        with Voice(stream) as voice:
            # Far more than a pipe takes.
            for _ in range(3 * LINES_MAX):
                voice.say(line)
            first = reader.readline()
            assert first == f"{line}\n".encode()
            while voice._lines.qsize():
                reader.readline()
            voice.say("the last")
            said = b""
            while b"the last\n" not in said:
                said += reader.readline()
        assert b"lines left out: nobody was reading\n" in said


def test_a_reader_that_is_gone_is_nobodys_trouble() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream, Voice(stream) as voice:
        voice.say("to nobody")
        voice.say("and again")


def test_lines_come_in_order_also_where_there_is_no_file() -> None:
    stream = io.StringIO()
    with Voice(stream) as voice:
        voice.say("one")
        voice.say("two")
    assert stream.getvalue() == "one\ntwo\n"
