"""Reconstruction accuracy of an autoencoder (§2): from the posterior mean, under its own noise, and under more."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calm.autoencoder import Autoencoder
from calm.checkpoint import load_autoencoder
from calm.data.chunks import ChunkedStream
from calm.data.loader import Batch, evaluation_batches
from calm.data.shards import PreparedData
from calm.data.tokenizer import load_tokenizer
from calm.distributed import move_model, resolve_device
from calm.errors import DataError
from calm.evaluate.health import evaluating, on_device
from calm.noise import RowNoise
from calm.seeds import row_seeds

COLLAPSED = 0.01  # nats: KL below which a dimension carries no information
EXTRA_NOISE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def evaluate_reconstruction(
    model: Autoencoder,
    batches: Iterable[Batch],
    *,
    extra_noise: tuple[float, ...] = EXTRA_NOISE,
    seed: int = 0,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> dict[str, Any]:
    """Accuracies in [0, 1], mean sigma, collapsed dimensions, and bits per chunk.

    `reduce` sums tensors over processes. The noise of a row depends on `seed` and the row's number alone.
    """
    names = ["mean", "sample", *(f"extra {scale}" for scale in extra_noise)]
    right = {name: torch.zeros(2, dtype=torch.float64) for name in names}  # tokens, chunks
    totals = torch.zeros(4, dtype=torch.float64)  # tokens, chunks, sum of std, nats of tokens
    kl = torch.zeros(model.config.latent_size, dtype=torch.float64)
    with evaluating(model):
        for batch in batches:
            rows = on_device(batch, model.embedding.weight.device)
            chunks, real = (part.unflatten(1, (-1, model.config.chunk_size)) for part in rows)  # (B, L, K)
            real[torch.from_numpy(batch.rows > 0), 0] = False  # a row starts with the last chunk of the one before it
            counted = real.any(-1)  # (B, L)
            noise = RowNoise(row_seeds(batch.rows, seed), chunks.device)
            posterior = model.encode(chunks).float()
            draw = (chunks.shape[1], model.config.latent_size)
            sample = posterior.sample(noise.normal(*draw))
            latents = {"mean": posterior.mean, "sample": sample}
            for scale in extra_noise:
                latents[f"extra {scale}"] = sample + scale * noise.normal(*draw)
            for name, latent in latents.items():
                ids, nats = model.reconstruct(latent.to(model.embedding.weight.dtype), chunks)
                hits = (ids == chunks) | ~real
                whole = hits.all(-1) & counted
                right[name] += torch.stack([(hits & real).sum(), whole.sum()]).cpu()
                if name == "sample":
                    totals[3] += (nats * counted[..., None]).sum().cpu()
            totals[:3] += torch.stack([real.sum(), counted.sum(), posterior.std[counted].sum()]).cpu()
            if model.config.variational:
                kl += posterior.kl()[counted].sum(0).cpu()
    right = {name: reduce(sums) for name, sums in right.items()}
    totals, kl = reduce(totals), reduce(kl)
    tokens, chunks, std, nats = totals.tolist()
    accuracy = {name: (sums / totals[:2].clamp(min=1)).tolist() for name, sums in right.items()}
    chunks = max(chunks, 1.0)
    return {
        "tokens": int(tokens),
        "chunks": int(chunks),
        "token_accuracy": accuracy["sample"][0],
        "chunk_accuracy": accuracy["sample"][1],
        "token_accuracy_from_mean": accuracy["mean"][0],
        "chunk_accuracy_from_mean": accuracy["mean"][1],
        "mean_sigma": std / chunks / model.config.latent_size,
        "collapsed_dimensions": int((kl / chunks < COLLAPSED).sum()) if model.config.variational else 0,
        "latent_size": model.config.latent_size,
        "kl_bits_per_chunk": kl.sum().item() / chunks / math.log(2) if model.config.variational else None,
        "reconstruction_bits_per_chunk": nats / chunks / math.log(2),
        "robustness": [
            {"extra_noise": scale, "token_accuracy": accuracy[name][0], "chunk_accuracy": accuracy[name][1]}
            for scale, name in zip((0.0, *extra_noise), names[1:], strict=True)
        ],
    }


def evaluate_autoencoder(
    directory: Path,
    data: Path,
    split: str = "validation",
    batch_size: int = 32,
    device: str = "auto",
    dtype: str = "auto",
) -> dict[str, Any]:
    """`calm evaluate` for a saved autoencoder: reconstruction on one split of prepared data."""
    model = load_autoencoder(directory)
    prepared = PreparedData(data)
    if load_tokenizer(str(directory)).sha256 != prepared.tokenizer.sha256:
        raise DataError(f"{data} was prepared with another tokenizer than the model in {directory}")
    chunk_size = model.config.chunk_size
    stream = ChunkedStream(prepared.split(split), chunk_size, 64 * chunk_size, prepared.tokenizer.pad_token_id)
    metrics = evaluate_reconstruction(
        move_model(model, resolve_device(device), dtype), evaluation_batches(stream, batch_size)
    )
    return {"model": str(directory), "data": str(data), "split": split, "chunk_size": chunk_size, **metrics}
