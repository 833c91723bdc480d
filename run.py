"""The command line: generate text from a prompt, or chat. Text goes to stdout, everything else to stderr."""

import os
import signal
import sys

if __name__ == "__main__":  # Ctrl-C while the imports below load torch: no traceback
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import torch

from checkpoint import DTYPES, find_checkpoint, load, pick_device, read_config, read_sampling, save_fp8
from fp8 import FORMATS
from launch import INTERPRETED
from model import KVCache, Timings, generate
from sampling import Sampling
from template import TEMPLATES
from tokenizer import Prompt, TextStream, Tokenizer

DEFAULT_MODEL = Path(__file__).parent / "models" / "tales"
HELP = "/clear forgets the conversation, /system TEXT sets the system prompt (and forgets), /exit or end-of-file leaves"


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors."""

    def error(self, message: str):
        self.exit(2, f"error: {message} (see --help)\n")


def within(kind: type, low: float, high: float = float("inf")):
    """An argparse type: a number in a range."""

    def number(text: str):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low:g} .. {high:g}")
        return value

    number.__name__ = kind.__name__
    return number


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", "-hf", default=str(DEFAULT_MODEL), help="folder of a checkpoint, or owner/name of one on the hub")
    add("-p", "--prompt", help="text to continue; - reads standard input")
    add("-f", "--file", help="read the prompt from a file")
    add("-n", "--n-predict", type=within(int, -1), default=-1, help="tokens to generate; -1: until the end or a full context")
    add("-c", "--ctx-size", type=within(int, 0, 1 << 24), help="context; 0: the model's; default: that, at most 4096")
    add("--temp", type=within(float, 0), help="temperature; 0 is greedy; default: the checkpoint's own, or 0.8")
    add("--top-k", type=within(int, 0), help="keep the k best tokens; 0 is off; default: the checkpoint's own, or 40")
    add(
        "--top-p",
        type=within(float, 0, 1),
        help="keep the best tokens that have this probability together; 1 is off; default: the checkpoint's own, or 0.95",
    )
    add("--min-p", type=within(float, 0, 1), default=0.05, help="keep tokens this probable, relative to the best; 0 is off")
    add(
        "--repeat-penalty",
        type=within(float, 0.01, 100),
        help="divide the logits of recent tokens; 1 is off; default: the checkpoint's own, or 1",
    )
    add("--repeat-last-n", type=within(int, -1), default=64, help="how many tokens are recent; -1: the whole context")
    add("-s", "--seed", type=within(int, -1, (1 << 63) - 1), default=-1, help="-1: random, and printed")
    add("--stop", action="append", default=[], metavar="TEXT", help="end where this text would come; may be repeated")
    add("--ignore-eos", action="store_true", help="never choose the end-of-sequence token")
    add("--no-display-prompt", action="store_true", help="print only what is generated")
    add("--chat", action="store_true", help="talk with the model")
    add("--system", default="", metavar="TEXT", help="system prompt of the chat")
    add(
        "--chat-template",
        metavar="NAME or FILE",
        help=f"instead of the checkpoint's own template: a file of Jinja, or one of {', '.join(TEMPLATES)}",
    )
    add("--device", default="auto", help="cpu, cuda or cuda:N")
    add("--backend", choices=["auto", "torch", "triton"], default="auto", help="auto: triton on a GPU, torch on a CPU")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: the checkpoint's; on a CPU bf16 or fp32")
    add("--fp8", nargs="?", const="e4m3", choices=list(FORMATS), help="keep the matrices as 8-bit floats; alone: e4m3")
    add("--kv-fp8", action="store_true", help="keep keys and values as 8-bit floats: half the memory of the context")
    add("--accumulate", choices=["auto", "fp32", "fp16"], default="auto", help="sums of a prompt's fp16 products; auto: fp16 "
        "on GeForce cards")  # fmt: skip
    add("--save-fp8", metavar="DIR", help="write the model with 8-bit matrices (see --fp8) to DIR, and no text; -m DIR runs it")
    add("--quiet", action="store_true", help="no model summary and no timings on stderr")
    add("--debug", action="store_true", help="errors with their traceback")
    args = parser.parse_args(argv)
    if args.prompt is not None and args.file is not None:
        parser.error("--prompt and --file are two prompts; give one")
    if args.chat and (args.prompt is not None or args.file is not None):
        parser.error("--chat reads what you say from standard input; it takes no --prompt or --file")
    if args.save_fp8 is not None and (args.chat or args.prompt is not None or args.file is not None):
        parser.error("--save-fp8 generates nothing; it takes no --prompt, --file or --chat")
    if not args.chat and (args.system or args.chat_template):
        parser.error("--system and --chat-template are for --chat")
    if args.seed < 0:
        args.seed = random.SystemRandom().randrange(1 << 32)
    return args


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_prompt(args: argparse.Namespace) -> str:
    """--prompt, --file, or standard input when it is no terminal; a newline at the end of the latter two is taken away."""
    if args.prompt not in (None, "-"):
        return decoded(os.fsencode(args.prompt), "--prompt")
    if args.file is not None:
        raw, source = Path(args.file).read_bytes(), args.file
    elif args.prompt == "-" or not sys.stdin.isatty():
        raw, source = sys.stdin.buffer.read(), "standard input"
    else:
        return ""
    return decoded(raw, source).removesuffix("\n").removesuffix("\r")


def decoded(raw: bytes, source: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}") from None


class Session:
    """A model with its tokenizer, cache and settings, and what it has cost so far."""

    def __init__(self, args: argparse.Namespace):
        start = time.perf_counter()
        self.args = args
        folder = find_checkpoint(args.model)
        config = read_config(folder)
        # its errors come before the weights' minutes
        self.tokenizer = Tokenizer(folder, config.vocab_size, config.bos_id, args.chat_template)
        self.model = load(
            args.model,
            dtype=args.dtype,
            device=args.device,
            ctx_size=args.ctx_size,
            backend=args.backend,
            fp8=args.fp8,
            kv_fp8=args.kv_fp8,
            accumulate=args.accumulate,
        )
        self.eos = {*config.eos_ids, self.tokenizer.eos} - {-1}
        self.cache = KVCache(self.model)
        given = {field.name: getattr(args, field.name) for field in fields(Sampling)}
        given = {name: value for name, value in given.items() if value is not None}
        self.own_sampling = {name: value for name, value in read_sampling(folder).items() if name not in given}
        self.sampling = Sampling(**self.own_sampling | given)
        self.timings = Timings()
        self.load_seconds = time.perf_counter() - start

    def summary(self) -> str:
        m, c = self.model, self.model.config
        heads = f"{c.n_heads} heads" + (f" ({c.n_kv_heads} of keys and values)" if c.n_kv_heads != c.n_heads else "")
        size = f"{m.checkpoint.elements / 1e6:.1f}M parameters, {c.n_layers} layers, dim {c.dim}, {heads}"
        dtype = next(name for name, value in DTYPES.items() if value == m.dtype)
        beyond = f" (beyond the model's {c.max_seq_len}: expect nonsense there)" if self.cache.size > c.max_seq_len else ""
        if format := m.weights.output.format:
            dtype += f" with {format.name} matrices"
        if m.kv_fp8:
            dtype += ", e4m3 keys and values"
        if m.fp16_sums:
            dtype += ", fp16 sums for prompts"
        backend = {"torch": "torch ops", "triton": "Triton kernels"}[m.backend]
        if m.backend == "triton" and m.device.type == "cpu":
            backend += " in the interpreter, which is slow"
        own = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in self.own_sampling.items())
        sampling = f"\nsampling  {own} (the checkpoint's own; the flags override)" if own else ""
        return (
            f"model     {m.checkpoint.folder}: {size}\n"
            f"running   {dtype} on {m.device}, {backend}, context {self.cache.size}{beyond}, seed {self.args.seed}{sampling}"
        )

    def closing(self) -> str:
        t = self.timings
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        gpu = self.model.device.type == "cuda"
        on_gpu = f", {torch.cuda.max_memory_reserved() / 1e9:.2f} GB on the GPU" if gpu else ""
        prompt_rate = t.prompt_tokens / max(t.prompt_seconds, 1e-9)
        rate = (
            f", {1e3 * t.step_seconds / t.steps:.2f} ms per token, {t.steps / t.step_seconds:.1f} tokens/s" if t.steps else ""
        )
        return (
            f"load      {self.load_seconds:.2f} s\n"
            f"prompt    {t.prompt_tokens} tokens in {1e3 * t.prompt_seconds:.1f} ms, {prompt_rate:.1f} tokens/s\n"
            f"generated {t.new_tokens} tokens{rate}\n"
            f"memory    peak {peak / 1e9:.2f} GB{on_gpu}"
        )

    def stream(self, ids: list[int], text: TextStream, answer: list[int], eos: set[int]) -> Iterator[str]:
        """Generate after ids; yield printable text. answer collects the new ids, without an eos."""
        args, token, count = self.args, None, 0
        for token in generate(self.model, ids, self.cache, args.n_predict, self.sampling, eos, args.ignore_eos, self.timings):
            count += 1
            if token not in eos:
                answer.append(token)
            yield text.push(token)
            if text.stopped:
                return
        yield text.finish()
        if token not in eos and count != args.n_predict:
            note(f"\nnote: the context of {self.cache.size} tokens is full (see -c)")


def put(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def complete(session: Session, prompt: str) -> None:
    """Print the prompt and its continuation."""
    args, tokenizer = session.args, session.tokenizer
    ids = tokenizer.encode(prompt) or [i for i in (tokenizer.bos, tokenizer.eos) if i >= 0][:1]
    if not ids:
        raise ValueError("the prompt is empty, and the tokenizer has no token to begin with")
    session.cache.check_room(len(ids))
    if not args.no_display_prompt:
        put(prompt)
    text = TextStream(tokenizer, at_start=not prompt, stops=args.stop)
    for piece in session.stream(ids, text, [], session.eos):
        put(piece)
    put("\n")


def ask(prompt: str) -> str:
    """A line of standard input. A person sees a prompt: from input(), which edits lines, unless stdout is kept for the text."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input(prompt)
    if sys.stdin.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
    return input()


class Chat:
    """A conversation. The cache keeps what was evaluated, so that each turn evaluates only what is new."""

    def __init__(self, session: Session):
        self.session = session
        self.messages: list[dict] = []  # "role" and "content" of each
        self.past: Prompt | None = None  # what the cache holds, up to the last answer
        self.set_system(session.args.system)
        ids, self.stops = session.tokenizer.turn_ends()
        self.eos, self.stops = session.eos | ids, [*session.args.stop, *self.stops]
        if not session.args.quiet:
            note(f"chat      template: {session.tokenizer.template_name}; /help lists commands")

    def set_system(self, text: str) -> None:
        """Begin anew, with this system prompt."""
        self.messages = [{"role": "system", "content": text}] if text else []

    def fit(self) -> Prompt:
        """The conversation as a prompt, with the oldest turns dropped until there is room for an answer."""
        tokenizer, size, dropped = self.session.tokenizer, self.session.cache.size, 0
        system = [message for message in self.messages[:1] if message["role"] == "system"]
        turns = self.messages[len(system) :]
        alone = len(tokenizer.apply_chat_template(system + turns[-1:]))
        if alone > size:
            raise ValueError(f"the message makes {alone} tokens; the context holds {size} (see -c)")
        room = min(size // 4, 256)
        while len((prompt := tokenizer.chat_prompt(system + turns, past=self.past)).ids) + room > size and len(turns) > 1:
            turns, dropped = turns[2:], dropped + 1
        if dropped:
            note(f"note: the context of {size} tokens is full: dropped the oldest {dropped} of the conversation's turns")
        self.messages = system + turns
        return prompt

    def answer(self, user: str) -> None:
        """Print the model's answer and remember the turn; Ctrl-C ends the answer early."""
        tokenizer, new, said = self.session.tokenizer, [], []
        self.messages.append({"role": "user", "content": user})
        try:
            prompt = self.fit()
        except ValueError:
            self.messages.pop()
            raise
        text = TextStream(tokenizer, at_start=True, stops=self.stops)
        try:
            for piece in self.session.stream(prompt.ids, text, new, self.eos):
                said.append(piece)
                put(piece)
        except KeyboardInterrupt:
            pass
        put("\n")
        answer = "".join(said)
        self.messages.append({"role": "assistant", "content": answer})
        self.past = prompt.answered(answer, tokenizer.encode(answer, bos=False) if text.stopped else new)

    def command(self, line: str) -> bool:
        """Carry out a line that begins with /; whether the chat goes on."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/clear":
            self.messages = [message for message in self.messages if message["role"] == "system"]
        elif name == "/system":
            self.set_system(rest.strip())
        elif name == "/help":
            note(HELP)
        else:
            note(f"no such command: {name}. {HELP}")
        return True

    def loop(self) -> None:
        sys.stdin.reconfigure(errors="surrogateescape")  # one bad byte costs its line, not the conversation
        while True:
            try:
                line = ask("> ").strip()
            except EOFError:
                return
            if not line.isprintable() and any(0xDC80 <= ord(c) <= 0xDCFF for c in line):
                note("error: standard input is not UTF-8; this line is left out")
            elif line.startswith("/"):
                if not self.command(line):
                    return
            elif line:
                try:
                    self.answer(line)
                except ValueError as error:  # a message longer than the context
                    note(f"error: {error}")


def use_interpreter(args: argparse.Namespace) -> None:
    """Triton's kernels run on a CPU in its interpreter, which must be chosen before they are imported: start again."""
    if args.backend == "triton" and pick_device(args.device).type == "cpu" and not INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.argv])


def save(args: argparse.Namespace) -> int:
    format = args.fp8 or "e4m3"
    file = save_fp8(args.model, args.save_fp8, fp8=format, dtype=args.dtype, device=args.device)
    if not args.quiet:
        note(f"saved     {file.parent}: {format} matrices, {file.name} of {file.stat().st_size:,} bytes")
    return 0


def work(args: argparse.Namespace) -> int:
    if args.save_fp8 is not None:
        return save(args)
    use_interpreter(args)
    prompt = "" if args.chat else read_prompt(args)
    session = Session(args)
    if not args.quiet:
        note(session.summary())
    code = 0
    try:
        if args.chat:
            if sys.stdin.isatty():
                import readline  # noqa: F401  line editing and history for input()
            Chat(session).loop()
        else:
            complete(session, prompt)
    except KeyboardInterrupt:
        code = 130
    if not args.quiet:
        note("\n" + session.closing())
    return code


def one_line_errors(work: Callable[[], int], debug: bool) -> int:
    """The exit code of a program's work: 1 and one line on stderr when it fails (a traceback with debug)."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  None when they were closed before the start
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="strict")
    try:
        return work()
    except BrokenPipeError:  # whoever read our text has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            raise
        line = " ".join(str(error).split())[:500] or type(error).__name__
        note("error: " + "".join(c if c.isprintable() else "?" for c in line))
        return 1


def main(argv: list[str] | None = None) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = parse_args(argv)
    return one_line_errors(lambda: work(args), args.debug)


if __name__ == "__main__":
    sys.exit(main())
