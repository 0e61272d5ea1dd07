"""Distillation from samples: a proper score of the teacher's distribution, teachers of both kinds, training."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from calm.checkpoint import load_calm, save_model
from calm.config import load_config
from calm.data.tokenizer import load_tokenizer
from calm.distributed import World
from calm.errors import ConfigError, DataError, UserError
from calm.llama import LlamaConfig
from calm.model import TeacherSamples
from calm.noise import RowNoise
from calm.scores.energy import energy_loss_of_samples
from calm.train.loop import train
from calm.train.stages import described_model
from calm.train.teacher import Teacher
from calm.transformer import Transformer
from tests.train.conftest import BACKBONE, metrics

V, K, EOS, PAD = 7, 2, 1, 2
ALONE = World(0, 1, torch.device("cpu"))


def test_energy_loss_of_samples_is_that_of_all_pairs():
    generator = torch.Generator().manual_seed(0)
    samples, targets = (torch.randn(n, 2, 3, generator=generator, dtype=torch.double) for n in (4, 5))
    found = energy_loss_of_samples(samples, targets, alpha=1.3)
    for place in range(2):
        fidelity = sum((x - z).norm() ** 1.3 for x in samples[:, place] for z in targets[:, place]) / 20
        pairs = [(x - y).norm() ** 1.3 for i, x in enumerate(samples[:, place]) for y in samples[:i, place]]
        assert found[place].item() == pytest.approx((2 * fidelity - sum(pairs) / 6).item(), rel=1e-5)


def test_the_students_distribution_converges_to_the_teachers():
    """The expected loss of a student that draws five points with probabilities q is smallest at the teacher's p."""
    generator = torch.Generator().manual_seed(0)
    points, p = torch.randn(5, 3, generator=generator), torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    weights = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    distances = torch.cdist(points, points)

    def expected(q: torch.Tensor) -> torch.Tensor:
        return 2 * q @ distances @ p - q @ distances @ q

    for _ in range(500):
        optimizer.zero_grad()
        expected(weights.softmax(0)).backward()
        optimizer.step()
    q = weights.softmax(0).detach()
    assert (q - p).abs().max() < 0.01
    drawn = [
        points[torch.multinomial(of, 40_000 * n, True, generator=generator)].view(n, -1, 3)
        for of, n in ((p, 2), (p, 3))
    ]
    losses = energy_loss_of_samples(drawn[0], drawn[1])
    error = losses.std() / len(losses) ** 0.5
    assert abs(losses.mean() - expected(p)) < 4 * error  # the estimate from samples is unbiased


def test_the_loss_is_a_mean_over_the_positions_with_samples():
    """The same for a batch and for its parts, and for samples that equal the true chunks, that of these positions."""
    model = described_model(load_config("toy-calm", ["language_model.head=chain"]), 50)
    chunks = torch.randint(
        3, 50, (3, 6, model.chunk_size)
    )  # five positions, of which the first and the last have samples
    mask = torch.ones(3, 6)
    mask[2, 4:] = 0

    def loss(rows: slice, **options) -> torch.Tensor:
        samples = TeacherSamples(chunks[None, rows, 1:][:, :, ::4], torch.tensor(True), 4, 1.0)
        return model(chunks[rows], mask[rows], noise=RowNoise([1, 2, 3]), teacher_samples=samples, **options)["loss"]

    hidden = model.hidden_states(chunks[:2, :-1])[:, ::4]
    expected = model.head.loss(hidden, chunks[:2, 1:][:, ::4])
    torch.testing.assert_close(loss(slice(2)), expected)
    parts = [loss(slice(row, row + 1), num_chunks=mask[:, 1:].sum()) for row in range(3)]
    torch.testing.assert_close(sum(parts), loss(slice(3)))


def make_teacher(directory, num_samples=1, stride=1) -> Teacher:
    teacher = Teacher(directory, K, num_samples, stride, EOS, PAD)
    teacher.prepare(ALONE, 8)
    return teacher


@pytest.fixture
def softmax(tmp_path):
    torch.manual_seed(0)
    model = Transformer(LlamaConfig(**BACKBONE, vocab_size=V))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    save_model(model, tmp_path / "softmax")
    return tmp_path / "softmax"


@pytest.mark.parametrize("stride", [1, 2])
@torch.no_grad()
def test_a_transformer_samples_the_next_chunks_of_its_own_distribution(softmax, stride):
    count = 4000
    teacher = make_teacher(softmax, count, stride)
    tokens = torch.tensor([[3, 4, 5, 6, 0, 3, 3, 4], [PAD, 5, 5, 4, 6, 3, 0, 0]])
    samples, finite = teacher.draw(tokens, RowNoise([0, 1]))
    assert finite
    assert samples.shape == (count, 2, {1: 3, 2: 2}[stride], K)
    for row, text in enumerate(tokens.masked_fill(tokens == PAD, EOS)):
        for number, end in enumerate(range(K, 7, K * stride)):
            first = teacher.model.logits(text[None, :end])[0, -1].softmax(-1)
            texts = torch.cat([text[:end].expand(V, -1), torch.arange(V)[:, None]], dim=1)
            joint = first[:, None] * teacher.model.logits(texts)[:, -1].softmax(-1)
            index = samples[:, row, number] @ torch.tensor([V, 1])
            found = index.bincount(minlength=V * V).view(V, V) / count
            error = (joint * (1 - joint) / count).sqrt()
            assert ((found - joint).abs() < 5 * error + 1e-4).all()


@torch.no_grad()
def test_draws_of_a_row_do_not_depend_on_the_batch(softmax):
    teacher, tokens = make_teacher(softmax, 3), torch.tensor([[3, 4, 5, 6], [5, 5, 4, 6]])
    together, _ = teacher.draw(tokens, RowNoise([5, 6]))
    for row in range(2):
        assert torch.equal(teacher.draw(tokens[[row]], RowNoise([5 + row]))[0][:, 0], together[:, row])


# ----------------------------------------------------------------------------------------------------------- training


@pytest.fixture
def teacher(transformer, tmp_path):
    """A baseline, trained for some steps."""
    train(load_config(str(transformer)), tmp_path / "teacher")
    return tmp_path / "teacher" / "model"


@pytest.mark.parametrize("head", ["energy", "flow", "chain", "probit"])
def test_distillation_of_a_transformer(language_model, teacher, head, tmp_path):
    settings = [f"language_model.head={head}", f"language_model.teacher={teacher}", "train.steps=20"]
    settings += ["language_model.num_teacher_samples=3", "language_model.teacher_weight=0.7"]
    run = load_config(str(language_model), settings)
    train(run, tmp_path / "run")
    losses = metrics(tmp_path / "run")
    assert losses[20] < losses[1]
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert not [name for name in config if "teacher" in name]
    assert load_calm(tmp_path / "run" / "model").config.head == head
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["language_model"]["teacher"] == str(teacher)
    (tmp_path / "again").mkdir()
    train(run, tmp_path / "again")
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_calm_model_teaches_another(language_model, tmp_path):
    train(load_config(str(language_model), ["language_model.head=chain", "train.steps=5"]), tmp_path / "chain")
    settings = [f"language_model.teacher={tmp_path / 'chain' / 'model'}", "language_model.teacher_stride=2"]
    train(load_config(str(language_model), [*settings, "train.steps=5"]), tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 5


def test_teachers_that_do_not_fit(language_model, teacher, softmax, tmp_path):
    def attempt(*settings: str) -> None:
        train(load_config(str(language_model), list(settings)), tmp_path / "run")

    with pytest.raises(UserError, match="is not a model directory"):
        attempt(f"language_model.teacher={tmp_path / 'nothing'}")
    with pytest.raises(DataError, match="has no tokenizer.json"):
        attempt(f"language_model.teacher={softmax}")
    with pytest.raises(ConfigError, match="num_teacher_samples: input should be greater than or equal to 1, not 0"):
        attempt(f"language_model.teacher={teacher}", "language_model.num_teacher_samples=0")
    made = Teacher(teacher, 4, 1, 1, EOS, PAD)
    with pytest.raises(ConfigError, match="tokens of a row that the teacher reads exceed"):
        made.prepare(ALONE, 10**6)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert load_tokenizer(str(teacher)).eos_token_id == EOS


def test_a_teacher_with_other_chunks(language_model, tmp_path):
    train(load_config(str(language_model), ["train.steps=2"]), tmp_path / "calm")
    with pytest.raises(
        ConfigError, match="has chunks of 4 tokens; use a Transformer, or a CALM model with chunks of 2"
    ):
        Teacher(tmp_path / "calm" / "model", 2, 1, 1, EOS, PAD)
