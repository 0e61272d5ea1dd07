"""Documents → token ids, and back, exactly.

One backend, Hugging Face's `tokenizers`, whatever the origin: a byte-level BPE trained here, a tokenizer directory or
hub name, or a tiktoken file (Llama 3). Three ids have a role in CALM and never stand for text:
  end   closes every document,
  fill  stands in the front of a first chunk that the text does not fill,
  mask  replaces tokens in the autoencoder's token dropout (§2.2).
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

from calm.errors import DataError
from calm.files import write_atomic, write_json

MASK, END, FILL = "<|mask|>", "<|end|>", "<|fill|>"
SMALLEST_BPE = 256 + 3  # every byte, and the three roles
LONGEST_PIECE = 2**20  # characters given to the backend at once: its memory grows with the text

# Llama 3: 128,000 ranks, then these at 128,000 to 128,255, then one pad token.
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
LLAMA3_ROLES = {"end": "<|end_of_text|>", "mask": "<|reserved_special_token_0|>", "fill": "<|pad|>"}


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers` tokenizer with the three roles of CALM."""

    backend: tokenizers.Tokenizer
    eos_token_id: int
    pad_token_id: int
    mask_token_id: int
    content: str  # the JSON it was made from, kept so that every copy has the same bytes

    @classmethod
    def from_json(cls, content: str, end: str, fill: str, mask: str) -> "Tokenizer":
        backend = tokenizers.Tokenizer.from_str(content)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # a document that contains "<|end|>" contains these characters
        vocabulary = backend.get_vocab(with_added_tokens=True)
        return cls(backend, vocabulary[end], vocabulary[fill], vocabulary[mask], content)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def dtype(self) -> str:
        """What an id is stored as."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def sha256(self) -> str:
        roles = f"{self.eos_token_id} {self.pad_token_id} {self.mask_token_id}\n"
        return hashlib.sha256((roles + self.content).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without an end id."""
        pieces = [(number, piece) for number, text in enumerate(texts) for piece in _pieces(text)]
        ids: list[list[int]] = [[] for _ in texts]
        encodings = self.backend.encode_batch_fast([piece for _, piece in pieces], add_special_tokens=False)
        for (number, _), encoding in zip(pieces, encodings, strict=True):
            ids[number] += encoding.ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; the three roles are left out."""
        roles = {self.eos_token_id, self.pad_token_id, self.mask_token_id}
        return self.backend.decode([int(i) for i in ids if i not in roles], skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write a directory that this class and `transformers.AutoTokenizer` load."""
        directory.mkdir(parents=True, exist_ok=True)
        end, fill, mask = (
            self.backend.id_to_token(i) for i in (self.eos_token_id, self.pad_token_id, self.mask_token_id)
        )
        write_atomic(directory / "tokenizer.json", self.content.encode())
        write_json(
            directory / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": end,
                "pad_token": fill,
                "mask_token": mask,
                "clean_up_tokenization_spaces": False,
            },
        )


def _pieces(text: str) -> Iterator[str]:
    """A long text in pieces, cut before a single space: there our pre-tokenizers begin a new word anyway."""
    while len(text) > LONGEST_PIECE:
        spaces = list(re.finditer(r"(?<=\S) (?=\S)", text[LONGEST_PIECE - 1000 : LONGEST_PIECE + 1]))
        cut = LONGEST_PIECE - 1000 + spaces[-1].start() if spaces else LONGEST_PIECE
        yield text[:cut]
        text = text[cut:]
    yield text


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the backend to the calling thread: the workers of a preparation are processes."""
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
    """A byte-level BPE: every Unicode text has ids, and comes back from them unchanged."""
    if vocab_size < SMALLEST_BPE:
        raise DataError(
            f"a byte-level BPE needs at least {SMALLEST_BPE} entries (256 bytes and 3 special ones), not {vocab_size}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[MASK, END, FILL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer.from_json(backend.to_str(), END, FILL, MASK)


def load_tokenizer(name: str, ids: dict[str, int] | None = None) -> Tokenizer:
    """A tokenizer directory (ours or Hugging Face's), a tiktoken file, or a hub name.

    `ids` says which ids are `eos_token` and `pad_token` where a directory's own files do not.
    """
    path = Path(name)
    if path.is_file():
        return _load_tiktoken(path)
    if (path / "tokenizer.json").is_file():
        config_file = path / "tokenizer_config.json"
        try:
            content = (path / "tokenizer.json").read_text("utf-8")
            config = json.loads(config_file.read_text("utf-8")) if config_file.exists() else {}
            backend = tokenizers.Tokenizer.from_str(content)
            known = {role: backend.id_to_token(number) for role, number in (ids or {}).items()}
            return _with_roles(backend, content, known | {role: token for role, token in config.items() if token})
        except Exception as error:  # the backend raises bare Exceptions for a broken file
            raise DataError(f"the tokenizer in {path} cannot be read: {error}") from error
    return _load_hub(name)


def _load_hub(name: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(name, use_fast=True)
        backend = loaded.backend_tokenizer
    except Exception as error:
        raise DataError(
            f"no tokenizer {name!r}: not a directory with tokenizer.json, not a tiktoken file, and as a hub name: "
            f"{(str(error) or repr(error)).splitlines()[0]}"
        ) from error
    roles = {role: getattr(loaded, role) for role in ("eos_token", "pad_token", "mask_token")}
    return _with_roles(backend, backend.to_str(), roles)


def _with_roles(backend: tokenizers.Tokenizer, content: str, config: dict[str, Any]) -> Tokenizer:
    """Take end, fill and mask from the tokenizer's own special tokens, and add those it has not."""
    roles: dict[str, str] = {}
    for role, key, ours in (
        ("end", "eos_token", END),
        ("fill", "pad_token", FILL),
        ("mask", "mask_token", MASK),
    ):
        token = config.get(key) or (LLAMA3_ROLES["mask"] if _is_free(backend, role) else ours)
        token = token["content"] if isinstance(token, dict) else str(token)
        roles[role] = ours if token in roles.values() else token  # an end token that doubles as padding is no fill
    missing = [token for token in roles.values() if backend.token_to_id(token) is None]
    if missing:
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in missing])
        content = backend.to_str()
    return Tokenizer.from_json(content, **roles)


def _is_free(backend: tokenizers.Tokenizer, role: str) -> bool:
    """Whether a tokenizer of Llama 3's family lends its reserved token for the mask, as its tiktoken file does."""
    return role == "mask" and backend.token_to_id(LLAMA3_ROLES["mask"]) is not None


def _load_tiktoken(path: Path) -> Tokenizer:
    """A file of `base64 rank` lines. With 128,000 ranks it is Llama 3's and gets its special tokens."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = _tiktoken_ranks(path)

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks  # tiktoken's own reader caches by file name, and so gives an old file for a new one

    llama3 = len(ranks) == LLAMA3_RANKS
    special = [*LLAMA3_SPECIAL, LLAMA3_ROLES["fill"]] if llama3 else [END, MASK, FILL]
    backend = Converter(vocab_file=str(path), extra_special_tokens=special).converted()
    roles = LLAMA3_ROLES if llama3 else {"end": END, "mask": MASK, "fill": FILL}
    return Tokenizer.from_json(backend.to_str(), **roles)


def _tiktoken_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise DataError(
                    f"{path}, line {number}: not a tiktoken file, whose lines hold a base64 token and its rank; "
                    "for a Hugging Face tokenizer name its directory"
                ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([b]) in ranks for b in range(256)):
        raise DataError(f"{path}: ranks should run from 0 without a gap and contain every single byte")
    return ranks


def round_trips(tokenizer: Tokenizer) -> bool:
    """Whether text survives encoding: false for tokenizers that lower-case, strip or normalise."""
    probe = "  Ünïcode, TABS\tand\r\n\nlines; 漢字 🙂 ﬁ e\u0301 \u200d <|end|> don't  "
    return tokenizer.decode(tokenizer.encode(probe)) == probe
