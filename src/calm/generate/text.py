"""Text in, text out: a model directory with its tokenizer, on top of the engine."""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

from calm.checkpoint import load_language_model
from calm.data.tokenizer import Tokenizer, load_tokenizer
from calm.distributed import move_model, resolve_device
from calm.errors import ConfigError, UserError
from calm.generate.engine import Engine, GenerationStats, Sequence, prepare_inference
from calm.generate.sampler import SamplingParams
from calm.seeds import SeedStream, torch_seed

REPLACEMENT = "\ufffd"  # what the first bytes of a character decode to
MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """Incremental detokenization with stop strings.

    Only whole characters come out (one may have its bytes in several tokens), and nothing that may turn out to be the
    beginning of a stop string. `stopped` is set once a stop string was met.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Many[str] = ()):
        if any(not stop for stop in stops):
            raise ConfigError("a stop string must not be empty")
        self.tokenizer, self.stops = tokenizer, list(stops)
        self.ids: list[int] = []
        self.text = ""  # of the tokens before `decoded`
        self.window = self.decoded = 0  # the last tokens are decoded again with new ones, which may depend on them
        self.emitted = 0  # characters
        self.stopped = False

    def push(self, ids: Many[int]) -> str:
        """Add tokens; returns the text that is certain now."""
        if self.stopped:
            return ""
        self.ids += ids
        text = self._decode()
        if (end := self._find_stop(text)) is not None:
            self.stopped = True
            return self._emit(text, end)
        for _ in range(MAX_CHARACTER_BYTES):
            text = text.removesuffix(REPLACEMENT)
        return self._emit(text, self._find_partial_stop(text))

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        text = self._decode()
        return "" if self.stopped else self._emit(text, len(text))

    def _decode(self) -> str:
        """The whole text so far, at the cost of the last tokens."""
        before = self.tokenizer.decode(self.ids[self.window : self.decoded])
        text = self.text + self.tokenizer.decode(self.ids[self.window :])[len(before) :]
        if not text.endswith(REPLACEMENT):
            self.text, self.window, self.decoded = text, self.decoded, len(self.ids)
        return text

    def _emit(self, text: str, end: int) -> str:
        new = text[self.emitted : end]
        self.emitted = max(self.emitted, end)
        return new

    def _find_stop(self, text: str) -> int | None:
        return min((text.index(stop) for stop in self.stops if stop in text), default=None)

    def _find_partial_stop(self, text: str) -> int:
        """Where a stop string may have begun at the end of the text."""
        return min(
            (len(text) - n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=len(text),
        )


@dataclass
class TextDelta:
    """What one step added to one text."""

    index: int  # of the prompt
    text: str
    token_ids: list[int]
    agreement: float | None = None  # share of the candidates that equal the chunk, or its probability


class TextGenerator:
    """A model and its tokenizer.

    Args:
        directory: a model directory, CALM or softmax, with a tokenizer.json.
        device: where to run it: "auto", "cpu", "cuda", or "cuda:N".
        dtype: of the weights: "auto" (bf16 on a GPU, fp32 elsewhere), "fp32", or "bf16".
        int8: quantize the linear layers to 8 bits (CPU only).

    Example:
        >>> generator = TextGenerator(Path("runs/calm/model"))
        >>> prompt = generator.tokenizer.encode("And God said")
        >>> "".join(delta.text for delta in generator.stream([prompt], SamplingParams(0.5), max_new_tokens=40))
    """

    def __init__(self, directory: Path, device: str = "auto", dtype: str = "auto", *, int8: bool = False):
        self.directory = directory
        self.model = move_model(load_language_model(directory), resolve_device(device), dtype).eval()
        if int8:
            prepare_inference(self.model, int8=True)
        if not (directory / "tokenizer.json").exists():
            raise UserError(f"{directory} has no tokenizer.json; put the model's tokenizer there")
        self.tokenizer = load_tokenizer(str(directory))
        self.stats = GenerationStats()
        if self.tokenizer.vocab_size > self.model.vocab_size:
            raise UserError(
                f"the tokenizer in {directory} has {self.tokenizer.vocab_size:,} tokens and the model's vocabulary "
                f"{self.model.vocab_size:,}: it is not the model's tokenizer"
            )

    def engine(self) -> Engine:
        """A new engine for this model."""
        return Engine(self.model, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)

    def stream(
        self,
        prompts: Many[list[int]],
        params: SamplingParams,
        *,
        max_new_tokens: int,
        stops: Many[Many[str]] = (),
        numbers: Many[int] | None = None,
        seed: int = 0,
    ) -> Iterator[TextDelta]:
        """Continue prompts (token ids), chunk by chunk.

        Args:
            stops: stop strings of each prompt.
            numbers: with `seed` the source of each prompt's noise; by default 0, 1, 2, …

        Yields:
            A `TextDelta` per step and prompt; a last one without tokens holds text that was kept back. `stats` counts
            what it costs.
        """
        numbers = range(len(prompts)) if numbers is None else numbers
        detokenizers = [Detokenizer(self.tokenizer, stops[i] if stops else ()) for i in range(len(prompts))]
        sequences = [
            Sequence(prompt, sequence_seed(seed, number), max_new_tokens, params)
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        index = {id(sequence): i for i, sequence in enumerate(sequences)}
        engine = self.engine()
        engine.add(sequences)
        self.stats = engine.stats
        while engine.waiting or engine.running:
            for sequence, ids, agreement in engine.step():
                i = index[id(sequence)]
                yield TextDelta(i, detokenizers[i].push(ids), ids, agreement)
                if detokenizers[i].stopped:
                    engine.remove([sequence])
        for i, detokenizer in enumerate(detokenizers):
            if rest := detokenizer.finish():
                yield TextDelta(i, rest, [])


def sequence_seed(seed: int, number: int) -> int:
    """The seed of a sequence's noise, from a request's seed and the sequence's number in it."""
    return torch_seed(seed, SeedStream.GENERATION, number)
