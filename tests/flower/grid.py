"""A Grid in this process: virtual SuperNodes that answer as Flower's simulation engine does."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from flwr_moshpit.flower import App
from flwr_moshpit.flower.compat import ensure_identity
from flwr_moshpit.user_code import pinned


class LocalGrid(Grid):
    """Messages and contexts are pickled on their way, as they are to Ray's actors and back.

    Replies come a few at a time, the last message's first, and with other random numbers drawn in
    between, so nothing can depend on their order or on who calls.
    """

    def __init__(self, app: App, num_nodes: int, run_config: dict[str, Any] | None = None) -> None:
        ensure_identity()
        self._client_app = app.load(app.client_ref)
        config = {**app.config, **(run_config or {})}
        # As in Flower, an id tells nothing about the partition.
        self.contexts = {
            1000 - 7 * partition: Context(
                run_id=1,
                node_id=1000 - 7 * partition,
                node_config={"partition-id": partition, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=config,
            )
            for partition in range(num_nodes)
        }
        self.calls: list[str] = []
        """The type of each message that was answered."""
        self.sizes: list[int] = []
        """How many messages were on their way at each answer."""
        self._number = count()
        self._waiting: deque[Message] = deque()

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            copy = pickle.loads(pickle.dumps(message))
            copy.metadata.__dict__["_message_id"] = str(next(self._number))
            self._waiting.append(copy)
            ids.append(copy.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        replies = []
        for _ in range(min(len(self._waiting), 1 + next(self._number) % 4)):
            message = self._waiting.pop()
            assert message.metadata.message_id in wanted
            replies.append(self._answer(message))
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        ids = self.push_messages(messages)
        replies: list[Message] = []
        while len(replies) < len(ids):
            replies += self.pull_messages(ids)
        return replies

    def _answer(self, message: Message) -> Message:
        self.calls.append(message.metadata.message_type)
        self.sizes.append(len(self._waiting) + 1)
        node = message.metadata.dst_node_id
        context = pickle.loads(pickle.dumps(self.contexts[node]))
        try:
            with pinned(next(self._number)):
                reply = self._client_app(message, context)
        except Exception as error:
            return Message(Error(2, repr(error)), reply_to=message)
        self.contexts[node] = pickle.loads(pickle.dumps(context))
        return pickle.loads(pickle.dumps(reply))

    def _not_used(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing of ours does this")

    create_message = set_run = _not_used
    run = property(_not_used)
