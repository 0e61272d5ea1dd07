"""Sources to documents: every form and compression, and every way in which one can be bad."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm.data import readers
from calm.data.corpus import BadDocument, documents, open_sources, split_of
from calm.errors import DataError

TEXTS = ["first", "second\nwith lines", "naïve 漢字 🙂", "last"]


def read(*names, **kwargs):
    blocks = (block for source in open_sources([str(n) for n in names], **kwargs) for block in source.blocks())
    return [text for block in blocks for text in documents(block, kwargs.get("text_field", "text"))]


def pack(path, content: bytes):
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # two frames, as parallel compressors write them
        content = b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("form", ["jsonl", "json", "json-lines", "json-one", "txt", "parquet"])
def test_every_form(tmp_path, form, packing):
    rows = [{"text": text, "meta": {"a": [1, "]"]}} for text in TEXTS]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        sink = arrow.BufferOutputStream()
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": TEXTS, "n": range(4)}), sink)
        content, expected = sink.getvalue().to_pybytes(), TEXTS
    else:
        content, expected = {
            "jsonl": (lines, TEXTS),
            "json": (json.dumps([*rows[:2], *TEXTS[2:]], indent=1), TEXTS),
            "json-lines": (lines, TEXTS),
            "json-one": (json.dumps(rows[2], indent=2), TEXTS[2:3]),
            "txt": ("\n\n".join(TEXTS), ["\n\n".join(TEXTS)]),
        }[form]
        content = content.encode()
    path = pack(tmp_path / f"corpus.{form.partition('-')[0]}{packing}", content)
    assert read(path) == expected


def test_small_reads_change_nothing(tmp_path, monkeypatch):
    """Values that lie across pieces of the file come out whole."""
    rows = [{"text": "é漢🙂" * (i % 7 + 1), "i": 1234567} for i in range(200)]
    array, lines = tmp_path / "a.json", tmp_path / "b.jsonl"
    array.write_text(json.dumps(rows, ensure_ascii=False))
    lines.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    monkeypatch.setattr(readers, "BLOCK_SIZE", 7)
    expected = [row["text"] for row in rows]
    assert read(array) == expected
    assert read(lines) == expected


@given(st.lists(st.text(alphabet="ab\n\r é漢🙂", max_size=40), max_size=20), st.integers(4, 60))
def test_plain_text_is_cut_without_loss(tmp_path_factory, paragraphs, document_size):
    path = tmp_path_factory.mktemp("txt") / "a.txt"
    content = "\n\n".join(paragraphs)
    path.write_bytes(content.encode())
    (source,) = open_sources([str(path)], document_size=document_size)
    pieces = [piece for block in source.blocks() for piece in block.values]
    assert b"".join(pieces).decode() == content
    assert all(len(piece) <= 2 * document_size + 4 for piece in pieces)
    for piece in pieces:
        piece.decode()  # no character was cut


def test_embedded_corpus():
    chapters = read("embedded")
    assert len(chapters) == 1189
    assert chapters[0].startswith("In the beginning God created the heaven and the earth.\nAnd the earth was")
    assert chapters[-1].endswith("The grace of our Lord Jesus Christ be with you all. Amen.")


def test_hub_source_from_a_local_folder(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in TEXTS))
    assert read(f"hf:{tmp_path}") == TEXTS
    assert read(f"hf:{tmp_path}:default:train") == TEXTS
    with pytest.raises(DataError, match="no column 'body'"):
        read(f"hf:{tmp_path}", text_field="body")
    with pytest.raises(DataError, match="cannot read hf:"):
        read(f"hf:{tmp_path}/nowhere")


def test_globs_are_sorted(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert read(tmp_path / "*.txt") == ["a", "b", "c"]
    with pytest.raises(DataError, match="no file matches"):
        read(tmp_path / "*.jsonl")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', "line 2: not valid UTF-8 at byte 30"),
        (b'{"text": 5}', "line 2: the text is not a string but 5"),
        (b'{"text": null}', "line 2: the text is not a string but None"),
        (b'{"body": "x"}', "line 2: no field 'text' (its fields: 'body'); --text-field names another one"),
        (b"{broken", "line 2: not JSON"),
        (b"[" * 100_000, "line 2: "),
        (b'{"text": "\\ud800"}', "line 2: a lone surrogate"),
    ],
)
def test_bad_lines_are_named_and_the_others_kept(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n\n{"text": "also"}\n')
    good, bad, also = read(path)
    assert (good, also) == ("good", "also")
    assert isinstance(bad, BadDocument)
    assert reason in bad.reason
    assert str(path) in bad.reason


def test_bad_text_is_named_by_its_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good " * 3 + b"\xff\xfe")
    (tmp_path / "b.txt").write_bytes(b"junk\0junk")
    invalid, binary = read(tmp_path / "a.txt", tmp_path / "b.txt")
    assert "not valid UTF-8 at byte 15" in invalid.reason
    assert "zero byte at byte 4" in binary.reason


def cut(path, content: bytes):
    whole = pack(path, content).read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    return path


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_truncated_files_give_what_they_have(tmp_path, packing):
    noise = np.random.default_rng(0).integers(0, 10**9, 300_000)
    path = cut(tmp_path / f"a.jsonl{packing}", "".join(f'{{"text": "{i}"}}\n' for i in noise).encode())
    (source,) = open_sources([str(path)])
    seen = []

    def read_on():
        for block in source.blocks():
            seen.extend(documents(block))

    with pytest.raises(readers.DamagedSource, match=f"a.jsonl{packing} ends too early or is damaged after"):
        read_on()
    # Two thirds of the file are there; zstd's second frame needs its last block to be whole.
    assert len(seen) > 0.45 * len(noise)
    assert seen == [str(i) for i in noise[: len(seen)]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", b"not gzip at all", "is not a .gz file, or is damaged"),
        ("a.jsonl.zst", b"not zstd at all", "is not a .zst file, or is damaged"),
        ("a.parquet", b"not parquet", "is not a parquet file"),
        ("a.json", b'[{"text": "a"}, {oops', "document 2: not JSON"),
        ("a.json", b'["caf\xe9"]', "a.json: not valid UTF-8 at byte 5"),
        ("a.json", b'[{"text": "a"}, {"text": "b"}', "the array has no end"),
        ("a.exe", b"", "cannot tell what"),
    ],
)
def test_files_that_are_not_what_they_say(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_parquet_without_the_column(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column 'text' \\(columns: 'body'\\)"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_field="body") == ["x"]


def test_split_depends_on_the_text_alone_and_has_the_share():
    splits = [split_of(f"document {i}", 0.1, 0.2) for i in range(10_000)]
    assert splits == [split_of(f"document {i}", 0.1, 0.2) for i in range(10_000)]
    # Binomial standard deviations are 30 and 40: five of them.
    assert abs(splits.count("validation") - 1000) < 150
    assert abs(splits.count("test") - 2000) < 200
    # A document of the validation split stays there when the share grows.
    grown = [split_of(f"document {i}", 0.3, 0.2) for i in range(10_000)]
    assert all(new == "validation" for old, new in zip(splits, grown, strict=True) if old == "validation")
