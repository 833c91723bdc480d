"""Chat templates: the checkpoint's own, and ours for those without one. A template is a program in
Jinja, which writes a conversation as the text that a model was trained on.

It is given `messages`, `add_generation_prompt` and names of control tokens, such as `bos_token`. To
add one of ours, give it a name in TEMPLATES, which --chat-template then knows. To recognise by a
folder's path whose it is, add a line to the end of find_template."""

import functools
import json
import re
from pathlib import Path

from loading.files import one_line, read_text

TEMPLATES = {
    "llama2": """\
{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}\
{% set messages = messages[1:] %}{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ bos_token ~ '[INST] ' ~ ((system if loop.first else '') ~ message['content']).strip() ~ ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' ~ message['content'].strip() ~ ' ' ~ eos_token }}\
{% else %}{{ raise_exception('a system prompt comes first') }}{% endif %}{% endfor %}""",
    "zephyr": """\
{{ bos_token }}{% for message in messages %}\
{{ '<|' ~ message['role'] ~ '|>\\n' ~ message['content'] ~ eos_token ~ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}""",
    "vicuna": """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}\
{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ASSISTANT:' }}\
{% else %}{{ ' ' ~ message['content'].strip() ~ eos_token }}{% endif %}{% endfor %}""",
    "chatml": """\
{{ bos_token }}{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "mistral": """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\\n\\n' %}\
{% set messages = messages[1:] %}{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ '[INST] ' ~ ((system if loop.first else '') ~ message['content']).strip() ~ ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' ~ message['content'].strip() ~ eos_token }}\
{% else %}{{ raise_exception('a system prompt comes first') }}{% endif %}{% endfor %}""",
    "plain": """\
{{ bos_token }}{% for message in messages %}\
{{ message['content'] + ('' if message['role'] == 'user' else '\\n') }}{% endfor %}""",
}


def find_template(folder: Path, config: dict, choice: str | None = None) -> tuple[str, str]:
    """A checkpoint's template, and where it comes from ("" for plain text if it has none). config:
    its tokenizer_config.json. choice: one of our names, or a file. Llama 2 in Meta's layout and
    Vicuna, which have none, are recognised by the folder's path. Raises ValueError, OSError."""
    if choice in TEMPLATES:
        return TEMPLATES[choice], f"{choice} (given)"
    if choice is not None:
        file = Path(choice)
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is not a chat template: neither one of {', '.join(TEMPLATES)} nor a file"
            )
        return read_text(file), f"{choice} (given)"
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file), f"the checkpoint's own ({file.name})"
    if own := named_template(config, "default"):
        return own, "the checkpoint's own"
    path = str(folder.absolute()).lower()
    for pattern, name in ("llama-2[^/]*chat", "llama2"), ("vicuna", "vicuna"):
        if re.search(pattern, path):
            return TEMPLATES[name], f"{name} (from the folder's name)"
    return TEMPLATES["plain"], ""


def named_template(config: dict, name: str) -> str | None:
    """One of the templates in a tokenizer_config.json. A single one is the default; where none is
    called so, the first one is."""
    own = config.get("chat_template")
    if isinstance(own, str):
        own = {"default": own}
    if isinstance(own, list):
        own = {str(t.get("name")): t.get("template") for t in own if isinstance(t, dict)}
    if not isinstance(own, dict):
        return None
    if name == "default" and own and name not in own:
        name = next(iter(own))
    found = own.get(name)
    return found if isinstance(found, str) else None


def render(template: str, /, **variables) -> str:
    """What a template writes. Raises ValueError where it is wrong or refuses the messages."""
    try:
        return compiled(template).render(variables)
    except Exception as error:
        said = str(error) or type(error).__name__
        raise ValueError(one_line(f"the chat template says: {said}")) from None


@functools.cache
def compiled(template: str):
    """The template in Jinja's immutable sandbox, set up as by transformers
    (utils/chat_template_utils.py)."""
    from datetime import datetime

    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    # {% generation %} marks what the assistant says, for training; here it is a block without an
    # effect
    template = re.sub(r"({%[-+]?\s*(?:end)?)generation(\s*[-+]?%})", r"\1with\2", template)
    return environment.from_string(template)
