"""HTTP for serve.py, in a process of its own: what is done here takes no time from the model, and is
done at once while a text is written.

The process of the model is at the other end of a pipe. It gets an Ask, and sends the text's Parts
and its End, or a Refused, before it takes the next. STOP ends a text early. Starlette and uvicorn
do what is not about models: HTTP, routes, CORS."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import socket
import sys
import time
from collections import deque
from functools import partial
from multiprocessing.connection import Connection

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from extra import cli
from extra.files import one_line
from extra.openai import STOP, Ask, End, Form, Refused, read_ask

BODY_BYTES = 8 << 20
LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins that may always ask
STREAM = [  # the headers of one, for which no proxy may wait
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

# ---- who waits for the model


class Left(Exception):
    """The client has gone."""


class Client:
    """Who asks for a text, and what the model's process sends for it."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self.events: asyncio.Queue = asyncio.Queue()

    async def hear(self) -> list:
        """All that came since the last time, at least one event. Raises what is an error."""
        events = [await self.events.get()]
        while not self.events.empty():
            events.append(self.events.get_nowait())
        for event in events:
            if isinstance(event, Exception):
                raise event
        return events


class Line:
    """The clients, in order of arrival. The text of the first one is being written."""

    def __init__(self, pipe: Connection, waiting: int):
        """waiting: how many clients may wait besides the first."""
        self.pipe = pipe
        self.waiting = waiting
        self.clients: deque[Client] = deque()

    def join(self, client: Client) -> None:
        """Raises Refused if too many wait."""
        if len(self.clients) > self.waiting:
            raise Refused(f"{self.waiting} requests wait already", 503, "queue_full")
        self.clients.append(client)
        if len(self.clients) == 1:
            self.pipe.send(client.ask)

    def leave(self, client: Client) -> None:
        """Called by each client, with or without its text."""
        if client in self.clients:
            if client is self.clients[0]:
                self.pipe.send(STOP)
            else:
                self.clients.remove(client)

    def read(self) -> None:
        """Pass on what has come from the model's process. Ends this process if that has ended."""
        try:
            event = self.pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        self.clients[0].events.put_nowait(event)
        if isinstance(event, End | Refused):
            self.clients.popleft()
            if self.clients:
                self.pipe.send(self.clients[0].ask)


# ---- what is answered


class App:
    """What is answered at each path."""

    def __init__(self, line: Line, args: argparse.Namespace, model: str, size: int):
        """args: serve.py's. model: its name. size: of the context, in tokens."""
        self.line = line
        self.model = model
        self.size = size
        self.bearer = args.api_key and f"Bearer {args.api_key}".encode()
        self.quiet = args.quiet
        origins = dict(allow_origins=args.cors, allow_origin_regex=LOCAL, allow_headers=["*"])
        origins |= dict(allow_methods=["GET", "POST"], allow_private_network=True)
        middleware = [(self.logged, {}), (CORSMiddleware, origins), (self.guarded, {})]
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{id:path}", self.models),
                Route("/v1/chat/completions", self.text, methods=["POST"]),
                Route("/v1/completions", self.text, methods=["POST"]),
            ],
            middleware=[Middleware(layer, **options) for layer, options in middleware],
            exception_handlers={HTTPException: http_error, Refused: refused},
        )

    async def health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> JSONResponse:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "fused-llama"}
        model |= {"context_length": self.size, "max_model_len": self.size}
        wanted = request.path_params.get("id")
        if wanted not in (None, self.model):
            raise Refused(f"the model is {self.model}", 404, "model_not_found")
        return JSONResponse(model if wanted else {"object": "list", "data": [model]})

    async def text(self, request: Request) -> ASGIApp:
        is_chat = request.url.path == "/v1/chat/completions"
        ask = read_ask(await body_of(request), is_chat)
        client = Client(ask)
        self.line.join(client)
        return partial(self.answer, client)

    async def answer(self, client: Client, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            client.events.put_nowait(Left())

        watching = asyncio.create_task(watch())
        form = Form(client.ask, self.model)
        try:
            events = await client.hear()
            if client.ask.stream:
                await stream(client, form, events, send)
            else:
                while not isinstance(events[-1], End):
                    events += await client.hear()
                response = JSONResponse(form.whole(events[:-1], events[-1]))
                await response(scope, receive, send)
        except Left:
            pass
        finally:
            watching.cancel()
            self.line.leave(client)

    def logged(self, app: ASGIApp) -> ASGIApp:
        """Write a line for each request, without what it says."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            start = time.perf_counter()
            status = "client left"

            async def noting(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app(scope, receive, noting)
            finally:
                if not self.quiet:
                    path = one_line(scope["raw_path"].decode(errors="replace"))
                    seconds = time.perf_counter() - start
                    line = f"{scope['client'][0]} {scope['method']} {path} {status}"
                    cli.note(f"{line} {seconds:.3f} s")

        return run

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Ask for the key, and answer what has failed."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            asks = self.bearer and scope["path"] != "/health"
            response = app
            if asks and not hmac.compare_digest(given, self.bearer):
                error = Refused("the API key is missing or wrong", 401, "invalid_api_key")
                response = refused(None, error)
            try:
                await response(scope, receive, send)
            except ClientDisconnect:
                pass
            except Exception as error:
                cli.note(f"error: {cli.error_line(error)}")
                error = Refused(cli.error_line(error), 500, "failed")
                await refused(None, error)(scope, receive, send)

        return run


async def stream(client: Client, form: Form, events: list, send: Send) -> None:
    """Send a stream. A part of it is what was written while the one before was sent."""
    await send({"type": "http.response.start", "status": 200, "headers": [*STREAM]})
    chunks = form.begin()
    ended = False
    while not ended:
        chunks += b"".join(map(form.chunks, events))
        ended = isinstance(events[-1], End | Refused)
        await send({"type": "http.response.body", "body": chunks, "more_body": not ended})
        chunks = b""
        if not ended:
            try:
                events = await client.hear()
            except Refused as error:
                events = [error]


async def body_of(request: Request) -> bytes:
    """Raises Refused if it is too large."""
    body = bytearray()
    size = int(request.headers.get("content-length", 0))
    if size <= BODY_BYTES:
        async for part in request.stream():
            body += part
            size = len(body)
            if size > BODY_BYTES:
                break
    if size > BODY_BYTES:
        raise Refused(f"the body has more than {BODY_BYTES} bytes", 413, "too_large")
    return bytes(body)


def refused(request: Request | None, error: Refused) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "2"}}
    return JSONResponse(error.body, error.status, headers.get(error.status))


def http_error(request: Request, error: HTTPException) -> JSONResponse:
    """The answer for a path, or a method of one, that does not exist."""
    code = error.detail.lower().replace(" ", "_")
    body = Refused(f"{error.detail}: {request.url.path}", error.status_code, code).body
    return JSONResponse(body, error.status_code, error.headers)


# ---- the process


class Server(uvicorn.Server):
    """Reads the pipe, too."""

    def __init__(self, app: App, line: Line):
        options = dict(http="h11", loop="asyncio", ws="none", lifespan="off", proxy_headers=False)
        options |= dict(log_config=None, log_level="critical", access_log=False)
        options |= dict(server_header=False, timeout_keep_alive=75)
        super().__init__(uvicorn.Config(app.app, **options))
        self.line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(self.line.pipe.fileno(), self.line.read)
        self.line.pipe.send(None)  # it listens


def main() -> None:
    """Called with the descriptors of the pipe and of the socket to listen on. What else there is to
    know comes through the pipe once the model is loaded."""
    cli.use_safe_streams()
    pipe = Connection(int(sys.argv[1]))
    try:
        args, model, size = pipe.recv()
    except EOFError:  # it could not be loaded
        return
    line = Line(pipe, args.queue)
    Server(App(line, args, model, size), line).run([socket.socket(fileno=int(sys.argv[2]))])


if __name__ == "__main__":
    main()
