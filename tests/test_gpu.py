"""Training, generation, evaluation, and serving on a simulated GPU: no mixed devices, and no waiting for it."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from calm.autoencoder import Posterior
from calm.config import load_config
from calm.distributed import World
from calm.evaluate.documents import Document
from calm.evaluate.estimators import estimator_of
from calm.evaluate.evaluation import evaluate_documents
from calm.generate.engine import Engine, Sequence
from calm.generate.sampler import SamplingParams
from calm.heads import HEADS
from calm.noise import RowNoise
from calm.scores.energy import _product_precision
from calm.train.loop import _Run, train
from calm.train.stages import described_model
from tests.generate.conftest import PAD, VOCAB_SIZE, build_model
from tests.generate.test_engine import METHODS, build_transformer
from tests.gpu import GPU, simulated_gpu
from tests.simulated_cuda import CUDA, Simulation, simulated_cuda
from tests.train.conftest import autoencoder, language_model, recipe, transformer  # noqa: F401  # fixtures

STATIC = ("token", "batch", "mixture", "noise")  # methods whose computation does not depend on values
VECTOR_HEADS = [name for name, head in HEADS.items() if "noise" in head.methods]


def test_the_simulation_finds_waits_uploads_and_mixed_devices():
    with simulated_cuda() as gpu:
        numbers = torch.arange(4.0, device=CUDA)
        assert not gpu.waits
        assert (numbers + 1).device == CUDA
        for wait in (numbers.sum().item, numbers.tolist, numbers.cpu, lambda: numbers[numbers > 1], numbers.nonzero):
            gpu.reset()
            wait()
            assert gpu.waits.total() == 1
        assert numbers.sum().item() == 6
        gpu.reset()
        numbers[[0, 1]] = torch.tensor([5.0, 6.0]).to(CUDA)
        assert gpu.uploads.total() == 2
        assert numbers[[1, 3]].tolist() == [6, 3]
        gpu.reset()
        assert not gpu.waits
        with pytest.raises(RuntimeError, match="mixes cuda:0 and cpu"):
            numbers + torch.ones(4)


# ----------------------------------------------------------------------------------------------------------- training


def training_steps(config: Any, directory: Path, gpu: Simulation) -> list[dict[str, float]]:
    """Metrics of three steps, of which only what is read for the log may wait."""
    run = _Run(config, directory, World(0, 1, CUDA), report=lambda _: None, warn=lambda _: None)
    run.build()
    metrics = []
    for step in range(3):
        share = run.stage.read(step)
        gpu.reset()
        output = run._step(step, run.stage.micro_batches(share))
        assert not gpu.waits, gpu.waits
        assert not gpu.uploads or step == 0, gpu.uploads  # constants are copied once
        metrics.append(run._read(step + 1, output))
        assert gpu.waits.total() == 1
    return metrics


@pytest.mark.parametrize("stage", ["recipe", "transformer", *(head for head in HEADS if head != "mean-flow")])
def test_training_step(stage, request, tmp_path):
    """The same losses as on a CPU, without waiting between logging steps."""
    fixture = stage if stage in ("recipe", "transformer") else "language_model"
    overrides = [] if fixture == stage else [f"language_model.head={stage}"]
    config = load_config(str(request.getfixturevalue(fixture)), overrides)
    with simulated_cuda() as gpu:
        found = training_steps(config, tmp_path / "gpu", gpu)
    run = _Run(config, tmp_path / "cpu", World(0, 1, torch.device("cpu")), lambda _: None, lambda _: None)
    run.build()
    for step, metrics in enumerate(found):
        expected = run._read(step + 1, run._step(step, run.stage.micro_batches(run.stage.read(step))))
        assert metrics.keys() == expected.keys()
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_mean_flow_loss():
    """Its derivatives cannot see through simulated tensors, so this runs on the meta device."""
    with torch.device(GPU):
        head = described_model(load_config("toy-calm", ["language_model.head=mean-flow"]), 50).head
        hidden = torch.empty(2, 5, head.denoiser.condition.in_features, requires_grad=True)
        posterior = Posterior(torch.empty(2, 5, head.latent_size), torch.empty(2, 5, head.latent_size))
        with simulated_gpu() as kernels:
            head.latent_loss(hidden, posterior, torch.ones(2, 5)).backward()
    assert kernels.total > 20
    assert hidden.grad is not None


def test_distillation(language_model, transformer, tmp_path):  # noqa: F811
    """A teacher samples without waiting, too."""
    train(load_config(str(transformer), ["train.steps=2"]), tmp_path / "teacher")
    teacher = tmp_path / "teacher" / "model"
    with simulated_cuda() as gpu:
        training_steps(load_config(str(language_model), [f"language_model.teacher={teacher}"]), tmp_path / "gpu", gpu)


@pytest.mark.parametrize("stage", ["recipe", "transformer", "language_model"])
def test_validation(stage, request, tmp_path):
    """The same metrics as on a CPU, with a few waits per batch."""
    config = load_config(str(request.getfixturevalue(stage)))
    with simulated_cuda() as gpu:
        run = _Run(config, tmp_path / "gpu", World(0, 1, CUDA), lambda _: None, lambda _: None)
        run.build()
        gpu.reset()
        found = run.stage.evaluate()
        assert gpu.waits.total() <= 8 * config.train.evaluation_batches, gpu.waits
    run = _Run(config, tmp_path / "cpu", World(0, 1, torch.device("cpu")), lambda _: None, lambda _: None)
    run.build()
    assert found == pytest.approx(run.stage.evaluate(), rel=1e-3)


# --------------------------------------------------------------------------------------------------------- generation


def tokens(model: Any, params: list[SamplingParams], gpu: Simulation | None = None, most: int = 1) -> list[list[int]]:
    """Outputs of sequences of different lengths; while none joins or leaves, `most` waits per step are allowed."""
    prompts = [[5, 6, 7], [4] * 9, [8, 9, 10, 11], [12]]
    engine = Engine(model, -1, PAD)
    sequences = [Sequence(prompts[i % 4], i, 10 + 2 * i, own) for i, own in enumerate(params)]
    engine.add(sequences[:1])
    engine.step()
    engine.add(sequences[1:])  # they join
    before: list[Sequence] = []
    while engine.running or engine.waiting:
        same, before = engine.running == before and not engine.waiting, engine.running
        if gpu is not None:
            gpu.reset()
        engine.step()
        if gpu is not None and same:
            assert 1 <= gpu.waits.total() <= most, gpu.waits
            if most == 1 and engine.running == before:  # none has left in this step
                assert not gpu.uploads, gpu.uploads
    return [sequence.output_ids for sequence in sequences]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("method", ["single", *METHODS])
def test_generation(head, method):
    """The same tokens as on a CPU, in a batch that sequences join and leave, with few waits."""
    if method == "noise" and head not in VECTOR_HEADS:
        pytest.skip("this head has no noise to scale")
    options = {} if method == "single" else METHODS[method]
    model = build_model(2, head=head, **({"num_sampling_steps": 3} if head in ("flow", "diffusion") else {}))
    params = [SamplingParams(**options)] * 3
    expected = tokens(model, params)
    with simulated_cuda() as gpu:
        found = tokens(model.to(CUDA), params, gpu, 1 if method in ("single", *STATIC) else 10**6)
    assert found == expected


@pytest.mark.parametrize("method", ["token", "batch", "mixture"])
def test_temperatures_share_one_pass(method):
    """Distinct temperatures cost neither waits nor proposals of their own, and change nothing."""
    model = build_model(2)
    params = [
        SamplingParams(1 / (1 + i / 7), 12, method, top_p=0.9 if method == "mixture" and i else None) for i in range(8)
    ]
    alone = [tokens(model, [own] * (i + 1))[i] for i, own in enumerate(params)]
    with patch.object(model.head, "propose", wraps=model.head.propose) as propose:
        tokens(model, [params[1]] * 8)
        one, propose.call_count = propose.call_count, 0
        assert tokens(model, params) == alone
        assert propose.call_count < 2 * one  # one pass for T = 1, and one for all others
    with simulated_cuda() as gpu:
        assert tokens(model.to(CUDA), params, gpu) == alone


def test_generation_with_a_transformer():
    model = build_transformer()
    params = [
        SamplingParams(),
        SamplingParams(0.5),
        SamplingParams(top_p=0.8),
        SamplingParams(2.0, top_k=5, min_p=0.01),
    ]
    expected = tokens(model, params)
    with simulated_cuda() as gpu:
        assert tokens(model.to(CUDA), params, gpu) == expected


def test_exact_sampling_that_settles_for_one_row_only():
    """A row that reaches its limit of draws has statistics on the GPU, one that settles on the CPU."""
    model = build_model(2)
    params = [SamplingParams(0.5, 2, "exact"), SamplingParams(0.5, 10_000, "exact")]
    expected = tokens(model, params)
    with simulated_cuda() as gpu:
        assert tokens(model.to(CUDA), params, gpu, 10**6) == expected


def test_products_on_a_gpu_have_the_precision_of_tf32():
    with simulated_cuda():
        numbers = torch.ones(2, device=CUDA)
        assert _product_precision(numbers) == torch.finfo(torch.float32).eps
        torch.set_float32_matmul_precision("high")
        try:
            assert _product_precision(numbers) == 2**-10
            assert _product_precision(torch.ones(2)) == torch.finfo(torch.float32).eps
        finally:
            torch.set_float32_matmul_precision("highest")


def test_prompts_are_read_without_a_mask():
    with simulated_cuda() as gpu:
        engine = Engine(build_model(2).to(CUDA), -1, PAD)
        engine.add([Sequence([5] * 9, 0, 8), Sequence([5] * 3, 1, 8)])
        engine.step()
        assert set(gpu.attention) == {"causal"}
        engine.step()
        assert set(gpu.attention) == {"causal", "mask"}


# --------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("head", ["energy", "chain", "probit", "transformer"])
def test_brier_lm(head):
    """The same estimates as on a CPU."""
    model = build_transformer() if head == "transformer" else build_model(2, head=head)
    texts = torch.randint(VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(0))

    def estimates(model: Any) -> Any:
        estimator = estimator_of(model, 8, 4, num_latents=1)
        with torch.no_grad():
            return estimator.estimate(texts.to(model.device), RowNoise([3, 4], model.device))

    expected = estimates(model)
    with simulated_cuda():
        found = estimates(model.to(CUDA))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.values, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["energy", "transformer"])
def test_brier_lm_of_documents(head):
    model = build_transformer() if head == "transformer" else build_model(2)
    documents = [Document(n, np.arange(length) % VOCAB_SIZE) for n, length in enumerate((30, 40))]

    def brier(model: Any, device: Any) -> Any:
        estimator = estimator_of(model, 16, 4, num_latents=1)
        return evaluate_documents(estimator, documents, unit=2, batch_size=2, device=device).brier.compute()

    expected = brier(model, torch.device("cpu"))
    with simulated_cuda():
        found = brier(model.to(CUDA), CUDA)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert getattr(found[name], "value", found[name]) == pytest.approx(getattr(value, "value", value), abs=1e-3)
