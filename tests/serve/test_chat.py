"""/v1/chat/completions with OpenAI's client: chat templates, streams, and invalid messages."""

import json
import shutil
from collections.abc import Callable, Iterator

import openai
import pytest
from transformers import AutoTokenizer

from calm.generate.text import TextGenerator
from calm.serve.limits import Limits
from tests.serve.conftest import LocalServer
from tests.serve.test_server import generate

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'developer' %}{{ raise_exception('no developer messages') }}"
    "{% endif %}{{ message.role }}: {{ message.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "the quick "},
    {"role": "user", "content": [{"type": "text", "text": "brown "}, {"type": "text", "text": "fox"}]},
]


def client_of(server: LocalServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def start_with_template(models, tmp_path) -> Iterator[Callable[..., LocalServer]]:
    """Start a server whose model has files in addition to those of a Transformer."""
    servers: list[LocalServer] = []

    def start(files: dict[str, str]) -> LocalServer:
        shutil.copytree(models / "softmax", tmp_path / "chat")
        for name, content in files.items():
            (tmp_path / "chat" / name).write_text(content)
        servers.append(LocalServer({"chat": TextGenerator(tmp_path / "chat")}, Limits(), []))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_messages_are_concatenated_without_a_template(server, generators):
    create = client_of(server).chat.completions.create
    fields = {"model": "calm-2", "messages": MESSAGES, "seed": 3}
    response = create(**fields, max_tokens=9, n=2, temperature=0.5)
    texts = [generate(generators["calm-2"], "the quick brown fox", 9, 3, n, temperature=0.5) for n in (0, 1)]
    assert [choice.message.content for choice in response.choices] == texts
    assert {choice.message.role for choice in response.choices} == {"assistant"}
    assert response.object == "chat.completion"
    assert response.usage.prompt_tokens == len(generators["calm-2"].tokenizer.encode("the quick brown fox"))
    assert create(**fields, max_completion_tokens=9, max_tokens=1).usage.completion_tokens > 1
    assert create(**{**fields, "messages": [*MESSAGES, response.choices[0].message]}, max_tokens=2).choices


def test_streams(server):
    create = client_of(server).chat.completions.create
    fields = {"model": "calm-2", "messages": MESSAGES, "seed": 3, "max_tokens": 9, "n": 2}
    full = create(**fields)
    events = list(create(**fields, stream=True, stream_options={"include_usage": True}))
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert events[-1].usage == full.usage
    for choice in full.choices:
        deltas = [each for event in events for each in event.choices if each.index == choice.index]
        assert [each.delta.role for each in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(each.delta.content for each in deltas) == choice.message.content
        assert [each.finish_reason for each in deltas] == [None] * (len(deltas) - 1) + [choice.finish_reason]


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json", "named templates"])
def test_chat_template(start_with_template, models, file):
    config = json.loads((models / "softmax" / "tokenizer_config.json").read_text())
    template = [{"name": "tools", "template": "-"}, {"name": "default", "template": TEMPLATE}]
    files = {
        "chat_template.jinja": {"chat_template.jinja": TEMPLATE},
        "tokenizer_config.json": {"tokenizer_config.json": json.dumps({**config, "chat_template": TEMPLATE})},
        "named templates": {"tokenizer_config.json": json.dumps({**config, "chat_template": template})},
    }
    server = start_with_template(files[file])
    client, generator = client_of(server), server.schedulers["chat"].generator
    expected = AutoTokenizer.from_pretrained(generator.directory).apply_chat_template(
        [
            {**message, "content": "brown fox"} if isinstance(message["content"], list) else message
            for message in MESSAGES
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert expected.count(generator.tokenizer.eos_token_id) == 2
    response = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=8, seed=1)
    completion = client.completions.create(model="chat", prompt=expected, max_tokens=8, seed=1)
    assert response.choices[0].message.content == completion.choices[0].text
    assert response.usage == completion.usage
    with pytest.raises(openai.BadRequestError, match="no developer messages"):
        client.chat.completions.create(model="chat", messages=[{"role": "developer", "content": "x"}])


def test_max_tokens_defaults_to_what_fits(server, generators):
    """The Transformer has 128 positions; the last token is sampled, but never read."""
    message = {"role": "user", "content": "the quick brown fox"}
    length = len(generators["softmax"].tokenizer.encode(message["content"]))
    fields = {"model": "softmax", "messages": [message]}
    create = client_of(server).chat.completions.create
    responses = [create(**fields, seed=seed) for seed in range(10)]  # some end early
    full = {response.usage.completion_tokens for response in responses if response.choices[0].finish_reason == "length"}
    assert full == {129 - length}
    with pytest.raises(openai.BadRequestError, match="exceed the backbone's 128 positions"):
        create(**fields, max_tokens=130 - length)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages"),
        ([{"role": "robot", "content": "x"}], "messages"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "unknown field 'messages.0.tool_calls'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages"),
        ([{"role": "user", "content": "x"}] * 1001, "1,001 messages, but at most 1,000 are accepted"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}] * 101}], "101 parts, but at most 100"),
        ([{"role": "user", "content": "the " * 5000}], "the number of prompt tokens"),
    ],
)
def test_invalid_messages_are_rejected_with_a_reason(server, messages, message):
    response = server.client.post("/v1/chat/completions", json={"model": "calm-2", "messages": messages})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
