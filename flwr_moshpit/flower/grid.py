"""Requests carried by Flower's Grid: many clients at a time, each one message at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.flower.actions import PARTITION
from flwr_moshpit.flower.client import FlowerTrainer
from flwr_moshpit.flower.messages import Reply
from flwr_moshpit.flower.orders import from_reply, to_message
from flwr_moshpit.flower.requests import Request, Talk
from flwr_moshpit.protocol.machine import Job, Result
from flwr_moshpit.simulation.backend import Outcome, WorkItem, examples_of, read_only
from flwr_moshpit.user_code import Call

POLL_S = 0.005
"""Between two looks for replies at least; Flower's own engine takes 5 ms for the smallest call."""
POLL_S_MAX = 0.1
LOOKING = 0.05
"""The part of the time that looking may take: with hundreds of messages under way Flower needs
milliseconds for it, and neither its actors nor anybody else gets a message meanwhile."""
NODES_S = 60.0
"""How long SuperNodes may take to appear after a run has begun."""


class _Work(ABC):
    """One call of a client that is to come, under way, or answered."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.reply: Message | None = None
        self.is_done = False
        self.is_settled = True
        """Whether it has happened, as far as virtual time has come; else it may be given up."""
        self.is_given_up = False

    @abstractmethod
    def request(self) -> Request | None:
        """What to ask, when its turn has come; None for nothing."""

    @abstractmethod
    def take(self) -> None:
        """The reply is there, and it has happened."""


class GridCarrier:
    """Carries requests to SuperNodes and replies back, each as soon as it can.

    A client has one message under way at a time: Flower's simulation would otherwise start both
    from the context of before and keep what the last one left.
    """

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        """`nodes`: the SuperNode of each client."""
        self._grid = grid
        self._nodes = nodes
        self._queues: dict[int, deque[_Work]] = {}
        self._sent: dict[str, _Work] = {}
        self._unsettled: dict[int, _Work] = {}
        """By client: what was answered ahead of its time."""
        self._undo: dict[int, None] = {}
        """Clients that shall forget their last call."""

    def settle(self, clients: Sequence[int]) -> None:
        while any(work.is_settled for client in clients for work in self._queues.get(client, ())):
            self._pull()

    def exchange(self, requests: Sequence[Request]) -> list[Reply]:
        asked = [_Question(request) for request in requests]
        for question in asked:
            self.add(question)
        for question in asked:
            self.wait(question)
        return [question.answer() for question in asked]

    def add(self, work: _Work) -> None:
        """Ask as soon as the client is free."""
        queue = self._queues.setdefault(work.client, deque())
        queue.append(work)
        if len(queue) == 1:
            self._send_next(work.client)

    def wait(self, work: _Work) -> None:
        """Until it is answered. It must not have been given up."""
        while not work.is_done:
            self._pull()

    def settled(self, work: _Work) -> None:
        """From now it has happened."""
        if work.is_settled:
            return
        work.is_settled = True
        if work.is_done:
            self._unsettled.pop(work.client, None)
            work.take()

    def give_up(self, work: _Work) -> None:
        """It shall not have happened."""
        work.is_given_up = True
        if work.is_done:
            self._unsettled.pop(work.client, None)
            self._undo[work.client] = None
        elif work in self._queues[work.client] and work not in self._sent.values():
            self._queues[work.client].remove(work)

    def _send_next(self, client: int) -> None:
        queue = self._queues[client]
        while queue:
            work = queue[0]
            request = work.request()
            if request is not None:
                break
            work.is_done = True
            queue.popleft()
        else:
            return
        # Who only looks shall not see what was done ahead of its time.
        undo = client in self._undo or (not request.keeps and client in self._unsettled)
        if request.keeps:
            self._undo.pop(client, None)
        [message_id] = self._grid.push_messages([to_message(request, self._nodes[client], undo)])
        if message_id is None:
            raise TrainerError(f"client {client}: its SuperNode has left the run")
        self._sent[message_id] = work

    def _pull(self) -> None:
        """Take in the replies that are there, at least one."""
        began_at = time.perf_counter()
        while not (messages := list(self._grid.pull_messages(list(self._sent)))):
            took_s = time.perf_counter() - began_at
            time.sleep(min(max(took_s / LOOKING, POLL_S), POLL_S_MAX))
            began_at = time.perf_counter()
        for message in messages:
            work = self._sent.pop(message.metadata.reply_to_message_id)
            work.reply, work.is_done = message, True
            self._queues[work.client].popleft()
            if work.is_given_up:
                self._undo[work.client] = None
            elif work.is_settled:
                work.take()
            else:
                self._unsettled[work.client] = work
            self._send_next(work.client)


class _Question(_Work):
    """A request whose reply somebody waits for."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.client)
        self._request = request

    def request(self) -> Request:
        return self._request

    def take(self) -> None:
        """Whoever asked calls `answer`."""

    def answer(self) -> Reply:
        assert self.reply is not None
        return from_reply(self.reply, str(Call(self.client, self._request.step)))


class _Job(_Work):
    """A job of the engine, which may be cancelled before it is due."""

    def __init__(self, item: WorkItem, talk: Talk[Result]) -> None:
        super().__init__(item.client)
        self.item = item
        """Kept, because its id tells it from others."""
        self.outcome: Outcome | None = None
        self.is_settled = False
        self._talk = talk
        self._whose = ""

    def request(self) -> Request | None:
        try:
            [request] = next(self._talk)
        except StopIteration as end:
            self.outcome = read_only(end.value)
            return None
        except TrainerError as error:
            self.outcome = error
            return None
        self._whose = str(Call(self.client, request.step))
        return request

    def take(self) -> None:
        if self.reply is None:
            return
        try:
            self._talk.send([from_reply(self.reply, self._whose)])
        except StopIteration as end:
            self.outcome = read_only(end.value)
        except TrainerError as error:
            self.outcome = error

    def close(self) -> None:
        """Take back what asking has counted."""
        self._talk.close()


class GridBackend:
    """Jobs of a virtual-time engine as messages to SuperNodes, begun when they are submitted."""

    is_lazy = False

    def __init__(self, trainer: FlowerTrainer, carrier: GridCarrier) -> None:
        self._trainer = trainer
        self._carrier = carrier
        self._jobs: dict[int, _Job] = {}
        self.num_jobs = 0
        """Begun so far."""

    def examples(self, client: int, job: Job) -> int | None:
        return examples_of(self._trainer, client, job)

    def begin(self, item: WorkItem) -> None:
        self.num_jobs += 1
        job = _Job(item, self._trainer.talk(item.client, item.job, item.seed))
        self._jobs[id(item)] = job
        self._carrier.add(job)

    def settle(self, item: WorkItem) -> None:
        self._carrier.settled(self._jobs[id(item)])

    def give_up(self, item: WorkItem) -> None:
        job = self._jobs.pop(id(item))
        if not job.is_settled:
            self._carrier.give_up(job)
            job.close()

    def outcome(self, item: WorkItem) -> Outcome:
        job = self._jobs.pop(id(item))
        self._carrier.settled(job)
        self._carrier.wait(job)
        assert job.outcome is not None
        return job.outcome

    def run(self, batch: Sequence[WorkItem]) -> Iterator[Outcome]:
        for item in batch:
            self.begin(item)
        for item in batch:
            yield self.outcome(item)

    def close(self) -> None:
        """Flower's engine ends with the run."""


def virtual_nodes(grid: Grid) -> list[int]:
    """The SuperNode of each client, in the order of the partitions.

    Flower registers its virtual SuperNodes while the ServerApp starts, so this waits for them.
    Raises ConfigError when there are none, or they do not say whose data they have.
    """
    [one, *_] = _nodes(grid, 1)
    [(_, expected)] = _partitions(grid, [one])
    nodes = _nodes(grid, expected)
    partitions = _partitions(grid, nodes)
    by_partition = {partition: node for node, (partition, _) in zip(nodes, partitions, strict=True)}
    if sorted(by_partition) != list(range(len(nodes))):
        raise ConfigError(
            "SuperNodes have the partition-ids "
            f"{', '.join(str(partition) for partition, _ in partitions)}: each needs one of its own"
        )
    return [by_partition[partition] for partition in range(len(nodes))]


def _nodes(grid: Grid, expected: int) -> list[int]:
    """As many as expected, when they are there."""
    ends_at = time.monotonic() + NODES_S
    while len(nodes := sorted(grid.get_node_ids())) < expected:
        if time.monotonic() > ends_at:
            raise ConfigError(
                f"{len(nodes)} of {expected} SuperNodes have come within {NODES_S:.0f} s: the log "
                "of the SuperLink says why"
            )
        time.sleep(POLL_S)
    return nodes


def _partitions(grid: Grid, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """(partition-id, num-partitions) of each."""
    messages = [Message(RecordDict(), node, f"query.{PARTITION}") for node in nodes]
    answers: dict[int, tuple[int, int]] = {}
    for reply in grid.send_and_receive(messages):
        if reply.has_error():
            raise ConfigError(
                f"a ClientApp cannot be asked for its partition: {reply.error.reason}"
            )
        config: Any = reply.content.config_records["partition"]
        answers[reply.metadata.src_node_id] = (config["partition-id"], config["num-partitions"])
    return [answers[node] for node in nodes]
