"""The continuous language model of §3 as it is trained: the network on a backbone of transformers, with its loss.

    chunks (B, L, K) ─► chunk embedding ─► backbone ─► hidden (B, L, H) ─► head ─► latent of the next chunk ─► tokens

Position i predicts chunk i + 1. The autoencoder inside is frozen and in eval mode, whatever happens around it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from calm.errors import ConfigError
from calm.files import write_atomic
from calm.heads import ChainHead
from calm.heads.common import masked_mean
from calm.models.autoencoder import ChunkAutoencoder, count_chunks
from calm.models.backbone import build_transformer, transformer_layers
from calm.models.card import model_card
from calm.models.configuration import CalmConfig
from calm.models.fields import check_positions
from calm.models.network import CalmNetwork
from calm.models.posterior import Posterior
from calm.noise import RowNoise, Source
from calm.scores.tokens import Words, token_nats

IGNORED = -100  # labels that transformers leaves out of a loss


@dataclass
class CalmOutput(ModelOutput):
    loss: Tensor | None = None
    last_hidden_state: Tensor | None = None  # (B, L, H), where no loss was asked for
    past_key_values: Cache | None = None


class CalmForCausalLM(CalmNetwork, PreTrainedModel):
    config_class = CalmConfig
    config: CalmConfig
    autoencoder: ChunkAutoencoder
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    entered_by = ("hidden_states", "predict")  # methods that need whole parameters under FSDP
    accepts_loss_kwargs = False  # transformers' Trainer then takes the mean over accumulated batches itself
    _no_split_modules = ["ChunkAutoencoder"]  # noqa: RUF012

    def __init__(self, config: CalmConfig):
        super().__init__(config)
        backbone = build_transformer(AutoModel, config.backbone_config)
        self.add_parts(backbone, backbone.get_input_embeddings())
        backbone.set_input_embeddings(None)  # it is the chunk embedding's, or unused
        self.autoencoder = ChunkAutoencoder(config.autoencoder_config)
        self.post_init()
        self.head.initialize()  # a module without parameters of its own is none that transformers initialises
        self._freeze()

    def _init_weights(self, module: nn.Module) -> None:
        std = getattr(self.config.backbone_config, "initializer_range", 0.02)
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def _freeze(self) -> None:
        self.autoencoder.requires_grad_(False)
        self.autoencoder.eval()

    def train(self, mode: bool = True) -> "CalmForCausalLM":
        super().train(mode)
        self.autoencoder.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "CalmForCausalLM":
        super().requires_grad_(requires_grad)
        self._freeze()
        return self

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As for any model; what transformers unfreezes is frozen again."""
        loaded: Any = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded)._freeze()
        return loaded

    def get_input_embeddings(self) -> Any:
        return self.chunk_embedding.tokens

    def sharded_parts(self) -> list[nn.Module]:
        """Groups of their own under FSDP: the backbone's layers, and the autoencoder where it is entered as a whole."""
        if self.config.is_chain:  # it takes the autoencoder's words alone
            return transformer_layers(self.backbone)
        return [*transformer_layers(self.backbone), *self.autoencoder.sharded_parts(), self.autoencoder]

    def chunks(self, input_ids: Tensor) -> Tensor:
        """(B, T) → (B, L, K)."""
        size = self.config.chunk_size
        if input_ids.shape[-1] % size:
            raise ConfigError(
                f"the model reads whole chunks of {size} tokens, and {input_ids.shape[-1]} is no multiple of {size}; "
                f"pad with the tokenizer's pad token (a collator does it with pad_to_multiple_of={size})"
            )
        return input_ids.unflatten(-1, (-1, size))

    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        latents: Tensor | None = None,
        generator: Source = None,
    ) -> Tensor:
        """(B, T) ids → (B, L, H); position i predicts chunk i + 1. A cache is filled as it goes."""
        chunks = self.chunks(input_ids)
        before = past_key_values.get_seq_length() if past_key_values is not None else 0
        check_positions(self.config.backbone_config, int(chunks.shape[1] + before), "chunks")
        mask = None
        if attention_mask is not None:
            mask = count_chunks(attention_mask, attention_mask, self.config.chunk_size).long()
        return self.backbone(
            inputs_embeds=self.embed(chunks, latents, generator),
            attention_mask=mask,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
        ).last_hidden_state

    def predict(
        self, input_ids: Tensor, num_samples: int, generator: Source = None
    ) -> tuple[Tensor, Tensor, Posterior]:
        """For each chunk but the first, on the true text before it: latents (N, B, L, Z) and tokens (N, B, L, K) drawn
        for it, and the posterior of the true one.
        """
        hidden = self.hidden_states(input_ids[:, : -self.config.chunk_size])
        true = self.posterior(self.chunks(input_ids)[:, 1:])
        if self.config.is_chain:
            chunks = self.draw(hidden, num_samples, generator)
            return self.posterior(chunks).mean, chunks, true
        latents = self.draw_latents(hidden, num_samples, generator)
        return latents, self.autoencoder.tokens(latents), true

    def take_autoencoder(self, autoencoder: ChunkAutoencoder) -> None:
        """The weights of a trained autoencoder; words of the head's own begin as its words."""
        self.autoencoder.load_state_dict(autoencoder.state_dict())
        if isinstance(self.head, ChainHead) and self.head.own_words is not None:
            self.head.own_words.load_state_dict(autoencoder.embedding.state_dict())

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Continue texts; calm.sampling.generator.generate says how."""
        from calm.sampling.generator import generate  # sampling is built on models; this one name points back

        return generate(self, input_ids, attention_mask, **options)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        noise: RowNoise | None = None,
        num_chunks: float | None = None,
        words: Words | None = None,
    ) -> CalmOutput:
        """With labels (the ids themselves; -100 where not to learn) the head's loss, else hidden states.

        A chunk is learnt where any of its labels is, and where the chunk before it is read. The mean is over
        `num_chunks`, by default those of this batch; a batch that is computed in parts gives the number of all.
        A chain takes `words` for the whole vocabulary.
        """
        self._check_shapes(input_ids, labels, attention_mask)
        if labels is None:
            hidden = self.hidden_states(input_ids, attention_mask, past_key_values, generator=noise)
            return CalmOutput(last_hidden_state=hidden, past_key_values=past_key_values)
        size = self.config.chunk_size
        noise = noise or RowNoise.fresh(len(input_ids), input_ids.device)
        chunks, learnt = self.chunks(input_ids), count_chunks(input_ids, labels != IGNORED, size)
        before = None
        if attention_mask is not None:
            read = count_chunks(input_ids, attention_mask, size)
            learnt[:, 1:] *= read[:, 1:] * read[:, :-1]
            before = attention_mask[:, :-size]
        counted = learnt[:, 1:]
        hidden = self.hidden_states(input_ids[:, :-size], before, generator=noise)
        if isinstance(self.head, ChainHead):
            nats = token_nats(self.chain_states(hidden, chunks[:, 1:]), self.words, chunks[:, 1:], words)
            loss = masked_mean(nats.mean(-1), counted)
        else:
            loss = self.head.loss(hidden, self.posterior(chunks[:, 1:]), counted, noise)
        if num_chunks is not None:
            loss = loss * counted.sum() / num_chunks
        return CalmOutput(loss)

    def _check_shapes(self, input_ids: Tensor, labels: Tensor | None, attention_mask: Tensor | None) -> None:
        self.chunks(input_ids)
        for name, given in (("labels", labels), ("attention_mask", attention_mask)):
            if given is not None and given.shape != input_ids.shape:
                raise ConfigError(f"{name} of shape {tuple(given.shape)} for input_ids of {tuple(input_ids.shape)}")
        if labels is not None and input_ids.shape[-1] < 2 * self.config.chunk_size:
            raise ConfigError(
                f"a loss needs at least two chunks of {self.config.chunk_size} tokens, one to read and one to learn"
            )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As for any model, with a model card where there is none yet."""
        super().save_pretrained(save_directory, *args, **kwargs)
        card = Path(save_directory) / "README.md"
        if kwargs.get("is_main_process", True) and not card.exists():
            write_atomic(card, model_card(self.config, self.num_parameters()).encode())


AutoModelForCausalLM.register(CalmConfig, CalmForCausalLM)
AutoModel.register(CalmConfig, CalmForCausalLM)
