"""Chat templates with tools as families of models bring them, shortened."""

from __future__ import annotations

# ruff: noqa: RUF001  (the bars in the markers of some models)

# Qwen2.5's, in the form that Hermes 2 Pro began. As with Hermes, results have the names of their functions.
HERMES = """\
{%- if tools %}
    {{- "<|im_start|>system\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" + tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nReturn <tool_call>\\n{\\"name\\": ..., \\"arguments\\": ...}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response name="' + message.name + '">\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Qwen3's adds thoughts, which the prompt can begin (as DeepSeek-R1's does) or rule out.
THINKING = HERMES.replace(
    "    {{- '<|im_start|>assistant\\n' }}\n",
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- elif begin_thinking %}\n"
    "        {{- '<think>\\n' }}\n"
    "    {%- endif %}\n",
)

# Llama 3.1's.
LLAMA3 = """\
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "<|python_tag|>" if builtin_tools is defined }}
{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) + "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name }}
        {{- '", "parameters": ' + tool_call.arguments | tojson + "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Mistral 7B Instruct v0.3's.
MISTRAL = """\
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.first %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": ' + tool | tojson + "}" }}
                {{- ", " if not loop.last else "][/AVAILABLE_TOOLS]" }}
            {%- endfor %}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

_CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
CALL
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Qwen3-Coder's writes calls.
QWEN3_CODER = _CHATML.replace(
    "CALL",
    """\
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {%- set structured = value is mapping or value is sequence and value is not string %}
            {%- set text = value | tojson if structured else value | string %}
            {{- '<parameter=' + name + '>\\n' + text + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}""",
)

# As GLM-4.5's and GLM-4.7's do.
GLM45 = _CHATML.replace(
    "CALL",
    """\
        {{- '\\n<tool_call>' + call.function.name + '\\n' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
            {{- value if value is string else value | tojson }}
            {{- '</arg_value>\\n' }}
        {%- endfor %}
        {{- '</tool_call>' }}""",
)
GLM47 = (
    GLM45.replace("</arg_key>\\n", "</arg_key>")
    .replace("name + '\\n'", "name")
    .replace("</arg_value>\\n", "</arg_value>")
)

# As DeepSeek V3's, R1's and V3.1's do: they add arguments to texts.
DEEPSEEK_V3 = _CHATML.replace(
    "CALL",
    """\
        {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
        {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
        {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {{- '<｜tool▁calls▁end｜>' if loop.last }}""",
)
DEEPSEEK_V31 = _CHATML.replace(
    "CALL",
    """\
        {{- '<｜tool▁calls▁begin｜>' if loop.first }}
        {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
        {{- '<｜tool▁call▁end｜>' }}
        {{- '<｜tool▁calls▁end｜>' if loop.last }}""",
)
