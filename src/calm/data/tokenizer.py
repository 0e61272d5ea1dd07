"""Documents → token ids, and back without loss.

All tokenizers use the Hugging Face `tokenizers` backend: a byte-level BPE trained here, a tokenizer directory or Hub
name, or a tiktoken file (Llama 3). CALM uses three special tokens, which never encode text:
  eos   ends every document,
  pad   fills the start of a first chunk that is only partly covered by text,
  mask  replaces tokens in the token dropout of the autoencoder (§2.2).
"""

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from calm.errors import DataError, one_line
from calm.files import write_atomic, write_json

EOS_TOKEN, PAD_TOKEN, MASK_TOKEN = "<|end|>", "<|fill|>", "<|mask|>"
MIN_BPE_SIZE = 256 + 3  # all bytes and the three special tokens
MAX_SEGMENT_LENGTH = 2**20  # characters per call of the backend, which bounds its memory

# Llama 3: 128,000 ranks, then these tokens at 128,000 to 128,255, then one pad token.
LLAMA3_RANKS = 128_000
LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 247)),
]
LLAMA3_ROLES = {
    "eos_token": "<|end_of_text|>",
    "pad_token": "<|pad|>",
    "mask_token": "<|reserved_special_token_0|>",
}
DEFAULT_ROLES = {"eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN, "mask_token": MASK_TOKEN}


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers` tokenizer with the three special tokens of CALM."""

    backend: tokenizers.Tokenizer
    eos_token_id: int
    pad_token_id: int
    mask_token_id: int
    vocab_size: int  # the largest token id + 1; some tokenizers leave ids out
    content: str  # of tokenizer.json; kept so that saved copies are byte-identical

    @classmethod
    def from_json(cls, content: str, eos_token: str, pad_token: str, mask_token: str) -> "Tokenizer":
        backend = tokenizers.Tokenizer.from_str(content)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # "<|end|>" in a document is encoded as plain text
        vocabulary = backend.get_vocab(with_added_tokens=True)
        ids = (vocabulary[token] for token in (eos_token, pad_token, mask_token))
        return cls(backend, *ids, vocab_size=max(vocabulary.values()) + 1, content=content)

    @property
    def dtype(self) -> str:
        """Smallest integer type that holds every token id."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def sha256(self) -> str:
        roles = f"{self.eos_token_id} {self.pad_token_id} {self.mask_token_id}\n"
        return hashlib.sha256((roles + self.content).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without an end-of-text token."""
        segments = [(number, segment) for number, text in enumerate(texts) for segment in _segments(text)]
        ids: list[list[int]] = [[] for _ in texts]
        with _backend_errors("the tokenizer cannot encode this text"):
            encodings = self.backend.encode_batch_fast([segment for _, segment in segments], add_special_tokens=False)
        for (number, _), encoding in zip(segments, encodings, strict=True):
            ids[number] += encoding.ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text. The three special tokens are skipped."""
        special = {self.eos_token_id, self.pad_token_id, self.mask_token_id}
        with _backend_errors("the tokenizer cannot decode these tokens"):
            return self.backend.decode([int(i) for i in ids if i not in special], skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Save to a directory that `load_tokenizer` and `transformers.AutoTokenizer` can load."""
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / "tokenizer.json", self.content.encode())
        write_json(
            directory / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": self.backend.id_to_token(self.eos_token_id),
                "pad_token": self.backend.id_to_token(self.pad_token_id),
                "mask_token": self.backend.id_to_token(self.mask_token_id),
                "clean_up_tokenization_spaces": False,
            },
        )


@contextmanager
def _backend_errors(problem: str) -> Iterator[None]:
    """Convert errors of the backend to `DataError`: bare Exceptions, and Rust panics, which are BaseExceptions."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{problem} ({one_line(error)}); check its tokenizer.json and tokenizer_config.json") from error


def _segments(text: str) -> Iterator[str]:
    """Split a long text before single spaces, where the pre-tokenizers split as well."""
    while len(text) > MAX_SEGMENT_LENGTH:
        spaces = list(re.finditer(r"(?<=\S) (?=\S)", text[MAX_SEGMENT_LENGTH - 1000 : MAX_SEGMENT_LENGTH + 1]))
        cut = MAX_SEGMENT_LENGTH - 1000 + spaces[-1].start() if spaces else MAX_SEGMENT_LENGTH
        yield text[:cut]
        text = text[cut:]
    yield text


@contextmanager
def single_threaded() -> Iterator[None]:
    """Disable the thread pool of the backend: preparation is already parallel over processes."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, which encodes any Unicode text without loss."""
    if vocab_size < MIN_BPE_SIZE:
        raise DataError(
            f"a byte-level BPE needs at least {MIN_BPE_SIZE} entries (256 bytes and 3 special tokens), not {vocab_size}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[MASK_TOKEN, EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer.from_json(backend.to_str(), **DEFAULT_ROLES)


def load_tokenizer(name: str, ids: dict[str, int] | None = None) -> Tokenizer:
    """Load a tokenizer from a directory, a tiktoken file, or the Hugging Face Hub.

    `ids` maps `eos_token` and `pad_token` to token ids, for directories whose files do not define them.
    """
    path = Path(name)
    if path.is_file():
        return _load_tiktoken(path)
    if (path / "tokenizer.json").is_file():
        config_file = path / "tokenizer_config.json"
        with _backend_errors(f"the tokenizer in {path} cannot be read"):
            content = (path / "tokenizer.json").read_text("utf-8")
            config = json.loads(config_file.read_text("utf-8")) if config_file.exists() else {}
            backend = tokenizers.Tokenizer.from_str(content)
            known = {role: backend.id_to_token(number) for role, number in (ids or {}).items()}
            return _with_roles(backend, content, known | {role: token for role, token in config.items() if token})
    return _load_hub(name)


def _load_hub(name: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
        backend = loaded.backend_tokenizer
    except Exception as error:
        raise DataError(
            f"no tokenizer {name!r}: not a directory with tokenizer.json, not a tiktoken file, and not on the Hub: "
            f"{(str(error) or repr(error)).splitlines()[0]}"
        ) from error
    with _backend_errors(f"the tokenizer {name!r} cannot be used"):
        roles = {role: getattr(loaded, role) for role in DEFAULT_ROLES}
        return _with_roles(backend, backend.to_str(), roles)


def _with_roles(backend: tokenizers.Tokenizer, content: str, config: dict[str, Any]) -> Tokenizer:
    """Use the tokenizer's own eos, pad and mask tokens, and add the missing ones."""
    roles: dict[str, str] = {}
    for role, default in DEFAULT_ROLES.items():
        token = config.get(role) or (LLAMA3_ROLES[role] if _has_reserved_token(backend, role) else default)
        token = token["content"] if isinstance(token, dict) else str(token)
        roles[role] = default if token in roles.values() else token  # eos must not double as padding
    missing = [token for token in roles.values() if backend.token_to_id(token) is None]
    if missing:
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in missing])
        content = backend.to_str()
    return Tokenizer.from_json(content, **roles)


def _has_reserved_token(backend: tokenizers.Tokenizer, role: str) -> bool:
    """Whether this is a Llama 3 tokenizer, whose reserved token serves as the mask, as for a tiktoken file."""
    return role == "mask_token" and backend.token_to_id(LLAMA3_ROLES[role]) is not None


def _load_tiktoken(path: Path) -> Tokenizer:
    """Load a file of `base64 rank` lines. A file with 128,000 ranks is Llama 3's and gets its special tokens."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = _tiktoken_ranks(path)

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks  # tiktoken's own reader caches by file name, and would miss a changed file

    llama3 = len(ranks) == LLAMA3_RANKS
    special = [*LLAMA3_SPECIAL, LLAMA3_ROLES["pad_token"]] if llama3 else [EOS_TOKEN, MASK_TOKEN, PAD_TOKEN]
    with _backend_errors(f"{path} cannot be converted"):
        backend = Converter(vocab_file=str(path), extra_special_tokens=special).converted()
    return Tokenizer.from_json(backend.to_str(), **(LLAMA3_ROLES if llama3 else DEFAULT_ROLES))


def _tiktoken_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise DataError(
                    f"{path}, line {number}: not a tiktoken file, whose lines contain a base64 token and its rank; "
                    "for a Hugging Face tokenizer, pass its directory"
                ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([b]) in ranks for b in range(256)):
        raise DataError(f"{path} is not a valid tiktoken file: the ranks must be 0 to N-1 and include all 256 bytes")
    return ranks


def round_trips(tokenizer: Tokenizer) -> bool:
    """Whether decoding restores the exact text: False for tokenizers that lowercase, strip or normalize."""
    probe = "  Ünïcode, TABS\tand\r\n\nlines; 漢字 🙂 ﬁ e\u0301 \u200d <|end|> don't  "
    return tokenizer.decode(tokenizer.encode(probe)) == probe
