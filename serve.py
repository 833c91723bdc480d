"""A model over HTTP in the words of OpenAI's API, for editors, front ends and agents.

The main thread generates one text at a time. Another talks with clients, by way of starlette and
uvicorn; extra/openai.py knows the words."""

from __future__ import annotations

import signal

if __name__ == "__main__":  # the imports take time, and Ctrl-C needs no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import hmac
import os
import queue
import socket
import threading
import time
from collections import deque
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
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from extra import cli
from extra.files import one_line
from extra.hub import local_checkpoint
from extra.openai import Ask, ChatAsk, Form, Refused, TextAsk, error_body, in_stream, read_ask
from run import open_session

if TYPE_CHECKING:  # they import torch, which takes seconds
    from extra.parallel import Ranks
    from session import Generation, Session

BODY_BYTES = 8 << 20
LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins that may always ask
# Seconds between two parts of a stream, less than a frame of a screen: sending one takes as long as a
# fifth of a token of a small model, and meanwhile the model's thread runs no Python
PAUSE = 0.01
NO_WAITING = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # for proxies


# ---- the command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.Parser(__doc__, {"serve": "serve.py"})
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
    """A request, and its answer so far. The thread that generates appends to it with `tell`; the one
    that talks with clients waits for what is new, and takes it, with `hear`."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self.parts: deque[bytes] = deque()
        self.error: Exception | None = None
        self.loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self.ended = asyncio.Event()  # all has been told, or the client has gone

    def tell(self, part: bytes, last: bool = False) -> None:
        self.parts.append(part)
        if last:
            self.loop.call_soon_threadsafe(self.ended.set)
        if last or not self.news.is_set():
            self.loop.call_soon_threadsafe(self.news.set)

    def fail(self, error: Exception) -> None:
        self.error = error
        self.tell(b"", last=True)

    async def hear(self) -> bytes:
        """What has been told since the last time. Raises the error if there is one."""
        await self.news.wait()
        self.news.clear()
        if self.error:
            raise self.error
        return b"".join(self.parts.popleft() for _ in range(len(self.parts)))

    async def stream(self, part: bytes) -> AsyncIterator[bytes]:
        """The parts of the answer, of which the first has been heard."""
        yield part
        while self.parts or not self.ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await self.ended.wait()
            try:
                yield await self.hear()
            except Refused as error:
                yield in_stream(error_body(error))
                return


# ---- the thread that generates


class Writer:
    """Generates the texts that clients ask for, on all ranks together. Rank 0 has the clients."""

    def __init__(self, session: Session, model: str, clients: queue.SimpleQueue[Client]):
        """model: its name."""
        self.session = session
        self.model = model
        self.clients = clients
        self.client: Client | None = None

    def write_next(self) -> None:
        """Wait until a text is asked for, and generate it."""
        from model import ContextFull

        ranks = self.session.ranks
        ask = ranks.broadcast(self._next)
        try:
            self._write(ask)
        except ClientGone:
            pass
        except ContextFull as error:
            self._fail(Refused(str(error), code="context_length_exceeded"))
        except ValueError as error:
            self._fail(Refused(str(error)))
        except Refused as error:
            self._fail(error)
        except Exception as error:
            if ranks.size > 1:  # the others may wait for this one
                raise
            cli.note(f"error: {cli.error_line(error)}")
            self._fail(Refused(cli.error_line(error), 500, "failed"))
            self.session.state.truncate(0)  # what is in it may be wrong

    def _next(self) -> Ask:
        self.client = self.clients.get()
        return self.client.ask

    def _tell(self, part: bytes, last: bool = False) -> None:
        if self.client:
            self.client.tell(part, last)

    def _fail(self, error: Refused) -> None:
        if self.client:
            self.client.fail(error)

    def _stop_if_gone(self, *_) -> None:
        """Raise ClientGone on all ranks if the client has."""
        if self.session.ranks.agree(bool(self.client and self.client.ended.is_set())):
            raise ClientGone

    def _write(self, ask: Ask) -> None:
        self._stop_if_gone()
        generation = self._begin(ask)
        form = Form(ask, self.model, self.session)
        begin = form.begin()  # comes with the first piece, which would otherwise wait for PAUSE
        with closing(generation):
            for piece in generation:
                if ask.stream and (piece.text or piece.logprobs):
                    self._tell(begin + form.piece(piece.text, piece.logprobs))
                    begin = b""
                self._stop_if_gone()
        answer = begin + form.end(generation) if ask.stream else form.whole(generation)
        self._tell(answer, last=True)

    def _begin(self, ask: Ask) -> Generation:
        """The text that is asked for, of which nothing is evaluated yet. Raises Refused or
        ValueError."""
        options = ask.options() | {"progress": self._stop_if_gone}
        if isinstance(ask, TextAsk):
            return self.session.generate(ask.prompt, **options)
        prompt = self.session.render([message.plain() for message in ask.messages])
        for message in ask.messages:
            text = message.plain()["content"].strip()
            if message.role in ("system", "developer") and text not in prompt.text:
                raise Refused("the chat template has no place for this system message")
        return self.session.chat(prompt, **options)


# ---- the thread that talks with clients


class App:
    """What is answered at each path."""

    def __init__(self, args: argparse.Namespace, model: str, size: int):
        """model: its name. size: of the context, in tokens."""
        self.args = args
        self.model = model
        self.size = size
        self.queue: queue.SimpleQueue[Client] = queue.SimpleQueue()  # for the other thread
        self.clients: list[Client] = []  # those without their text
        origins = dict(allow_origins=args.cors, allow_origin_regex=LOCAL, allow_headers=["*"])
        origins |= dict(allow_methods=["GET", "POST"], allow_private_network=True)
        middleware = [(self.logged, {}), (CORSMiddleware, origins), (self.guarded, {})]
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{id:path}", self.models),
                Route("/v1/chat/completions", partial(self.text, ChatAsk), methods=["POST"]),
                Route("/v1/completions", partial(self.text, TextAsk), methods=["POST"]),
            ],
            middleware=[Middleware(layer, **options) for layer, options in middleware],
            exception_handlers={HTTPException: refused},
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

    async def text(self, kind: type[Ask], request: Request) -> ASGIApp:
        client = Client(read_ask(await body_of(request), kind))
        self.clients = [other for other in self.clients if not other.ended.is_set()]
        if len(self.clients) > self.args.queue:
            raise Refused(f"{self.args.queue} requests wait already", 503, "queue_full")
        self.clients.append(client)
        self.queue.put(client)
        return partial(self.answer, client)

    async def answer(self, client: Client, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            client.fail(ClientGone())

        watching = asyncio.create_task(watch())
        kind = "text/event-stream" if client.ask.stream else "application/json"
        try:
            parts = client.stream(await client.hear())
            headers = NO_WAITING | {"Content-Type": kind}
            await StreamingResponse(parts, headers=headers).stream_response(send)
        except ClientGone:
            pass
        finally:
            watching.cancel()
            client.ended.set()

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
                if not self.args.quiet:
                    path = one_line(scope["raw_path"].decode(errors="replace"))
                    seconds = time.perf_counter() - start
                    line = f"{scope['client'][0]} {scope['method']} {path} {status}"
                    cli.note(f"{line} {seconds:.3f} s")

        return run

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Ask for the key, and answer what has failed."""
        key = self.args.api_key and f"Bearer {self.args.api_key}".encode()

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            response = app
            if key and scope["path"] != "/health" and not hmac.compare_digest(given, key):
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


def refused(request: Request | None, error: HTTPException) -> JSONResponse:
    """The answer to what is refused, by this program or by starlette."""
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


def start_web_thread(app: App, listener: socket.socket) -> None:
    """Serve the app in a thread that ends with the process; if it ends by itself, so does the
    process."""
    options = dict(http="h11", loop="asyncio", ws="none", lifespan="off", proxy_headers=False)
    options |= dict(log_config=None, log_level="critical", access_log=False)
    options |= dict(server_header=False, timeout_keep_alive=75)
    server = uvicorn.Server(uvicorn.Config(app.app, **options))

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


def ready_session(args: argparse.Namespace, ranks: Ranks) -> Session:
    """A session that has generated a first text, so that what that compiles is ready."""
    session = open_session(args, ranks)
    with suppress(ValueError):  # a client is told the same
        session.turn_ends()
        session.generate("a", n=2).finish()
    return session


def work(args: argparse.Namespace, ranks: Ranks) -> int:
    from extra.hardware import pick_device

    ranks.join(pick_device(args.device, ranks))
    listener = None
    if ranks.rank == 0:
        listener = listen(args.host, args.port)
    session = ready_session(args, ranks)
    name = args.model  # on the hub
    if path := local_checkpoint(name):
        name = path.resolve().name
    app = App(args, name, session.state.size)
    if listener:
        start_web_thread(app, listener)
        if not args.quiet:
            host = f"[{args.host}]" if ":" in args.host else args.host
            port = listener.getsockname()[1]
            cli.note(f"model     {session.model.checkpoint.folder}")
            cli.note(f"running   {session.types()}, context {session.state.size}")
            cli.note(f"serving   http://{host}:{port}/v1 (Ctrl-C ends it)")
    writer = Writer(session, name, app.queue)
    while True:
        writer.write_next()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cli.import_torch()
    cli.choose_interpreter(args)
    return cli.exit_code(work, args)


if __name__ == "__main__":
    cli.use_safe_streams()
    code = main()
    os._exit(code)  # at once, whatever clients still wait for
