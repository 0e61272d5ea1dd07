"""Texts that grow by a chunk a step, many at once, each on its own (§3.1).

    prompt of any length     fill ids at its front put its end on a chunk border, as in training
    several prompts          shorter ones stand behind empty chunks that nobody attends to
    a text that ends         leaves the batch; those that stay do not notice

Every text has a noise of its own, so whoever is beside it, it is the same text.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import DynamicCache

from calm.errors import ConfigError
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import check_positions
from calm.noise import RowNoise


class Generation:
    """Continues prompts; `running` holds the numbers of those that have not ended."""

    def __init__(
        self,
        model: CalmForCausalLM,
        prompts: list[list[int]],
        seeds: list[int],
        *,
        max_new_tokens: int,
        end_id: int,
        fill_id: int,
    ):
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        self.model, self.end_id, self.max_new_tokens = model, end_id, max_new_tokens
        self.running = list(range(len(prompts)))
        self.noise = RowNoise(seeds, model.device)
        self.cache = DynamicCache()
        self.length = 0  # of the new text, in tokens
        self.next, self.read = _laid_out(prompts, model.config.chunk_size, end_id, fill_id)  # (B, L, K) and (B, L)
        self.next, self.read = self.next.to(model.device), self.read.to(model.device)
        steps = -(-max_new_tokens // model.config.chunk_size)
        check_positions(model.config.backbone_config, self.next.shape[1] + steps - 1, "chunks")

    @torch.no_grad()
    def step(self) -> dict[int, list[int]]:
        """One more chunk for every running text: its number → new tokens, cut at the end of the text."""
        hidden = self._hidden()
        latents = self.model.head.sample(hidden, 1, self.noise)[0]
        self.next = self.model.autoencoder.tokens(latents)[:, None]  # (B, 1, K)
        self.read = torch.cat([self.read, torch.ones_like(self.read[:, :1])], dim=1)
        room = self.max_new_tokens - self.length
        self.length += self.next.shape[-1]
        found, ended = {}, []
        for number, chunk in zip(self.running, self.next[:, 0].tolist(), strict=True):
            cut = chunk[:room]
            found[number] = cut[: cut.index(self.end_id)] if self.end_id in cut else cut
            if self.end_id in cut or self.length >= self.max_new_tokens:
                ended.append(number)
        self.end(ended)
        return found

    def end(self, numbers: Iterable[int]) -> None:
        """Let some texts end here."""
        ended = set(numbers)
        keep = [place for place, number in enumerate(self.running) if number not in ended]
        if len(keep) == len(self.running):
            return
        self.running = [self.running[place] for place in keep]
        self.noise = self.noise.rows(keep)
        index = torch.tensor(keep, dtype=torch.long, device=self.next.device)
        self.next, self.read = self.next[index], self.read[index]
        if keep:
            self.cache.batch_select_indices(index)

    def _hidden(self) -> Tensor:
        """Read what has come since the last step: (B, H), the states that predict the next chunk."""
        positions = (self.read.long().cumsum(1) - 1).clamp(min=0)[:, -self.next.shape[1] :]
        return self.model.backbone(
            inputs_embeds=self.model.embed(self.next),
            attention_mask=self.read.long(),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state[:, -1]


def _laid_out(prompts: list[list[int]], size: int, end_id: int, fill_id: int) -> tuple[Tensor, Tensor]:
    """Prompts as chunks (B, L, K), all ending together, and which of them are there (B, L)."""
    texts = [prompt or [end_id] for prompt in prompts]  # nothing before: a document begins behind the end of another
    counts = [-(-len(text) // size) for text in texts]
    longest = max(counts)
    rows = [[fill_id] * (longest * size - len(text)) + text for text in texts]
    chunks = torch.tensor(rows).unflatten(1, (longest, size))
    places = torch.arange(longest)
    return chunks, places >= longest - torch.tensor(counts)[:, None]
