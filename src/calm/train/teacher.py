"""Sample-based distillation (§8): a teacher gives a head several targets at each position, the chunks that it samples.

The true next chunk is one point of a distribution. A trained model can be asked for as many points as one pays for.
Only its samples are used, so that a teacher needs no probabilities.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calm.checkpoint import load_language_model
from calm.distributed import World
from calm.errors import ConfigError
from calm.evaluate.branches import Branches, BranchNoise, check_branches
from calm.generate.engine import prepare_inference
from calm.llama import check_positions
from calm.noise import RowNoise


class Teacher:
    """A saved language model that is asked for next chunks of K tokens.

    Args:
        directory: a CALM model with chunks of K tokens, or a Transformer.
        chunk_size: K.
        num_samples: M, chunks per position.
        stride: every how many chunks of a row it is asked.
        eos_token_id, pad_token_id: a Transformer reads padding at the front of a row as the end of a text.
    """

    def __init__(
        self, directory: Path, chunk_size: int, num_samples: int, stride: int, eos_token_id: int, pad_token_id: int
    ):
        self.model: Any = load_language_model(directory).eval().requires_grad_(False)
        if self.model.chunk_size not in (1, chunk_size):
            raise ConfigError(
                f"the teacher in {directory} has chunks of {self.model.chunk_size} tokens; use a Transformer, or a "
                f"CALM model with chunks of {chunk_size}"
            )
        self.chunk_size, self.num_samples, self.stride = chunk_size, num_samples, stride
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id

    def prepare(self, world: World, length: int) -> None:
        """Move to the device; `length` is that of the longest row, in tokens."""
        config = getattr(self.model.config, "backbone_config", self.model.config)
        check_positions(config, length // self.model.chunk_size, "tokens of a row that the teacher reads")
        if self.model.chunk_size == 1:
            check_branches(self.model)
        self.model.to(world.device)
        prepare_inference(self.model)

    @torch.no_grad()
    def draw(self, tokens: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Chunks that may follow every `stride`-th chunk but the last of rows (B, T).

        Returns:
            Ids (M, B, P, K), and whether the teacher's output was finite, a scalar: nothing waits for the device here.
        """
        if self.model.chunk_size == self.chunk_size:
            chunks = tokens.unflatten(1, (-1, self.chunk_size))
            hidden = self.model.hidden_states(chunks[:, :-1])[:, :: self.stride]
            proposals = self.model.head.propose(hidden, self.num_samples, noise)
            return proposals.tokens(), proposals.finite().all()
        return self._draw_tokens(tokens, noise)

    def _draw_tokens(self, tokens: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Token by token, in branches that share the row's keys and values."""
        model, (rows, length), count = self.model, tokens.shape, self.num_samples
        text = tokens.masked_fill(tokens == self.pad_token_id, self.eos_token_id)[:, : length - self.chunk_size]
        branches = Branches(model.backbone)
        hidden = branches.read(model.embed(text[..., None]))  # (B, T - K, H)
        ends = torch.arange(self.chunk_size - 1, text.shape[1], self.chunk_size * self.stride, device=tokens.device)
        branches.start_at(0, text.shape[1])
        nodes = torch.arange(rows, device=tokens.device)[:, None] * text.shape[1] + ends  # (B, P)
        parents = nodes.flatten().repeat_interleave(count)
        proposals = model.head.propose(hidden[:, ends], count, noise)
        finite = proposals.finite().all()
        chosen = [proposals.tokens()[..., 0].permute(1, 2, 0).flatten()]  # (B·P·M,)
        for _ in range(self.chunk_size - 1):
            states = branches.grow(parents, model.embed(chosen[-1][:, None]), len(ends) * count)
            parents = torch.arange(len(states), device=tokens.device)
            proposals = model.head.propose(states, 1, BranchNoise(noise, branches.counts))
            finite = finite & proposals.finite().all()
            chosen.append(proposals.tokens()[0, :, 0])
        samples = torch.stack(chosen, dim=-1).view(rows, len(ends), count, self.chunk_size)
        return samples.permute(2, 0, 1, 3), finite
