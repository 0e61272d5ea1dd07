"""How large the experiments are: seconds, hours on two cores, a day, or the paper's own size on a cluster.

A scale says which recipes stand for the paper's models, on which text, and how much of it is scored. Everything else is
the same at every scale. The embedded text is cut into letters and their most frequent pairs, where small models soon
have a BrierLM: orderings can be seen only where scores are above 0.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calm.data.workers import PrepareOptions
from calm.errors import UserError, did_you_mean
from calm.paper.runs import STEPS, Run

CHUNK_SIZES = (1, 2, 4, 8)
USUAL_CHUNK_SIZE = 4
EMBEDDED = PrepareOptions("bpe:280", validation_share=0.05, test_share=0.05)


@dataclass(frozen=True)
class Scale:
    name: str
    about: str
    prepared: Path | None  # where the user has put the text; None: the embedded one, which is prepared on the way
    preparation: str  # the command for it
    autoencoders: dict[int, Run]  # by K
    calms: dict[str, Run]  # by size; "base" is that of the ablations
    transformers: dict[str, Run]
    moments: tuple[float, ...]  # of training, as shares of its steps, where curves are measured
    seeds: tuple[int, ...] = (0,)  # of every run
    repeats: tuple[int, ...] = ()  # seeds of the base run alone, which show how far trainings lie apart by chance
    chunk_size: int = USUAL_CHUNK_SIZE
    split: str = "test"
    samples: int = 16  # at each position
    context: int | None = None  # tokens
    most_tokens: int | None = None  # of the text
    positions: int = 400  # of the accuracy-diversity plane
    candidates: tuple[int, ...] = (1, 10, 20, 50, 100, 200, 500, 1000)

    @property
    def has_other_chunks(self) -> bool:
        return self.chunk_size != USUAL_CHUNK_SIZE

    @property
    def directory(self) -> str:
        return f"{self.name}-k{self.chunk_size}" if self.has_other_chunks else self.name

    def autoencoder(self, changes: dict[str, Any] | None = None, chunk_size: int | None = None) -> Run:
        return self.autoencoders[chunk_size or self.chunk_size].but(changes or {})

    def calm(self, changes: dict[str, Any] | None = None, *, size: str = "base", autoencoder: Run | None = None) -> Run:
        """A language model on the scale's own autoencoder, or on another."""
        below = autoencoder or self.autoencoder()
        chunk_size = below.plain.data.chunk_size
        shape = {f"autoencoder.{name}": getattr(below.plain.autoencoder, name) for name in SHAPE}
        run = Run(self.calms[size].recipe, self.calms[size].settings, below)
        length = run.plain.data.sequence_length * chunk_size // run.plain.data.chunk_size  # as many chunks
        rows = (
            run.plain.data.batch_size * self.chunk_size // chunk_size
        )  # and as many tokens as the scale's own K reads
        kept = {"data.chunk_size": chunk_size, "data.sequence_length": length, "data.batch_size": max(1, rows)}
        return run.but(kept | shape | (changes or {}))

    def transformer(self, size: str = "base") -> Run:
        return self.transformers[size]

    def along(self, run: Run) -> list[tuple[int, Run]]:
        """The run at several moments of its training, with the steps of each."""
        return [((until := run.until(share)).steps, until) for share in self.moments]


SHAPE = ("latent_size", "hidden_size", "intermediate_size", "num_encoder_layers", "num_decoder_layers")


def _backbone(layers: int, width: int, heads: int = 4) -> dict[str, Any]:
    inner = -(-width * 8 // 3 // 16) * 16
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    shape["num_attention_heads"] = heads
    return {f"language_model.backbone.{name}": value for name, value in shape.items()}


def _embedded(name: str, about: str, sizes: dict[str, dict[str, Any]], changes: dict[str, Any], **more: Any) -> Scale:
    """A scale on the embedded text, by the recipes for characters; `changes` are those of all three."""
    autoencoders = {
        k: Run("characters-autoencoder").but({"data.chunk_size": k, "autoencoder.latent_size": 8 * k, **changes})
        for k in CHUNK_SIZES
    }
    calm, transformer = (Run(f"characters-{kind}").but(changes) for kind in ("calm", "transformer"))
    calms = {size: calm.but(shape) for size, shape in sizes.items()}
    transformers = {size: transformer.but(shape) for size, shape in sizes.items()}
    return Scale(name, about, None, "", autoencoders, calms, transformers, context=128, **more)


_SMALL = {"S": _backbone(1, 32), "M": _backbone(1, 48), "L": _backbone(2, 48), "XL": _backbone(2, 64)}
TOY = _embedded(
    "toy",
    "minutes on two cores: to see that everything runs; the numbers mean nothing",
    {"base": _SMALL["S"], **_SMALL},
    {STEPS: 20, "optimizer.warmup_steps": 5, "autoencoder.hidden_size": 32, "autoencoder.intermediate_size": 64},
    moments=(0.25, 0.5, 1.0),
    samples=4,
    most_tokens=3_000,
    positions=40,
    candidates=(1, 10, 20),
    repeats=(0, 1, 2),
)
_MIDDLE = {"S": _backbone(2, 128), "M": _backbone(4, 192), "L": _backbone(4, 256), "XL": _backbone(6, 384, 6)}
LAPTOP = _embedded(
    "laptop",
    "hours on two cores: about six minutes of one core a run, on text in letters",
    {"base": _MIDDLE["L"], **_MIDDLE},
    {},
    moments=(0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
    most_tokens=40_000,
    positions=2_000,
    repeats=(0, 1, 2, 3),
)


def _recipes(prefix: str, sizes: tuple[str, ...]) -> dict[str, Run]:
    return {size.upper(): Run(f"{prefix}-{size}") for size in sizes}


ENWIK8 = Scale(
    "enwik8",
    "days on two cores: text of Wikipedia, an hour a run",
    Path("data/enwik8"),
    "calm prepare enwik8.train.jsonl.gz --tokenizer bpe:8192 --validation-share 0.02 --test-share 0.02 "
    "--output data/enwik8",
    {k: Run("enwik8-autoencoder").but({"data.chunk_size": k, "autoencoder.latent_size": 16 * k}) for k in CHUNK_SIZES},
    {
        "base": Run("enwik8-calm"),
        "M": Run("enwik8-calm").but(_backbone(4, 256)),
        "L": Run("enwik8-calm"),
        "XL": Run("enwik8-calm").but(_backbone(8, 512, 8)),
    },
    {
        "base": Run("enwik8-transformer"),
        "S": Run("enwik8-transformer").but(_backbone(4, 192)),
        "M": Run("enwik8-transformer").but(_backbone(4, 256)),
        "L": Run("enwik8-transformer"),
    },
    moments=(0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
)
PAPER = Scale(
    "paper",
    "the paper's sizes, text and steps: for a cluster (torchrun ... -m calm reproduce)",
    Path("data/pile"),
    "calm prepare 'pile/*.jsonl.zst' --tokenizer tokenizer.model --validation-share 0.0001 --test-share 0.0001 "
    "--output data/pile",
    {k: Run(f"paper-autoencoder-k{k}") for k in CHUNK_SIZES},
    {"base": Run("paper-ablation"), **_recipes("paper-calm", ("s", "m", "l", "xl"))},
    {"base": Run("paper-transformer-s"), **_recipes("paper-transformer", ("s", "m", "l"))},
    moments=(0.1, 0.25, 0.5, 0.75, 1.0),
    samples=4,
)
SCALES = {scale.name: scale for scale in (TOY, LAPTOP, ENWIK8, PAPER)}


def scale_of(name: str, chunk_size: int = USUAL_CHUNK_SIZE) -> Scale:
    if name not in SCALES:
        raise UserError(f"no scale {name!r}: there are {', '.join(SCALES)}{did_you_mean(name, list(SCALES))}")
    if chunk_size not in CHUNK_SIZES:
        raise UserError(f"--chunk-size must be one of {', '.join(map(str, CHUNK_SIZES))}, not {chunk_size}")
    return replace(SCALES[name], chunk_size=chunk_size)
