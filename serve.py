"""Serve a model over HTTP with OpenAI's API, for editors, front ends and agents.

One process generates, one text at a time. Another talks with clients, by way of starlette and
uvicorn, so that the model never waits for Python's lock; extra/openai.py knows the words."""

from __future__ import annotations

import signal

if __name__ == "__main__":  # the imports take time, and Ctrl-C needs no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import hmac
import logging
import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

import uvicorn
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from extra import cli
from extra.hub import local_checkpoint
from extra.openai import Ask, ChatAsk, Form, Refused, TextAsk, error_body, event, read_ask
from run import open_session

if TYPE_CHECKING:  # they import torch, which takes seconds
    from extra.parallel import Ranks
    from session import Session

BODY_BYTES = 8 << 20
LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins that may always ask
HEALTH = ("/health", "/v1/health")
# Seconds between two parts of a stream. Each part takes 0.3 ms of the model's time, or more where
# the other process has no core of its own
PAUSE = 1 / 20
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


# ---- the process that generates


class Part(NamedTuple):
    """A part of an answer, for the process that talks with clients."""

    body: bytes
    status: int = 200
    last: bool = True


class Link:
    """What the process that generates has of the other: requests, one at a time, each of which it
    answers, and the word that the client has gone."""

    def __init__(self, pipe: Connection | None = None, gone: mmap.mmap | bytes = b"\0"):
        """pipe: None on all ranks but the first, which alone has clients. gone: a byte that both
        processes share; it is not 0 if the client has gone."""
        self.pipe = pipe
        self.gone = gone
        self.begun = False  # a part of the answer has been sent

    def receive(self) -> Ask:
        self.begun = False
        return self.pipe.recv()

    def send(self, part: Part) -> None:
        self.begun = True
        if self.pipe:
            self.pipe.send(part)


class ClientGone(Exception):
    """The client has gone."""


def write_next(session: Session, model: str, link: Link) -> None:
    """Wait for a request, and generate its text, on all ranks together. model: its name."""
    from model import ContextFull

    ranks = session.ranks
    ask = ranks.broadcast(link.receive)
    try:
        write(session, ask, Form(ask, model, session), link)
        return
    except ClientGone:
        link.send(Part(b""))
        return
    except ContextFull as error:
        refusal = Refused(str(error), code="context_length_exceeded")
    except ValueError as error:
        refusal = Refused(str(error))
    except OSError:  # the other process has ended
        raise
    except Exception as error:
        if ranks.size > 1:  # the others may wait for this one
            raise
        session.state.truncate(0)  # what is in it may be wrong
        refusal = failure(error)
    body = error_body(refusal)
    body = event(body) if link.begun else to_json(body)
    link.send(Part(body, refusal.status_code))


def write(session: Session, ask: Ask, form: Form, link: Link) -> None:
    def stop_if_gone(*_) -> None:
        if session.ranks.agree(link.gone[0] != 0):
            raise ClientGone

    begin = form.begin()
    pieces = []
    sent = 0.0  # when
    with closing(ask.begin(session, progress=stop_if_gone)) as text:
        for piece in text:
            if piece.text or piece.logprobs:
                pieces.append(piece)
            now = time.perf_counter()
            if ask.stream and pieces and now > sent + PAUSE:
                link.send(Part(begin + form.pieces(pieces), last=False))
                begin = b""
                pieces = []
                sent = now
            stop_if_gone()
    if ask.stream:
        link.send(Part(begin + form.pieces(pieces) + form.end(text)))
    else:
        link.send(Part(to_json(form.whole(text))))


def failure(error: Exception) -> Refused:
    """What the client is told of an error that is not the client's, and so is stderr."""
    line = cli.error_line(error)
    cli.note(f"error: {line}")
    return Refused(line, 500, "failed")


# ---- the process that talks with clients


class Client:
    """A request, and what is still to be sent to the one who asks."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self.parts: asyncio.Queue[Part | None] = asyncio.Queue()  # None: the client has gone
        self.watching: asyncio.Task | None = None


class Front:
    """What is answered at each path: to all but requests for a text always the same."""

    def __init__(
        self, args: argparse.Namespace, pipe: Connection, gone: mmap.mmap, model: str, size: int
    ):
        """pipe and gone: see Link. model: its name; size: of its context."""
        self.pipe = pipe
        self.gone = gone
        self.most = args.queue
        self.waiting: list[Client] = []  # in order of arrival; the first one's text is generated
        origins = dict(allow_origins=args.cors, allow_origin_regex=LOCAL, allow_headers=["*"])
        origins |= dict(allow_methods=["GET", "POST"], allow_private_network=True)
        middleware = [Middleware(CORSMiddleware, **origins)]
        if args.api_key:
            middleware.append(Middleware(guarded, key=args.api_key))
        about = {"id": model, "object": "model", "created": 0, "owned_by": "fused-llama"}
        about |= {"context_length": size, "max_model_len": size}
        models = JSONResponse({"object": "list", "data": [about]})
        routes = [
            Route("/health", JSONResponse({"status": "ok"}), methods=["GET"]),
            Route("/models", models, methods=["GET"]),
            Route("/models/{name:path}", JSONResponse(about), methods=["GET"]),
            Route("/chat/completions", partial(self.text, ChatAsk), methods=["POST"]),
            Route("/completions", partial(self.text, TextAsk), methods=["POST"]),
        ]
        self.app = Starlette(
            routes=[Mount("/v1", routes=routes), *routes],
            middleware=middleware,
            exception_handlers={HTTPException: refused, Exception: refused},
        )

    async def run(self, listener: socket.socket, access_log: bool) -> None:
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self.receive)
        logging.getLogger("uvicorn.error").disabled = True  # of what clients do wrong
        logging.getLogger("uvicorn.access").addHandler(logging.StreamHandler())
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        options = dict(http="h11", ws="none", lifespan="off", proxy_headers=False, log_config=None)
        options |= dict(server_header=False, timeout_keep_alive=75, access_log=access_log)
        await uvicorn.Server(uvicorn.Config(self.app, **options)).serve([listener])

    def receive(self) -> None:
        """Take a part of an answer from the process that generates, with which this one ends."""
        try:
            part = self.pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        self.waiting[0].parts.put_nowait(part)
        if part.last:
            del self.waiting[0]
            self.gone[0] = 0
            if self.waiting:
                self.pipe.send(self.waiting[0].ask)

    async def text(self, kind: type[Ask], request: Request) -> ASGIApp:
        try:
            client = Client(read_ask(await body_of(request), kind))
        except ClientDisconnect:
            return Response()  # nobody reads it
        if len(self.waiting) > self.most:
            raise Refused(f"{self.most} requests wait already", 503, "queue_full")
        self.waiting.append(client)
        if client is self.waiting[0]:
            self.pipe.send(client.ask)
        client.watching = asyncio.create_task(self.watch(client, request))
        first = await client.parts.get()
        if first is None:
            return Response()
        if client.ask.stream and first.status == 200:
            response = StreamingResponse(bodies(first, client.parts), headers=STREAM)
            # without starlette's own watch, whose group of tasks takes half a millisecond to begin
            return lambda scope, receive, send: response.stream_response(send)
        return Response(first.body, first.status, media_type="application/json")

    async def watch(self, client: Client, request: Request) -> None:
        """Wait until a client has its answer or has gone."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        client.parts.put_nowait(None)
        if client in self.waiting[1:]:
            self.waiting.remove(client)
        elif client in self.waiting:
            self.gone[0] = 1


async def bodies(part: Part | None, parts: asyncio.Queue[Part | None]) -> AsyncIterator[bytes]:
    """What is in a part and in those that follow it, to the last one or until the client goes."""
    while part and not part.last:
        yield part.body
        part = await parts.get()
    if part:
        yield part.body


def guarded(app: ASGIApp, key: str) -> ASGIApp:
    """Ask for the key, but for the server's health."""
    wanted = f"Bearer {key}".encode()

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        response = app
        if scope["path"] not in HEALTH and not hmac.compare_digest(given, wanted):
            error = Refused("the API key is missing or wrong", 401, "invalid_api_key")
            response = await refused(None, error)
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


async def refused(request: Request | None, error: Exception) -> Response:
    """The answer to what this program refuses, or starlette, or to what has failed."""
    if not isinstance(error, HTTPException):
        error = failure(error)
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


def start_front(args: argparse.Namespace) -> Link:
    """Start the process that talks with clients, and return the link to it. It begins when it is
    sent the model's name and its context's size. Raises OSError."""
    listener = listen(args.host, args.port)
    args.port = listener.getsockname()[1]
    ours, theirs = multiprocessing.Pipe()
    gone = mmap.mmap(-1, 1)
    if os.fork():
        theirs.close()
        listener.close()
        return Link(ours, gone)
    os.setsid()  # Ctrl-C is for the process that generates
    ours.close()
    with suppress(EOFError):  # that process has failed to load the model
        front = Front(args, theirs, gone, *theirs.recv())
        asyncio.run(front.run(listener, not args.quiet))
    os._exit(1)


# ---- the program


def work(link: Link, args: argparse.Namespace, ranks: Ranks) -> int:
    from extra.hardware import pick_device

    ranks.join(pick_device(args.device, ranks))
    session = open_session(args, ranks)
    # What a first text compiles is ready when a client asks
    with suppress(ValueError):  # a client is told the same
        session.turn_ends()
        session.generate("a", n=2).finish()
    model = args.model  # its name, on the hub
    if path := local_checkpoint(args.model):
        model = path.resolve().name
    if not args.quiet:
        host = f"[{args.host}]" if ":" in args.host else args.host
        cli.note(f"model     {session.model.checkpoint.folder}")
        cli.note(f"running   {session.types()}, context {session.state.size}")
        cli.note(f"serving   http://{host}:{args.port}/v1 (Ctrl-C ends it)")
    try:
        if link.pipe:
            link.pipe.send((model, session.state.size))
        while True:
            write_next(session, model, link)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        what = "the process that answers clients has ended"
        raise RuntimeError(what) from None


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    link = Link()
    if cli.is_rank0():
        try:
            link = start_front(args)
        except OSError as error:
            cli.note(f"error: {cli.error_line(error)}")
            return 1
    cli.import_torch()
    cli.choose_interpreter(args)
    return cli.exit_code(partial(work, link), args)


if __name__ == "__main__":
    cli.use_safe_streams()
    code = main()
    os._exit(code)  # at once, whatever clients still wait for
