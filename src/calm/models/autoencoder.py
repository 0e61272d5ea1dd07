"""The autoencoder of §2 as it is trained: the codec with its loss, as a model of transformers.

Robustness (§2.2), each a field: the variational posterior, the KL's weight and floor, token and latent dropout.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from calm.models.codec import Codec
from calm.models.configuration import ChunkAutoencoderConfig
from calm.models.posterior import drop, floored_kl
from calm.noise import RowNoise
from calm.scores.vocabulary import vocabulary_cross_entropy


@dataclass
class AutoencoderOutput(ModelOutput):
    loss: Tensor | None = None  # reconstruction + kl_weight · KL
    reconstruction: Tensor | None = None  # nats a chunk
    kl: Tensor | None = None  # nats a chunk, floored


def count_chunks(input_ids: Tensor, attention_mask: Tensor | None, chunk_size: int) -> Tensor:
    """1 for each chunk that holds a real token, else 0: (B, L)."""
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return real.unflatten(1, (-1, chunk_size)).any(-1).float()


class ChunkAutoencoder(Codec, PreTrainedModel):
    config_class = ChunkAutoencoderConfig
    config: ChunkAutoencoderConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True  # it has none
    entered_by = ("encode", "decode", "tokens", "reconstruct")  # methods that need whole parameters under FSDP

    def __init__(self, config: ChunkAutoencoderConfig):
        super().__init__(config)
        self.add_parts()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    def sharded_parts(self) -> list[nn.Module]:
        """Groups of their own under FSDP; the embedding, used at both ends, stays with the root."""
        return [self.encoder, self.decoder]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        noise: RowNoise | None = None,
        candidates: Tensor | None = None,
        num_chunks: float | None = None,
    ) -> AutoencoderOutput:
        """The loss of §2 on rows of whole chunks (B, T). Chunks without a real token do not count.

        `candidates` limits the softmax to some words (see scores.vocabulary). The mean is over `num_chunks`, by
        default those of this batch; a batch that is computed in parts gives the number of all its chunks.
        In eval mode nothing is dropped.
        """
        config = self.config
        noise = noise or RowNoise.fresh(len(input_ids), input_ids.device)
        chunks = input_ids.unflatten(1, (-1, config.chunk_size))  # (B, L, K)
        length = chunks.shape[1]
        counted = count_chunks(input_ids, attention_mask, config.chunk_size)  # (B, L)

        shown = chunks
        if self.training and config.token_dropout:
            dropped = noise.uniform(length, config.chunk_size) < config.token_dropout
            shown = chunks.masked_fill(dropped, config.mask_token_id)
        posterior = self.encode(shown)
        latents = posterior.mean
        if config.variational:
            latents = posterior.sample(noise.normal(length, config.latent_size, dtype=latents.dtype))
        if self.training and config.latent_dropout:
            latents = drop(latents, noise.uniform(length, config.latent_size), config.latent_dropout)

        states = self.decoder(latents).flatten(0, 2)  # (B·L·K, d)
        counted = counted / (num_chunks or counted.sum().clamp(min=1))
        weights = counted.flatten().repeat_interleave(config.chunk_size)
        reconstruction = vocabulary_cross_entropy(states, self.embedding.weight, chunks.flatten(), weights, candidates)
        kl = reconstruction.new_zeros(())
        if config.variational:
            kl = (floored_kl(posterior.float(), config.kl_floor) * counted).sum()
        return AutoencoderOutput(reconstruction + config.kl_weight * kl, reconstruction, kl)


# Last: with the Auto classes our other models are imported, too (see calm/_auto.py), and they need this one.
from transformers import AutoModel  # noqa: E402

AutoModel.register(ChunkAutoencoderConfig, ChunkAutoencoder)
