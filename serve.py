"""A model over HTTP in the words of OpenAI's API, for editors, front ends and agents.

Two threads share the work. The main one owns the model and writes one text at a time (Writer); the
other reads requests and sends answers (App), so that it answers at once while a text is written,
and no slow client delays the model. Starlette and uvicorn do what is not about models: HTTP,
routes, CORS. They are well kept, plain Python, and need four small packages."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from extra import cli, openai
from extra.openai import Ask, Refused
from run import open_session
from tokenizer import local_checkpoint, one_line

if TYPE_CHECKING:  # they import torch, which takes seconds
    from extra.parallel import Ranks
    from session import Generation, Session

BODY_BYTES = 8 << 20
LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins that may always ask

# ---- writing: the main thread


class Left(Exception):
    """The client has gone."""


class Client:
    """Who asks for a text, and what the writer tells it."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self.left = False
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue = asyncio.Queue()

    def tell(self, event: object) -> None:
        """Called by the main thread."""
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
        """A client has gone or got its answer: its text ends with the next token."""
        client.left = True
        with self.changed:
            if client in self.clients and client is not self.clients[0]:
                self.clients.remove(client)

    def run(self) -> None:
        """Write texts for ever, on all ranks."""
        ranks = self.session.ranks
        while True:
            client = self._next() if ranks.rank == 0 else None
            ask = ranks.broadcast(lambda: client.ask)
            told = client.tell if client else lambda event: None
            try:
                self._write(ask, told, lambda: ranks.agree(client is not None and client.left))
            except Left as left:
                told(left)
            except (Refused, ValueError) as error:
                told(error if isinstance(error, Refused) else Refused(str(error)))
            except Exception as error:
                if ranks.size > 1:  # the others may wait for this one
                    raise
                self.session.state.truncate(0)  # what is in it may be wrong
                cli.note(f"error: {cli.error_line(error)}")
                told(Refused(cli.error_line(error), 500, "failed"))
            if client:
                with self.changed:
                    self.clients.popleft()

    def _next(self) -> Client:
        with self.changed:
            self.changed.wait_for(lambda: self.clients)
            return self.clients[0]

    def _write(
        self, ask: Ask, tell: Callable[[object], None], has_left: Callable[[], bool]
    ) -> None:
        """Tell a client its generation, its pieces, and None at the end."""

        def go_on(*_) -> None:
            if has_left():
                raise Left

        session = self.session
        prompt = ask.prompt
        if ask.is_chat:
            prompt = session.render(ask.prompt)
            for message in ask.prompt:
                if message["role"] == "system" and message["content"].strip() not in prompt.text:
                    raise Refused("the chat template has no place for a system message there")
        ids = prompt.ids if ask.is_chat else prompt
        if isinstance(ids, str):
            ids = session.encode(ids)
        needed = len(ids) + min(1, abs(ask.options.get("n", -1)))  # room for a token
        if needed > session.state.size:
            message = f"the prompt has {len(ids)} tokens; the context holds {session.state.size}"
            raise Refused(message, code="context_length_exceeded")
        go_on()
        if ask.is_chat:
            generation = session.chat(prompt, progress=go_on, **ask.options)
        else:
            at_start = ask.prompt == ""
            generation = session.generate(ids, at_start=at_start, progress=go_on, **ask.options)
        before = ""
        if ask.echo:
            before = ask.prompt if isinstance(ask.prompt, str) else session.tokenizer.decode(ids)
        tell((generation, before))
        with closing(generation):
            for piece in generation:
                if ask.stream:
                    tell(piece)
                go_on()
        tell(None)


# ---- answering: the other thread


class App:
    """What is answered at each path."""

    def __init__(self, writer: Writer, args: argparse.Namespace):
        self.writer = writer
        self.model = model_id(args.model)
        self.quiet = args.quiet
        self.bearer = args.api_key and f"Bearer {args.api_key}".encode()
        origins = dict(allow_origins=args.cors, allow_origin_regex=LOCAL, allow_headers=["*"])
        origins |= dict(allow_methods=["GET", "POST"], allow_private_network=True)
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{id:path}", self.models),
                Route("/v1/chat/completions", self.text, methods=["POST"]),
                Route("/v1/completions", self.text, methods=["POST"]),
            ],
            middleware=[
                Middleware(self.logged),
                Middleware(CORSMiddleware, **origins),
                Middleware(self.guarded),
            ],
            exception_handlers={HTTPException: not_found, Refused: refused},
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
        client = Client(openai.read_ask(await body_of(request), is_chat))
        self.writer.add(client)
        return partial(self.answer, client)

    async def answer(self, client: Client, scope: Scope, receive: Receive, send: Send) -> None:
        form = openai.Form(client.ask, self.model, self.writer.session.tokenizer)
        watching = asyncio.create_task(self.watch(client, receive))
        try:
            (generation, before), *events = await client.hear()
            if client.ask.stream:
                await self.stream(client, form, send, generation, before, events)
                return
            while None not in events:
                events = await client.hear()
            await JSONResponse(form.whole(before, generation))(scope, receive, send)
        except Left:
            pass
        finally:
            watching.cancel()
            self.writer.remove(client)

    async def watch(self, client: Client, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.writer.remove(client)
        client.events.put_nowait(Left())

    async def stream(
        self,
        client: Client,
        form: openai.Form,
        send: Send,
        generation: Generation,
        before: str,
        events: list,
    ) -> None:
        """Send pieces as they come, in one part those that have come meanwhile."""
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM]})
        chunks = form.begin(before)
        ended = False
        while not ended:
            for piece in events:
                if piece is None:
                    chunks += form.end(generation)
                elif piece.text or piece.logprobs:
                    chunks += form.chunk(piece.text, piece.logprobs)
            ended = None in events
            await send({"type": "http.response.body", "body": chunks, "more_body": not ended})
            chunks = b""
            try:
                if not ended:
                    events = await client.hear()
            except Refused as error:
                events = [None]
                chunks = openai.event(error.body)

    def logged(self, app: ASGIApp) -> ASGIApp:
        """Writes a line for each request, without what it says."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            start = time.perf_counter()
            status = "client left"

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, noting)
            finally:
                if not self.quiet:
                    host = scope["client"][0] if scope["client"] else "-"
                    path = one_line(scope["raw_path"].decode(errors="replace"))
                    seconds = time.perf_counter() - start
                    cli.note(f"{host} {scope['method']} {path} {status} {seconds:.3f} s")

        return run

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Asks for the key, and answers what fails for no good reason."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            try:
                if self.bearer and scope["path"] != "/health":
                    if not hmac.compare_digest(given, self.bearer):
                        raise Refused("the API key is missing or wrong", 401, "invalid_api_key")
                await app(scope, receive, send)
            except ClientDisconnect:
                pass
            except Exception as error:
                if not isinstance(error, Refused):
                    cli.note(f"error: {cli.error_line(error)}")
                    error = Refused(cli.error_line(error), 500, "failed")
                await refused(None, error)(scope, receive, send)

        return run


STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


async def body_of(request: Request) -> bytes:
    """Raises Refused if it is too large."""
    body = bytearray()
    length = int(request.headers.get("content-length", 0))
    too_large = Refused(f"the body has more than {BODY_BYTES} bytes", 413, "too_large")
    if length > BODY_BYTES:
        raise too_large
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise too_large
    return bytes(body)


def refused(request: Request | None, error: Refused) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "2"}}
    return JSONResponse(error.body, error.status, headers.get(error.status))


def not_found(request: Request, error: HTTPException) -> JSONResponse:
    """A path, or a method of one, that does not exist."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
    message = f"{error.detail}: {request.method} {request.url.path}"
    return JSONResponse(
        Refused(message, error.status_code, code).body, error.status_code, error.headers
    )


def model_id(name: str) -> str:
    """What the model is called: the name of its folder or file, or its name on the hub."""
    path = local_checkpoint(name)
    return path.resolve().name if path else name


# ---- the program


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.Parser(__doc__, {"serve": "serve.py"})
    # fmt: off
    add = cli.add_model_flags(parser)
    cli.add_template_flag(add)
    cli.add_proposal_flags(parser.group("speculation"))
    add = parser.group("server")
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="address to listen on; 0.0.0.0: of all networks")
    add("--port", type=cli.within(int, 0, 65535), default=8080, metavar="N", help="0: any free one")
    add("--api-key", metavar="KEY", help="what clients have to send as their key")
    add("--cors", action="append", default=[], metavar="ORIGIN",
        help="let web pages of this origin ask, such as https://example.org, besides those on"
        " localhost; * is all; may be repeated")
    add("--queue", type=cli.within(int, 0, 10_000), default=64, metavar="N",
        help="how many requests may wait; more are refused with 503")
    add("--quiet", action="store_true", help="print only errors")
    add("--debug", action="store_true", help="print errors with their traceback")
    # fmt: on
    args = parser.parse(argv, lambda args: "serve")
    empty = [(getattr(args, name) == "", f"--{name} is empty") for name in ("model", "host")]
    empty.append((args.api_key == "", "--api-key is empty"))
    parser.refuse([*empty, *cli.model_contradictions(args)])
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


def work(args: argparse.Namespace, ranks: Ranks) -> int:
    from checkpoint import pick_device

    ranks.join(pick_device(args.device, ranks))
    listener = None
    if ranks.rank == 0:
        listener = listen(args.host, args.port)
    session = open_session(args, ranks)
    with suppress(ValueError):  # a request says the same
        session.turn_ends()
        session.generate("a", n=2).finish()  # what is compiled at first use
    writer = Writer(session, args.queue)
    if listener:
        start(App(writer, args), listener)
        if not args.quiet:
            model = session.model
            host, port, *_ = listener.getsockname()
            host = f"[{host}]" if ":" in host else host
            cli.note(
                f"model     {model.checkpoint.folder}\n"
                f"running   {session.types()} on {model.device}, context {session.state.size}\n"
                f"serving   http://{host}:{port}/v1 (Ctrl-C ends it)"
            )
    writer.run()


def start(app: App, listener: socket.socket) -> None:
    """Answer requests in another thread."""
    config = uvicorn.Config(
        app.app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise OSError("the server did not start")
        time.sleep(0.01)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cli.import_torch()
    cli.choose_interpreter(args)
    return cli.exit_code(work, args)


if __name__ == "__main__":
    cli.use_safe_streams()
    code = main()
    os._exit(code)  # at once, whatever clients still wait for
