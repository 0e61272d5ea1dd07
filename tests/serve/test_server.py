"""End-to-end tests over HTTP: OpenAI's fields, streaming, limits, API keys, and malformed input."""

import gc
import socket
import time
from pathlib import Path

import openai
import pytest
import torch

from calm.cli import serve as serve_command
from calm.errors import UserError
from calm.generate.sampler import SamplingParams
from calm.serve import run
from calm.serve.limits import Limits
from calm.serve.metrics import Metrics
from calm.serve.requests import CompletionRequest, build_sequences
from calm.serve.scheduler import Scheduler, SequenceState
from tests.serve.conftest import wait_for


def generate(generator, prompt: str, count: int, seed: int, number: int = 0, **options) -> str:
    """The output of `calm generate` for a seed and a sample number."""
    ids = generator.tokenizer.encode(prompt)
    deltas = generator.stream([ids], SamplingParams(**options), max_new_tokens=count, seed=seed, numbers=[number])
    return "".join(delta.text for delta in deltas)


def test_completion_equals_calm_generate(server, generators):
    for name, generator in generators.items():
        response = server.post(model=name, prompt="the quick", max_tokens=11, seed=5, temperature=0.5, n=2).json()
        texts = [choice["text"] for choice in response["choices"]]
        assert texts == [generate(generator, "the quick", 11, 5, n, temperature=0.5) for n in (0, 1)]
        assert texts[0] != texts[1]
        assert response["object"] == "text_completion"
        assert [choice["index"] for choice in response["choices"]] == [0, 1]
        prompt = len(generator.tokenizer.encode("the quick"))
        finish_reasons = [choice["finish_reason"] for choice in response["choices"]]
        if finish_reasons == ["length", "length"]:
            assert response["usage"] == {"prompt_tokens": prompt, "completion_tokens": 22, "total_tokens": prompt + 22}


def test_prompt_formats(server, generators):
    tokenizer = generators["calm-2"].tokenizer
    ids = [tokenizer.encode(text) for text in ("the quick", "lazy dogs")]
    common = {"max_tokens": 6, "seed": 1}

    def complete(prompt, **options):
        return [choice["text"] for choice in server.post(prompt=prompt, **common, **options).json()["choices"]]

    assert complete("the quick") == complete(["the quick"]) == complete(ids[0]) == complete([ids[0]])
    both = complete(["the quick", "lazy dogs"])
    assert both == complete(ids)
    assert both == [generate(generators["calm-2"], text, 6, 1, n) for n, text in enumerate(("the quick", "lazy dogs"))]
    assert complete("the quick", echo=True) == ["the quick" + complete("the quick")[0]]
    assert len(complete("")) == 1


def test_the_limit_of_candidates_is_their_default_where_it_is_lower(start):
    server, request = start(max_candidates=3), {"temperature": 0.5, "max_tokens": 4, "seed": 1}
    before = server.schedulers["calm-2"].engine.stats.draws
    text = server.text(**request)
    assert server.schedulers["calm-2"].engine.stats.draws - before == 2 * 3  # two chunks
    assert server.text(num_candidates=3, **request) == text
    assert server.post(num_candidates=4, **request).status_code == 400


def test_models_name_their_default_method(server):
    models = {model["id"]: model for model in server.client.get("/v1/models").json()["data"]}
    assert {name: model["default_method"] for name, model in models.items()} == {
        "calm-2": "token",
        "softmax": "mixture",
    }


def test_stream_has_one_event_per_chunk(server):
    fields = {"max_tokens": 9, "seed": 3, "n": 2, "temperature": 0.5, "stop": None}
    full = server.post(**fields).json()
    events = server.stream(**fields, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == full["usage"]
    for index, choice in enumerate(full["choices"]):
        deltas = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        assert "".join(delta["text"] for delta in deltas) == choice["text"]
        assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + [choice["finish_reason"]]
        assert all(len(delta["chunk"]["ids"]) <= 2 and 0 < delta["chunk"]["agreement"] <= 1 for delta in deltas)
        if choice["finish_reason"] == "length":
            assert len(deltas) == 5  # nine tokens in chunks of two
    assert len({event["id"] for event in events}) == 1


def test_stop_strings_and_echo_in_streams(server):
    unstopped = server.text(max_tokens=40, seed=2)
    stop = unstopped[10:13]
    expected = unstopped[: unstopped.index(stop)]
    assert server.text(max_tokens=40, seed=2, stop=stop) == expected
    events = server.stream(max_tokens=40, seed=2, stop=["never seen", stop], echo=True)
    assert "".join(event["choices"][0]["text"] for event in events) == "the" + expected
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_events_contain_only_complete_characters(server, generators):
    tokenizer = generators["calm-2"].tokenizer
    for seed in range(5):  # random weights generate many invalid UTF-8 sequences, and some valid ones
        choices = [event["choices"][0] for event in server.stream(max_tokens=60, seed=seed)]
        ids = [token for choice in choices for token in choice["chunk"]["ids"]]
        assert "".join(choice["text"] for choice in choices) == tokenizer.decode(ids)
        assert server.text(max_tokens=60, seed=seed) == tokenizer.decode(ids)


def test_openai_client(server, generators):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
    assert [model.id for model in client.models.list()] == ["calm-2", "softmax"]
    assert client.models.retrieve("softmax").id == "softmax"
    with pytest.raises(openai.NotFoundError, match="this endpoint does not exist; this server has POST /v1/comp"):
        client.embeddings.create(model="calm-2", input="the")
    fields = {"model": "calm-2", "prompt": "the fox", "max_tokens": 12, "seed": 4}
    response = client.completions.create(**fields, extra_body={"method": "batch", "num_candidates": 7}, temperature=0.5)
    expected = generate(generators["calm-2"], "the fox", 12, 4, temperature=0.5, method="batch", num_candidates=7)
    assert response.choices[0].text == expected
    full = client.completions.create(**fields)
    parts = list(client.completions.create(**fields, stream=True))
    assert "".join(part.choices[0].text for part in parts) == full.choices[0].text
    assert parts[-1].choices[0].finish_reason == full.choices[0].finish_reason
    with pytest.raises(openai.BadRequestError, match="no token probabilities"):
        client.completions.create(**fields, logprobs=3)
    with pytest.raises(openai.NotFoundError, match="available models: calm-2, softmax"):
        client.completions.create(**{**fields, "model": "gpt-9"})


def test_truncation(server, generators):
    for model, method in (("softmax", None), ("calm-2", "mixture")):
        for truncation in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.4}):
            fields = {"method": method, "temperature": 1.5, **truncation}
            expected = generate(generators[model], "the", 12, 2, **fields)
            assert server.text(model=model, max_tokens=12, seed=2, **fields) == expected
    everything = {"top_p": 1, "top_k": -1, "min_p": 0}  # what clients send by default
    assert server.text(seed=2, **everything) == server.text(seed=2)


def test_temperature_zero_is_greedy(server, generators):
    model, tokenizer = generators["softmax"].model, generators["softmax"].tokenizer
    ids = tokenizer.encode("the quick")
    for _ in range(9):
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    new = ids[len(tokenizer.encode("the quick")) :]
    assert tokenizer.eos_token_id not in new
    for seed in (1, 2):
        fields = {"model": "softmax", "prompt": "the quick", "temperature": 0, "max_tokens": 9, "seed": seed}
        assert server.text(**fields) == tokenizer.decode(new)
    texts = [
        server.text(temperature=0, method="mixture", num_candidates=500, seed=seed, max_tokens=2) for seed in (1, 2)
    ]
    assert texts[0] == texts[1]  # of the mean of 500 softmaxes
    for method in ("token", "batch", "noise"):
        assert server.post(temperature=0, method=method, seed=1).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": 1}, "this model has no token probabilities"),
        ({"model": "softmax", "logprobs": 6}, "logprobs"),
        ({"model": "softmax", "logprobs": 1, "stream": True}, "set stream to false"),
        ({"max_tokens": 0}, "set echo to true"),
        ({"top_p": 0.9}, "top_p needs token probabilities: use the method 'mixture', not 'token'"),
        ({"top_k": 5}, "top_k needs token probabilities: use the method 'mixture', not 'token'"),
        ({"min_p": 0.1}, "min_p needs token probabilities: use the method 'mixture', not 'token'"),
        ({"model": "softmax", "top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"model": "softmax", "top_k": -2}, "top_k must be at least 1, not -2"),
        ({"best_of": 3}, "use n"),
        ({"presence_penalty": 0.5}, "penalties are not available"),
        ({"logit_bias": {"5": 1}}, "logits cannot be changed"),
        ({"suffix": "x"}, "can only be appended"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": 0, "method": "exact"}, "above 0 with the method 'exact', not 0; use 'token'"),
        ({"temperature": 1.5}, "at most 1, not 1.5, with the method 'token'; use the method 'mixture'"),
        ({"temperature": "0.5"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 3000}, "max_tokens is 3000, but this server accepts at most 2048"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 33}, "at most 32"),
        ({"num_candidates": 1001}, "at most 1000"),
        ({"method": "greedy"}, "method"),
        ({"model": "softmax", "method": "token"}, "the method 'token' is not available for this model"),
        ({"prompt": []}, "empty list"),
        ({"prompt": [10**6]}, "token id 1000000 is out of range"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "the " * 5000}, "the number of prompt tokens"),
        ({"stop": ""}, "a stop string must not be empty"),
        ({"stop": ["a"] * 5}, "at most 4"),
        ({"stop": "x" * 201}, "at most 200"),
        ({"stream_options": {"include_usage": True}}, "set stream to true"),
        ({"seed": 2**70}, "seed"),
        ({"echo": "yes"}, "echo"),
        ({"temprature": 0.5}, "unknown field 'temprature'"),
        ({"x" * 10_000: 1}, "unknown field 'xxx"),
        ({"suffix": "x" * 10_000}, "…"),
        ({"stream": True, "stream_options": {"usage": True}}, "unknown field 'stream_options.usage'"),
        ({"prompt": [0.5] * 200_000}, "prompt"),
        ({"prompt": [""] * 20, "n": 2}, "n times the number of prompts is 40"),
        ({"prompt": [""] * 200_000}, "prompt: 200,000 prompts, but at most 32 are accepted"),
        ({"prompt": [[1]] * 9_000}, "prompt: 9,000 prompts, but at most 32 are accepted"),
        ({"prompt": [[1]] * 100_000}, "more than 10,000 lists and objects"),
        ({"prompt": [{}] * 100_000}, "more than 10,000 lists and objects"),
        ({"stop": ["a"] * 200_000}, "stop: 200,000 strings, but at most 4 are accepted"),
        ({"logit_bias": dict.fromkeys(range(90_000), "")}, "logit_bias: 90,000 entries, but at most 300 are accepted"),
        ({"logit_bias": dict.fromkeys(range(300), 1)}, "logits cannot be changed"),
        ({str(i): 1 for i in range(70_000)}, "70,002 fields, but at most 100 are accepted"),
        ({"stream": True, "stream_options": {str(i): 1 for i in range(70_000)}}, "stream_options: 70,000 fields"),
        ({"n": 32, "temperature": 0.5, "num_candidates": 1000}, "candidates of all sequences is 32000"),
        ({"n": 32, "temperature": 0.5, "method": "exact"}, "candidates of all sequences is 32000"),
    ],
)
def test_invalid_requests_are_rejected_with_a_reason(server, fields, message):
    response = server.post(**fields)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"model": "calm-2", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model": "calm-2", "prompt": "\xff\xfe"}',
        b'{"model": "calm-2", "prompt": "\\ud800"}',
        b'{"model": "calm-2", "seed": ' + b"9" * 6000 + b"}",
        b'{"model": "calm-2", "temperature": 1e999}',
        b'{"model": "calm-2", "temperature": NaN}',
        b'"calm-2"',
        b"null",
    ],
)
def test_malformed_bodies(server, body):
    response = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200


def test_brackets_in_strings_are_no_collections(server):
    prompt = '[{"\\' * 10_000
    response = server.post(prompt=[prompt, "{"], max_tokens=1)
    assert "the number of prompt tokens" in response.json()["error"]["message"]
    assert server.post(prompt="\\", suffix="[" * 20_000).json()["error"]["param"] == "suffix"


def test_unknown_paths_and_methods(server):
    assert server.client.get("/v1/completions").status_code == 405
    assert server.client.get("/../../etc/passwd").status_code == 404
    assert server.client.get("/v1/models/..%2f..%2fetc%2fpasswd").status_code == 404
    for path in ("/v1/embeddings", "/v1/responses", "/completions"):  # the last one without /v1 in the base URL
        response = server.client.post(path, json={})
        assert response.status_code == 404
        for endpoint in ("POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"):
            assert endpoint in response.json()["error"]["message"]
    plain = server.client.post(
        "/v1/completions", content=b'{"model": "calm-2"}', headers={"Content-Type": "text/plain"}
    )
    assert plain.status_code == 400  # cross-origin pages can only send JSON after a CORS preflight


def test_large_body_is_rejected(start):
    server = start(max_body_bytes=10_000)
    response = server.client.post("/v1/completions", content=b"x" * 10_000_000)
    assert response.status_code == 413
    with server.connect() as connection:  # chunked, without Content-Length
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall((b"%x\r\n" % 20_000) + b"x" * 20_000 + b"\r\n")
        assert b"413" in connection.recv(100)
    assert server.post(max_tokens=2).status_code == 200


def test_slow_clients_time_out(start):
    server = start(receive_timeout=0.5)
    with (
        server.connect() as slow_head,
        server.connect() as slow_body,
        server.connect() as silent,
        server.connect() as keep_alive,
    ):
        keep_alive.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        while not keep_alive.recv(1000).endswith(b"}"):
            pass
        keep_alive.sendall(b"GET /ready HTTP/1.1\r\nHost:")  # second request on the connection
        slow_head.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        slow_body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert server.post(max_tokens=2).status_code == 200  # other clients are not affected
        assert b"408" in slow_body.recv(100)
        for connection in (slow_head, silent, keep_alive):
            assert connection.recv(100) == b""


def test_api_keys(start):
    server = start(keys=["first", "sécond"])
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"[:3]}):
        for path in ("/v1/models", "/v1/models/calm-2"):
            assert server.client.get(path, headers=header).status_code == 401
        assert server.client.post("/v1/completions", json={}, headers=header).status_code == 401
    assert server.client.get("/v1/models", headers={"Authorization": "first"}).status_code == 401
    for scheme, key in (("Bearer", "first"), ("bearer", "sécond")):
        header = {"Authorization": f"{scheme} {key}".encode()}
        assert server.client.get("/v1/models", headers=header).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/", "/docs", "/openapi.json"):
        assert server.client.get(path).status_code == 200


def test_full_queue_rejects_immediately(start):
    server = start(max_batch=1, max_queue=1)
    scheduler, permits = server.schedulers["calm-2"], server.pause_steps()
    with server.send(max_tokens=4) as running, server.send(max_tokens=4) as waiting:
        wait_for(lambda: scheduler.running and scheduler.waiting)
        response = server.post(max_tokens=2)
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) > 0
        permits.release(100)
        for connection in (running, waiting):
            assert b"200 OK" in connection.recv(100)
    assert server.post(max_tokens=2).status_code == 200
    assert server.post(n=3, max_tokens=2).status_code == 400  # can never fit, so not a 429


def test_slots_are_shared_among_requests(generators):
    scheduler = Scheduler("calm-2", generators["calm-2"], Limits(max_batch=8), Metrics())

    def add(n: int) -> list[SequenceState]:
        request = CompletionRequest(model="calm-2", prompt="the", n=n)
        states = build_sequences(request, [("the", [5])], 16, scheduler.generator.tokenizer, scheduler.limits)
        scheduler.add(states)
        return states

    def num_running(*requests: list[SequenceState]) -> list[int]:
        scheduler._schedule_waiting()
        return [sum(id(state.sequence) in scheduler.running for state in states) for states in requests]

    first, second = add(7), add(5)
    assert num_running(first, second) == [3, 3]  # a quarter of the slots is kept for other requests
    third, fourth, fifth = add(2), add(1), add(1)
    assert num_running(first, second, third, fourth, fifth) == [3, 3, 1, 1, 0]
    for state in first[:2]:
        scheduler._remove(state)
    assert num_running(first, second, third, fourth, fifth) == [1, 3, 1, 1, 1]  # before the others of older requests
    assert [id(state.sequence) in scheduler.running for state in first] == [False, False, True] + [False] * 4


def test_requests_with_many_sequences_do_not_block_others(start):
    server = start()
    scheduler, permits = server.schedulers["calm-2"], server.pause_steps()
    large = [server.send(n=8, max_tokens=1000) for _ in range(4)]
    wait_for(lambda: len(scheduler.waiting) + len(scheduler.running) == 32)
    with server.send(max_tokens=2) as small:
        wait_for(lambda: len(scheduler.waiting) + len(scheduler.running) == 33)
        permits.release(2)  # the step in progress, and one with the small request
        small.settimeout(5)
        assert b"200 OK" in small.recv(100)
    for connection in large:
        connection.close()
    permits.release(1000)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_the_slot_within_one_step(start, stream):
    server = start(max_batch=1)
    scheduler, permits = server.schedulers["calm-2"], server.pause_steps()
    connection = server.send(max_tokens=1000, stream=stream)
    wait_for(lambda: scheduler.running)
    (state,) = scheduler.running.values()
    connection.close()
    wait_for(lambda: state.aborted)
    permits.release()  # the step in progress
    wait_for(lambda: scheduler.idle)
    assert len(state.sequence.output_ids) <= 2


def test_client_that_does_not_read_does_not_block_others(start):
    server = start(max_batch=2)
    with server.send(max_tokens=2000, stream=True) as silent:
        wait_for(lambda: server.schedulers["calm-2"].running)
        for seed in range(3):
            assert server.post(max_tokens=4, seed=seed).status_code == 200
        wait_for(lambda: server.schedulers["calm-2"].idle)  # its sequence finished anyway
        assert silent.recv(10) == b"HTTP/1.1 2"


def test_client_that_does_not_read_is_disconnected(start):
    server = start(send_timeout=0.5)
    connections = server.server.server_state.connections
    with server.send(max_tokens=2000, stream=True):
        wait_for(lambda: connections)
        wait_for(lambda: not connections)
    wait_for(lambda: server.schedulers["calm-2"].idle)
    assert server.post(max_tokens=2).status_code == 200


def test_request_timeout(start):
    server = start(max_seconds=0.5, max_batch=1)
    scheduler, permits = server.schedulers["calm-2"], server.pause_steps()
    with server.send(max_tokens=1000) as running:
        wait_for(lambda: scheduler.running)
        waiting = server.send(max_tokens=4)
        wait_for(lambda: scheduler.waiting)
        time.sleep(1)
        permits.release(100)
        assert b"429" in waiting.recv(100)  # never left the waiting queue
        assert b"200 OK" in running.recv(15)
        body = b""
        while not body.endswith(b"}"):
            body += running.recv(10_000)
        assert b'"finish_reason":"timeout"' in body


def test_model_error_fails_its_requests_but_not_the_server(start, monkeypatch):
    server = start()
    scheduler = server.schedulers["calm-2"]

    def failing_step():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(scheduler.engine, "step", failing_step)
    response = server.post(max_tokens=2)
    assert response.status_code == 500
    assert "out of memory" in response.json()["error"]["message"]
    assert server.post(max_tokens=2).status_code == 200  # with a new engine


def test_shutdown_finishes_accepted_requests_and_rejects_new_ones(start):
    server = start(max_batch=1)
    scheduler, permits = server.schedulers["calm-2"], server.pause_steps()
    with server.send(max_tokens=8) as running, server.send(max_tokens=8) as waiting:
        wait_for(lambda: scheduler.running and scheduler.waiting)
        server.server.handle_exit(15, None)
        rejected = server.post(max_tokens=2)
        assert (rejected.status_code, server.client.get("/ready").status_code) == (503, 503)
        assert "Retry-After" in rejected.headers
        assert server.client.get("/health").status_code == 200
        permits.release(100)
        for connection in (running, waiting):
            assert b"200 OK" in connection.recv(100)
    server.thread.join(30)
    assert not server.thread.is_alive()


def test_second_signal_exits_immediately(start):
    server = start()
    scheduler, permits = server.schedulers["calm-2"], server.pause_steps()
    with server.send(max_tokens=8):
        wait_for(lambda: scheduler.running)
        for _ in range(2):
            server.server.handle_exit(15, None)
        server.thread.join(30)
        assert not server.thread.is_alive()  # although the request is not finished
        assert scheduler.running
    permits.release(100)


def test_bind_addresses():
    with pytest.raises(UserError, match="--open-to-all"):
        run.bind("0.0.0.0", 0, has_keys=False, open_to_all=False)
    for options in ({"has_keys": True, "open_to_all": False}, {"has_keys": False, "open_to_all": True}):
        run.bind("0.0.0.0", 0, **options).close()
    with pytest.raises(UserError, match="cannot resolve --host"):
        run.bind("no such host.invalid", 0, True, False)
    with run.bind("127.0.0.1", 0, False, False) as listener:
        listener.listen()
        with pytest.raises(UserError, match="try another --port"):
            run.bind("127.0.0.1", listener.getsockname()[1], False, False)


def test_dns_rebinding(start):
    with run.bind("127.0.0.1", 0, has_keys=False, open_to_all=False) as listener:
        allowed = run.allowed_hosts(listener, "127.0.0.1", ["Calm.example"], has_keys=False)
    server = start(allowed_hosts=allowed)
    fields = {"model": "calm-2", "max_tokens": 2}
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000", "calm.example"):
        assert server.client.post("/v1/completions", json=fields, headers={"Host": host}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::2]", ""):
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/metrics")):
            response = server.client.request(method, path, json=fields, headers={"Host": host})
            assert response.status_code == 403
            assert f"the host {host!r} is not allowed" in response.json()["error"]["message"]
    with server.connect() as connection:
        connection.sendall(b"GET /ready HTTP/1.0\r\n\r\n")  # without a Host header
        assert b"403" in connection.recv(100)


def test_which_servers_check_the_host():
    local = {"localhost", "127.0.0.1", "[::1]"}
    with run.bind("127.0.0.1", 0, True, False) as loopback, run.bind("0.0.0.0", 0, True, False) as everywhere:
        assert run.allowed_hosts(loopback, "127.0.0.1", [], has_keys=False) == local
        assert run.allowed_hosts(loopback, "here", ["a.example:80"], has_keys=False) == local | {"here", "a.example"}
        assert run.allowed_hosts(loopback, "127.0.0.1", ["a.example"], has_keys=True) == local | {"a.example"}
        assert run.allowed_hosts(loopback, "127.0.0.1", [], has_keys=True) is None
        assert run.allowed_hosts(everywhere, "0.0.0.0", [], has_keys=False) is None


def test_connections_have_tcp_nodelay(start):
    """Without it each response waits about 40 ms for the client's delayed acknowledgement."""
    server = start()
    assert server.client.get("/ready").status_code == 200
    (connection,) = server.server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_requests_cause_no_garbage_collection_of_the_model(monkeypatch):
    """A full collection of torch's objects takes 0.2 s, and a request with many lists causes several."""

    class Exit(Exception):
        pass

    def make_server(*_):
        assert gc.get_freeze_count() > 0
        raise Exit

    monkeypatch.setattr(run, "load_generators", lambda *_: {})
    monkeypatch.setattr(run, "make_server", make_server)
    try:
        with pytest.raises(Exit):
            serve_command(Path("bundled"), port=0)
    finally:
        gc.unfreeze()


def test_command_errors(calm, models):
    def serve(model: str | Path, host: str = "127.0.0.1", keys: tuple[str, ...] = (), **options) -> None:
        serve_command(Path(model), host=host, port=0, api_key=list(keys), **options)

    with pytest.raises(UserError, match="is not a model directory"):
        serve("nowhere")
    with pytest.raises(UserError, match="holds an autoencoder, not a CALM language model"):
        serve(models / "autoencoder")
    with pytest.raises(UserError, match="an API key is empty"):
        serve("bundled", keys=("first", " "))
    for name in (" ", "http://calm.example"):
        with pytest.raises(UserError, match="is not a host name"):
            serve("bundled", allowed_host=[name])
    result = calm("serve", "bundled", "--host", "0.0.0.0")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "--open-to-all" in result.stderr
