#!/usr/bin/env bash
# transformers 5.24.0: `apply_chat_template` takes keys whose value is None out of messages before it renders. The
# content of an assistant's message with tool calls alone is null in the OpenAI form, and some templates know such a
# message by `content is none` (those of DeepSeek-R1's distills). There an undefined content is not none: the branch
# that writes the calls is passed over, and the prompt has an empty turn of the assistant in their place. 4.57.6 renders
# the same messages by the same template with the calls. No error, no warning. Expected: messages reach a template as
# they are, as before. A None within the arguments of a call stays in both. Remedy: templates that ask `tool_calls is
# defined`; or render by Jinja oneself, with the key.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/calls.py" <<'PROGRAM'
import json

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, __version__

words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
call = {"type": "function", "function": {"name": "add", "arguments": {"to": None}}}
messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
template = """{%- for message in messages -%}
{%- if message['content'] is none -%}
calls {{ message['tool_calls'][0]['function']['name'] }}
{%- else -%}
text '{{ message['content'] }}'
{%- endif -%}
{%- endfor -%}"""
inner = "{{ messages[0]['tool_calls'][0]['function']['arguments']['to'] is none }}"
render = tokenizer.apply_chat_template
prompt = render(messages, chat_template=template, tokenize=False)
kept = render(messages, chat_template=inner, tokenize=False)
print(json.dumps([__version__, prompt, kept]))
PROGRAM
seen=""
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version" \
        'jinja2==3.1.6'
    line=$("$folder/$version/bin/python" -W ignore "$folder/calls.py" 2>/dev/null | tail -n 1)
    echo "$line"
    seen+="$line"
done
[ "$seen" = "[\"4.57.6\", \"calls add\", \"True\"][\"5.24.0\", \"text ''\", \"True\"]" ]
# Seen:
# ["4.57.6", "calls add", "True"]
# ["5.24.0", "text ''", "True"]
