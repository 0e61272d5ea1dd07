"""`calm evaluate`: measures of a saved model on prepared data, as numbers and as a picture."""

from pathlib import Path
from typing import Any

import torch

from calm.data.chunks import ChunkedStream
from calm.data.loader import evaluation_batches
from calm.data.shards import PreparedData
from calm.data.tokenizer import load_tokenizer
from calm.errors import DataError, UserError
from calm.evaluate.reconstruction import evaluate_reconstruction
from calm.models.autoencoder import ChunkAutoencoder


def load_autoencoder(directory: Path) -> ChunkAutoencoder:
    """A saved autoencoder; what is wrong with it is said in one sentence."""
    if not (directory / "config.json").exists():
        hint = f"; its model is in {directory / 'model'}" if (directory / "model" / "config.json").exists() else ""
        raise UserError(f"{directory} is not a model directory (no config.json in it){hint}")
    try:
        loaded: Any = ChunkAutoencoder.from_pretrained(directory, output_loading_info=True)
    except Exception as error:  # transformers and safetensors raise many kinds for a broken directory
        raise UserError(f"the model in {directory} cannot be read: {str(error).splitlines()[0]}") from error
    model, found = loaded
    if wrong := [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in found[kind]]:
        raise UserError(f"the weights in {directory} do not fit their config.json: {', '.join(map(str, wrong[:3]))}")
    return model


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
