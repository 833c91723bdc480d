"""A model over HTTP in the words of OpenAI's API, for editors, front ends and agents.

This process owns the model and writes one text at a time. Another (extra/web.py) talks with clients;
extra/openai.py knows the words."""

from __future__ import annotations

import signal

if __name__ == "__main__":  # the imports take time, and Ctrl-C needs no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from extra import cli
from extra.hub import local_checkpoint
from extra.openai import STOP, Ask, End, Part, Refused, Score, Token
from run import open_session

if TYPE_CHECKING:  # they import torch, which takes seconds
    from extra.parallel import Ranks
    from session import Generation, Logprob, Session

# what OpenAI calls the reasons for which a text ends
ENDS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}

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


# ---- texts


class Left(Exception):
    """The client has gone."""


class Writer:
    """Writes the texts that clients ask for, on all ranks together. Rank 0 has the pipe to the
    process that talks with them."""

    def __init__(self, session: Session, pipe: Connection | None):
        self.session = session
        self.pipe = pipe
        self.names = {id: name for name, id in session.tokenizer.control.items()}

    def write_next(self) -> None:
        """Wait until a text is asked for, and write it."""
        ranks = self.session.ranks
        ask = ranks.broadcast(self._receive)
        try:
            self._write(ask)
        except Left:
            self._send(Refused("the client has gone"))
        except Refused as error:
            self._send(error)
        except ValueError as error:
            self._send(Refused(str(error)))
        except Exception as error:
            if ranks.size > 1:  # the others may wait for this one
                raise
            self.session.state.truncate(0)  # what is in it may be wrong
            cli.note(f"error: {cli.error_line(error)}")
            self._send(Refused(cli.error_line(error), 500, "failed"))

    def _receive(self) -> Ask:
        """What is asked for next."""
        ask = STOP  # of the text before, which had ended meanwhile
        while ask == STOP:
            ask = self.pipe.recv()
        return ask

    def _send(self, event: Part | End | Refused) -> None:
        if self.pipe:
            self.pipe.send(event)

    def _go_on(self, *_) -> None:
        """Raise Left on all ranks if there is a STOP: nothing else comes while a text is
        written."""
        stopped = bool(self.pipe and select.select([self.pipe], [], [], 0)[0])
        if self.session.ranks.agree(stopped):
            raise Left

    def _write(self, ask: Ask) -> None:
        generation, before = self._begin(ask)
        self._send(Part(before, []))
        with closing(generation):
            for piece in generation:
                if ask.stream and (piece.text or piece.logprobs):
                    self._send(Part(piece.text, [*map(self._score, piece.logprobs)]))
                self._go_on()
        if not ask.stream:
            self._send(Part(generation.text, [*map(self._score, generation.logprobs)]))
        cached = generation.prompt_tokens - generation.timings.prompt_tokens
        reason = ENDS[generation.ended_by]
        self._send(End(reason, generation.prompt_tokens, cached, len(generation.ids)))

    def _score(self, logprob: Logprob) -> Score:
        def token(id: int, value: float) -> Token:
            raw = self.session.tokenizer.bytes_of(id)
            text = self.names.get(id) or raw.decode(errors="replace")
            return Token(text, raw, value)

        best = [token(*pair) for pair in logprob.best]
        return Score(token(logprob.id, logprob.logprob), best, logprob.begins)

    def _begin(self, ask: Ask) -> tuple[Generation, str]:
        """The text that is asked for, of which nothing is evaluated yet, and what comes before it.
        Raises Refused or ValueError."""
        session = self.session
        options = ask.options | {"progress": self._go_on}
        prompt = ask.prompt
        ids = prompt
        if ask.is_chat:
            prompt = session.render(ask.prompt)
            ids = prompt.ids
            for message in ask.prompt:
                if message["role"] == "system" and message["content"].strip() not in prompt.text:
                    raise Refused("the chat template has no place for this system message")
        elif isinstance(prompt, str):
            ids = session.encode(prompt)
        needed = len(ids)
        if options.get("n") != 0:
            needed += 1
        if needed > session.state.size:
            message = f"the prompt has {len(ids)} tokens; the context holds {session.state.size}"
            raise Refused(message, code="context_length_exceeded")
        if ask.is_chat:
            return session.chat(prompt, **options), ""
        before = ""
        if ask.echo and isinstance(prompt, str):
            before = prompt
        elif ask.echo:
            before = session.tokenizer.decode(ids)
        return session.generate(ids, at_start=prompt == "", **options), before


# ---- the program


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, but refuses connections as yet. asyncio sends small writes at once
    only if the protocol is named."""
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listener


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextmanager
def web_process(host: str, port: int) -> Iterator[tuple[Connection, int]]:
    """Start the process that talks with clients; it ends together with this one. Yields the pipe to
    it, and the port that it will listen on."""
    ours, its = Pipe()
    with listen(host, port) as listener:
        descriptors = (its.fileno(), listener.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", "extra.web", *map(str, descriptors)],
            pass_fds=descriptors,
            cwd=Path(__file__).parent,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        port = listener.getsockname()[1]
    its.close()
    try:
        yield ours, port
    finally:
        process.kill()
        process.wait()


def ready_session(args: argparse.Namespace, ranks: Ranks) -> Session:
    """A session that has written a first text, so that what that compiles is ready."""
    session = open_session(args, ranks)
    with suppress(ValueError):  # a client is told the same
        session.turn_ends()
        session.generate("a", n=2).finish()
    return session


def write_all(session: Session, pipe: Connection | None = None) -> None:
    """Write texts until the process is interrupted."""
    writer = Writer(session, pipe)
    while True:
        writer.write_next()


def work(args: argparse.Namespace, ranks: Ranks) -> int:
    from checkpoint import pick_device

    ranks.join(pick_device(args.device, ranks))
    if ranks.rank > 0:
        write_all(ready_session(args, ranks))
    try:
        with web_process(args.host, args.port) as (pipe, port):
            session = ready_session(args, ranks)
            name = args.model  # on the hub
            if path := local_checkpoint(name):
                name = path.resolve().name
            pipe.send((args, name, session.state.size))
            pipe.recv()  # it listens
            if not args.quiet:
                cli.note(f"model     {session.model.checkpoint.folder}")
                cli.note(f"running   {session.types()}, context {session.state.size}")
                cli.note(f"serving   http://{in_url(args.host)}:{port}/v1 (Ctrl-C ends it)")
            write_all(session, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise RuntimeError("the process that talks with clients has ended") from None


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cli.import_torch()
    cli.choose_interpreter(args)
    return cli.exit_code(work, args)


if __name__ == "__main__":
    cli.use_safe_streams()
    code = main()
    os._exit(code)  # at once, whatever clients still wait for
