import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from calm.data.prepare import prepare
from calm.data.workers import PrepareOptions

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel and start processes
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a network
settings.register_profile("calm", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("calm")

BACKBONE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared() -> Path:
    if not SHARED.exists():
        pytest.skip("../shared is not here")
    return SHARED


@pytest.fixture
def compiler() -> None:
    from calm.cpu import native  # imports torch, which reads OMP_NUM_THREADS once

    if native.library() is None:
        pytest.skip("no C compiler")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Forty documents of different lengths, some with non-ASCII characters."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dogs",
        "—",
        "naïve",
        "café",
        "漢字",
        "🙂",
        "and",
        "again",
    ]
    return [" ".join(words[(i * 7 + j * 3) % len(words)] for j in range(5 + i * 11 % 90)) for i in range(40)]


@pytest.fixture(scope="session")
def jsonl(texts, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "meta": {"n": 1}}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def prepared(jsonl, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "data"
    options = PrepareOptions("bpe:400", validation_share=0.2, test_share=0.1, shard_tokens=300)
    prepare([str(jsonl)], output, options, workers=1)
    return output


@pytest.fixture
def calm():
    """Run the command line in a subprocess."""

    def run(*arguments: object, **kwargs) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "calm", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, **{"timeout": 300, **kwargs})

    return run


@pytest.fixture(scope="session")
def models(prepared, tmp_path_factory) -> Path:
    """A directory of saved models with random weights: calm-1 to calm-4, softmax (a Transformer), and autoencoder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from calm.checkpoint import save_model
    from calm.data.shards import PreparedData
    from calm.hf import CalmConfig, CalmForCausalLM

    directory = tmp_path_factory.mktemp("models")
    tokenizer = PreparedData(prepared).tokenizer
    autoencoder = {"vocab_size": tokenizer.vocab_size, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    for chunk_size in (1, 2, 3, 4):
        torch.manual_seed(chunk_size)
        config = CalmConfig(
            {**BACKBONE, "initializer_range": 0.5}, {**autoencoder, "chunk_size": chunk_size, "initializer_range": 0.5}
        )
        model = CalmForCausalLM(config)
        torch.nn.init.normal_(model.head.latent.weight)  # it is initialized to 0: the samples would not differ
        model.save_pretrained(directory / f"calm-{chunk_size}")
    save_model(model.autoencoder, directory / "autoencoder")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, **{**BACKBONE, "max_position_embeddings": 128})
    LlamaForCausalLM(config).save_pretrained(directory / "softmax")
    for path in directory.iterdir():
        tokenizer.save(path)
    return directory
