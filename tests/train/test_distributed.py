"""Two processes compute the same as one, and each resumes the checkpoints of the other."""

import shutil

from tests.train.conftest import metrics, run


def succeed(*arguments, **kwargs):
    done = run(*arguments, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_two_processes_equal_one_and_resume_each_other(recipe, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    succeed(recipe, one)
    succeed(recipe, two, processes=2)
    alone, together = metrics(one), metrics(two)
    assert sorted(together) == list(range(1, 31))
    for step, loss in alone.items():
        assert abs(loss - together[step]) < 1e-5 * loss
    assert metrics(one, "score").keys() == metrics(two, "score").keys()
    for first, processes in ((one, 2), (two, 1)):
        # As if the run had been interrupted after step 10 or 20: the last checkpoint is gone.
        shutil.rmtree(first / "checkpoints" / "step-00000030")
        shutil.rmtree(first / "model")
        times = metrics(first, "time")
        succeed(recipe, first, "--resume", processes=processes)
        continued = metrics(first)
        for step, loss in alone.items():
            assert abs(loss - continued[step]) < 1e-5 * loss
        again = [step for step, when in metrics(first, "time").items() if when != times[step]]
        assert again == list(range(21, 31))  # resumed from step 20
        assert (first / "model" / "model.safetensors").exists()


def test_batch_size_that_is_not_a_multiple_of_the_processes(recipe, tmp_path):
    done = run(recipe, tmp_path / "run", "--set", "data.batch_size=5", processes=2)
    assert done.returncode != 0
    assert "batch_size must be a positive multiple of the number of processes, but 5 is none of 2" in done.stderr
