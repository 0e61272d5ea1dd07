"""The head contract: a head turns the backbone's hidden state into a loss in training, and into draws in generation.

Code outside `heads/` does not depend on the type of head. A new head is one file with a subclass of `Head` (or, if it
draws latent vectors, of `VectorHead`) and one line in `HEADS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from calm.autoencoder import Autoencoder, Posterior
from calm.errors import UserError
from calm.noise import NoiseSource, RowNoise
from calm.scores.likelihood import mixture_cross_entropy
from calm.scores.vocabulary import VocabularySubset, token_losses

NORM_EPS = 1e-6
FORWARD_AND_BACKWARD = 3  # a backward pass costs two forward passes
LATENT_ELEMENTS = 2**22  # numbers of a row that a likelihood bound holds at once


class HeadConfig(BaseModel):
    """Fields that a head adds to a recipe and to config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class HeadCost(NamedTuple):
    """FLOPs per chunk and parameters of a head, by part of the model."""

    parameters: dict[str, int]
    training: dict[str, float]  # forward and backward
    generation: dict[str, float]  # one chunk at temperature 1
    candidate: dict[str, float]  # each further candidate at a lower temperature; empty if it needs none


class Proposals(ABC):
    """n draws of the next chunk at each position, decoded lazily."""

    lazy: bool  # whether it pays to find only the tokens that are needed

    @abstractmethod
    def finite(self) -> Tensor:
        """Whether the model's output is finite at each position (...); if not, the tokens are meaningless."""

    @abstractmethod
    def tokens(self) -> Tensor:
        """All tokens: (n, ..., K)."""

    @abstractmethod
    def tokens_at(self, draws: Tensor, rows: Tensor, first: int, last: int) -> Tensor:
        """Tokens `first` to before `last` of some draws (m,) at some positions (m,): (m, last - first)."""

    @abstractmethod
    def log_probs(self, prefix: Tensor) -> Tensor:
        """Log-probabilities of the next token under each draw, given the chunk's first tokens (..., k).

        (n, ..., V), or (1, ..., V) if they are the same for every draw.
        """

    @abstractmethod
    def latents(self) -> Tensor:
        """Latent vectors of the draws: (n, ..., Z)."""


class TokenProposals(Proposals):
    """Draws of a head with token probabilities, made when the first of them is asked for."""

    lazy = False

    def __init__(self, head: Any, hidden: Tensor, num_samples: int, noise: NoiseSource):
        self.head, self.hidden, self.num_samples, self.noise = head, hidden, num_samples, noise

    @abstractmethod
    def draw(self) -> Tensor:
        """Draw the tokens: (n, ..., K)."""

    def finite(self) -> Tensor:
        return self.hidden.isfinite().all(-1)

    @cached_property
    def _tokens(self) -> Tensor:
        return self.draw()

    def tokens(self) -> Tensor:
        return self._tokens

    def tokens_at(self, draws: Tensor, rows: Tensor, first: int, last: int) -> Tensor:
        return self._tokens[draws, rows, first:last]


class Head(nn.Module, ABC):
    """What a model asks of its head.

    Args:
        config: the model's config, which holds the fields of `Config`.
        autoencoder: the frozen autoencoder. The model owns it; the head only refers to it.
    """

    Config: ClassVar[type[HeadConfig]] = HeadConfig
    exact_likelihood: ClassVar[bool]  # whether it has token probabilities of its own
    vocabulary_loss: ClassVar[bool] = False  # whether its training loss sums over the vocabulary
    methods: ClassVar[tuple[str, ...]]  # sampling methods that it supports
    unsupported_reason: ClassVar[str] = ""  # why it does not support the others
    fsdp_methods = ("loss", "propose", "cross_entropy")  # called from outside: they gather its parameters under FSDP
    autoencoder: Any

    def __init__(self, config: Any, autoencoder: Autoencoder | None):
        super().__init__()
        self.chunk_size: int = config.chunk_size
        self.vocab_size: int = config.vocab_size
        object.__setattr__(self, "autoencoder", autoencoder)  # not registered: its weights are the model's

    @abstractmethod
    def reset_parameters(self) -> None:
        """Initialise the weights."""

    @abstractmethod
    def loss(
        self,
        hidden: Tensor,
        chunks: Tensor,
        *,
        mask: Tensor | None = None,
        noise: NoiseSource = None,
        vocabulary: VocabularySubset | None = None,
    ) -> Tensor:
        """Training loss, a mean over positions.

        Args:
            hidden: hidden states (B, L, H).
            chunks: the chunk that follows each of them, ids (B, L, K).
            mask: positions that count (B, L).
            noise: source of randomness.
            vocabulary: tokens to estimate softmaxes from, for heads with token probabilities.
        """

    def samples_loss(
        self,
        hidden: Tensor,
        samples: Tensor,
        *,
        mask: Tensor | None = None,
        noise: NoiseSource = None,
        vocabulary: VocabularySubset | None = None,
    ) -> Tensor:
        """The same for M samples of the next chunk instead of one: ids (M, B, L, K)."""
        losses = [self.loss(hidden, chunks, mask=mask, noise=noise, vocabulary=vocabulary) for chunks in samples]
        return torch.stack(losses).mean()

    @abstractmethod
    def propose(self, hidden: Tensor, num_samples: int, noise: NoiseSource = None) -> Proposals:
        """Independent draws of the next chunk for hidden states (..., H)."""

    @abstractmethod
    def cross_entropy(self, hidden: Tensor, chunks: Tensor, num_latents: int, noise: RowNoise) -> Tensor:
        """Nats per token of chunks (B, L, K) given hidden states (B, L, H); a bound, unless `exact_likelihood`."""

    def default_method(self, tempered: bool, truncated: bool) -> str:
        """The default sampling method.

        Args:
            tempered: the temperature is not 1.
            truncated: top_k, top_p, or min_p is set.
        """
        return "token"

    def initialize_from(self, autoencoder: Autoencoder) -> None:
        """Called when the model receives a trained autoencoder."""

    @abstractmethod
    def cost(self, subset_share: float = 1.0) -> HeadCost:
        """FLOPs and parameters; `subset_share` is the share of the vocabulary that the training loss sums over."""

    @abstractmethod
    def activation_size(self) -> float:
        """Activations per position that are kept for the backward pass, in elements."""

    def compile_units(self) -> list[nn.Module]:
        """Modules that `train.compile` compiles, each by itself."""
        return []

    def quantizable(self) -> list[nn.Module]:
        """Modules whose linear layers may be quantized."""
        return [self]

    @abstractmethod
    def streamed_weights(self) -> list[Tensor]:
        """Matrices that drawing one chunk reads from memory, each as often as it is read."""


class VectorHead(Head):
    """A head that draws latent vectors of the frozen autoencoder (§3.2): likelihood-free.

    Subclasses define `sample`, `latent_loss`, `reset_parameters`, and what these cost: `sample_flops` and
    `activation_size`.
    """

    exact_likelihood = False
    methods = ("token", "batch", "exact", "mixture", "noise")
    autoencoder: Autoencoder

    def __init__(self, config: Any, autoencoder: Autoencoder | None):
        super().__init__(config, autoencoder)
        self.latent_size = config.latent_size

    @abstractmethod
    def sample(self, hidden: Tensor, num_samples: int = 1, generator: NoiseSource = None) -> Tensor:
        """Samples of the next latent: (..., H) → (N, ..., Z)."""

    @abstractmethod
    def latent_loss(
        self, hidden: Tensor, posterior: Posterior, mask: Tensor | None = None, generator: NoiseSource = None
    ) -> Tensor:
        """Loss of hidden states (..., H) against the posterior of the next latent (..., Z), a mean over positions."""

    def loss(
        self,
        hidden: Tensor,
        chunks: Tensor,
        *,
        mask: Tensor | None = None,
        noise: NoiseSource = None,
        vocabulary: VocabularySubset | None = None,
    ) -> Tensor:
        with torch.no_grad():
            posterior = self.autoencoder.encode(chunks)
        return self.latent_loss(hidden, posterior, mask, noise)

    def propose(self, hidden: Tensor, num_samples: int, noise: NoiseSource = None) -> "LatentProposals":
        return LatentProposals(self.autoencoder, self.sample(hidden, num_samples, noise))

    def cross_entropy(self, hidden: Tensor, chunks: Tensor, num_latents: int, noise: RowNoise) -> Tensor:
        """An upper bound: the mixture of the decoder's softmaxes over `num_latents` samples."""

        def draw(count: int) -> Tensor:
            return self.autoencoder.decoder(self.propose(hidden, count, noise).latents())

        return mixture_bound(draw, self.autoencoder.embedding.weight, chunks, num_latents)

    @abstractmethod
    def sample_flops(self) -> tuple[float, float, float]:
        """FLOPs per position of training (forward and backward), of a first sample, and of each further one."""

    def cost(self, subset_share: float = 1.0) -> HeadCost:
        training, first, more = self.sample_flops()
        encoder, decoder, projection = self.autoencoder.flops()
        decoding = {"autoencoder": decoder, "vocabulary projection": projection}
        return HeadCost(
            parameters={"head": count_parameters(self)},
            training={"head": training, "autoencoder": encoder},
            generation={"head": first, **decoding},
            candidate={"head": more, **decoding},
        )

    def streamed_weights(self) -> list[Tensor]:
        parts = (self, self.autoencoder.decoder, self.autoencoder.nearest)
        matrices = [p for part in parts for p in part.parameters() if p.ndim > 1]
        return [*matrices, self.autoencoder.nearest.streamed(self.autoencoder.embedding.weight)]


class LatentProposals(Proposals):
    """Latent vectors (n, ..., Z), decoded position by position on a CPU, all at once on a GPU."""

    def __init__(self, autoencoder: Autoencoder, latents: Tensor):
        self.autoencoder, self._latents = autoencoder, latents
        self.lazy = latents.device.type == "cpu"

    def finite(self) -> Tensor:
        return self._latents.isfinite().all(-1).all(0)

    @cached_property
    def _states(self) -> Tensor:
        return self.autoencoder.decoder.chunk_states(self._latents)  # (n, ..., d)

    def latents(self) -> Tensor:
        return self._latents

    def tokens(self) -> Tensor:
        return self.autoencoder.tokens(self._latents)

    def tokens_at(self, draws: Tensor, rows: Tensor, first: int, last: int) -> Tensor:
        states = self.autoencoder.decoder.token_states(self._states[draws, rows], first, last)
        return self.autoencoder.tokens_of(states)

    def log_probs(self, prefix: Tensor) -> Tensor:
        position = prefix.shape[-1]
        states = self.autoencoder.decoder.token_states(self._states, position, position + 1)[..., 0, :]
        return self.autoencoder.logits(states).float().log_softmax(-1)


def mixture_bound(draw: Callable[[int], Tensor], vocabulary: Tensor, chunks: Tensor, num_latents: int) -> Tensor:
    """Cross-entropy per token of chunks (B, L, K) under the mean of the softmaxes of some draws: an upper bound.

    `draw(n)` returns the token states of n draws (n, B, L, K, d).
    """
    at_once, losses = max(1, LATENT_ELEMENTS // (chunks[0].numel() * vocabulary.shape[1])), []
    for first in range(0, num_latents, at_once):
        states = draw(min(at_once, num_latents - first))
        targets = chunks.expand(len(states), *chunks.shape)
        losses.append(token_losses(states.flatten(0, -2), vocabulary, targets.flatten())[1].view(targets.shape))
    return mixture_cross_entropy(torch.cat(losses))


def check_finite(proposals: Proposals) -> Proposals:
    """Raise UserError if a model's output is not finite; synchronizes with a GPU."""
    if not bool(proposals.finite().all()):
        raise UserError("the model's output is not finite (NaN or inf): check its weights, or try --dtype fp32")
    return proposals


def masked_mean(losses: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of losses (..., L) over positions whose mask is 1; the others may hold anything, NaN included."""
    if mask is None:
        return losses.mean()
    return torch.where(mask > 0, losses, 0.0).sum() / mask.sum().clamp(min=1)


def xavier_init(module: nn.Module) -> None:
    """Xavier-uniform weights and zero biases, so that small and large heads start alike."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.LayerNorm | nn.RMSNorm) and part.elementwise_affine:
            nn.init.ones_(part.weight)
            if getattr(part, "bias", None) is not None:
                nn.init.zeros_(part.bias)  # pyright: ignore[reportArgumentType]


def zero_init(linear: nn.Linear) -> None:
    """Zero weights and biases: the layer starts without any effect."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)


def count_parameters(*modules: nn.Module) -> int:
    """The number of elements of all parameters."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
