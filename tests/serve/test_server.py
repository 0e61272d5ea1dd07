"""The server as its clients meet it: OpenAI's fields, streams, limits, keys, and whatever may come over a socket."""

import time
from pathlib import Path

import openai
import pytest

from calm.commands import serve as serve_command
from calm.errors import UserError
from calm.sampling.next_chunk import Sampling
from calm.serve import run
from calm.serve.limits import Limits
from tests.serve.conftest import wait_for


def written(writer, prompt: str, count: int, seed: int, number: int = 0, **options) -> str:
    """What `calm generate` writes for a seed and a number."""
    ids = writer.tokenizer.encode(prompt)
    pieces = writer.write([ids], Sampling(**options), max_new_tokens=count, seed=seed, numbers=[number])
    return "".join(piece.text for piece in pieces)


def test_a_completion_is_what_calm_generate_writes(server, writers):
    for name, writer in writers.items():
        answer = server.ask(model=name, prompt="the quick", max_tokens=11, seed=5, temperature=0.5, n=2).json()
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [written(writer, "the quick", 11, 5, n, temperature=0.5) for n in (0, 1)]
        assert texts[0] != texts[1]
        assert answer["object"] == "text_completion"
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        prompt = len(writer.tokenizer.encode("the quick"))
        ended = [choice["finish_reason"] for choice in answer["choices"]]
        if ended == ["length", "length"]:
            assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 22, "total_tokens": prompt + 22}


def test_prompts_of_every_form(server, writers):
    tokenizer = writers["calm-2"].tokenizer
    ids = [tokenizer.encode(text) for text in ("the quick", "lazy dogs")]
    common = {"max_tokens": 6, "seed": 1}

    def texts(prompt, **more):
        return [choice["text"] for choice in server.ask(prompt=prompt, **common, **more).json()["choices"]]

    assert texts("the quick") == texts(["the quick"]) == texts(ids[0]) == texts([ids[0]])
    both = texts(["the quick", "lazy dogs"])
    assert both == texts(ids)
    assert both == [written(writers["calm-2"], text, 6, 1, n) for n, text in enumerate(("the quick", "lazy dogs"))]
    assert texts("the quick", echo=True) == ["the quick" + texts("the quick")[0]]
    assert len(texts("")) == 1


def test_a_stream_has_an_event_for_each_chunk(server):
    fields = {"max_tokens": 9, "seed": 3, "n": 2, "temperature": 0.5, "stop": None}
    whole = server.ask(**fields).json()
    events = server.stream(**fields, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        own = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        assert "".join(event["text"] for event in own) == choice["text"]
        assert [event["finish_reason"] for event in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert all(len(event["chunk"]["ids"]) <= 2 and 0 < event["chunk"]["agreement"] <= 1 for event in own)
        if choice["finish_reason"] == "length":
            assert len(own) == 5  # nine tokens by two
    assert len({event["id"] for event in events}) == 1


def test_stop_strings_and_echo_in_streams(server):
    free = server.text(max_tokens=40, seed=2)
    stop = free[10:13]
    cut = free[: free.index(stop)]
    assert server.text(max_tokens=40, seed=2, stop=stop) == cut
    events = server.stream(max_tokens=40, seed=2, stop=["never seen", stop], echo=True)
    assert "".join(event["choices"][0]["text"] for event in events) == "the" + cut
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_no_event_holds_half_a_character(server, writers):
    tokenizer = writers["calm-2"].tokenizer
    for seed in range(5):  # random weights write many bytes that are no characters, and some that are
        choices = [event["choices"][0] for event in server.stream(max_tokens=60, seed=seed)]
        ids = [token for choice in choices for token in choice["chunk"]["ids"]]
        assert "".join(choice["text"] for choice in choices) == tokenizer.decode(ids)
        assert server.text(max_tokens=60, seed=seed) == tokenizer.decode(ids)


def test_openais_own_client(server, writers):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
    assert [model.id for model in client.models.list()] == ["calm-2", "softmax"]
    assert client.models.retrieve("softmax").id == "softmax"
    fields = {"model": "calm-2", "prompt": "the fox", "max_tokens": 12, "seed": 4}
    answer = client.completions.create(**fields, extra_body={"method": "batch", "num_candidates": 7}, temperature=0.5)
    expected = written(writers["calm-2"], "the fox", 12, 4, temperature=0.5, method="batch", num_candidates=7)
    assert answer.choices[0].text == expected
    plain = client.completions.create(**fields)
    parts = list(client.completions.create(**fields, stream=True))
    assert "".join(part.choices[0].text for part in parts) == plain.choices[0].text
    assert parts[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    with pytest.raises(openai.BadRequestError, match="no probabilities"):
        client.completions.create(**fields, logprobs=3)
    with pytest.raises(openai.NotFoundError, match="only calm-2, softmax"):
        client.completions.create(**{**fields, "model": "gpt-9"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": 1}, "no probabilities of tokens"),
        ({"top_p": 0.9}, "no probabilities to cut"),
        ({"best_of": 3}, "use n"),
        ({"presence_penalty": 0.5}, "could be lowered"),
        ({"logit_bias": {"5": 1}}, "no logits"),
        ({"suffix": "x"}, "at their end"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": 1.5}, "at most 1, not 1.5"),
        ({"temperature": "0.5"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3000}, "max_tokens is 3000, and this server takes at most 2048"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 33}, "at most 32"),
        ({"num_candidates": 1001}, "at most 1000"),
        ({"method": "greedy"}, "method"),
        ({"model": "softmax", "method": "token"}, "no method"),
        ({"prompt": []}, "empty list"),
        ({"prompt": [10**6]}, "token 1000000"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "the " * 5000}, "tokens of a prompt"),
        ({"stop": ""}, "a stop string must have a character"),
        ({"stop": ["a"] * 5}, "at most 4"),
        ({"stop": "x" * 201}, "at most 200"),
        ({"stream_options": {"include_usage": True}}, "set stream to true"),
        ({"seed": 2**70}, "seed"),
        ({"echo": "yes"}, "echo"),
        ({"temprature": 0.5}, "there is no field 'temprature'"),
        ({"x" * 10_000: 1}, "there is no field 'xxx"),
        ({"suffix": "x" * 10_000}, "…"),
        ({"stream": True, "stream_options": {"usage": True}}, "there is no field 'stream_options.usage'"),
        ({"prompt": [0.5] * 200_000}, "prompt"),
        ({"prompt": [""] * 200_000}, "n times the number of prompts is 200000"),
        ({"n": 32, "temperature": 0.5, "num_candidates": 1000}, "candidates of all texts is 32000"),
        ({"n": 32, "temperature": 0.5, "method": "exact"}, "candidates of all texts is 32000"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(server, fields, message):
    answer = server.ask(**fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


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
def test_bodies_that_are_no_requests(server, body):
    answer = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200


def test_other_paths_and_methods(server):
    assert server.client.get("/v1/completions").status_code == 405
    assert server.client.get("/../../etc/passwd").status_code == 404
    assert server.client.get("/v1/models/..%2f..%2fetc%2fpasswd").status_code == 404
    assert server.client.get("/nowhere").json()["error"]["message"] == "Not Found"
    plain = server.client.post(
        "/v1/completions", content=b'{"model": "calm-2"}', headers={"Content-Type": "text/plain"}
    )
    assert plain.status_code == 400  # no page of another site can send JSON without asking first


def test_a_long_body_is_not_read(start):
    server = start(max_body=10_000)
    answer = server.client.post("/v1/completions", content=b"x" * 10_000_000)
    assert answer.status_code == 413
    with server.connect() as connection:  # without a length, in pieces
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall((b"%x\r\n" % 20_000) + b"x" * 20_000 + b"\r\n")
        assert b"413" in connection.recv(100)
    assert server.ask(max_tokens=2).status_code == 200


def test_slow_clients_are_let_go(start):
    server = start(patience=0.5)
    with (
        server.connect() as slow_head,
        server.connect() as slow_body,
        server.connect() as silent,
        server.connect() as kept,
    ):
        kept.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        while not kept.recv(1000).endswith(b"}"):
            pass
        kept.sendall(b"GET /ready HTTP/1.1\r\nHost:")  # the second request of a connection
        slow_head.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        slow_body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert server.ask(max_tokens=2).status_code == 200  # others do not notice
        assert b"408" in slow_body.recv(100)
        for connection in (slow_head, silent, kept):
            assert connection.recv(100) == b""


def test_keys(start):
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


def test_a_full_queue_refuses_at_once(start):
    server = start(max_batch=1, max_queue=1)
    scheduler, allowed = server.schedulers["calm-2"], server.step_by_step()
    with server.send(max_tokens=4) as running, server.send(max_tokens=4) as waiting:
        wait_for(lambda: scheduler.running and scheduler.waiting)
        answer = server.ask(max_tokens=2)
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) > 0
        allowed.release(100)
        for connection in (running, waiting):
            assert b"200 OK" in connection.recv(100)
    assert server.ask(max_tokens=2).status_code == 200
    assert server.ask(n=3, max_tokens=2).status_code == 400  # no wait would help


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place_within_a_step(start, stream):
    server = start(max_batch=1)
    scheduler, allowed = server.schedulers["calm-2"], server.step_by_step()
    connection = server.send(max_tokens=1000, stream=stream)
    wait_for(lambda: scheduler.running)
    (job,) = scheduler.running.values()
    connection.close()
    wait_for(lambda: job.given_up)
    allowed.release()  # the step that was under way
    wait_for(lambda: scheduler.idle)
    assert len(job.text.new) <= 2


def test_a_reader_that_does_not_read_blocks_nobody(start):
    server = start(max_batch=2)
    with server.send(max_tokens=2000, stream=True) as silent:
        wait_for(lambda: server.schedulers["calm-2"].running)
        for seed in range(3):
            assert server.ask(max_tokens=4, seed=seed).status_code == 200
        wait_for(lambda: server.schedulers["calm-2"].idle)  # its text grew to its end all the same
        assert silent.recv(10) == b"HTTP/1.1 2"


def test_a_client_that_reads_nothing_is_let_go(start):
    server = start(stalled=0.5)
    connections = server.server.server_state.connections
    with server.send(max_tokens=2000, stream=True):
        wait_for(lambda: connections)
        wait_for(lambda: not connections)
    wait_for(lambda: server.schedulers["calm-2"].idle)
    assert server.ask(max_tokens=2).status_code == 200


def test_time_is_limited(start):
    server = start(max_seconds=0.5, max_batch=1)
    scheduler, allowed = server.schedulers["calm-2"], server.step_by_step()
    with server.send(max_tokens=1000) as running:
        wait_for(lambda: scheduler.running)
        waiting = server.send(max_tokens=4)
        wait_for(lambda: scheduler.waiting)
        time.sleep(1)
        allowed.release(100)
        assert b"429" in waiting.recv(100)  # it never had a place
        assert b"200 OK" in running.recv(15)
        answer = b""
        while not answer.endswith(b"}"):
            answer += running.recv(10_000)
        assert b'"finish_reason":"timeout"' in answer


def test_a_model_that_fails_loses_its_texts_and_not_the_server(start, monkeypatch):
    server = start()
    scheduler = server.schedulers["calm-2"]

    def broken():
        raise RuntimeError("no memory")

    monkeypatch.setattr(scheduler.batch, "step", broken)
    answer = server.ask(max_tokens=2)
    assert answer.status_code == 500
    assert "no memory" in answer.json()["error"]["message"]
    assert server.ask(max_tokens=2).status_code == 200  # with a new batch


def test_the_end_finishes_what_runs_and_waits_and_refuses_what_comes(start):
    server = start(max_batch=1)
    scheduler, allowed = server.schedulers["calm-2"], server.step_by_step()
    with server.send(max_tokens=8) as running, server.send(max_tokens=8) as waiting:
        wait_for(lambda: scheduler.running and scheduler.waiting)
        server.server.handle_exit(15, None)
        refused = server.ask(max_tokens=2)
        assert (refused.status_code, server.client.get("/ready").status_code) == (503, 503)
        assert "Retry-After" in refused.headers
        assert server.client.get("/health").status_code == 200
        allowed.release(100)
        for connection in (running, waiting):
            assert b"200 OK" in connection.recv(100)
    server.thread.join(30)
    assert not server.thread.is_alive()


def test_a_second_signal_ends_it_at_once(start):
    server = start()
    scheduler, allowed = server.schedulers["calm-2"], server.step_by_step()
    with server.send(max_tokens=8):
        wait_for(lambda: scheduler.running)
        for _ in range(2):
            server.server.handle_exit(15, None)
        server.thread.join(30)
        assert not server.thread.is_alive()  # though its text is not finished
        assert scheduler.running
    allowed.release(100)


def test_addresses():
    with pytest.raises(UserError, match="--open-to-all"):
        run.bind("0.0.0.0", 0, has_keys=False, open_to_all=False)
    for options in ({"has_keys": True, "open_to_all": False}, {"has_keys": False, "open_to_all": True}):
        run.bind("0.0.0.0", 0, **options).close()
    with pytest.raises(UserError, match="no address of this machine"):
        run.bind("no such host.invalid", 0, True, False)
    with run.bind("127.0.0.1", 0, False, False) as taken:
        taken.listen()
        with pytest.raises(UserError, match="try another --port"):
            run.bind("127.0.0.1", taken.getsockname()[1], False, False)


def test_the_command_says_what_is_wrong(calm, models):
    def serve(model: str | Path, host: str = "127.0.0.1", keys: tuple[str, ...] = ()) -> None:
        serve_command.serve(Path(model), None, host, 0, list(keys), False, Limits())

    with pytest.raises(UserError, match="is not a model directory"):
        serve("nowhere")
    with pytest.raises(UserError, match="holds an autoencoder, not a CALM language model"):
        serve(models / "autoencoder")
    with pytest.raises(UserError, match="an API key is empty"):
        serve("bundled", keys=("first", " "))
    done = calm("serve", "bundled", "--host", "0.0.0.0")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "--open-to-all" in done.stderr
