"""One connection of two peers: both directions, over a pipe of frames.

Frames are numbered from a number that their receiver has drawn, so one that was recorded elsewhere,
or comes twice, or is left out, ends the link. A message that is malformed is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.carrier import Pipe
from flwr_moshpit.runtime.frames import Breach
from flwr_moshpit.runtime.greeting import Doorkeeper, Greeting
from flwr_moshpit.runtime.outbox import Outbox
from flwr_moshpit.runtime.receiver import Deliver, Receiver
from flwr_moshpit.runtime.sender import Sender
from flwr_moshpit.runtime.uplink import UplinkMeter
from flwr_moshpit.runtime.wire import Limits

log = logging.getLogger(__name__)


class Link:
    """A greeted connection. `run` carries it until it ends.

    OPEN -> RETIRING   nothing was said for a while, and this side dialled: it has said bye
         -> DRAINING   the other side has said bye: finish what waits, then end
    any  -> ended      the pipe broke, the other side broke the rules, or `end` was called
    """

    def __init__(
        self,
        pipe: Pipe,
        mine: Greeting,
        theirs: Greeting,
        outbox: Outbox,
        limits: Limits,
        deliver: Deliver,
        door: Doorkeeper,
        uplink: UplinkMeter,
        on_line: Callable[[bool], None],
        *,
        dialled: bool,
    ) -> None:
        self.dialled = dialled
        self.reason = ""
        """Why it ended."""
        self.ended_well = False
        self.is_retiring = False
        self.received_bytes = 0
        self.sent_bytes = 0
        self.ended = asyncio.Event()
        self.flushed = asyncio.Event()
        """After `flush`: everything that waited has arrived."""
        self._pipe = pipe
        self._outbox = outbox
        self._door = door
        self._uplink = uplink
        self._on_line = on_line
        """Told whether what is sent as `Delivery.NEWEST` has to wait, when that changes."""
        self._line_is_busy = False
        self._peer = theirs.src
        self._awake = asyncio.Event()
        self._end = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._num_messages = 0
        self._owes_bye = False
        self._began_at = self._now()
        self.receiver = Receiver(limits, mine.first_sequence, deliver, self.wake, door.refusals)
        self.receiver.on_receipt = self._on_receipt
        self.sender = Sender(
            outbox, limits, theirs.first_sequence, theirs.window_bytes, self.receiver.receipt
        )

    @property
    def age_s(self) -> float:
        return self._now() - self._began_at

    @property
    def is_draining(self) -> bool:
        return self.receiver.bye is not None

    def wake(self) -> None:
        """There may be something to send."""
        self._awake.set()

    def flush(self) -> None:
        """Find out, by `flushed`, when everything has arrived."""
        self.sender.flushing = True
        self.flushed.clear()
        self.wake()

    def end(self, reason: str, *, well: bool = False) -> None:
        """`well`: nothing was lost."""
        if not self._end.is_set():
            self.reason, self.ended_well = reason, well
            self.sender.may_begin = False
            self._end.set()

    def retire_if_idle(self) -> bool:
        """Whether nothing was said since the last call; then a link that this side dialled says
        bye, and takes no more messages."""
        num_messages = self.sender.num_messages + self.receiver.num_messages
        is_idle = num_messages == self._num_messages and not self._outbox
        # A model may take minutes to come over a slow line, and be all that is said meanwhile.
        is_idle = is_idle and not self.receiver.is_assembling
        self._num_messages = num_messages
        if not is_idle:
            return False
        if self.is_retiring:
            self.end("retired", well=True)
        elif not self.sender.is_idle:
            self.flush()
        elif self.dialled:
            self.is_retiring = self._owes_bye = True
            self.sender.may_begin = False
            self.wake()
        return self.is_retiring

    async def run(self) -> None:
        """Returns when the link has ended."""
        tasks = [
            asyncio.create_task(self._read()),
            asyncio.create_task(self._write()),
            asyncio.create_task(self._end.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.end("closed")
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    log.error("a link has failed", exc_info=outcome)
            self._uplink.lost(self.sender.pacer.under_way_bytes)
            await self._pipe.close()
            self.ended.set()

    async def _read(self) -> None:
        try:
            while self._take(await self._pipe.read()):
                pass
            self.end("the peer is gone", well=self.is_retiring)
        except ConnectionError as error:
            self.end(str(error) or "broken")
        except Breach as error:
            self._door.refuse(error, self._peer)
            self.end(f"refused: {error}")

    def _take(self, raw: bytes | None) -> bool:
        """Whether there may be more. Nothing holds the frame afterwards, which may be large."""
        if raw is None:
            return False
        self.received_bytes += len(raw)
        self.receiver.on_frame(raw)
        if self.is_draining and not self.sender.flushing:
            self.flush()
        return True

    async def _write(self) -> None:
        try:
            while True:
                before = self.sender.pacer.under_way_bytes
                raw = self._next_frame()
                self._tell_uplink(before)
                self._tell_line()
                if raw is not None:
                    self.sent_bytes += len(raw)
                    await self._pipe.write(raw)
                    del raw
                elif self.is_draining and self._all_has_arrived:
                    self.end("drained", well=True)
                    return
                else:
                    await self._sleep()
        except ConnectionError as error:
            self.end(str(error) or "broken")

    async def _sleep(self) -> None:
        """Until there may be something to send, or to tell of the line."""
        self._awake.clear()
        leaves_s = self.sender.newest_leaves_at - self._now()
        timer = self._loop.call_later(leaves_s, self.wake) if leaves_s > 0 else None
        try:
            await self._awake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _next_frame(self) -> bytes | None:
        raw = self.sender.next_frame(self._now())
        if raw is not None:
            return raw
        if self._owes_bye:
            self._owes_bye = False
            return self.sender.bye("", self._now())
        if self.sender.flushing and self._all_has_arrived:
            self.sender.flushing = self.is_draining
            self.flushed.set()
        return None

    @property
    def _all_has_arrived(self) -> bool:
        return self.sender.is_idle and not self._outbox

    def _on_receipt(self, receipt: pb.Receipt) -> None:
        before = self.sender.pacer.under_way_bytes
        self.sender.on_receipt(receipt, self._now())
        self._tell_uplink(before)
        self.wake()

    def _tell_line(self) -> None:
        if self._end.is_set():
            # The outbox may be another link's by now, which tells what becomes of it.
            return
        # A message that fits into one frame has left by now, unless the link was full.
        is_busy = self.sender.line_is_busy(self._now())
        if self._line_is_busy != is_busy:
            self._line_is_busy = is_busy
            self._on_line(self._line_is_busy)

    def _tell_uplink(self, before: int) -> None:
        change = self.sender.pacer.under_way_bytes - before
        if change:
            self._uplink.changed(change, self._now())
