import base64
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from calm.data import tokenizer as module
from calm.data.prepare import prepare
from calm.data.shards import PreparedData
from calm.data.tokenizer import EOS_TOKEN, MASK_TOKEN, PAD_TOKEN, load_tokenizer, round_trips, train_bpe
from calm.data.workers import PrepareOptions
from calm.errors import DataError

TEXT = "In the beginning God created the heaven and the earth. " * 5
BPE = train_bpe([TEXT], 290)


@given(st.text())
def test_any_text_round_trips(text):
    assert BPE.decode(BPE.encode(text)) == text


@given(st.text(alphabet="ab <|endfilmask>\n", max_size=40))
def test_special_token_strings_in_text_are_encoded_as_text(text):
    ids = BPE.encode(text + EOS_TOKEN + MASK_TOKEN)
    assert not {BPE.eos_token_id, BPE.pad_token_id, BPE.mask_token_id} & set(ids)
    assert BPE.decode(ids) == text + EOS_TOKEN + MASK_TOKEN


def test_special_tokens_are_distinct_and_not_decoded():
    special = [BPE.mask_token_id, BPE.eos_token_id, BPE.pad_token_id]
    assert special == [0, 1, 2]
    assert BPE.decode([BPE.pad_token_id, *BPE.encode("God"), BPE.mask_token_id, BPE.eos_token_id]) == "God"


def test_training_is_deterministic_and_reaches_the_requested_size():
    again = train_bpe([TEXT], 290)
    assert again.sha256 == BPE.sha256
    assert BPE.vocab_size == 290


def test_save_and_load(tmp_path):
    BPE.save(tmp_path / "t")
    loaded = load_tokenizer(str(tmp_path / "t"))
    assert loaded.sha256 == BPE.sha256
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert theirs("the heaven", add_special_tokens=False)["input_ids"] == BPE.encode("the heaven")
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.mask_token_id) == (
        BPE.eos_token_id,
        BPE.pad_token_id,
        BPE.mask_token_id,
    )


@given(st.text(min_size=30, max_size=200), st.integers(5, 25))
def test_long_texts_are_split_and_round_trip(text, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SEGMENT_LENGTH", limit + 1000)
        long = "word " * 300 + text
        assert "".join(module._segments(long)) == long
        assert max(map(len, module._segments(long))) <= limit + 1000
        assert BPE.decode(BPE.encode(long)) == long


def test_splitting_at_spaces_does_not_change_the_ids(monkeypatch):
    text = TEXT * 30
    expected = BPE.encode(text)
    monkeypatch.setattr(module, "MAX_SEGMENT_LENGTH", 1200)
    assert len(list(module._segments(text))) > 5
    assert BPE.encode(text) == expected


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory):
    """A tiktoken file with all bytes, followed by merges in the order of their length."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    merges = [
        " th",
        "the",
        " the",
        "he",
        "in",
        "nin",
        "ea",
        "en",
        " God",
        "Go",
        " G",
        " t",
        "th",
        "crea",
        "cr",
    ]
    for merge in sorted(merges, key=len):
        ranks[merge.encode()] = len(ranks)
    path = tmp_path_factory.mktemp("tiktoken") / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in ranks.items()))
    return path, ranks


def test_tiktoken_file_matches_tiktoken(tiktoken_file):
    tiktoken = pytest.importorskip("tiktoken")
    path, ranks = tiktoken_file
    ours = load_tokenizer(str(path))
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    theirs = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    @given(st.text(alphabet="the Godcranib\n 12é'🙂", max_size=60))
    def check(text):
        assert ours.encode(text) == theirs.encode(text, disallowed_special=())
        assert ours.decode(ours.encode(text)) == text

    check()
    assert ours.vocab_size == len(ranks) + 3


def test_llama3_layout(tmp_path, monkeypatch):
    """Special tokens have the positions that Llama 3 models expect. The test uses 260 ranks instead of 128,000."""
    monkeypatch.setattr(module, "LLAMA3_RANKS", 260)
    ranks = [bytes([b]) for b in range(256)] + [b"th", b"he", b"in", b"er"]
    path = tmp_path / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {r}\n" for r, t in enumerate(ranks)))
    loaded = load_tokenizer(str(path))
    assert len(module.LLAMA3_SPECIAL) == 256
    assert loaded.vocab_size == 260 + 256 + 1
    assert (loaded.eos_token_id, loaded.mask_token_id, loaded.pad_token_id) == (261, 262, 260 + 256)
    assert round_trips(loaded)


@pytest.mark.parametrize("content", ["not base64!\n", "YQ== x\n", "YQ== 0\n", '{"json": 1}'])
def test_invalid_tiktoken_file(tmp_path, content):
    path = tmp_path / "tokenizer.model"
    path.write_text(content)
    with pytest.raises(DataError, match="tokenizer.model"):
        load_tokenizer(str(path))


def test_missing_special_tokens_are_added(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[END]": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.normalizer = normalizers.Lowercase()
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[END]", "pad_token": "[END]"}')
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.eos_token_id == 2
    assert loaded.backend.id_to_token(loaded.pad_token_id) == PAD_TOKEN
    assert len({loaded.eos_token_id, loaded.pad_token_id, loaded.mask_token_id}) == 3
    assert loaded.encode("A B a b") == [0, 1, 0, 1]  # truncation is disabled
    assert not round_trips(loaded)


def test_unknown_names_and_invalid_sizes(tmp_path):
    with pytest.raises(DataError, match="no tokenizer 'no/such'"):
        load_tokenizer("no/such")
    with pytest.raises(DataError, match="at least 259"):
        train_bpe([TEXT], 100)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(str(tmp_path))


def change_tokenizer(directory, **parts) -> str:
    """Save a tokenizer with other parts in its tokenizer.json."""
    BPE.save(directory)
    file = directory / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    return str(directory)


def test_ids_beyond_the_number_of_entries(tmp_path):
    """The shards and the model must hold the largest id."""
    content = json.loads(BPE.content)["model"]
    last = max(content["vocab"], key=content["vocab"].get)
    content["vocab"][last] = 70_000
    name = change_tokenizer(tmp_path / "tokenizer", model=content)
    tokenizer = load_tokenizer(name)
    assert (tokenizer.vocab_size, tokenizer.dtype) == (70_001, "uint32")
    assert 70_000 in tokenizer.encode(TEXT)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(TEXT) + "\n")
    prepare([str(path)], tmp_path / "data", PrepareOptions(name, validation_share=0), workers=1)
    data = PreparedData(tmp_path / "data")
    assert data.tokenizer.decode(data.split("train")[:].tolist()) == TEXT


WORDS = {MASK_TOKEN: 0, EOS_TOKEN: 1, PAD_TOKEN: 2}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be read .Precompiled: Error"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot encode this text .chunk size must be"),
        ({"model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "?"}}, "cannot encode .* Missing .UNK. token"),
    ],
    ids=["panic on loading", "panic on encoding", "no unknown token"],
)
def test_errors_and_panics_of_the_backend(tmp_path, jsonl, parts, message):
    name = change_tokenizer(tmp_path / "tokenizer", **parts)
    with pytest.raises(DataError, match=f"{message}.*; check its tokenizer.json"):
        prepare([str(jsonl)], tmp_path / "data", PrepareOptions(name), workers=1)
    assert not (tmp_path / "data").exists()
