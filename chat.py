"""A conversation with the model, at a terminal or with messages piped in."""

import dataclasses
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from parallel import group
from session import Answer, Session
from template import TEMPLATES
from terminal import Printer, Reader, note, one_line, text_of
from tokenizer import Prompt

HELP = """/clear        forget the conversation, and what was read
/system TEXT  set the system prompt, and forget the conversation
/regen        answer the last message again
/read FILE    put a text file before the next message
/exit         leave; so do Ctrl-D and a second Ctrl-C
A line that ends in \\ continues on the next one; pasted text is one message. Ctrl-C ends an answer."""


def has_template(session: Session) -> bool:
    return session.args.chat_template is not None or session.tokenizer.chat_template != TEMPLATES["plain"]


class Chat:
    """A conversation. The cache keeps what was evaluated, so that each turn evaluates only what is new."""

    def __init__(self, session: Session):
        self.session, args = session, session.args
        self.to_read = ""  # text from /read, which goes before the next message
        self.past: Prompt | None = None  # what the cache holds, up to the last answer
        self.begin(args.system)
        ids, stops = session.tokenizer.turn_ends()
        self.eos, self.stops = session.eos | ids, [*args.stop, *stops]
        self.printer, self.reader = Printer(), Reader()
        why = "" if args.mode == "chat" else "; chatting, since there is no prompt (-no-cnv: plain text)"
        session.note(f"chat      template: {session.tokenizer.template_name}; /help lists commands{why}")

    # ---- turns

    def run(self, message: str | None, single: bool) -> int:
        """Answer the one message, or one after another until the input ends; return the exit code."""
        # Whether Ctrl-C ends only an answer; with several processes, torchrun ends them all
        self.stays = self.reader.interactive and not single and group().size == 1
        if single:
            with suppress(EOFError):
                self.answer(group().from_first(self.reader.read) if message is None else message)
            return 0
        warned = False
        while True:
            try:
                goes_on = self.turn(group().from_first(self.reader.read))
                warned = False
                if not goes_on:
                    return 0
            except EOFError:
                self.blank_line()
                return 0
            except KeyboardInterrupt:
                if not self.stays or warned and not self.reader.has_text():
                    return 130
                print(file=sys.stderr)
                self.session.note("(to leave: Ctrl-C again, Ctrl-D or /exit)")
                warned = True

    def turn(self, message: str) -> bool:
        """Carry out a command or answer a message; return whether the chat goes on."""
        command, _, rest = message.partition(" ")
        try:
            if command in ("/exit", "/quit", "/bye"):
                return False
            elif command == "/help":
                note(HELP)
            elif command == "/clear":
                self.messages, self.to_read = self.messages[: self.first], ""
                self.session.note("conversation cleared")
            elif command == "/system":
                self.begin(rest.strip())
                self.session.note(f"a new conversation, {'with this' if rest.strip() else 'without a'} system prompt")
            elif command == "/read":
                self.read(rest.strip())
            elif command == "/regen":
                self.answer_again()
            elif message and self.answer(self.to_read + message):
                self.to_read = ""
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:  # a message longer than the context, a file that cannot be read
            note(f"error: {one_line(error)}")
            if self.session.args.output == "jsonl":
                print(json.dumps({"prompt": message, "error": one_line(error)}), flush=True)
        return True

    def answer(self, message: str) -> bool:
        """Print the model's answer to a message, and remember both; Ctrl-C cuts it short. Return whether there is one."""
        self.check(message, "the message")
        prompt = self.fit(message)
        answer, as_text = Answer(len(prompt.ids)), self.session.args.output == "text"
        self.blank_line()
        try:
            for piece in self.session.stream(prompt.ids, answer, self.eos, self.stops, at_start=True):
                if as_text:
                    self.printer.write(piece)
        except KeyboardInterrupt:
            if not self.stays:
                self.end(message, answer)
                raise
        self.end(message, answer)
        self.session.note_end(answer)
        answered = bool(answer.ids) or answer.ended_by != "interrupt"
        if answered:
            self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer.text}]
            ids = self.session.tokenizer.encode(answer.text, bos=False) if answer.ended_by == "stop" else answer.ids
            self.past = prompt.answered(answer.text, ids)
        self.blank_line()
        return answered

    def check(self, text: str, name: str) -> None:
        """Raise ValueError for text that cannot be encoded or is far too long."""
        if any(0xDC80 <= ord(c) <= 0xDCFF for c in text):  # read with surrogateescape
            raise ValueError(f"{name} is not UTF-8")
        self.session.check_length(len(text), name)

    def end(self, message: str, answer: Answer) -> None:
        """Finish a turn's output: end the line, or print its JSON object."""
        if self.session.args.output == "text":
            self.printer.end()
        else:
            print(json.dumps({"prompt": message} | answer.record()), flush=True)

    def blank_line(self) -> None:
        """Separate the user's text from the model's, if both are on the screen."""
        if self.reader.edits and self.session.args.output == "text":
            print(flush=True)

    # ---- commands

    def begin(self, system: str) -> None:
        """Forget the conversation, and begin a new one with a system prompt, which may be empty. Raises ValueError if it leaves
        no room for a message, or the template refuses it."""
        messages = [{"role": "system", "content": system}] if system else []
        if messages:
            self.check(system, "the system prompt")
            self.length_of([*messages, {"role": "user", "content": "?"}], "the system prompt")
        self.messages = messages
        self.first = len(self.messages)  # where the turns begin; each is a message and its answer

    def answer_again(self) -> None:
        if len(self.messages) == self.first:
            raise ValueError("there is no answer yet")
        if self.session.sampling.temp == 0:
            self.session.note("note: with --temp 0 the answer is always the same")
        turn, self.messages = self.messages[-2:], self.messages[:-2]
        self.session.sampling = dataclasses.replace(self.session.sampling, seed=(self.session.sampling.seed + 1) % (1 << 63))
        if not self.answer(turn[0]["content"]):
            self.messages += turn

    def read(self, name: str) -> None:
        """Put a file's text before the next message. Raises ValueError or OSError."""
        text = group().from_first(lambda: self.text_of(name))
        to_read = self.to_read + text.rstrip("\n") + "\n\n"
        self.length_alone(to_read, name)
        self.to_read = to_read
        self.session.note(f"{name}, {len(text):,} characters, goes before your next message")

    def text_of(self, name: str) -> str:
        if not name:
            raise ValueError("/read needs the name of a file")
        file = Path(os.path.expanduser(name))
        if file.exists() and not file.is_file():
            raise ValueError(f"{name} is not a file")
        self.session.check_length(file.stat().st_size, name, "bytes")
        with file.open("rb") as f:
            return text_of(f, name).replace("\r\n", "\n").replace("\r", "\n")

    # ---- the context

    def fit(self, message: str) -> Prompt:
        """The conversation with a new message. Where it leaves little room for an answer, the oldest turns are dropped, and
        then the beginning of the last answer, until half of the context is free; the system prompt stays."""
        size, new = self.session.cache.size, [{"role": "user", "content": message}]
        system, turns = self.messages[: self.first], self.messages[self.first :]
        prompt = self.render([*self.messages, *new])
        if len(prompt.ids) + min(size // 4, 256) <= size:
            return prompt
        alone = self.length_alone(message, "the message")
        if not turns:
            return prompt
        while turns and len(prompt.ids) > max(size // 2, alone):
            turns = turns[2:] if len(turns) > 2 else self.shortened(turns, len(prompt.ids) - size // 2)
            prompt = self.render([*system, *turns, *new])
        self.messages = [*system, *turns]
        self.session.note(f"note: the context of {size} tokens is full: dropped the oldest part of the conversation")
        return prompt

    def length_alone(self, message: str, name: str) -> int:
        """How many tokens a message takes as the first one. Raises ValueError if the context does not hold them."""
        return self.length_of([*self.messages[: self.first], {"role": "user", "content": message}], name)

    def length_of(self, messages: list[dict], name: str) -> int:
        length = len(self.render(messages).ids)
        if length > self.session.cache.size:
            raise ValueError(f"{name} takes {length} tokens; the context holds {self.session.cache.size} (see -c)")
        return length

    def render(self, messages: list[dict]) -> Prompt:
        return self.session.tokenizer.chat_prompt(messages, past=self.past)

    def shortened(self, turn: list[dict], excess: int) -> list[dict]:
        """A turn without the first `excess` tokens of its answer; empty if nothing of that is left."""
        message, answer = turn
        ids = self.session.tokenizer.encode(answer["content"], bos=False)
        ids = ids[excess + 1 :]  # + 1: a space that encoding may put first
        text = self.session.tokenizer.decode(ids).lstrip("\N{REPLACEMENT CHARACTER}")  # of a character that was cut in two
        return [message, answer | {"content": text}] if text else []
