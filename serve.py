"""A model over HTTP in the words of OpenAI's API, for editors, front ends and agents.

Two threads share the work. The main one owns the model and writes one text at a time
(extra/writer.py); the other reads requests and sends answers (App), so that it answers at once
while a text is written, and no slow client delays the model. extra/openai.py knows the words.
Starlette and uvicorn do what is not about models: HTTP, routes, CORS. They are well kept, plain
Python, and need five small packages."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
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

from extra import cli, openai
from extra.openai import Refused
from extra.writer import Client, Left, Writer, failed
from run import open_session
from tokenizer import local_checkpoint, one_line

if TYPE_CHECKING:  # they import torch, which takes seconds
    from extra.parallel import Ranks

BODY_BYTES = 8 << 20
LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins that may always ask
STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # no proxy may wait for more

# ---- what is answered


class App:
    """What is answered at each path."""

    def __init__(self, writer: Writer, args: argparse.Namespace):
        self.writer = writer
        path = local_checkpoint(args.model)
        self.model = path.resolve().name if path else args.model
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
        size = self.writer.session.state.size
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "fused-llama"}
        model |= {"context_length": size, "max_model_len": size}
        wanted = request.path_params.get("id")
        if wanted not in (None, self.model):
            raise Refused(f"the model is {self.model}", 404, "model_not_found")
        return JSONResponse(model if wanted else {"object": "list", "data": [model]})

    async def text(self, request: Request) -> ASGIApp:
        is_chat = request.url.path == "/v1/chat/completions"
        ask = openai.read_ask(await body_of(request), is_chat)
        client = Client(ask, asyncio.get_running_loop())
        self.writer.add(client)
        return partial(self.answer, client)

    async def answer(self, client: Client, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.writer.remove(client)
            client.tell(Left())

        watching = asyncio.create_task(watch())
        try:
            (generation, before), *events = await client.hear()
            form = openai.Form(client.ask, self.model, self.writer.session.tokenizer, generation)
            if client.ask.stream:
                watching.cancel()  # the response does the same
                parts = stream(client, form.begin(before), form.part, events)
                response = StreamingResponse(parts, headers=STREAM, media_type="text/event-stream")
            else:
                while None not in events:
                    events = await client.hear()
                response = JSONResponse(form.whole(before))
            await response(scope, receive, send)
        except Left:
            pass
        finally:
            watching.cancel()
            self.writer.remove(client)

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
                await refused(None, failed(error))(scope, receive, send)

        return run


async def stream(
    client: Client, first: bytes, part: Callable, events: list
) -> AsyncIterator[bytes]:
    """The parts of a stream: what is told while the one before is sent, as `part` writes it."""
    try:
        while True:
            yield first + b"".join(map(part, events))
            if None in events:
                return
            first = b""
            events = await client.hear()
    except Refused as error:
        yield openai.event(error.body)


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
    """A path, or a method of one, that does not exist."""
    code = error.detail.lower().replace(" ", "_")
    body = Refused(f"{error.detail}: {request.url.path}", error.status_code, code).body
    return JSONResponse(body, error.status_code, error.headers)


# ---- the program


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
    is_empty = "" in (args.model, args.host, args.api_key)
    parser.refuse([(is_empty, "-m, --host or --api-key is empty")])
    parser.refuse(cli.model_contradictions(args))
    cli.settle_model(args)
    parser.find([args.model, args.draft])
    return args


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, but refuses connections as yet. asyncio sends small writes at once
    only if the protocol is named."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listener


def start(app: App, listener: socket.socket) -> None:
    """Answer requests in another thread from now on."""
    options = dict(http="h11", loop="asyncio", ws="none", lifespan="off", proxy_headers=False)
    options |= dict(log_config=None, log_level="critical", access_log=False, server_header=False)
    server = uvicorn.Server(uvicorn.Config(app.app, timeout_keep_alive=75, **options))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise OSError("the server did not start")
        time.sleep(0.01)


def work(args: argparse.Namespace, ranks: Ranks) -> int:
    from checkpoint import pick_device

    ranks.join(pick_device(args.device, ranks))
    listener = None
    if ranks.rank == 0:
        listener = listen(args.host, args.port)
    session = open_session(args, ranks)
    with suppress(ValueError):  # a request is told the same
        session.turn_ends()
        session.generate("a", n=2).finish()  # compiles what the first request needs
    writer = Writer(session, args.queue)
    if listener:
        start(App(writer, args), listener)
        host = f"[{args.host}]" if ":" in args.host else args.host
        if not args.quiet:
            cli.note(f"model     {session.model.checkpoint.folder}")
            cli.note(f"running   {session.types()}, context {session.state.size}")
            cli.note(f"serving   http://{host}:{listener.getsockname()[1]}/v1 (Ctrl-C ends it)")
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
