"""`calm evaluate`: measures of a saved model on prepared data, as numbers and as a picture."""

from pathlib import Path
from typing import Any

import torch

from calm.data.chunks import ChunkedStream
from calm.data.loader import evaluation_batches
from calm.data.shards import PreparedData
from calm.data.tokenizer import load_tokenizer
from calm.errors import DataError
from calm.evaluate.reconstruction import evaluate_reconstruction
from calm.models.loading import load_autoencoder


def evaluate_autoencoder(
    directory: Path, data: Path, split: str = "validation", batch_size: int = 32
) -> dict[str, Any]:
    """Reconstruction on one split of prepared data."""
    model = load_autoencoder(directory)
    prepared = PreparedData(data)
    if load_tokenizer(str(directory)).sha256 != prepared.tokenizer.sha256:
        raise DataError(f"{data} was prepared with another tokenizer than that of the model in {directory}")
    chunk_size = model.config.chunk_size
    stream = ChunkedStream(prepared.split(split), chunk_size, 64 * chunk_size, prepared.tokenizer.fill_id)
    if torch.cuda.is_available():
        model.cuda()  # pyright: ignore[reportCallIssue]
    measures = evaluate_reconstruction(model, evaluation_batches(stream, batch_size))
    return {"model": str(directory), "data": str(data), "split": split, "chunk_size": chunk_size, **measures}


def plot_robustness(measures: dict[str, Any], path: Path) -> None:
    """Accuracy under noise beyond the posterior's own."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = measures["robustness"]
    scales = [point["extra_noise"] for point in points]
    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    axis.plot(scales, [100 * p["token_accuracy"] for p in points], marker="o", label="tokens")
    axis.plot(
        scales, [100 * p["chunk_accuracy"] for p in points], marker="s", label=f"chunks of {measures['chunk_size']}"
    )
    axis.axvline(measures["mean_sigma"], color="grey", linestyle=":", label="mean sigma of the posterior")
    axis.set_xlabel("standard deviation of extra noise on a posterior sample")
    axis.set_ylabel("reconstructed (%)")
    axis.set_ylim(0, 102)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
