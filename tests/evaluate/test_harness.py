"""lm_eval tasks, defined in local files: no test needs a network."""

import json

import pytest
import yaml

from calm.errors import UserError

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

TASK = {
    "task": "continue",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["e"], "max_gen_toks": 10},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture
def task(tmp_path):
    def make(name: str, **changes):
        data = tmp_path / "questions.jsonl"
        data.write_text(
            "".join(json.dumps({"question": "the quick " * n, "answer": "fox"}) + "\n" for n in range(1, 5))
        )
        path = tmp_path / f"{name}.yaml"
        kwargs = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")}
        path.write_text(yaml.safe_dump({**TASK, "task": name, "dataset_kwargs": kwargs, **changes}))
        return str(path)

    return make


@pytest.mark.parametrize("name", ["calm-4", "softmax"])
def test_task_runs(models, task, name):
    from calm.evaluate.harness import run_harness

    found = run_harness(models / name, [task("continue")], limit=3, batch_size=2, seed=0)
    assert 0 <= found["tasks"]["continue"]["exact_match,none"] <= 1


def test_stop_strings_and_independence_of_the_batch(models):
    from lm_eval.api.instance import Instance

    from calm.evaluate.harness import HarnessModel

    def ask(batch_size, stops):
        model = HarnessModel(str(models / "calm-4"), batch_size)
        asked = {"until": stops, "max_gen_toks": 10}
        requests = [Instance("generate_until", {}, ("the quick " * n, asked), n) for n in range(5)]
        return model.generate_until(requests)

    unstopped = ask(2, [])
    assert ask(5, []) == ask(1, []) == unstopped
    letter = next(letter for text in unstopped for letter in text[1:])
    stopped = ask(2, [letter])
    assert stopped == [text.split(letter)[0] for text in unstopped]


def test_likelihood_tasks_report_a_bound(models, task):
    from calm.evaluate.harness import run_harness

    likelihood = task("likely", output_type="loglikelihood", metric_list=[{"metric": "acc"}], generation_kwargs=None)
    found = run_harness(models / "calm-4", [likelihood], limit=2, batch_size=2, seed=0, num_latents=3)
    assert found["likelihood_bound"] == 3
    assert 0 <= found["tasks"]["likely"]["acc,none"] <= 1
    assert run_harness(models / "calm-4", [task("free")], limit=2, batch_size=2, seed=0)["likelihood_bound"] is None


def test_loglikelihood_and_rolling_loglikelihood(models):
    from lm_eval.api.instance import Instance

    from calm.evaluate.harness import HarnessModel

    model = HarnessModel(str(models / "calm-4"), num_latents=8)
    text = "the quick brown fox jumps over lazy dogs " * 12  # exceeds the positions
    (long,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    assert -20 * len(model.tokenizer.encode(text)) < long < 0
    pair, again = model.loglikelihood([Instance("loglikelihood", {}, ("the quick ", "brown fox"), 0)] * 2)
    assert pair[0] < 0
    assert isinstance(pair[1], bool)
    assert pair != again  # each request has its own noise
    with_space = model.loglikelihood([Instance("loglikelihood", {}, ("the quick", " brown fox"), 0)])
    assert with_space == [pair]


def test_temperature_of_tasks():
    from calm.evaluate.harness import _temperature

    assert _temperature({"do_sample": True, "temperature": 0.7}) == 0.7
    assert _temperature({"do_sample": True, "temperature": 1.5}) == 1
    assert _temperature({"do_sample": False, "temperature": 0.7}) == 0.1
    assert _temperature({"do_sample": True}) == 1
    assert _temperature({}) == 0.1


def test_unknown_and_broken_tasks(models, task):
    from calm.evaluate.harness import run_harness

    with pytest.raises(UserError, match=r"no task 'gsm8kk'; did you mean gsm8k"):
        run_harness(models / "calm-4", ["gsm8kk"], limit=2, batch_size=2, seed=0)
    with pytest.raises(UserError, match="lm_eval cannot run"):
        run_harness(models / "calm-4", [task("broken", dataset_path="no-such-thing")], limit=2, batch_size=2, seed=0)
