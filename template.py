"""Chat templates: where a checkpoint keeps its own, ours for those without one, and a separate process that renders them.

A template is untrusted code. It runs in Jinja's immutable sandbox, as in transformers, and in a process with limited memory and
time, so that one that loops for ever or grows without bound ends in a one-line error.
"""

import contextlib
import json
import math
import re
import resource
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

SECONDS = 5.0  # of computing, for one rendering
MEMORY = 1 << 30  # bytes of the process that renders
LENGTH = 1 << 20  # characters of a template, and of what it may write besides the messages

# ---- templates by name

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}\
{% set messages = messages[1:] %}{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ bos_token ~ '[INST] ' ~ ((system if loop.first else '') ~ message['content']).strip() ~ ' [/INST]' }}\
{% else %}{{ ' ' ~ message['content'].strip() ~ ' ' ~ eos_token }}{% endif %}{% endfor %}"""

MISTRAL = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\\n\\n' %}\
{% set messages = messages[1:] %}{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ '[INST] ' ~ ((system if loop.first else '') ~ message['content']).strip() ~ ' [/INST]' }}\
{% else %}{{ ' ' ~ message['content'].strip() ~ eos_token }}{% endif %}{% endfor %}"""

ZEPHYR = """\
{{ bos_token }}{% for message in messages %}{{ '<|' ~ message['role'] ~ '|>\\n' ~ message['content'] ~ eos_token ~ '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

VICUNA = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}\
{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ASSISTANT:' }}\
{% else %}{{ ' ' ~ message['content'].strip() ~ eos_token }}{% endif %}{% endfor %}"""

CHATML = """\
{{ bos_token }}{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

PLAIN = """\
{{ bos_token }}{% for message in messages %}\
{{ message['content'] + ('' if message['role'] == 'user' else '\\n') }}{% endfor %}"""

TEMPLATES = {
    "llama2": LLAMA2,
    "zephyr": ZEPHYR,
    "vicuna": VICUNA,
    "chatml": CHATML,
    "mistral": MISTRAL,
    "plain": PLAIN,
}


def find_template(folder: Path, config: dict, choice: str | None = None) -> tuple[str, str]:
    """A checkpoint's template and where it comes from. config: its tokenizer_config.json; choice: one of our names, or a file.

    Meta's Llama 2 and Vicuna come without a template: they are recognised by the folder's path. Raises ValueError, OSError.
    """
    if choice in TEMPLATES:
        return TEMPLATES[choice], f"{choice} (given)"
    if choice is not None:
        return read_template(Path(choice).resolve()), f"{choice} (given)"
    if (folder / "chat_template.jinja").is_file():
        return read_template(folder / "chat_template.jinja"), "the checkpoint's own (chat_template.jinja)"
    own = config.get("chat_template")
    if isinstance(own, list):  # several, by name
        own = {t.get("name"): t.get("template") for t in own if isinstance(t, dict)}.get("default")
    if isinstance(own, str):
        if len(own) > LENGTH:
            raise ValueError(f"{folder}: chat_template has {len(own):,} characters: not a chat template")
        return own, "the checkpoint's own"
    path = str(folder.absolute()).lower()
    for pattern, name in ("llama-2[^/]*chat", "llama2"), ("vicuna", "vicuna"):
        if re.search(pattern, path):
            return TEMPLATES[name], f"{name} (from the folder's name)"
    return PLAIN, "no template found: plain text"


def read_template(file: Path) -> str:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a chat template: neither one of {', '.join(TEMPLATES)} nor a file")
    from files import read_bytes  # here, so that the child, which does not need it, starts a second sooner

    raw = read_bytes(file, LENGTH)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text: not a chat template") from None


# ---- the process that renders


class Renderer:
    """Renders templates in one child process, which is started when it is first needed and ends with this object."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent only
        )
        weakref.finalize(self, end, self.process)
        if not self.process.stdout.readline():  # an empty line says that it is ready
            raise RuntimeError("the process that renders chat templates did not start: is jinja2 installed?")

    def render(self, template: str, **variables) -> str:
        """Raises ValueError when the template is wrong, refuses the messages, takes too long or grows too large."""
        try:
            if self.process is None or self.process.poll() is not None:
                self.start()
            self.process.stdin.write(json.dumps([template, variables, SECONDS]).encode() + b"\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # a late answer must not be taken for the next one
            if self.process:
                self.process.kill()
            raise
        if not answer:
            self.process.kill()
            self.process.wait()
            raise ValueError(f"the chat template took more than {SECONDS:g} seconds or {MEMORY >> 20} MiB")
        text, error = json.loads(answer)
        if error:
            raise ValueError(f"the chat template says: {error}")
        return text


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()  # closes the pipes


def serve() -> None:
    """The child: writes an empty line when it is ready; then, for each line of input, a template and its variables as JSON, a
    line of output, the text and the error (one of them empty) as JSON."""
    with contextlib.suppress(ValueError, OSError):  # a system without such limits
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment = sandbox()
    print(flush=True)
    for line in sys.stdin.buffer:
        try:
            template, variables, seconds = json.loads(line)
            limit_time(seconds)
            answer = [bounded(environment.from_string(template).generate(**variables), LENGTH + 2 * len(line)), None]
        except MemoryError:
            answer = ["", f"more than {MEMORY >> 20} MiB of memory"]
        except Exception as error:
            answer = ["", str(error)[:400] or type(error).__name__]
        print(json.dumps(answer), flush=True)


def limit_time(seconds: float) -> None:
    """Have the system end this process once it has computed for so long from now, in whole seconds."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    with contextlib.suppress(ValueError):  # less is allowed
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), most))


def sandbox():
    """The environment that transformers gives a chat template (utils/chat_template_utils.py)."""
    from datetime import datetime

    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what the assistant says, for training; here only its content is rendered."""

        tags = {"generation"}

        def parse(self, parser):
            lineno = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def bounded(pieces: Iterable[str], limit: int) -> str:
    """The pieces, joined. Raises ValueError if they have more than `limit` characters."""
    text, length = [], 0
    for piece in pieces:
        text.append(piece)
        length += len(piece)
        if length > limit:
            raise ValueError(f"more than {limit:,} characters")
    return "".join(text)


if __name__ == "__main__":
    serve()
