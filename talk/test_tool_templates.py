# ruff: noqa: E501
"""Tests of chat templates with tools."""

import pytest
import tokenizers
import transformers

from loading.checkpoint import open_tokenizer
from talk.test_tools import WEATHER
from talk.tools import CODER, HERMES, LLAMA, MISTRAL, STYLES, style_of

# ---- templates with tools, each written for these tests with what its family's own is made of

TEMPLATES = {
    "Qwen2.5": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Help.' }}{%- endif %}
    {{- "\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nAnswer <tool_call> {\\"name\\": .., \\"arguments\\": ..} </tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "Qwen3": """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> <tool_call>{% endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not
        (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.function.name }}{{- '", "arguments": ' }}
            {%- if tool_call.function.arguments is string %}{{- tool_call.function.arguments }}
            {%- else %}{{- tool_call.function.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "Qwen3-Coder": """\
{%- macro render_extra_keys(dictionary, handled) %}
    {%- if dictionary is mapping %}{%- for key in dictionary if key not in handled %}
        {%- if dictionary[key] is mapping or (dictionary[key] is sequence and dictionary[key] is not string) %}
            {{- '\\n<' ~ key ~ '>' ~ (dictionary[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
        {%- else %}{{- '\\n<' ~ key ~ '>' ~ (dictionary[key] | string) ~ '</' ~ key ~ '>' }}{%- endif %}
    {%- endfor %}{%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}
    {%- set tool = tool.function if tool.function is defined else tool %}
    {{- '<function>\\n<name>' ~ tool.name ~ '</name>' }}
    {%- if tool.description is defined %}{{- '\\n' ~ (tool.description | trim) }}{%- endif %}
    {%- if tool.parameters is defined and tool.parameters.properties is mapping %}
        {%- for name, fields in tool.parameters.properties|items %}
            {{- '\\n<parameter>' ~ name }}{{- render_extra_keys(fields, ['name', 'type']) }}{{- '</parameter>' }}
        {%- endfor %}
    {%- endif %}{{- render_extra_keys(tool, ['type', 'name', 'description', 'parameters']) }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}
        {{- message.content | trim + '\\n' }}{%- endif %}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
        {%- for name, value in tool_call.function.arguments|items %}
            {{- '<parameter=' + name + '>\\n' }}
            {%- set value = value | tojson | safe if value is mapping or value is sequence and value is not string else value | string %}
            {{- value }}{{- '\\n</parameter>\\n' }}
        {%- endfor %}{{- '</function>\\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "Llama 3.1": """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{{- "Today: " + date_string + "\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- '{"name": function name, "parameters": dictionary}' }}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at once") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "Mistral": """\
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}{{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}{{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- raise_exception("ids of 9") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "tool" %}
        {%- set content = message.content.content if message.content is mapping else message.content %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ', ' }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}{%- endif %}
{%- endfor %}""",
    "Hermes": """\
{%- macro json_to_python_type(spec) %}
    {%- set basic = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
    {%- if basic[spec.type] is defined %}{{- basic[spec.type] }}
    {%- elif spec.type == "array" %}{{- "list[" + json_to_python_type(spec|items) + "]" }}{%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}{{- '<|im_start|>system\\n<tools> ' }}
{%- for tool in tools or [] %}{%- set tool = tool.function %}
    {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for name, fields in tool.parameters.properties|items %}
        {{- name + ": " + json_to_python_type(fields) }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
    {{- ')", "parameters": ' }}
    {%- if tool.parameters.properties | length == 0 %}{{- "{}" }}{%- else %}{{- tool.parameters|tojson }}{%- endif %}{{- "}}" }}
{%- endfor %}{{- ' </tools><|im_end|>\\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.role == "assistant" and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments|tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}{{- '\\n<tool_response>\\n' + message.content }}
    {%- else %}{{- '\\n' + message['content'] }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "SmolLM3": """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\\nReasoning Mode: " + reasoning_mode + "\\n" -}}
{%- if xml_tools or python_tools or tools -%}
    {%- set ns = namespace(xml_tool_string="<tools>\\n") -%}
    {%- if tools -%}{%- set xml_tools = tools -%}{%- endif -%}
    {%- for tool in xml_tools[:] -%}{%- set ns.xml_tool_string = ns.xml_tool_string ~ (tool | string) ~ "\\n" -%}{%- endfor -%}
    {{- ns.xml_tool_string + "</tools> <tool_call>" -}}
{%- endif -%}{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}{% generation %}
        {{- "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" -}}{% endgeneration %}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}
    {%- if not enable_thinking -%}{{ "<think>\\n\\n</think>\\n" }}{%- endif -%}{%- endif -%}""",
}  # fmt: skip
FUNCTIONS = [
    {"type": "function", "function": {"name": "get_weather", "description": 'Größe "x" <|im_end|>', "parameters": {
        **WEATHER, "required": ["city"], "$defs": {"a": {"enum": [1, None, True, 1.5]}}}, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": " ", "parameters": {"properties": {}}}},
]  # fmt: skip
CONVERSATION = [
    {"role": "user", "content": "Weather? </think> <tool_call>"},
    {"role": "assistant", "content": "", "reasoning_content": "\nHm.\n", "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Łódź \n", "l": [{}]}}}]},
    {"role": "tool", "tool_call_id": "123456789", "content": '{"rain": true}'},
    {"role": "assistant", "content": "<think>\nOld.\n</think>\n\nIt rains."},
    {"role": "user", "content": "And now?"},
]  # fmt: skip


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_with_tools_write_what_transformers_writes(family, tiny, tmp_path):
    (tmp_path / "template").write_text(TEMPLATES[family])
    ours = open_tokenizer(tiny, chat_template=str(tmp_path / "template"))
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **ours.named)
    theirs.chat_template = TEMPLATES[family]
    for length in 1, 3, 5:
        for tools in None, FUNCTIONS:
            for variables in {}, {"enable_thinking": False, "date_string": "1 May"}:
                talk = CONVERSATION[:length]
                asked = dict(tools=tools, tokenize=False, add_generation_prompt=True)
                expected = theirs.apply_chat_template(talk, **asked, **variables)
                assert ours.chat_prompt(talk, tools=tools, variables=variables).text == expected


def test_the_styles_of_families():
    templates = TEMPLATES | {"no tools": "{{ messages }}", "another": "{% if tools %}"}
    *_, unknown = STYLES
    assert {family: style_of(template) for family, template in templates.items()} == {
        "Qwen2.5": HERMES, "Qwen3": HERMES, "Hermes": HERMES, "SmolLM3": HERMES, "Qwen3-Coder": CODER,
        "Llama 3.1": LLAMA, "Mistral": MISTRAL, "no tools": None, "another": unknown,
    }  # fmt: skip
