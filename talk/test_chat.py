"""Tests of the chat at a terminal."""

import codecs
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

from hypothesis import strategies as st

import run
from engine import generate
from sampling import Sampling
from session import Conversation, Session, dropped_part
from talk import cli as cli_module
from talk.chat import Chat, Output, Printer
from talk.tools import Part
from tests.helpers import (
    GREEDY,
    HERE,
    PATIENCE,
    chat,
    conversation,
    examples,
    interrupted_at,
    objects,
)

# ---- talk/chat.py: conversations


def chat_objects(cli, folder, *lines: str, flags=()) -> list[dict]:
    return objects(chat(cli, folder, *lines, flags=["-o", "jsonl", *flags])[1])


def test_a_chat_in_any_order(tiny, tiny_model, tmp_path, monkeypatch, capsys):
    """Messages and commands, with Ctrl-C at any time: the prompt is what the template makes of the
    conversation so far, the answer is the model's, all of it is shown, and what is interrupted
    before its first token changes nothing."""
    session = Session(tiny, dtype="fp32", device="cpu", chat_template="llama2")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    (notes, saved), seen = (tmp_path / "notes", tmp_path / "saved"), []
    notes.write_bytes(b"a\rnote\r\n")
    commands = ["hello", "good \\day", "/regen", "/clear", "/system Be kind.", "/system"]
    commands += [f"/read {notes}", f"/save {saved}", f"/load {saved}", "/set seed 3", "/set temp 0"]
    answer = session.chat

    def recorded(prompt, **options):
        seen.append((prompt, options["sampling"], answer(prompt, **options)))
        return seen[-1][2]

    monkeypatch.setattr(session, "chat", recorded)
    line = st.tuples(st.sampled_from([*commands, "hello", "/regen"]), st.integers(0, 60))

    @examples(100, lines=st.lists(line, min_size=3, max_size=7))
    def check(lines):
        talk = Conversation(session)
        shown = Chat(talk, Output(session, quiet=True), n=4, ignore_eos=True)
        shown.survives_ctrl_c = True
        system, turns, to_read, at = [], [], "", dict(temp=0.8, seed=0)
        saved.write_text("[]")
        kept = ([], [])
        for line, stops in [("hello", 60), *lines]:
            capsys.readouterr()
            seen.clear()
            with monkeypatch.context() as patch:
                interrupted_at(patch, session.model.ops, stops)
                shown.turn(line)
            command, _, rest = line.partition(" ")
            earlier, message = turns, to_read + line
            if command == "/regen" and turns:
                earlier, message = turns[:-2], turns[-2]["content"]
                at["seed"] += 1
            if command == "/clear":
                turns, to_read = [], ""
            elif command == "/system":
                system, turns = conversation(system=rest), []
            elif command == "/read":
                to_read += "a\nnote\n\n"
            elif command == "/save":
                kept = (system, turns)
            elif command == "/load":
                system, turns = kept
            elif command == "/set":
                at[rest.split()[0]] = int(rest.split()[1])
            for prompt, settings, generation in seen:
                asked = [*system, *earlier, {"role": "user", "content": message}]
                assert prompt.text == session.tokenizer.chat_prompt(asked).text
                assert settings == Sampling(**at)
                options = dict(n=4, sampling=settings, eos=session.eos, ignore_eos=True)
                expected = [*generate(tiny_model, prompt.ids, **options)]
                got, interrupted = generation.ids, generation.ended_by == "interrupt"
                assert got == expected[: len(got)] and (interrupted or len(got) == 4)
                assert capsys.readouterr().out == generation.text + "\n"
                if got:
                    turns = [*earlier, *conversation(message, generation.text)]
                    to_read = to_read if command == "/regen" else ""
            assert talk.turns == turns and talk.system == system and shown.to_read == to_read

    check()


def test_what_fits_into_the_context(tiny):
    """Where less than a quarter is left for the answer, turns go, the oldest first, and then the
    beginning of the last answer, until half of it is free, and no more than that."""
    session = Session(tiny, device="cpu", ctx_size=64, chat_template="llama2")
    word = st.sampled_from("fox said Żółw \u4f60\u597d\u4f60\u597d".split())
    text = st.lists(word, max_size=25).map(" ".join)
    turn = st.tuples(text, text).map(lambda said: conversation(*said))

    @examples(80, system=st.sampled_from(["", "Be kind."]), turns=st.lists(turn, max_size=6))
    def check(system, turns):
        talk, turns = Conversation(session, system), [*itertools.chain(*turns)]
        asked = lambda turns: [*talk.system, *turns, {"role": "user", "content": "fox"}]
        length = lambda turns: len(session.render(asked(turns)).ids)
        prompt, kept = talk.fit("fox", turns)
        dropped = dropped_part(turns, kept)
        assert prompt.text == session.tokenizer.chat_prompt(asked(kept)).text
        if length(turns) <= 48:
            assert (kept, dropped) == (turns, "")
            return
        count = (len(turns) - len(kept)) // 2
        expected, rest = [f"{count} of {len(turns) // 2} turns"] * bool(count), turns[2 * count :]
        assert len(prompt.ids) <= max(32, length([])), "half of the context is not free"
        if kept == rest:
            assert length(turns[2 * count - 2 :]) > 32, "more than needed is dropped"
        else:
            (message, answer), (_, whole) = kept, rest
            end = answer["content"].strip()
            assert message == rest[0] and end and whole["content"].endswith(end)
            assert length(rest) > 32 and 32 - len(prompt.ids) < 8, "more than needed is cut"
            expected.append("the beginning of the last answer")
        assert dropped == " and ".join(expected)

    check()
    # by more than the space before it
    _, answer = Conversation(session).shortened(conversation("fox", "\u4f60 good day"), 1)
    assert answer["content"].strip() == "good day"


def test_lines_of_a_chat(cli, tiny):
    messages = "/usr/bin/python says", "/etc is what?", "/* a comment */", "/ or \\?"
    turns = chat_objects(cli, tiny, *messages, "", "one \\", "two", "/usr\\", "next", "/bye", "no")
    said = [*messages, "one \ntwo", "/usr\nnext"]
    assert [turn["prompt"] for turn in turns] == said and all("text" in turn for turn in turns)
    assert chat_objects(cli, tiny, "one\\")[0]["prompt"] == "one", "the input ended"
    assert "generated 12 tokens" in chat(cli, tiny, "hello", "again")[2]
    assert "0 tokens" not in chat(cli, tiny)[2], "nothing was evaluated"


def test_chat_single_turn(cli, tiny, tmp_path):
    flags = ("-m", tiny, "-n", 6, *GREEDY, "--quiet")
    expected = chat(cli, tiny, "hello", flags=["--quiet"])[1]
    (tmp_path / "message").write_text("hello\n")
    file = ("-cnv", "-f", tmp_path / "message")
    for how in (("--chat", "-p", "hello"), ("-st", "-p", "hello"), file, ("-st",)):
        assert cli(*flags, *how, stdin=b"hello\n") == (0, expected, ""), how
    for how in (("--chat", "-p", "hello\\nyou"), ("-st",)):
        (turn,) = objects(cli(*flags, *how, "-o", "jsonl", stdin=b"hello\nyou\n")[1])
        assert turn["prompt"] == "hello\nyou"


def test_what_a_chat_says(cli, tiny, tmp_path):
    """Of a line after an answer; test_a_chat_in_any_order knows what the line does."""
    notes, saved = tmp_path / "notes", tmp_path / "saved"
    notes.write_bytes(b"good\r\nday,\rcrow!\n")
    saved.write_text(json.dumps(conversation("hello", "good day")))
    said = {
        "/HELP": "/clear        forget",
        "/?": "/clear        forget",
        "/system\\\nBe kind.\\\nAnd terse.": "with this system prompt",
        "/clear": "conversation cleared",
        "/system Be kind.": "with this system prompt",
        "/system": "without a system prompt",
        "/regen": "always the same",
        f"/read {notes}": "15 characters, goes before your next message",
        "/set temp 5": "temp 5.0, top_k 40",
        "/set temperature 6": "temp 6.0, top_k 40",
        "/set repetition-penalty 2": "repeat_penalty 2.0",
        f"/load {saved}": f"{saved}: 1 turns",
        f"/save {tmp_path / 'new'}": f"saved to {tmp_path / 'new'}",
    }
    _, answer, alone = chat(cli, tiny, "hello")
    assert "this model has no chat template; sending plain text" in alone
    assert alone.count("note: cut after 6 tokens (see -n)") == 1
    given = chat(cli, tiny, "hello", flags=["--chat-template", "zephyr"])[2]
    assert "template: zephyr (given)" in given
    for line, text in said.items():
        assert text in chat(cli, tiny, "hello", line)[2] and text not in alone, line
    kind = chat(cli, tiny, "/system Be kind.", "hello")[1]
    assert kind == chat(cli, tiny, "hello", flags=["--system", "Be kind."])[1] != answer
    stats = chat(cli, tiny, "/stats", "hello", "/stats", "more")[2]
    assert stats.count(" tokens/s; prompt:") == 1, "shown until /stats is said again"
    first, again = chat_objects(cli, tiny, "hello", "/regen")
    assert again["evaluated_tokens"] == 0 < first["evaluated_tokens"]
    assert chat_objects(cli, tiny, "/regen")[0]["error"] == "there is no answer yet"
    lines = ["tell me a tale"] * 12
    dropped = "context of 64 tokens is full: dropped the oldest part of the conversation, [1-9] of "
    assert re.search(dropped, chat(cli, tiny, *lines, flags=["-c", 64])[2])
    assert chat(cli, tiny, *lines, "/clear", flags=["--quiet", "-c", 64])[2] == "", "--quiet"


def test_chat_errors_end_only_their_turn(cli, tiny, tmp_path):
    refuses = "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('too bad') }}{% endif %}"
    (tmp_path / "t").write_text(refuses + "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = ("bad", "long", "other", "lone", "nothing")
    bad, long, other, surrogate, nothing = (tmp_path / name for name in names)
    bad.write_bytes(b"ab\xff")
    long.write_text("x" * 10_000)
    other.write_text('[{"role": "user", "content": "?"}]')
    turn = [{"role": "user", "content": "\udcff"}, {"role": "assistant", "content": "."}]
    surrogate.write_text(json.dumps(turn))
    nothing.write_text("{}")
    said = {
        "tell me a tale " * 60: "context holds 64",
        "\udcff": "not UTF-8",
        "bad": "too bad",
        "/system " + "tell me a tale " * 60: "prompt takes",
        "/REGNE now": "no command /regne: did you mean /regen? /help lists them",
        "/regenerate": "no command /regenerate: did you mean /regen? /help",
        "/show info": "no command /show: /help lists them",
        "/read": "/read needs the name of a file",
        "/read nowhere": "nowhere: No such file",
        "/read .": ".: Is a directory",
        f"/read {bad}": "not UTF-8: byte 0xff at offset 2",
        f"/read {long}": f"{long} takes ",
        "/set tmp 1": "/set needs one of temp, top_k",
        "/set top-k many": "many: top_k needs a whole number",
        "/set top_p 2": "top_p is 2.0; it must be from 0 to 1",
        "/set seed nan": "nan: seed needs a whole number",
        "/save": "/save needs the name of a file",
        "/save /no/where": "/no/where: No such file",
        f"/load {other}": f"{other}: it is not a conversation",
        f"/load {surrogate}": f"{surrogate}: it is not a conversation",
        f"/load {tiny / 'config.json'}": "it is not a conversation",
        f"/load {nothing}": f"{nothing}: it is not a conversation",
        f"/load {tmp_path / 't'}": "t: it is not a conversation",
    }
    flags = ["-o", "jsonl", "-c", 64, "--quiet", "--chat-template", tmp_path / "t"]
    code, out, err = chat(cli, tiny, "hello", *said, "/regen", flags=flags)
    first, *refused, last = objects(out)
    assert code == 0 and last["prompt"] == first["prompt"] == "hello", "the conversation is lost"
    for turn, text in zip(refused, said.values(), strict=True):
        assert text in turn["error"], turn
    errors = [f"error: {turn['error']}" for turn in refused]
    assert err.splitlines() == errors and "Errno" not in err


# ---- talk/chat.py: a person at a terminal


def test_control_characters_are_not_shown(capsys):
    printer = Printer("Once ")
    printer.at_terminal = True
    for piece in ("up\x1b[2J", "\x9bc\r", "\tx\n"):
        printer.write(piece)
    printer.write_parts([Part("thought", "hm"), Part("text", "yes")])
    printer.end()
    assert capsys.readouterr().out == "Once up\ufffd[2J\ufffdc \tx\n\x1b[2mhm\n\n\x1b[0myes\n"
    cli_module.note("model  a\x1b]0;b\x07\x9b\nc\td\r")  # a file's name may hold them
    assert capsys.readouterr().err == "model  a\ufffd]0;b\ufffd\ufffd\nc\td \n"


def test_ctrl_c_at_once(tmp_path):
    """While the program's own modules are imported."""
    (tmp_path / "dataclasses.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)")
    for program in ("run.py", "bench.py", "serve.py"):
        run = [sys.executable, HERE / program, "--help"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        ended = subprocess.run(run, env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


class Person:
    """Types into a program at a pseudo-terminal and reads what it shows."""

    def __init__(self, *arguments, script: Path = HERE / "run.py", **variables):
        own = dict(TERM="xterm-256color", OMP_NUM_THREADS="1", XDG_STATE_HOME="/none")
        environment = os.environ | own | dict(INPUTRC="/dev/null") | variables
        for name in {"COLUMNS", "LINES", "NO_COLOR"} - {*variables}:
            environment.pop(name, None)
        command = [sys.executable, str(script), "--device", "cpu", *map(str, arguments)]
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            termios.tcsetwinsize(0, (24, 80))
            os.execve(sys.executable, command, environment)
        self.unread, self._decoder = "", codecs.getincrementaldecoder("utf-8")("replace")

    def types(self, text: str, seen: str = "") -> str:
        """Types, and returns what is shown up to a match of the pattern `seen`."""
        os.write(self.terminal, text.encode())
        return self.sees(seen)

    def interrupts(self, seen: str) -> str:
        """Types Ctrl-C and returns what sees(seen) does. A signal that comes while readline draws
        is handled with the next one: SIGWINCH, which does nothing else."""
        os.write(self.terminal, b"\x03")
        return self.sees(seen, lambda: os.kill(self.pid, signal.SIGWINCH))

    def sees(self, pattern: str, wake=lambda: None) -> str:
        """What is shown up to a match of the pattern. wake is called while there is nothing."""
        deadline = time.monotonic() + PATIENCE
        while not (match := re.search(pattern, self.unread)):
            if select.select([self.terminal], [], [], 1)[0]:
                assert self._reads(), f"no {pattern!r} in {self.unread!r}"
            else:
                assert time.monotonic() < deadline, f"no {pattern!r} in {self.unread!r}"
                wake()
        seen, self.unread = self.unread[: match.end()], self.unread[match.end() :]
        return seen

    def leaves(self) -> tuple[int, str]:
        """The exit code, and what is shown until then."""
        while self._reads():
            pass
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.unread

    def _reads(self) -> bool:
        try:
            new = os.read(self.terminal, 1 << 16)
        except OSError:  # the end of output, on Linux
            return False
        self.unread += self._decoder.decode(new)
        return bool(new)


UP, CTRL_D = "\x1b[A", "\x04"
# bracketed paste, perhaps in colour; no text of the model holds an escape
READY = r"\x1b\[\?2004h(\x1b\[1;32m)?> "


def test_chat_at_a_terminal(tiny, tmp_path):
    home = tmp_path / "of a new user"
    person = Person("-m", tiny, "--chat", "-n", 6, *GREEDY, XDG_STATE_HOME=str(home))
    assert "\x1b[?2004h\x1b[1;32m> " in person.sees(READY)
    turn = person.types("hello\r", READY)
    answered = r"(?s)hello\r\n(\x1b\[\?2004l\r)?\x1b\[0m\r\n[^\x1b]+\r\n\r\n"
    assert re.fullmatch(answered + r"\x1b\[\?2004h\x1b\[1;32m> ", turn), repr(turn)
    person.types("\x1b[200~good\rday\x1b[201~", "day")  # pasted
    person.types("\r", READY)
    person.types("two \\\r", r"\x1b\[1;32m  ")
    person.types("lines\r", READY)
    assert "good\r\n" in person.types(UP + UP, "day"), "a pasted message comes back whole"
    assert "to leave" not in person.interrupts(READY), "the line had text"
    person.interrupts(r"to leave: Ctrl-C again, Ctrl-D or /exit\)[^>]*> ")
    person.types("abc", "abc")
    person.interrupts(READY)
    person.types("/clear\r", "conversation cleared[^>]*> ")
    person.interrupts(READY)
    rest = person.interrupts("memory ")
    assert person.leaves()[0] == 130
    assert rest.startswith("\x1b[?2004l\r\x1b[0m") and "Traceback" not in rest
    assert "generated 18 tokens" in rest
    history = home / "fused-llama" / "history"
    messages = [json.loads(line) for line in history.read_text().splitlines()]
    assert messages == ["hello", "good\nday", "two \nlines", "/clear"]
    assert history.parent.stat().st_mode & 0o077 == 0, "others can read it"


def test_chat_without_colour(tiny, tmp_path):
    """With a long history of other runs, one line of it cut off."""
    (tmp_path / "fused-llama").mkdir()
    history = '"older"\n' * 1000 + '"good\\nday"\n"half\n42\nnull\n' + "[" * 100_000 + '\n"hello"\n'
    (tmp_path / "fused-llama" / "history").write_text(history)
    flags = ("-m", tiny, "--chat", "--ignore-eos", "-c", 5000)
    person = Person(*flags, XDG_STATE_HOME=str(tmp_path), NO_COLOR="1")
    status = person.sees(READY)
    assert "\x1b[1" not in status and "/help" in status
    assert "good\r\n" in person.types(UP + UP, "day")
    person.types("\r", r"\x1b\[\?2004l\r")
    person.sees(r"\S")
    person.interrupts(READY)
    person.types(CTRL_D)
    code, rest = person.leaves()
    assert code == 0 and "generated" in rest


def test_bare_run_at_a_terminal_is_a_chat(tmp_path):
    # models/tales is looked for beside the program
    (tmp_path / "llama").symlink_to(HERE / "run.py")
    person = Person("-n", 4, script=tmp_path / "llama", TERM="dumb")
    assert re.search(r"since\s+there\s+is\s+no\s+prompt", person.sees("> "))
    person.types("Tell me a tale\r", "> ")
    person.types("/exit\r")
    code, rest = person.leaves()
    assert code == 0 and "\x1b" not in rest and "Traceback" not in rest


def test_terminal_after_sigterm(tiny):
    person = Person("-m", tiny, "--chat")
    person.sees(READY)
    os.kill(person.pid, signal.SIGTERM)
    # see interrupts
    person.sees(r"\x1b\[\?2004l\r\x1b\[0m", lambda: os.kill(person.pid, signal.SIGWINCH))
    assert person.leaves()[0] == 128 + signal.SIGTERM


def test_mode_of_a_run(monkeypatch):
    modes = {"": "bare", "-no-cnv": "text", "-p x": "text", "-p=": "text", "-f /dev/null": "text"}
    modes |= {"-st": "chat", "-sys x": "bare", "--chat -p x": "chat", "--fp8 --save x": "save"}
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert {flags: run.parse_args(flags.split()).mode for flags in modes} == modes
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert run.parse_args([]).mode == "text"
