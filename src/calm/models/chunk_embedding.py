"""What the backbone reads for a chunk (Table 5 of the paper, "Model Input").

discrete     embeddings of its K tokens, compressed by a two-layer MLP: the paper's choice
continuous   a linear map of its latent
both         their sum
"""

from torch import Tensor, nn

from calm.models.fields import CalmFields


class ChunkEmbedding(nn.Module):
    def __init__(self, config: CalmFields, tokens: nn.Embedding):
        """`tokens` is the backbone's own embedding, which a pretrained one brings along."""
        super().__init__()
        size, kind = config.hidden_size, config.model_input
        self.tokens = self.compress = self.latent = None
        if kind != "continuous":
            self.tokens = tokens
            self.compress = nn.Sequential(
                nn.Linear(config.chunk_size * tokens.embedding_dim, 2 * size),
                nn.SiLU(),
                nn.Linear(2 * size, size),
                nn.LayerNorm(size, eps=1e-6),
            )
        if kind != "discrete":
            self.latent = nn.Linear(config.latent_size, size)

    @property
    def reads_latents(self) -> bool:
        return self.latent is not None

    def forward(self, chunks: Tensor, latents: Tensor | None = None) -> Tensor:
        """Token ids (..., K) and, where they are read, latents (..., Z) → (..., H)."""
        parts = []
        if self.tokens is not None and self.compress is not None:
            parts.append(self.compress(self.tokens(chunks).flatten(-2)))
        if self.latent is not None:
            assert latents is not None
            parts.append(self.latent(latents))
        return sum(parts[1:], parts[0])
