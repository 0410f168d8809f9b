"""Chats become the prompts that their model's template makes of them, and templates get no further than text."""

import json
from pathlib import Path

import pytest

from gpu_runtime.serve.chat_template import ChatTemplate, load_template
from gpu_runtime.serve.request import Chat, Refused
from gpu_runtime.serve.text import ByteCodec, FileCodec
from sim.errors import UserError

CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
MISTRAL = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %} [INST] {{ message['content'] | trim }} [/INST]
    {%- else %} {{ message['content'] }}{{ eos_token }}
    {%- endif %}
{%- endfor %}
{{ {'é': messages | length} | tojson }}
"""
MESSAGES = [
    {"role": "user", "content": "1 < 2 & 'é'?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", [CHATML, MISTRAL])
@pytest.mark.parametrize(
    "chat",
    [
        Chat(MESSAGES),
        Chat(MESSAGES, add_generation_prompt=False),
        Chat(MESSAGES[:2], add_generation_prompt=False, continue_final_message=True),
        Chat(MESSAGES[:1], options={"enable_thinking": False}),
    ],
)
def test_a_chat_is_the_text_that_transformers_makes_of_it(source, chat):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = utils.render_jinja_template(
        [chat.messages],
        chat_template=source,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **TOKENS | chat.options,
    )
    assert ChatTemplate(source, Path("t"), TOKENS).render(chat) == expected


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (MISTRAL, "roles must alternate user/assistant"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ messages[0].role + 1 }}", "can only concatenate"),
    ],
)
def test_what_a_template_does_not_take_or_may_not_do_is_the_client_s_to_hear(source, why):
    with pytest.raises(Refused, match=why) as refused:
        ChatTemplate(source, Path("t"), TOKENS).render(Chat(MESSAGES[1:]))
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_an_answer_cannot_go_on_with_a_message_that_the_template_changes():
    chat = Chat(MESSAGES[:2], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(Refused, match=r"continue_final_message: .* changes the last message") as refused:
        ChatTemplate("{{ messages[-1].content | upper }}", Path("t"), TOKENS).render(chat)
    assert refused.value.param == "continue_final_message"


def test_a_tokenizer_s_folder_says_which_template(tmp_path):
    chat, config = Chat(MESSAGES[:1]), tmp_path / "tokenizer_config.json"
    assert load_template(None, None) is load_template(tmp_path, None) is None
    with pytest.raises(Refused, match="has no chat template; serve with --chat-template FILE"):
        FileCodec(None).chat(chat)
    config.write_text(json.dumps({"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}one"}))
    assert load_template(tmp_path, None).render(chat) == "<b>one"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_template(tmp_path, None).render(chat) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert load_template(tmp_path, None).render(chat) == "three"
    given = tmp_path / "mine.jinja"
    given.write_text("four")
    assert ByteCodec(256, load_template(tmp_path, given)).chat(chat) == "four"
    given.write_text("{% if %}")
    with pytest.raises(UserError, match=r"mine\.jinja: line 1: .*: correct the chat template"):
        load_template(tmp_path, given)
    with pytest.raises(UserError, match="cannot be read as a chat template"):
        load_template(tmp_path, tmp_path / "none.jinja")
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(UserError, match="chat_template names no 'default': give --chat-template FILE"):
        load_template(tmp_path, None)
    config.write_text('{"chat_template": 3}')
    with pytest.raises(UserError, match="neither text nor a list"):
        load_template(tmp_path, None)


def test_without_a_template_a_chat_is_a_line_a_message():
    said = "user: 1 < 2 & 'é'?\n\nassistant: Yes.\nuser: Why?\n"
    assert Chat(MESSAGES).plain() == said + "assistant:"
    assert Chat(MESSAGES, add_generation_prompt=False).plain() == said
    goes_on = Chat(MESSAGES[:2], add_generation_prompt=False, continue_final_message=True)
    assert goes_on.plain() == "user: 1 < 2 & 'é'?\n\nassistant: Yes."
