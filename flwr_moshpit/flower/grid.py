"""Requests carried by Flower's Grid: many clients at a time, each one message at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.flower.actions import PARTITION
from flwr_moshpit.flower.client import FlowerTrainer
from flwr_moshpit.flower.messages import Reply
from flwr_moshpit.flower.orders import from_reply, to_message
from flwr_moshpit.flower.requests import Request, Talk
from flwr_moshpit.protocol.machine import Job
from flwr_moshpit.simulation.backend import Outcome, WorkItem, examples_of, read_only
from flwr_moshpit.user_code import Call

T = TypeVar("T")

POLL_S = 0.02
"""Between two looks for replies; Flower's own engine takes 5 ms for the smallest call."""
NODES_S = 60.0
"""How long SuperNodes may take to appear after a run has begun."""


class GridCarrier:
    """Carries requests to SuperNodes and replies back, as each comes."""

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        """`nodes`: the SuperNode of each client."""
        self._grid = grid
        self._nodes = nodes

    def exchange(self, requests: Sequence[Request]) -> list[Reply]:
        def talk() -> Talk[list[Reply]]:
            replies = yield requests
            return list(replies)

        [outcome] = self.hold_all([(0, talk())])
        if isinstance(outcome, TrainerError):
            raise outcome
        return outcome

    def hold_all(self, talks: Sequence[tuple[int, Talk[T]]]) -> list[T | TrainerError]:
        """What each of the (client, talk) comes to.

        Clients go on at the same time, each at its own pace; a client's talks one after the other,
        since Flower's simulation would start both from the context of before.
        """
        under = [_Under(client, talk) for client, talk in talks]
        queues: dict[int, list[_Under]] = {}
        for one in under:
            queues.setdefault(one.client, []).append(one)
        sent: dict[str, tuple[_Under, int]] = {}
        moved = [queue[0] for queue in queues.values()]
        while True:
            asking: list[_Under] = []
            for one in moved:
                queue = queues[one.client]
                while queue and not queue[0].wants():
                    queue.pop(0)
                asking += queue[:1]
            self._send(asking, sent)
            if not sent:
                return [one.outcome for one in under]
            moved = self._replied(sent)

    def _send(self, asking: Sequence[_Under], sent: dict[str, tuple[_Under, int]]) -> None:
        if not asking:
            return
        slots = [(one, slot) for one in asking for slot in range(len(one.requests))]
        messages = []
        for one, slot in slots:
            request = one.requests[slot]
            messages.append(to_message(request, self._nodes[request.client]))
        ids = list(self._grid.push_messages(messages))
        if len(ids) != len(messages):
            raise TrainerError(
                f"Flower took {len(ids)} of {len(messages)} messages: a SuperNode has left the run"
            )
        sent.update(zip(ids, slots, strict=True))

    def _replied(self, sent: dict[str, tuple[_Under, int]]) -> list[_Under]:
        """Wait for a reply; those whose replies are complete now."""
        while not (messages := list(self._grid.pull_messages(list(sent)))):
            time.sleep(POLL_S)
        complete = []
        for message in messages:
            one, slot = sent.pop(message.metadata.reply_to_message_id)
            one.replies[slot] = message
            if all(one.replies):
                complete.append(one)
        return complete


class _Under:
    """A talk that is under way."""

    def __init__(self, client: int, talk: Talk[Any]) -> None:
        self.client = client
        self.requests: Sequence[Request] = ()
        self.replies: list[Message | None] = []
        self.outcome: Any = None
        self._talk = talk
        self._begun = False

    def wants(self) -> bool:
        """Hand over the replies; whether there are requests now, and not an outcome."""
        try:
            if self._begun:
                self.requests = self._talk.send(self._read())
            else:
                self._begun = True
                self.requests = next(self._talk)
        except StopIteration as end:
            self.outcome = end.value
            return False
        except TrainerError as error:
            self.outcome = error
            return False
        self.replies = [None] * len(self.requests)
        return True

    def _read(self) -> list[Reply]:
        return [
            from_reply(cast(Message, reply), str(Call(request.client, request.step)))
            for request, reply in zip(self.requests, self.replies, strict=True)
        ]


class GridBackend:
    """Jobs of a virtual-time engine as messages to SuperNodes, a batch at a time."""

    is_lazy = False

    def __init__(self, trainer: FlowerTrainer, carrier: GridCarrier) -> None:
        self._trainer = trainer
        self._carrier = carrier
        self.num_jobs = 0
        """Carried out so far."""

    def examples(self, client: int, job: Job) -> int | None:
        return examples_of(self._trainer, client, job)

    def run(self, batch: Sequence[WorkItem]) -> Iterator[Outcome]:
        self.num_jobs += len(batch)
        talks = [(i.client, self._trainer.talk(i.client, i.job, i.seed)) for i in batch]
        for outcome in self._carrier.hold_all(talks):
            yield outcome if isinstance(outcome, TrainerError) else read_only(outcome)

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
