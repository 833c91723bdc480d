"""Llama 2 and its relatives from the command line: complete a prompt, or chat. Text goes to stdout,
all else to stderr."""

from __future__ import annotations

import signal

if __name__ == "__main__":  # the imports take time, and Ctrl-C needs no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import os
import random
import re
import resource
import sys
from typing import TYPE_CHECKING

from grammars import lark_grammar
from settings import FORMAT_FLAGS, RANDOM, SETTINGS
from talk.cli import (
    Parser,
    add_model_flags,
    add_proposal_flags,
    add_sampling_flags,
    add_template_flag,
    ending_cleanly,
    exit_code,
    first_empty,
    import_torch,
    model_contradiction,
    note,
    open_session,
    read_input,
    sampling_flags,
    set_environment,
    settle_model,
    use_safe_streams,
    within,
)

# What imports torch, which takes seconds, is imported where it is used, once the command line is
# parsed
if TYPE_CHECKING:
    from ranks.processes import Ranks
    from session import Session
    from talk.chat import Output

# ---- the command line

# The modes (see mode_of) and their names in messages
MODES = {"text": "a prompt", "bare": "no prompt", "chat": "--chat", "save": "--save"}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, MODES)
    writes = "text bare chat"
    # fmt: off
    add = add_model_flags(parser, writes)
    add("--save", metavar="DIR",
        help=f"write the model with its matrices as {' or '.join(FORMAT_FLAGS)} says to DIR"
        " instead of generating; -m DIR runs it")

    add = parser.group("text", writes)
    add("-p", "--prompt", metavar="TEXT", only="text chat",
        help="text to continue; - reads standard input; with --chat, the message")
    add("-f", "--file", metavar="FILE", only="text chat",
        help="read the prompt from a file, without escapes")
    add("--no-escape", action="store_true",
        help="take \\n, \\t, \\\\, \\\" and \\xHH in --prompt, --system and --stop as they are written;"
        " otherwise they mean what they do in C")
    add("-n", "--n-predict", "--predict", type=within(int, -2), default=-1, metavar="N",
        help="tokens to generate; -1 and -2: until the end or a full context")
    add("-r", "--reverse-prompt", "--stop", action="append", dest="stop", default=[],
        metavar="TEXT", help="stop before this text; may be repeated")
    add("-j", "--json-schema", metavar="TEXT",
        help="write JSON as this JSON schema says; {} is any JSON")
    add("-jf", "--json-schema-file", metavar="FILE", help="read the schema from a file")
    add("--grammar", metavar="TEXT", help="write what this grammar says, in GBNF or Lark")
    add("--grammar-file", metavar="FILE", help="read the grammar from a file")
    add_proposal_flags(add)
    add("--ignore-eos", action="store_true", help="never choose the end-of-sequence token")

    add = parser.group("sampling", writes)
    add_sampling_flags(add)
    add("-s", "--seed", type=within(int, RANDOM, SETTINGS["seed"].high), default=RANDOM,
        metavar="N", help="-1: random, and printed")

    add = parser.group("chat", "chat bare")
    add("-cnv", "--conversation", "--chat", action="store_true", dest="chat", only="chat",
        help="chat; the default at a terminal if there is no prompt and the model has a chat"
        " template")
    add("-no-cnv", "--no-conversation", action="store_true", only="text bare", help="do not chat")
    add("-st", "--single-turn", action="store_true", only="chat",
        help="one turn, then exit; implied by --chat with --prompt or --file")
    add("-sys", "--system-prompt", "--system", dest="system", default="", metavar="TEXT",
        help="system prompt")
    add("-sysf", "--system-prompt-file", dest="system_file", metavar="FILE",
        help="read the system prompt from a file")
    add_template_flag(add)

    add = parser.group("output")
    add("-o", "--output", choices=["text", "jsonl"], default="text", only=writes,
        help="jsonl: a JSON object for the text or for each turn, with why it ended, counts and"
        " seconds")
    add("--no-display-prompt", action="store_true", only="text bare",
        help="print only what is generated")
    add("--quiet", action="store_true", help="print only text and errors")
    add("--debug", action="store_true", help="print errors with their traceback")
    # fmt: on

    args = parser.parse(argv, mode_of)
    settle_model(args)
    if error := contradiction(args) or model_contradiction(args):
        parser.error(error)
    if not args.no_escape:
        args.prompt = args.prompt and unescaped(args.prompt)
        args.system = unescaped(args.system)
        args.stop = [unescaped(stop) for stop in args.stop]
    files = [args.file, args.system_file, args.json_schema_file, args.grammar_file]
    parser.find([args.model, args.draft], files)
    if args.seed < 0:
        args.seed = random.SystemRandom().randrange(1 << 32)
    return args


def mode_of(args: argparse.Namespace) -> str:
    """What to do: "save", "chat", "text", or "bare", which is chat if the checkpoint has a template
    and text otherwise."""
    if args.save is not None:
        return "save"
    if args.chat or args.single_turn:
        return "chat"
    if args.prompt is not None or args.file is not None or args.no_conversation:
        return "text"
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return "bare" if at_terminal else "text"


def contradiction(args: argparse.Namespace) -> str | None:
    """What is wrong with flags that are right one by one. Returns None if nothing is."""
    if empty := first_empty(args, "model", "save"):
        return empty
    if args.prompt is not None and args.file is not None:
        return "--prompt and --file both give a prompt; use one"
    if args.save is not None and not args.format:
        return f"--save writes matrices in 8 or 4 bits: add {' or '.join(FORMAT_FLAGS)}"
    if args.system and args.system_file:
        return "--system and --system-prompt-file both give a system prompt; use one"
    texts = "json_schema", "json_schema_file", "grammar", "grammar_file"
    given = [name for name in texts if vars(args)[name] is not None]
    if len(given) > 1:
        first, second, *_ = (f"--{name.replace('_', '-')}" for name in given)
        return f"{first} and {second} both say what the text has to be; use one"
    return None


ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def unescaped(text: str) -> str:
    """llama.cpp's escapes (common.cpp, string_process_escapes) as what they stand for; other
    backslashes stay."""

    def replaced(match: re.Match) -> bytes:
        escape = match[1]
        return ESCAPES.get(escape) or bytes.fromhex(escape[1:].decode())

    raw = re.sub(rb"\\([nrt'\"\\]|x[0-9a-fA-F]{2})", replaced, os.fsencode(text))
    return os.fsdecode(raw)


# ---- what the program does


def work(args: argparse.Namespace, ranks: Ranks) -> int:
    from loading.place import pick_device
    from talk.chat import Output

    if args.mode == "save":
        if ranks.rank == 0:  # one process does it
            save(args)
        return 0
    ranks.join(pick_device(args.device, ranks))
    # Only rank 0 sees the terminal, and its random seed is the one that counts
    args = ranks.broadcast(lambda: args)
    single = args.single_turn or args.prompt is not None or args.file is not None
    prompt = None
    if args.mode != "chat" or single:
        prompt = ranks.broadcast(lambda: read_prompt(args))
    if args.system_file is not None:
        args.system = ranks.broadcast(lambda: read_input(args.system_file))
    if args.json_schema_file is not None:
        args.json_schema = ranks.broadcast(lambda: read_input(args.json_schema_file))
    if args.grammar_file is not None:
        args.grammar = ranks.broadcast(lambda: read_input(args.grammar_file))
    session = open_session(args, ranks)
    output = Output(session, args.output == "jsonl", args.quiet)
    output.note(summary(args, session))
    made_for_chat = bool(session.tokenizer.template_name)
    code = 0
    try:
        if args.mode == "chat" or args.mode == "bare" and made_for_chat:
            code = converse(args, session, output, prompt, single)
        else:
            complete(args, session, output, prompt or "")
    except KeyboardInterrupt:
        code = 130
    output.note("\n" + closing(session))
    return code


def read_prompt(args: argparse.Namespace) -> str | None:
    """The text of --prompt, of --file, or of standard input (for "--prompt -", or if it is not a
    terminal). Returns None if there is no prompt."""
    if args.prompt not in (None, "-"):
        return args.prompt
    if args.file is None and args.prompt is None and sys.stdin.isatty():
        return None
    return read_input(args.file)


def text_options(args: argparse.Namespace) -> dict:
    """The flags that are arguments of Session.generate."""
    options = dict(n=args.n_predict, stop=args.stop, ignore_eos=args.ignore_eos)
    if args.grammar is not None:
        options["grammar"] = lark_grammar(args.grammar)
    return options | dict(schema=args.json_schema)


def complete(args: argparse.Namespace, session: Session, output: Output, prompt: str) -> None:
    """Print the prompt, once it is evaluated, and its continuation."""
    shown = "" if args.no_display_prompt else prompt
    generation = session.generate(prompt, progress=output.progress, **text_options(args))
    if generation.doubles_bos:
        output.note("note: the prompt begins with a bos of its own, after the tokenizer's")
    output.write(generation, prompt, first=shown)
    if generation.ended_by == "interrupt":
        raise KeyboardInterrupt


def converse(
    args: argparse.Namespace,
    session: Session,
    output: Output,
    prompt: str | None,
    single: bool,
) -> int:
    """Answer one message, which may be the prompt, or hold a conversation. Returns the exit code."""
    from session import Conversation
    from talk.chat import Chat

    chat = Chat(Conversation(session, args.system), output, **text_options(args))
    template = "this model has no chat template; sending plain text"
    if session.tokenizer.template_name:
        template = f"template: {session.tokenizer.template_name}"
    why = ""
    if args.mode != "chat":
        why = "; chatting, since there is no prompt (-no-cnv: plain text)"
    output.note(f"chat      {template}; /help lists commands{why}")
    if not single:
        return chat.run()
    chat.run_once(prompt)
    return 0


def save(args: argparse.Namespace) -> None:
    from loading.checkpoint import save as save_model

    with ending_cleanly():
        file = save_model(
            args.model,
            args.save,
            format=args.format,
            dtype=args.dtype,
            device=args.device,
            quiet=args.quiet,
        )
    if not args.quiet:
        matrices = f"{args.format} matrices, {file.name} of {file.stat().st_size:,} bytes"
        note(f"saved     {file.parent}: {matrices}")


# ---- what it says about a run


def summary(args: argparse.Namespace, session: Session) -> str:
    """What is about to run, in two or three lines."""
    model = session.model
    checkpoint = model.checkpoint
    c = checkpoint.config
    size = session.ctx_size
    heads = f"{c.n_heads} heads"
    if c.n_kv_heads != c.n_heads:
        heads += f" ({c.n_kv_heads} of keys and values)"
    backend = {"torch": "torch ops", "triton": "Triton kernels"}[model.backend]
    if model.backend == "triton" and model.device.type == "cpu":
        backend += " in the interpreter, which is slow"
    context = f"context {size}"
    if size > c.max_seq_len:
        context += f" (beyond the model's {c.max_seq_len}: expect nonsense there)"
    if session.sampling.temp:
        context += f", seed {args.seed}"
    where = f"{model.device}{session.ranks.described(bool(model.exchange), model.device)}"
    parameters = f"{checkpoint.elements / 1e6:.1f}M parameters"
    lines = [
        f"model     {checkpoint.folder}: {parameters}, {c.n_layers} layers, dim {c.dim}, {heads}",
        f"running   {session.types()} on {where}, {backend}, {context}",
    ]
    own = [
        f"{name.replace('_', '-')} {value:g}"
        for name, value in checkpoint.sampling(sampling_flags(args)).items()
    ]
    if own:
        lines.append(f"sampling  {', '.join(own)} (from the checkpoint; flags override it)")
    return "\n".join(lines)


def closing(session: Session) -> str:
    """How fast it was, and the memory it took."""
    import torch

    t = session.timings
    lines = [f"load      {session.load_seconds:.2f} s"]
    if t.prompt_tokens:  # a prompt was evaluated
        prompt = f"prompt    {t.prompt_tokens} tokens"
        generated = f"generated {t.new_tokens} tokens"
        if t.new_tokens:
            rate = t.prompt_tokens / t.prompt_seconds
            prompt += f" in {1e3 * t.prompt_seconds:.1f} ms, {rate:.1f} tokens/s"
        if t.steps:
            rate = t.steps / t.step_seconds
            generated += f", {1e3 * t.step_seconds / t.steps:.2f} ms per token, {rate:.1f} tokens/s"
        lines += [prompt, generated]
    if session.engine.proposer:
        lines.append(session.engine.proposer.summary())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = f"memory    peak {peak / 1e9:.2f} GB"
    if session.model.device.type == "cuda":
        memory += f", {torch.cuda.max_memory_reserved() / 1e9:.2f} GB on the GPU"
    lines.append(f"{memory}; {session.types()}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    import_torch()
    set_environment(args)
    return exit_code(work, args)


if __name__ == "__main__":
    use_safe_streams()
    code = main()
    # Nothing is left to interrupt, but Python takes a moment to exit
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
