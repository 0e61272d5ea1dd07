"""Log-probabilities of prompts and of generated tokens, against the model's own, with OpenAI's client and lm_eval's."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch

from calm.checkpoint import resolve_model_dir
from calm.generate.text import TextGenerator
from calm.serve.limits import Limits
from tests.serve.conftest import LocalServer, wait_for

PROMPT = "And God said unto the naïve man, Let there be light"


@pytest.fixture(scope="module")
def chain() -> TextGenerator:
    """A model with a chain head, K = 4."""
    return TextGenerator(resolve_model_dir(Path("bundled")))


@pytest.fixture(scope="module")
def chain_server(chain) -> Iterator[LocalServer]:
    server = LocalServer({"chain": chain}, Limits(), [])
    yield server
    server.stop()


@torch.no_grad()
def token_log_probs(generator: TextGenerator, ids: list[int]) -> list[float]:
    """Of all tokens after the first chunk, by the loss of the head."""
    model, size = generator.model, generator.model.chunk_size
    front = -len(ids) % size
    chunks = torch.tensor([generator.tokenizer.pad_token_id] * front + ids).view(1, -1, size)
    hidden = model.backbone(model.embed(chunks[:, :-1]))
    return (-model.head.cross_entropy(hidden, chunks[:, 1:], 1, None)).flatten().tolist()


@pytest.mark.parametrize("name", ["softmax", "chain"])
def test_prompt(name, request):
    server = request.getfixturevalue("chain_server" if name == "chain" else "server")
    generator = server.schedulers[name].generator
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    ids = generator.tokenizer.encode(PROMPT)
    expected = token_log_probs(generator, ids)
    for prompt in (PROMPT, ids):
        completion = client.completions.create(model=name, prompt=prompt, max_tokens=0, echo=True, logprobs=3)
        assert completion.usage.completion_tokens == 0
        (choice,) = completion.choices
        assert (choice.text, choice.finish_reason) == (PROMPT, "length")
        unknown, known = len(ids) - len(expected), choice.logprobs.token_logprobs[len(ids) - len(expected) :]
        assert choice.logprobs.token_logprobs[:unknown] == choice.logprobs.top_logprobs[:unknown] == [None] * unknown
        assert known == pytest.approx(expected, abs=1e-4)
        assert choice.logprobs.tokens == [generator.tokenizer.decode([token]) for token in ids]
        offsets = zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
        assert all(PROMPT[offset:].startswith(token) for offset, token in offsets if "\ufffd" not in token)
        for log_prob, top in zip(known, choice.logprobs.top_logprobs[unknown:], strict=True):
            assert 1 <= len(top) <= 4
            assert max(top.values()) >= log_prob


@pytest.mark.parametrize("name", ["softmax", "chain"])
def test_output(name, request):
    """Those of the output are those of the same tokens in a prompt, and greedy tokens are the most probable ones."""
    server = request.getfixturevalue("chain_server" if name == "chain" else "server")
    generator = server.schedulers[name].generator
    size = generator.model.chunk_size
    ids = generator.tokenizer.encode(PROMPT)
    prompt = ids[len(ids) % size :]  # whole chunks, so that the output begins a chunk in the second prompt, too
    for temperature in (0, 1):
        fields = {"model": name, "max_tokens": 2 * size, "temperature": temperature, "seed": 1, "logprobs": 1}
        echoed = server.post(**fields, prompt=prompt, echo=True).json()["choices"][0]["logprobs"]
        output = server.post(**fields, prompt=prompt).json()["choices"][0]["logprobs"]
        assert echoed["token_logprobs"][len(prompt) :] == pytest.approx(output["token_logprobs"], abs=1e-4)
        assert len(output["tokens"]) == 2 * size
        greedy = [
            p == max(top.values()) for p, top in zip(output["token_logprobs"], output["top_logprobs"], strict=True)
        ]
        assert all(greedy) == (temperature == 0)


def test_chat(chain_server):
    client = openai.OpenAI(base_url=f"{chain_server.url}/v1", api_key="any", max_retries=0)
    fields = {"model": "chain", "max_tokens": 6, "temperature": 0}
    messages = [{"role": "user", "content": PROMPT}]
    choice = client.chat.completions.create(**fields, messages=messages, logprobs=True, top_logprobs=2).choices[0]
    completion = client.completions.create(**fields, prompt=PROMPT, logprobs=2).choices[0]
    content = choice.logprobs.content
    assert [token.logprob for token in content] == completion.logprobs.token_logprobs
    assert "".join(token.token for token in content) == choice.message.content
    assert [len(token.top_logprobs) for token in content] == [2] * 6
    assert [token.top_logprobs[0].logprob for token in content] == [token.logprob for token in content]
    with pytest.raises(openai.BadRequestError, match="set logprobs to true"):
        client.chat.completions.create(**fields, messages=messages, top_logprobs=2)


def test_one_sequence_is_scored_per_step(start, monkeypatch):
    """Scoring takes as long as a prefill, and must not delay the sequences of others for several of them."""
    server = start()
    scheduler, permits = server.schedulers["softmax"], server.pause_steps("softmax")
    scored, score = [], scheduler._score

    def counted_score(*last):
        scored.append(last)
        return score(*last)

    monkeypatch.setattr(scheduler, "_score", counted_score)
    with server.send(model="softmax", max_tokens=100) as other:
        wait_for(lambda: scheduler.running)
        with server.send(model="softmax", n=3, max_tokens=1, logprobs=1) as connection:
            wait_for(lambda: len(scheduler.waiting) == 3)
            permits.release(2)  # the step in progress, and the one that finishes the three sequences
            wait_for(lambda: len(scored) == 1)
            permits.release(100)
            assert b"200 OK" in connection.recv(100)
        assert len(scored) == 3
        assert b"200 OK" in other.recv(100)
        assert scheduler.idle


def test_model_error_while_scoring(start, monkeypatch):
    server = start()

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.schedulers["softmax"].engine, "log_probs", fail)
    assert server.post(model="softmax", max_tokens=2, logprobs=1).status_code == 500
    assert server.post(model="softmax", max_tokens=2).status_code == 200


def test_requests_and_parser_of_lm_eval(chain_server, chain):
    """What its local-completions sends for likelihoods of token ids, and how it reads the response."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    ids, context_length = chain.tokenizer.encode(PROMPT), 8
    payload = LocalCompletionsAPI._create_payload(SimpleNamespace(model="chain"), [ids, ids[:12]], seed=1234)
    response = chain_server.client.post("/v1/completions", json=payload).json()
    scores = LocalCompletionsAPI.parse_logprobs(response, ctxlens=[context_length] * 2)
    for each, (log_likelihood, is_greedy) in zip((ids, ids[:12]), scores, strict=True):
        continuation = token_log_probs(chain, each)[context_length - len(each) :]
        assert log_likelihood == pytest.approx(sum(continuation), abs=1e-3)
        assert not is_greedy


def test_lm_eval(server, models, monkeypatch):
    """Likelihoods and greedy generation by lm_eval's local-completions, with its default settings."""
    pytest.importorskip("tenacity", reason="lm_eval's API models need the extra lm_eval[api]")
    api_models = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    monkeypatch.setenv("OPENAI_API_KEY", "any")
    url, directory = f"{server.url}/v1/completions", str(models / "softmax")
    model = api_models.LocalCompletionsAPI(base_url=url, model="softmax", tokenizer=directory)
    generator = server.schedulers["softmax"].generator
    context, continuation = "the quick brown", " fox jumps"
    doc = {"doc": {}, "idx": 0, "metadata": ("task", 0, 1)}
    requests = [Instance("loglikelihood", arguments=(context, continuation), **doc)]
    ((log_likelihood, is_greedy),) = model.loglikelihood(requests, disable_tqdm=True)
    ids, count = (generator.tokenizer.encode(text) for text in (context + continuation, context))
    assert log_likelihood == pytest.approx(sum(token_log_probs(generator, ids)[len(count) - 1 :]), abs=1e-3)
    assert not is_greedy
    arguments = (context, {"until": ["\n\n"], "max_gen_toks": 8})
    (text,) = model.generate_until([Instance("generate_until", arguments=arguments, **doc)], disable_tqdm=True)
    assert text == server.text(model="softmax", prompt=context, max_tokens=8, temperature=0)
