"""One session for many clients: texts are written one at a time, in order of arrival.

The thread that owns the model writes (Writer.write_next); clients belong to the thread of an asyncio
loop, which neither waits for the model nor makes it wait."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING

from extra import cli, openai
from extra.openai import Ask, Refused

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from session import Session


class Left(Exception):
    """The client has gone."""


class Client:
    """Who asks for a text, and what the writer tells it: the generation with what comes before it,
    in a stream each piece, and None at the end; or an error."""

    def __init__(self, ask: Ask | None = None, loop: asyncio.AbstractEventLoop | None = None):
        """Without a loop, nobody listens."""
        self.ask = ask
        self.loop = loop
        self.left = False
        self.events: asyncio.Queue = asyncio.Queue()

    def tell(self, event: object) -> None:
        """Called by any thread."""
        if self.loop:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def hear(self) -> list:
        """All that was told since the last time, at least one event. Raises what is an error."""
        events = [await self.events.get()]
        while not self.events.empty():
            events.append(self.events.get_nowait())
        for event in events:
            if isinstance(event, Exception):
                raise event
        return events


class Writer:
    """Writes the texts that clients ask for, one at a time, in order of arrival."""

    def __init__(self, session: Session, waiting: int):
        """waiting: how many clients may wait besides the one whose text is written."""
        self.session = session
        self.waiting = waiting
        self.clients: deque[Client] = deque()  # the first is the one whose text is written
        self.changed = threading.Condition()

    def add(self, client: Client) -> None:
        """Raises Refused if too many wait."""
        with self.changed:
            if len(self.clients) > self.waiting:
                raise Refused(f"{self.waiting} requests wait already", 503, "queue_full")
            self.clients.append(client)
            self.changed.notify()

    def remove(self, client: Client) -> None:
        """If its text is being written, that ends with the next token."""
        client.left = True
        with self.changed:
            if client in self.clients and client is not self.clients[0]:
                self.clients.remove(client)

    def write_next(self) -> None:
        """Wait for a client, and write its text. All ranks do so together."""
        ranks = self.session.ranks
        client = Client()
        if ranks.rank == 0:
            with self.changed:
                self.changed.wait_for(lambda: self.clients)
                client = self.clients[0]
        client.ask = ranks.broadcast(lambda: client.ask)
        try:
            self._write(client)
        except (Left, Refused) as error:
            client.tell(error)
        except ValueError as error:
            client.tell(Refused(str(error)))
        except Exception as error:
            if ranks.size > 1:  # the others may wait for this one
                raise
            self.session.state.truncate(0)  # what is in it may be wrong
            client.tell(failed(error))
        if ranks.rank == 0:
            with self.changed:
                self.clients.popleft()

    def _write(self, client: Client) -> None:
        def go_on(*_) -> None:
            if self.session.ranks.agree(client.left):
                raise Left

        generation, before = openai.begin_text(self.session, client.ask, progress=go_on)
        client.tell((generation, before))
        with closing(generation):
            for piece in generation:
                if client.ask.stream:
                    client.tell(piece)
                go_on()
        client.tell(None)


def failed(error: Exception) -> Refused:
    """An error of ours, not of the client's."""
    line = cli.error_line(error)
    cli.note(f"error: {line}")
    return Refused(line, 500, "failed")
