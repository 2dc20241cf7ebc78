"""A line that delays frames and loses some, where the kernel cannot (`tc netem` is often missing):

    python impaired_line.py FAR_NAMESPACE FAR_DEVICE NEAR_NAMESPACE NEAR_DEVICE DELAY_S LOSS SEED

Two TAP devices, each in its network namespace, and this process between them: each Ethernet frame
that goes in at one comes out at the other `DELAY_S` later, or never. So TCP really retransmits.
For each line on stdin it prints `{"carried": N, "dropped": N}`; it ends with its stdin. Root only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque

FRAME_BYTES_MAX = 1 << 16
FRAMES_AT_ONCE = 32

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000


def open_tap(namespace: str, device: str) -> int:
    """A file descriptor of `device`, which is made in `namespace`; this thread stays there."""
    own = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        # `os.setns` came with Python 3.12.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(own, _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"{namespace}: {os.strerror(error)}")
    finally:
        os.close(own)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP_WITHOUT_HEADER))
    return tap


class Line:
    """Both directions. A frame that the far end's device does not take is lost as well."""

    def __init__(self, taps: tuple[int, int], delay_s: float, loss: float, seed: int) -> None:
        self.carried = self.dropped = 0
        self._far = {taps[0]: taps[1], taps[1]: taps[0]}
        self._delay_s = delay_s
        self._loss = loss
        self._draw = random.Random(seed).random
        self._under_way: deque[tuple[float, int, bytes]] = deque()
        """(when due, out of which device, frame), in order: all take equally long."""

    @property
    def wait_s(self) -> float | None:
        """Until the next frame is due; None: there is none."""
        if not self._under_way:
            return None
        return max(0.0, self._under_way[0][0] - time.monotonic())

    def take(self, tap: int) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = os.read(tap, FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            if self._draw() < self._loss:
                self.dropped += 1
            else:
                due = time.monotonic() + self._delay_s
                self._under_way.append((due, self._far[tap], frame))

    def give(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, tap, frame = self._under_way.popleft()
            try:
                os.write(tap, frame)
                self.carried += 1
            except OSError:
                # The device is down, or has no room.
                self.dropped += 1


def main(arguments: list[str]) -> None:
    far_namespace, far, near_namespace, near, delay_s, loss, seed = arguments
    taps = open_tap(far_namespace, far), open_tap(near_namespace, near)
    line = Line(taps, float(delay_s), float(loss), int(seed))
    asked = sys.stdin.fileno()
    _say("ready")
    while True:
        ready, _, _ = select.select([*taps, asked], [], [], line.wait_s)
        for tap in taps:
            if tap in ready:
                line.take(tap)
        line.give()
        if asked in ready:
            if not os.read(asked, 1):
                return
            _say(json.dumps({"carried": line.carried, "dropped": line.dropped}))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
