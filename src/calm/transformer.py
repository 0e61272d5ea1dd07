"""The baseline: a standard Transformer that predicts one token at a time, behind the same contract as a CALM model.

Its directory is one of transformers' `LlamaForCausalLM`: the weights have the same names.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from calm.autoencoder import VocabularyProjection
from calm.heads.softmax import SoftmaxHead
from calm.llama import Llama, LlamaConfig
from calm.noise import RowNoise
from calm.scores.vocabulary import VocabularySubset


class Transformer(nn.Module):
    """A Llama with a token embedding and an output projection.

    Args:
        config: a `LlamaConfig`.

    Example:
        >>> loss = model(tokens[..., None])["loss"]                   # tokens (B, T); a chunk has one token
        >>> logits = model.logits(tokens)                             # (B, T, V)
    """

    chunk_size = 1
    front_padding = True
    fsdp_methods = ("logits",)  # called from outside of `forward`

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.model = Llama(config)
        self.model.add_module("embed_tokens", nn.Embedding(config.vocab_size, config.hidden_size))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.project = VocabularyProjection()
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in (self.embedding, self.lm_head):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        self.model.reset_parameters()

    @property
    def embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.model.embed_tokens)

    @property
    def backbone(self) -> Llama:
        return self.model

    @property
    def head(self) -> SoftmaxHead:
        return SoftmaxHead(self.lm_head, matmul=self.project.forward)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def embed(self, chunks: Tensor) -> Tensor:
        return self.embedding(chunks[..., 0])

    def logits(self, tokens: Tensor) -> Tensor:
        """Ids (B, T) → (B, T, V)."""
        return self.lm_head(self.backbone(self.embed(tokens[..., None])))

    def forward(
        self,
        chunks: Tensor,
        loss_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        noise: RowNoise | None = None,
        vocabulary: VocabularySubset | None = None,
        num_chunks: float | Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Cross-entropy per token of all but the first; see `Calm.forward`."""
        counted = torch.ones(chunks.shape[:2], device=chunks.device) if loss_mask is None else loss_mask.float()
        counted = counted[:, 1:]
        attended = None if attention_mask is None else attention_mask[:, :-1]
        hidden = self.backbone(self.embed(chunks[:, :-1]), mask=attended)
        loss = self.head.loss(hidden, chunks[:, 1:], mask=counted, vocabulary=vocabulary)
        if num_chunks is not None:
            loss = loss * counted.sum() / num_chunks
        return {"loss": loss}

    def config_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return {"architectures": ["LlamaForCausalLM"], **self.config.to_dict()}

    def fsdp_units(self) -> list[tuple[nn.Module, bool]]:
        """See `Calm.fsdp_units`. The root, which is not resharded, holds `lm_head`, and the embedding if it is tied."""
        embedding = [] if self.config.tie_word_embeddings else [(self.embedding, True)]
        return [*embedding, *((layer, True) for layer in self.model.layers)]

    def fsdp_replicated(self) -> list[nn.Module]:
        return []

    def compile_units(self) -> list[nn.Module]:
        return list(self.model.layers)

    def quantizable(self) -> list[nn.Module]:
        return [self.model]
