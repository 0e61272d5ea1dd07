"""Texts that grow by a chunk a step, many at once, each on its own (§3.1).

    prompt of any length     fill ids at its front put its end on a chunk border, as in training
    several prompts          shorter ones stand behind empty chunks that nobody attends to
    a text that ends         leaves the batch; those that stay do not notice

Every text has a noise of its own, so whoever is beside it, it is the same text.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from calm.errors import CalmWarning, ConfigError, did_you_mean
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import check_positions
from calm.noise import RowNoise
from calm.sampling.next_chunk import Chosen, Sampling, next_chunks
from calm.sampling.vocabulary import search_of

NEW_TOKENS = 128  # where nobody says how many
MEANINGLESS = {
    "num_beams": "there are no beams: a CALM model has no probabilities of texts to search by",
    "do_sample": "a CALM model always samples; a low temperature, like 0.1, comes near to the likeliest text",
    "output_logits": "a CALM model has no logits",
    "output_scores": "a CALM model has no scores of tokens",
    "logprobs": "log-probabilities exist with the method 'mixture' only; calm.sampling.next_chunk returns them",
    "repetition_penalty": "there are no probabilities of tokens that could be lowered",
}


@dataclass
class Spent:
    """What the chunks of some texts have cost so far."""

    chunks: int = 0
    draws: int = 0
    fallen_back: int = 0  # chunks for which n had to be lowered
    unsettled: int = 0

    def add(self, chosen: Chosen) -> None:
        self.chunks += len(chosen.chunks)
        self.draws += int(chosen.cost.draws.sum())
        self.fallen_back += int((chosen.cost.fallbacks > 0).sum())
        self.unsettled += int(chosen.cost.unsettled.sum())

    def warning(self, sampling: Sampling) -> str | None:
        """What a user should know about how a temperature was kept."""
        if sampling.method == "exact" and self.unsettled:
            return f"{self.unsettled} of {self.chunks} chunks hit the limit of draws and are approximate"
        if sampling.method == "batch" and 2 * self.fallen_back > self.chunks:
            remedy = "take more candidates or the method 'token'" if sampling.number > 1 else "take more"
            return (
                f"for {self.fallen_back} of {self.chunks} chunks no candidate came up often enough among "
                f"{sampling.number}, so the temperature acted less or not at all; {remedy}"
            )
        if sampling.method == "token" and sampling.number < 1 / sampling.temperature:
            return f"{sampling.number} candidates are too few for a temperature of {sampling.temperature}"
        return None


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
        sampling: Sampling | None = None,
    ):
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be a whole number, at least 1, not {max_new_tokens}")
        for token in {token for prompt in prompts for token in prompt}:
            if not 0 <= token < model.config.vocab_size:
                raise ConfigError(f"a prompt has token {token}, and the model has {model.config.vocab_size} words")
        self.model, self.end_id, self.max_new_tokens = model, end_id, max_new_tokens
        self.sampling = (sampling or Sampling()).of(model.config)
        self.search = search_of(model.autoencoder, self.sampling.caution)
        self.running = list(range(len(prompts)))
        self.noise = RowNoise(seeds, model.device)
        self.cache = DynamicCache()
        self.length = 0  # of the new text, in tokens
        self.spent = Spent()
        size = model.config.chunk_size
        if not model.config.knows_fill:
            prompts, fill_id = [whole_chunks(prompt, size) for prompt in prompts], end_id
        self.next, self.read = _laid_out(prompts, size, end_id, fill_id)  # (B, L, K) and (B, L)
        self.next, self.read = self.next.to(model.device), self.read.to(model.device)
        steps = -(-max_new_tokens // size)
        check_positions(model.config.backbone_config, self.next.shape[1] + steps - 1, "chunks")

    @torch.no_grad()
    def step(self) -> dict[int, list[int]]:
        """One more chunk for every running text: its number → new tokens, cut at the end of the text.

        `chosen` then says how the chunks were found, in the same order.
        """
        self.chosen = next_chunks(self.model, self.search, self._hidden(), self.sampling, self.noise)
        self.spent.add(self.chosen)
        self.next = self.chosen.chunks[:, None]  # (B, 1, K)
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


def whole_chunks(prompt: list[int], size: int) -> list[int]:
    """For a model that never saw fill: up to K-1 leading tokens are left out, unless that is all there is."""
    return prompt[len(prompt) % size :] if len(prompt) >= size else prompt


def _laid_out(prompts: list[list[int]], size: int, end_id: int, fill_id: int) -> tuple[Tensor, Tensor]:
    """Prompts as chunks (B, L, K), all ending together, and which of them are there (B, L)."""
    texts = [prompt or [end_id] for prompt in prompts]  # nothing before: a document begins behind the end of another
    counts = [-(-len(text) // size) for text in texts]
    longest = max(counts)
    rows = [[fill_id] * (longest * size - len(text)) + text for text in texts]
    chunks = torch.tensor(rows).unflatten(1, (longest, size))
    places = torch.arange(longest)
    return chunks, places >= longest - torch.tensor(counts)[:, None]


def generate(
    model: CalmForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = NEW_TOKENS,
    stop: Sequence[Sequence[int]] = (),
    generator: torch.Generator | None = None,
    streamer: Any = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    **options: Any,
) -> Tensor:
    """Prompts (B, T) with what follows them, each cut before its end or a `stop` (token ids); shorter ones are padded.

    `attention_mask` says which tokens are there: pads may stand before or behind a prompt. `options` are the fields of
    Sampling: temperature, num_candidates, method and so on. A streamer, as transformers has them, gets the prompt and
    then chunk after chunk of a single text.
    """
    sampling = _sampling(options)
    end_id, *ends = _role("eos_token_id", eos_token_id, model)
    fill_id = _role("pad_token_id", pad_token_id, model)[0]
    stops = [*_token_lists(stop), *([other] for other in ends)]
    if input_ids.ndim != 2 or not len(input_ids):
        raise ConfigError(f"input_ids should have the shape (B, T), not {tuple(input_ids.shape)}")
    there = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if there.shape != input_ids.shape:
        raise ConfigError(f"attention_mask of shape {tuple(there.shape)} for input_ids of {tuple(input_ids.shape)}")
    if streamer is not None and len(input_ids) > 1:
        raise ConfigError(f"a streamer takes one text, and there are {len(input_ids)}")
    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, there, strict=True)]
    device = None if generator is None else generator.device
    seeds = torch.randint(2**62, (len(prompts),), generator=generator, device=device).tolist()
    generation = Generation(
        model, prompts, seeds, max_new_tokens=max_new_tokens, end_id=end_id, fill_id=fill_id, sampling=sampling
    )
    if streamer is not None:
        streamer.put(input_ids.cpu())
    new: list[list[int]] = [[] for _ in prompts]
    shown = 0
    while generation.running:
        for number, tokens in generation.step().items():
            new[number] += tokens
            if (cut := _first_stop(new[number], stops)) is not None:
                new[number] = new[number][:cut]
                generation.end([number])
        if streamer is not None:
            sure = len(new[0]) - (_begun_stop(new[0], stops) if generation.running else 0)
            if sure > shown:
                streamer.put(torch.tensor(new[0][shown:sure]))
                shown = sure
    if streamer is not None:
        streamer.end()
    if warning := generation.spent.warning(generation.sampling):
        warnings.warn(warning, CalmWarning, stacklevel=3)
    behind = pad_sequence([torch.tensor(ids, dtype=torch.long) for ids in new], True, fill_id)
    return torch.cat([input_ids, behind.to(input_ids.device)], dim=1)


def _sampling(options: dict[str, Any]) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    for name, value in options.items():
        if name in MEANINGLESS and not (name == "do_sample" and value):
            raise ConfigError(f"generate takes no {name}: {MEANINGLESS[name]}")
        if name not in known and name != "do_sample":
            raise ConfigError(f"generate takes no {name!r}{did_you_mean(name, known)}")
    return Sampling(**{name: value for name, value in options.items() if name != "do_sample"})


def _role(name: str, given: int | list[int] | None, model: CalmForCausalLM) -> list[int]:
    """The ids of a role; a config.json may name several."""
    found = given if given is not None else getattr(model.config, name, None)
    if found is None:
        raise ConfigError(f"the model's config.json has no {name}; give it to generate")
    return list(found) if isinstance(found, list | tuple) else [int(found)]


def _token_lists(stop: Any) -> list[list[int]]:
    if isinstance(stop, str) or not all(isinstance(ids, list | tuple) for ids in stop):
        raise ConfigError("stop takes lists of token ids, as tokenizer.encode gives them; calm generate takes strings")
    if not all(stop):
        raise ConfigError("a stop without a token would end every text at once")
    return [list(ids) for ids in stop]


def _first_stop(ids: list[int], stops: list[list[int]]) -> int | None:
    """Where the first of some sequences begins."""
    places = range(len(ids))
    return next((place for place in places if any(s == ids[place : place + len(s)] for s in stops)), None)


def _begun_stop(ids: list[int], stops: list[list[int]]) -> int:
    """How many tokens at the end may be the beginning of a stop."""
    return max((n for stop in stops for n in range(1, len(stop)) if ids[-n:] == stop[:n]), default=0)
