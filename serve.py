"""Serve a model over HTTP with OpenAI's API, for editors, front ends and agents.

The main thread generates one text at a time. Another talks with clients, by way of starlette and
uvicorn; extra/openai.py knows the words."""

from __future__ import annotations

import signal

if __name__ == "__main__":  # the imports take time, and Ctrl-C needs no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import hmac
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from extra import cli
from extra.hub import local_checkpoint
from extra.openai import Ask, ChatAsk, Form, Refused, TextAsk, error_body, event, read_ask
from run import open_session

if TYPE_CHECKING:  # they import torch, which takes seconds
    from extra.parallel import Ranks
    from session import Generation, Piece, Session

BODY_BYTES = 8 << 20
LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins that may always ask
# Seconds between two parts of a stream, such as a film has between two pictures: while one is sent,
# the thread that generates waits for Python's lock, and finds less of its own in the caches
PAUSE = 1 / 30
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
STREAM["X-Accel-Buffering"] = "no"  # in proxies


# ---- the command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.Parser(__doc__.split("\n\n")[0], {"serve": "serve.py"})
    cli.add_template_flag(cli.add_model_flags(parser))
    cli.add_proposal_flags(parser.group("speculation"))
    add = parser.group("server")
    # fmt: off
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="where to listen; 0.0.0.0: on all networks")
    add("--port", type=cli.within(int, 0, 65535), default=8080, metavar="N", help="0: any free one")
    add("--api-key", metavar="KEY", help="what clients have to send")
    add("--cors", action="append", default=[], metavar="ORIGIN",
        help="allow web pages of this origin, such as https://example.org, besides those on"
        " localhost; * is all; may be repeated")
    add("--queue", type=cli.within(int, 0, 10_000), default=64, metavar="N",
        help="how many requests may wait; others are refused")
    add("--quiet", action="store_true", help="print only errors")
    add("--debug", action="store_true", help="print errors with their traceback")
    # fmt: on
    args = parser.parse(argv, lambda args: "serve")
    if "" in (args.model, args.host, args.api_key):
        parser.error("-m, --host or --api-key is empty")
    if error := cli.model_contradiction(args):
        parser.error(error)
    cli.settle_model(args)
    parser.find([args.model, args.draft])
    return args


# ---- between the two threads


class ClientGone(Exception):
    """The client has gone."""


class Client:
    """A request, and what becomes of it: the thread that generates tells it, and the one that talks
    with clients hears it."""

    def __init__(self, ask: Ask | None, loop: asyncio.AbstractEventLoop | None = None):
        """loop: of the thread that talks with clients; if None, nothing is told, since another rank
        does it."""
        self.ask = ask
        self.loop = loop
        self.news: asyncio.Queue[list[Piece] | Generation | Exception] = asyncio.Queue()
        self.ended = False  # all has been told, or the client has gone

    def tell(self, news: list[Piece] | Generation | Exception) -> None:
        """What has been generated, the whole text when it ends, or why there is none."""
        if self.loop:
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)

    async def hear(self) -> list[Piece] | Generation:
        """What is told next. Raises it if it is an error."""
        news = await self.news.get()
        if isinstance(news, Exception):
            raise news
        return news


# ---- the thread that generates


def write_next(session: Session, clients: queue.SimpleQueue[Client]) -> None:
    """Wait for a client, and generate its text, on all ranks together. Rank 0 has the clients."""
    from model import ContextFull

    ranks = session.ranks
    client = clients.get() if ranks.rank == 0 else Client(None)
    client.ask = ranks.broadcast(lambda: client.ask)
    try:
        write(session, client)
    except ClientGone:
        pass
    except ContextFull as error:
        client.tell(Refused(str(error), code="context_length_exceeded"))
    except ValueError as error:
        client.tell(Refused(str(error)))
    except Exception as error:
        if ranks.size > 1:  # the others may wait for this one
            raise
        cli.note(f"error: {cli.error_line(error)}")
        client.tell(Refused(cli.error_line(error), 500, "failed"))
        session.state.truncate(0)  # what is in it may be wrong
    client.ended = True


def write(session: Session, client: Client) -> None:
    def stop_if_gone(*_) -> None:
        if session.ranks.agree(client.ended):
            raise ClientGone

    stop_if_gone()
    pieces = []
    told = 0.0  # when
    with closing(client.ask.begin(session, progress=stop_if_gone)) as text:
        for piece in text:
            pieces.append(piece)
            now = time.perf_counter()
            if client.ask.stream and now > told + PAUSE:
                client.tell(pieces)
                pieces = []
                told = now
            stop_if_gone()
    if client.ask.stream:
        client.tell(pieces)
    client.tell(text)


# ---- the thread that talks with clients


class App:
    """What is answered at each path."""

    def __init__(
        self, args: argparse.Namespace, session: Session, clients: queue.SimpleQueue[Client]
    ):
        """clients: for the thread that generates."""
        self.model = args.model  # its name, on the hub
        if path := local_checkpoint(args.model):
            self.model = path.resolve().name
        self.session = session
        self.most = args.queue
        self.queue = clients
        self.clients: list[Client] = []  # those without their text
        origins = dict(allow_origins=args.cors, allow_origin_regex=LOCAL, allow_headers=["*"])
        origins |= dict(allow_methods=["GET", "POST"], allow_private_network=True)
        middleware = [Middleware(CORSMiddleware, **origins)]
        if args.api_key:
            middleware.append(Middleware(guarded, key=args.api_key))
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{id:path}", self.models),
                Route("/v1/chat/completions", partial(self.text, ChatAsk), methods=["POST"]),
                Route("/v1/completions", partial(self.text, TextAsk), methods=["POST"]),
            ],
            middleware=middleware,
            exception_handlers={
                HTTPException: refused,
                ClientDisconnect: lambda *_: Response(),  # nobody reads it
                Exception: refused,
            },
        )

    async def health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> JSONResponse:
        size = self.session.state.size
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "fused-llama"}
        model |= {"context_length": size, "max_model_len": size}
        wanted = request.path_params.get("id")
        if wanted not in (None, self.model):
            raise Refused(f"the model is {self.model}", 404, "model_not_found")
        return JSONResponse(model if wanted else {"object": "list", "data": [model]})

    async def text(self, kind: type[Ask], request: Request) -> ASGIApp:
        ask = read_ask(await body_of(request), kind)
        self.clients = [client for client in self.clients if not client.ended]
        if len(self.clients) > self.most:
            raise Refused(f"{self.most} requests wait already", 503, "queue_full")
        client = Client(ask, asyncio.get_running_loop())
        self.clients.append(client)
        self.queue.put(client)
        return partial(self.answer, client)

    async def answer(self, client: Client, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            client.ended = True
            client.news.put_nowait(ClientGone())

        watching = asyncio.create_task(watch())
        form = Form(client.ask, self.model, self.session)
        try:
            first = await client.hear()
            if client.ask.stream:
                response = StreamingResponse(stream(client, form, first), headers=STREAM)
                await response.stream_response(send)
            else:
                await JSONResponse(form.whole(first))(scope, receive, send)
        except ClientGone:
            pass
        finally:
            watching.cancel()
            client.ended = True


async def stream(
    client: Client, form: Form, news: list[Piece] | Generation
) -> AsyncIterator[bytes]:
    """The answer, as it is told; news: what has been told first."""
    part = form.begin()
    try:
        while isinstance(news, list):
            yield part + form.pieces(news)
            part = b""
            news = await client.hear()
        yield part + form.end(news)
    except Refused as error:
        yield event(error_body(error))


def guarded(app: ASGIApp, key: str) -> ASGIApp:
    """Ask for the key, but for the server's health."""
    wanted = f"Bearer {key}".encode()

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        response = app
        if scope["path"] != "/health" and not hmac.compare_digest(given, wanted):
            error = Refused("the API key is missing or wrong", 401, "invalid_api_key")
            response = refused(None, error)
        await response(scope, receive, send)

    return run


async def body_of(request: Request) -> bytes:
    """Raises Refused if it is too large: at once if its length is announced."""
    too_large = Refused(f"the body has more than {BODY_BYTES} bytes", 413, "too_large")
    if int(request.headers.get("content-length", 0)) > BODY_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise too_large
    return bytes(body)


def refused(request: Request | None, error: Exception) -> Response:
    """The answer to what this program refuses, or starlette, or to what has failed."""
    if not isinstance(error, HTTPException):
        cli.note(f"error: {cli.error_line(error)}")
        error = Refused(cli.error_line(error), 500, "failed")
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "2"}}
    status = error.status_code
    return JSONResponse(error_body(error), status, headers.get(status, error.headers))


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    # Connections inherit this, so that small writes are sent at once. asyncio would set it only if
    # the socket named its protocol
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def start_web_thread(app: ASGIApp, listener: socket.socket, quiet: bool) -> None:
    """Serve the app in a thread that ends with the process; if it ends by itself, so does the
    process."""
    logging.getLogger("uvicorn.error").disabled = True  # of what clients do wrong
    logging.getLogger("uvicorn.access").addHandler(logging.StreamHandler())
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    options = dict(http="h11", loop="asyncio", ws="none", lifespan="off", proxy_headers=False)
    options |= dict(log_config=None, access_log=not quiet)
    options |= dict(server_header=False, timeout_keep_alive=75)
    server = uvicorn.Server(uvicorn.Config(app, **options))

    def run() -> None:
        try:
            server.run([listener])
            reason = "uvicorn has ended"
        except BaseException as error:
            reason = cli.error_line(error)
        cli.note(f"error: clients cannot be answered any more: {reason}")
        os._exit(1)

    threading.Thread(target=run, daemon=True).start()


# ---- the program


def work(args: argparse.Namespace, ranks: Ranks) -> int:
    from extra.hardware import pick_device

    ranks.join(pick_device(args.device, ranks))
    if ranks.rank == 0:
        listener = listen(args.host, args.port)  # an error comes before the model
    session = open_session(args, ranks)
    # What a first text compiles is ready when a client asks
    with suppress(ValueError):  # a client is told the same
        session.turn_ends()
        session.generate("a", n=2).finish()
    clients: queue.SimpleQueue[Client] = queue.SimpleQueue()
    if ranks.rank == 0:
        start_web_thread(App(args, session, clients).app, listener, args.quiet)
        if not args.quiet:
            host = f"[{args.host}]" if ":" in args.host else args.host
            port = listener.getsockname()[1]
            cli.note(f"model     {session.model.checkpoint.folder}")
            cli.note(f"running   {session.types()}, context {session.state.size}")
            cli.note(f"serving   http://{host}:{port}/v1 (Ctrl-C ends it)")
    while True:
        write_next(session, clients)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cli.import_torch()
    cli.choose_interpreter(args)
    return cli.exit_code(work, args)


if __name__ == "__main__":
    cli.use_safe_streams()
    code = main()
    os._exit(code)  # at once, whatever clients still wait for
