"""Serve a model over HTTP with OpenAI's API, for editors, front ends and agents.

One process has the model, and answers several requests at the same time. Another talks with clients,
by way of starlette and uvicorn, so that the model never waits for Python's GIL. What requests and
answers look like is in talk/openai.py."""

from __future__ import annotations

import signal

if __name__ == "__main__":  # the imports take time, and Ctrl-C needs no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import base64
import gc
import hashlib
import hmac
import itertools
import logging
import multiprocessing
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import uvicorn
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from grammars import GrammarError
from loading.hub import local_checkpoint
from prompts import Order, Writer
from talk import cli
from talk.cli import open_session
from talk.endpoints import ENDPOINTS
from talk.openai import APIError, ModelRequest, error_body, event, parse_request
from texts import ContextFull, Generation, Piece, Timings
from tokenizer import Tokenizer, TokenizerFiles

if TYPE_CHECKING:  # they import torch, which takes seconds
    from ranks.processes import Ranks
    from session import Session

BODY_BYTES = 8 << 20
QUEUE_BYTES = 4 * BODY_BYTES  # of the bodies of all requests that are not answered yet
LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins that are always allowed
PUBLIC = ("/", "/health", "/v1/health")  # need no key: the page has a field for it
# Seconds between two times that texts are sent to the other process. Each takes 0.3 ms of the model's
# time, or more where that process has no core of its own
PAUSE = 1 / 20
# objects that the process without the model makes before it looks for garbage: a request may have
# millions, and nothing else runs meanwhile
COLLECTED_AFTER = 50_000
SILENCE = 15  # seconds, after which a comment keeps proxies from ending a stream
COMMENT = b": the answer is being written\n\n"
STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # in proxies
}


# ---- the command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.Parser(__doc__.split("\n\n")[0], {"serve": "serve.py"})
    cli.add_template_flag(cli.add_model_flags(parser))
    cli.add_proposal_flags(parser.group("speculation"))
    cli.add_sampling_flags(parser.group("sampling, for requests that do not say"))
    add = parser.group("server")
    # fmt: off
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="where to listen; 0.0.0.0 is all networks, :: also those of IPv6")
    add("--port", type=cli.within(int, 0, 65535), default=8080, metavar="N", help="0: any free one")
    add("--api-key", type=cli.in_utf8, metavar="KEY", help="what clients have to send")
    add("-a", "--alias", type=cli.in_utf8, metavar="NAME",
        help="the model's name for clients [that of its folder or file]")
    add("--cors", type=origin, action="append", default=[], metavar="ORIGIN",
        help="allow web pages of this origin, such as https://example.org, besides those on"
        " localhost; * is all; may be repeated")
    cli.add_option(add, "parallel", default=4)
    add("--queue", type=cli.within(int, 0, 10_000), default=64, metavar="N",
        help="how many requests may wait; others are refused")
    add("--quiet", action="store_true", help="print only errors")
    add("--debug", action="store_true", help="print errors with their traceback")
    # fmt: on
    args = parser.parse(argv, lambda args: "serve")
    if empty := cli.first_empty(args, "model", "host", "api_key", "alias"):
        parser.error(empty)
    if error := cli.model_contradiction(args):
        parser.error(error)
    cli.settle_model(args)
    parser.find([args.model, args.draft])
    return args


def origin(text: str) -> str:
    """An argparse type: what a browser names as a page's origin, or * for any."""
    host = r"(\[[0-9a-f:.]+\](:\d+)?|[^\s/?#,@\[\]]*)"
    if not re.fullmatch(rf"\*|null|[a-z][a-z0-9+.-]*://{host}", text.lower()):
        raise argparse.ArgumentTypeError(f"{text}: must be an origin, such as https://example.org")
    return text.lower()


# ---- the process that has the model


class Asked(NamedTuple):
    """What that process is asked for: a text, or that one ends."""

    number: int
    order: Order | None  # None: nobody wants the text any more


class News(NamedTuple):
    """What was written of a text since the last news of it."""

    number: int
    pieces: list[Piece]
    cached_tokens: int
    timings: Timings
    ended_by: str = ""  # empty while the text goes on
    stop: str = ""
    error: str = ""  # why it failed
    refused: bool = False  # whether that is the client's fault


class Desk:
    """Writes the texts that clients want, on all ranks together."""

    def __init__(self, session: Session, pipe: Connection | None, debug: bool = False):
        """pipe: to the process that talks with clients; None on all ranks but the first, which alone
        has clients."""
        self.session = session
        self.pipe = pipe
        self.debug = debug
        self.inbox: SimpleQueue[Asked | None] = SimpleQueue()  # None: the other process has ended
        self.texts: dict[int, Generation] = {}
        self.told = 0.0  # when

    def receive(self) -> None:
        """Take what clients ask for, in a thread of its own: passes go on while a grammar is compiled,
        which is then known when its text begins."""
        self.session.digits  # noqa: B018, made before a client asks, and grammars with it
        grammars = self.session.grammars
        with suppress(EOFError, OSError):
            while True:
                asked = self.pipe.recv()
                if asked.order and asked.order.grammar is not None:
                    with suppress(ValueError):  # whoever asks for the text is told
                        grammars.matcher(asked.order.grammar)
                self.inbox.put(asked)
        self.inbox.put(None)

    def work(self) -> None:
        """Take what clients have asked for, run a pass, and send them what there is."""
        for number, order in self.asked():
            if order:
                self.begin(number, order)
            elif text := self.texts.pop(number, None):
                text.close()
        if self.texts:
            self.session.engine.step()
            self.tell()

    def asked(self) -> list[Asked]:
        """What clients have asked for since the last pass. Waits for it if there is nothing to do."""
        found = []
        while self.pipe and not (self.inbox.empty() and (self.texts or found)):
            asked = self.inbox.get()
            if asked is None:
                raise EOFError
            found.append(asked)
        if not self.session.ranks.agree(bool(found)):
            return []
        return self.session.ranks.broadcast(lambda: found)

    def begin(self, number: int, order: Order) -> None:
        try:
            text = self.session.write(order)
            text.begin()
            self.texts[number] = text
        except Exception as error:
            said = failure(error, self.debug).detail
            self.send([News(number, [], 0, Timings(), "interrupt", error=said)])

    def tell(self) -> None:
        """Send what was written, if it is time, or a text begins or ends."""
        now = time.perf_counter()
        ready = {number: text for number, text in self.texts.items() if text.ready}
        urgent = any(text.finished or not text.ids for text in ready.values())
        if ready and (urgent or now > self.told + PAUSE):
            self.told = now
            self.send([self.news_of(number, text) for number, text in ready.items()])

    def news_of(self, number: int, text: Generation) -> News:
        pieces = []
        error = ended_by = ""
        refused = False
        try:
            while text.ready:
                pieces.append(next(text))
        except StopIteration:
            pass
        except GrammarError as found:
            error = str(found)
            refused = True
        except Exception as failed:
            error = failure(failed, self.debug).detail
        if text.ended:
            ended_by = text.ended_by
            del self.texts[number]
        return News(
            number,
            pieces,
            text.cached_tokens,
            text.timings,
            ended_by=ended_by,
            stop=text.stop,
            error=error,
            refused=refused,
        )

    def send(self, news: list[News]) -> None:
        if self.pipe:
            self.pipe.send(news)


# ---- the process that talks with clients


class RemoteGeneration(Generation):
    """A text that the process with the model writes."""

    def __init__(self, session: RemoteSession, order: Order):
        super().__init__(len(order.prompt))
        self.client: Client | None = None  # who wants it
        self._session = session
        self._asked = Asked(next(session.numbers), order)
        self._pieces: deque[Piece] = deque()
        self._last: News | None = None

    @property
    def ready(self) -> bool:
        return not self.ended and bool(self._pieces or self._last)

    def take(self, news: News) -> None:
        self._pieces += news.pieces
        self.cached_tokens = news.cached_tokens
        self.timings = news.timings
        if news.ended_by:
            self._last = news

    def _begin(self) -> None:
        self._session.texts[self._asked.number] = self
        self._session.send(self._asked)

    def _next(self) -> Piece | None:
        if self._pieces:
            return self._pieces.popleft()
        if self._last.refused:
            raise APIError(self._last.error)
        if self._last.error:
            raise APIError(self._last.error, 500, "failed")
        self.ended_by = self._last.ended_by
        self.stop = self._last.stop
        return None

    def _leave(self) -> None:
        if self._session.texts.pop(self._asked.number, None):
            self._session.send(Asked(self._asked.number, None))


class RemoteSession(Writer):
    """What a Session is for those who have a model: its model is in the other process."""

    def __init__(self, send: Callable[[Asked], None], files: TokenizerFiles, bos_id: int, **known):
        """files, bos_id: of the tokenizer. known: arguments of Writer."""
        super().__init__(Tokenizer(files, known["vocab_size"], bos_id), **known)
        self.send = send
        self.texts: dict[int, RemoteGeneration] = {}  # those that are being written
        self.numbers = itertools.count()  # of texts

    def write(
        self, order: Order, progress: Callable[[int, int], None] | None = None
    ) -> RemoteGeneration:
        return RemoteGeneration(self, order)

    def take(self, news: News) -> RemoteGeneration | None:
        """Give a text its news. Returns None if nobody wants it any more."""
        text = self.texts.get(news.number)
        if text:
            text.take(news)
        if news.ended_by:
            self.texts.pop(news.number, None)
        return text


def failure(error: Exception, debug: bool) -> APIError:
    """Report an error that is not the client's on stderr. Returns what the client is told."""
    cli.report(error, debug)
    return APIError(cli.error_line(error), 500, "failed")


class Part(NamedTuple):
    """A part of an answer, for a client."""

    body: bytes
    status: int = 200
    last: bool = True


class Client:
    """Who has sent a request, and what is still to be sent of the answer."""

    def __init__(self, kind: type[ModelRequest], size: int):
        """size: bytes of the request."""
        self.kind = kind
        self.size = size
        self.request: ModelRequest | None = None
        self.answer: Iterator[bytes] = iter([])
        self.parts: asyncio.Queue[Part | None] = asyncio.Queue()  # None: the client has gone
        self.watching: asyncio.Task | None = None  # asyncio's own references are weak

    def prepare(self, body: bytes, session: RemoteSession, model: str) -> None:
        """Read the request, and make prompts for it. This may take seconds. Raises APIError for what
        is the client's fault, whatever it is: a prompt that does not fit into the context, or that the
        tokenizer or the chat template refuses."""
        self.request = parse_request(body, self.kind)
        try:
            self.answer = self.request.answer(session, model)
        except ContextFull as error:
            raise APIError(str(error), code="context_length_exceeded") from None
        except APIError:
            raise
        except Exception as error:
            raise APIError(cli.error_line(error)) from None

    @property
    def texts(self) -> list[RemoteGeneration]:
        return self.request.texts if self.request else []

    def begin(self) -> None:
        for text in self.texts:
            text.client = self
            text.begin()

    def close(self) -> None:
        """End what is left of the texts."""
        for text in self.texts:
            text.close()


class Frontend:
    """The HTTP application. What is answered at paths without a class of requests never changes."""

    def __init__(self, args: argparse.Namespace, pipe: Connection, model: str, **known):
        """pipe: to the process that has the model. model: its name. known: arguments of
        RemoteSession."""
        self.pipe = pipe
        self.args = args
        self.clients: set[Client] = set()  # those whose answer is not complete
        self.sender = ThreadPoolExecutor(1)  # where waiting for the model delays nobody
        self.session = RemoteSession(self.send, **known)
        self.session.grammars  # noqa: B018, made before a client asks
        size = self.session.ctx_size
        cors = Middleware(
            AllowedOrigins,
            host=args.host,
            allow_origins=args.cors,
            allow_origin_regex=LOCAL,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
        )
        middleware = [Middleware(without_empty_segments), cors]
        if args.api_key:
            middleware.append(Middleware(require_key, key=args.api_key))
        self.about = {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": "fused-llama",
            "context_length": size,
            "max_model_len": size,
        }
        # what llama.cpp's clients ask for
        props = {
            "default_generation_settings": {"n_ctx": size},
            "total_slots": args.parallel,
            "model_path": model,
        }
        models = JSONResponse({"object": "list", "data": [self.about]})
        routes = [
            Route("/", page(), methods=["GET"]),
            Route("/health", JSONResponse({"status": "ok"}), methods=["GET"]),
            Route("/models", models, methods=["GET"]),
            Route("/props", JSONResponse(props), methods=["GET"]),
            Route("/slots", self.slots, methods=["GET"]),
            Route("/models/{name:path}", self.about_model, methods=["GET"]),
        ]
        for path, kind in ENDPOINTS.items():
            routes.append(Route(path, partial(self.answer, kind), methods=["POST"]))
        self.app = Starlette(
            routes=[Mount("/v1", routes=routes), *routes],
            middleware=middleware,
            exception_handlers={HTTPException: error_response, Exception: self.failed},
        )
        self.app.router.redirect_slashes = False

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self.pipe.fileno(), self.receive)
        loop.set_exception_handler(self.note_error)
        logging.getLogger("uvicorn.error").disabled = True  # of what clients do wrong
        logging.getLogger("uvicorn.access").addHandler(logging.StreamHandler())
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        config = uvicorn.Config(
            self.app,
            http="h11",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
            log_config=None,
            access_log=not self.args.quiet,
        )
        await uvicorn.Server(config).serve([listener])

    def receive(self) -> None:
        """Take news of texts from the process that has the model, with which this one ends."""
        try:
            news = self.pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        texts = [*filter(None, map(self.session.take, news))]
        for client in {text.client for text in texts}:
            self.go_on(client)

    def send(self, asked: Asked) -> None:
        self.sender.submit(self.pipe.send, asked)

    def note_error(self, _: asyncio.AbstractEventLoop, context: dict) -> None:
        """Report what fails outside of a request, such as accepting one when all file descriptors
        are in use: asyncio tries that again without end."""
        error = context.get("exception")
        reason = f": {cli.error_line(error)}" if error else ""
        cli.note_once(context["message"] + reason)

    async def about_model(self, received: Request) -> Response:
        name = received.path_params["name"]
        if name != self.about["id"]:
            message = f"there is no model {name}, only {self.about['id']}"
            raise APIError(message, 404, "model_not_found", "model")
        return JSONResponse(self.about)

    async def slots(self, received: Request) -> Response:
        slot = {"n_ctx": self.session.ctx_size}
        busy = len(self.session.texts)
        count = self.args.parallel
        return JSONResponse([slot | {"id": i, "is_processing": i < busy} for i in range(count)])

    async def answer(self, kind: type[ModelRequest], received: Request) -> ASGIApp:
        try:
            body = await body_of(received)
        except ClientDisconnect:
            return Response()  # nobody reads it
        client = Client(kind, len(body))
        self.check_room(client)
        self.clients.add(client)
        client.watching = asyncio.create_task(self.watch(client, received))
        try:
            await asyncio.to_thread(client.prepare, body, self.session, self.about["id"])
        except Exception:
            self.clients.discard(client)
            raise
        del body
        if client in self.clients:
            client.begin()
            self.go_on(client)
        is_stream = client.request.is_stream
        first = await (next_part(client) if is_stream else client.parts.get())
        if first is None:
            client.close()
            return Response()
        if is_stream and first.status == 200:
            response = StreamingResponse(bodies(first, client), headers=STREAM_HEADERS)
            # without starlette's own watch, whose group of tasks takes half a millisecond to begin
            return lambda scope, receive, send: response.stream_response(send)
        return Response(first.body, first.status, media_type="application/json")

    def go_on(self, client: Client) -> None:
        """Write what can be written of an answer."""
        request = client.request
        body = b""
        last = None
        try:
            while request.ready:
                body += next(client.answer)
        except StopIteration:
            last = Part(body)
            if request.texts and not self.args.quiet:
                cli.note(summary(request.texts[0]))
        except Exception as error:
            client.close()
            if not isinstance(error, APIError):
                error = failure(error, self.args.debug)
            last = Part(to_json(error_body(error)), error.status_code)
        if body and not (last and last.status == 200):  # of a stream
            client.parts.put_nowait(Part(body, last=False))
        if last:
            self.clients.discard(client)
            client.parts.put_nowait(last)

    def check_room(self, client: Client) -> None:
        """Raise APIError if a client cannot wait."""
        size = sum(each.size for each in [*self.clients, client])
        full = ""
        if len(self.clients) >= self.args.parallel + self.args.queue:
            full = f"queue of {self.args.queue}"
        elif self.clients and size > QUEUE_BYTES:
            full = f"queue of {QUEUE_BYTES} bytes"
        if full:
            raise APIError(f"the server is busy, and its {full} is full", 503, "queue_full")

    async def watch(self, client: Client, received: Request) -> None:
        """Wait until a client has its answer or has gone."""
        while (await received.receive())["type"] != "http.disconnect":
            pass
        self.clients.discard(client)
        client.close()
        client.parts.put_nowait(None)

    async def failed(self, received: Request, error: Exception) -> Response:
        return await error_response(received, failure(error, self.args.debug))


def summary(text: Generation) -> str:
    """What the log says of an answer."""
    said = cli.speed(text)
    if text.doubles_bos:
        said += "; the prompt begins with a bos of its own, after the tokenizer's"
    return said


async def next_part(client: Client) -> Part | None:
    """The next part of a stream, which is a comment if there is none for some time."""
    try:
        return await asyncio.wait_for(client.parts.get(), SILENCE)
    except TimeoutError:
        return Part(COMMENT, last=False)


async def bodies(part: Part | None, client: Client) -> AsyncIterator[bytes]:
    """What is in a part and in those that follow it, to the last one or until the client goes."""
    while part:
        body = part.body
        if part.status != 200:  # after a comment
            body = event(from_json(body))
        yield body
        part = None if part.last else await next_part(client)


class AllowedOrigins(CORSMiddleware):
    """Answers no web page of a foreign origin. CORS by itself only keeps a page from reading an
    answer: a POST of plain text, which needs no preflight, would still have a text generated.

    The server's own page may ask it at the address that the page came from. A name has to be known
    as well: any can be made to stand for this machine's address (DNS rebinding)."""

    def __init__(self, app: ASGIApp, host: str, **options):
        """host: the address or the name at which the server listens."""
        super().__init__(app, **options)
        names = {urlsplit(origin).hostname for origin in options["allow_origins"]}
        self.own_names = {host.lower(), *names} - {None}

    def is_own_page(self, origin: str, host: str) -> bool:
        """Whether a page's origin is the host that was asked, by an address or a known name."""
        scheme, _, asked = origin.partition("://")
        if scheme not in ("http", "https") or asked != host:
            return False
        try:
            name = urlsplit(origin).hostname or ""
            return name in self.own_names or bool(ip_address(name))
        except ValueError:
            return False

    async def simple_response(
        self, scope: Scope, receive: Receive, send: Send, request_headers: Headers
    ) -> None:
        origin = request_headers.get("origin")  # programs other than browsers seldom send it
        own = origin and self.is_own_page(origin, request_headers.get("host", ""))
        if not origin or own or self.is_allowed_origin(origin):
            await super().simple_response(scope, receive, send, request_headers)
            return
        message = f"web pages of {origin} may not ask this server; --cors {origin} allows it"
        response = await error_response(None, APIError(message, 403, "origin_not_allowed"))
        await response(scope, receive, send)


def without_empty_segments(app: ASGIApp) -> ASGIApp:
    """Take //v1/models/ for /v1/models. A redirection would name the scheme and the host that this
    process sees, which may stand behind a proxy."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        segments = filter(None, scope["path"].split("/"))
        await app(scope | {"path": "/" + "/".join(segments)}, receive, send)

    return run


def page() -> Response:
    """The page for people, which may run its own script and ask this server, and nothing else."""
    html = (Path(__file__).parent / "talk" / "page.html").read_text()

    def hashed(tag: str) -> str:
        inside = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1]
        return base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()

    policy = [
        "default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        *(f"{tag}-src 'sha256-{hashed(tag)}'" for tag in ("script", "style")),
    ]  # fmt: skip
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(html, headers=headers)


def require_key(app: ASGIApp, key: str) -> ASGIApp:
    """Answer only requests with the key, except for what is public."""
    wanted = key.encode()

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        header = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        scheme, _, given = header.partition(b" ")
        response = app
        has_key = scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), wanted)
        if scope["path"] not in PUBLIC and not has_key:
            error = APIError("the API key is missing or wrong", 401, "invalid_api_key")
            response = await error_response(None, error)
        await response(scope, receive, send)

    return run


async def body_of(request: Request) -> bytes:
    """Raises APIError if it is too large: at once if its length is announced."""
    too_large = APIError(f"the body has more than {BODY_BYTES} bytes", 413, "too_large")
    if int(request.headers.get("content-length", 0)) > BODY_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise too_large
    return bytes(body)


async def error_response(received: Request | None, error: HTTPException) -> Response:
    """The answer to what this program or starlette refuses, or to what has failed."""
    if error.status_code == 404 and received and not isinstance(error, APIError):
        routes = [route for route in received.app.routes if isinstance(route, Route)]
        paths = ", ".join(route.path for route in routes if "{" not in route.path)
        error.detail = f"there is no {received.url.path} here: this server has {paths}"
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "2"}}
    status = error.status_code
    return JSONResponse(error_body(error), status, headers.get(status, error.headers))


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: is all of IPv4, too
    try:
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        reason, *_ = error.strerror.split(" (while")  # create_server adds the address
        what = f"cannot listen on {host}, port {port}: {reason}"
        raise OSError(f"{what}; choose others with --host and --port") from None
    # Connections inherit this, so that small writes are sent at once. asyncio would set it only if
    # the socket named its protocol
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def start_frontend(args: argparse.Namespace) -> Connection:
    """Start the process that talks with clients, and return the pipe to it. It begins when it is
    sent the arguments of Frontend. Raises OSError."""
    listener = listen(args.host, args.port)
    args.port = listener.getsockname()[1]
    ours, theirs = multiprocessing.Pipe()
    if os.fork():
        theirs.close()
        listener.close()
        return ours
    os.setsid()  # Ctrl-C is for the process that has the model
    ours.close()
    keep_stderr()
    with suppress(EOFError):  # that process has failed to load the model
        front = Frontend(args, theirs, **theirs.recv())
        gc.freeze()
        gc.set_threshold(COLLECTED_AFTER)
        asyncio.run(front.run(listener))
    os._exit(1)


def keep_stderr() -> None:
    """Keep stderr for this program. tokenizer.py lets what libraries write there go nowhere as long as
    it asks them, which would be what other threads write as well."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    cli.use_safe_streams()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


# ---- the program


def warm_up(session: Session, parallel: int) -> None:
    """Write as many texts at once as there may be, and fewer before, so that what a first text compiles
    and captures is ready when a client asks."""
    count = parallel if session.model.uses_graphs else 1
    with suppress(ContextFull):  # of one token
        session.batch(["a"] * count, n=2 * count)


def model_name(model: str, alias: str | None) -> str:
    """What a model is called: its alias, its name on the hub, or that of its folder or file. Of a
    file that is named by its content, as in ollama's store and the hub's, the name inside."""
    from loading.gguf import read_header

    path = local_checkpoint(model)
    if alias or not path:
        return alias or model
    name = os.path.basename(os.path.abspath(path))
    if re.fullmatch("(sha256-)?[0-9a-f]{40,64}", name) and path.is_file():
        name = read_header(path).get("general.name", str) or name
    return name


def known_of(session: Session, args: argparse.Namespace) -> dict:
    """What the process that talks with clients has to know of a model: arguments of Frontend."""
    checkpoint = session.model.checkpoint
    return dict(
        model=model_name(args.model, args.alias),
        files=checkpoint.tokenizer_files(args.chat_template),
        bos_id=checkpoint.config.bos_id,
        vocab_size=session.vocab_size,
        eos=session.eos,
        sampling=session.sampling,
        ctx_size=session.ctx_size,
        parallel=args.parallel,
    )


def work(pipe: Connection | None, args: argparse.Namespace, ranks: Ranks) -> int:
    from loading.place import pick_device

    ranks.join(pick_device(args.device, ranks))
    session = open_session(args, ranks)
    with suppress(ValueError):  # whoever asks for a chat is told that the template fails
        session.turn_ends()
    desk = Desk(session, pipe, args.debug)
    if pipe:
        pipe.send(known_of(session, args))
        Thread(target=desk.receive, daemon=True).start()
    warm_up(session, args.parallel)
    if not args.quiet:
        host = f"[{args.host}]" if ":" in args.host else args.host
        cli.note(f"model     {session.model.checkpoint.folder}")
        cli.note(
            f"running   {session.types()} on {session.model.device}, context {session.ctx_size}"
            f" for each of {args.parallel} texts"
        )
        cli.note(f"serving   http://{host}:{args.port}/v1 (Ctrl-C ends it)")
    try:
        while True:
            desk.work()
    except (EOFError, ConnectionError):
        what = "the process that answers clients has ended"
        raise RuntimeError(what) from None


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    pipe = None
    if cli.is_rank0():
        try:
            pipe = start_frontend(args)
        except OSError as error:
            cli.note(f"error: {cli.error_line(error)}")
            return 1
    cli.import_torch()
    cli.set_environment(args)
    return cli.exit_code(partial(work, pipe), args)


if __name__ == "__main__":
    cli.use_safe_streams()
    code = main()
    os._exit(code)  # at once, whatever clients still wait for
