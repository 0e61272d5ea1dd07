"""Reading documents from sources: file formats, compression and invalid input."""

import contextlib
import gzip
import json
import subprocess
import sys
import zlib

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


def write_compressed(path, content: bytes):
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # two frames, as parallel compressors write them
        content = b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("file_format", ["jsonl", "json", "json-lines", "json-one", "txt", "parquet"])
def test_all_file_formats_and_compressions(tmp_path, file_format, compression):
    rows = [{"text": text, "meta": {"a": [1, "]"]}} for text in TEXTS]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if file_format == "parquet":
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
        }[file_format]
        content = content.encode()
    path = write_compressed(tmp_path / f"corpus.{file_format.partition('-')[0]}{compression}", content)
    assert read(path) == expected


def test_values_that_span_several_reads(tmp_path, monkeypatch):
    """Small reads split values and characters, which must be restored."""
    rows = [{"text": "é漢🙂" * (i % 7 + 1), "i": 1234567} for i in range(200)]
    array, lines = tmp_path / "a.json", tmp_path / "b.jsonl"
    array.write_text(json.dumps(rows, ensure_ascii=False))
    lines.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    monkeypatch.setattr(readers, "BLOCK_SIZE", 7)
    expected = [row["text"] for row in rows]
    assert read(array) == expected
    assert read(lines) == expected


@given(st.lists(st.text(alphabet="ab\n\r é漢🙂", max_size=40), max_size=20), st.integers(4, 60))
def test_plain_text_is_split_without_loss(tmp_path_factory, paragraphs, document_size):
    path = tmp_path_factory.mktemp("txt") / "a.txt"
    content = "\n\n".join(paragraphs)
    path.write_bytes(content.encode())
    (source,) = open_sources([str(path)], document_size=document_size)
    values = [value for block in source.blocks() for value in block.values]
    assert b"".join(values).decode() == content
    assert all(len(value) <= 2 * document_size + 4 for value in values)
    for value in values:
        value.decode()  # no character is split


def test_embedded_corpus():
    chapters = read("embedded")
    assert len(chapters) == 1189
    assert chapters[0].startswith("In the beginning God created the heaven and the earth.\nAnd the earth was")
    assert chapters[-1].endswith("The grace of our Lord Jesus Christ be with you all. Amen.")


def test_hub_source_from_local_directory(tmp_path):
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
        (b'{"text": 5}', "line 2: the text must be a string, not 5"),
        (b'{"text": null}', "line 2: the text must be a string, not None"),
        (b'{"body": "x"}', "line 2: no field 'text' (fields: 'body'); choose another with --text-field"),
        (b"{broken", "line 2: invalid JSON"),
        (b"[" * 100_000, "line 2: "),
        (b'{"text": "\\ud800"}', "line 2: lone surrogate"),
    ],
)
def test_invalid_lines_are_reported_and_valid_lines_kept(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n\n{"text": "also"}\n')
    good, bad, also = read(path)
    assert (good, also) == ("good", "also")
    assert isinstance(bad, BadDocument)
    assert reason in bad.reason
    assert str(path) in bad.reason


def test_invalid_text_is_reported_with_its_byte_offset(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good " * 3 + b"\xff\xfe")
    (tmp_path / "b.txt").write_bytes(b"junk\0junk")
    invalid, binary = read(tmp_path / "a.txt", tmp_path / "b.txt")
    assert "not valid UTF-8 at byte 15" in invalid.reason
    assert "null byte at byte 4" in binary.reason


def write_truncated(path, content: bytes):
    complete = write_compressed(path, content).read_bytes()
    path.write_bytes(complete[: len(complete) * 2 // 3])
    return path


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_truncated_files_are_read_up_to_the_damage(tmp_path, compression):
    noise = np.random.default_rng(0).integers(0, 10**9, 300_000)
    path = write_truncated(tmp_path / f"a.jsonl{compression}", "".join(f'{{"text": "{i}"}}\n' for i in noise).encode())
    (source,) = open_sources([str(path)])
    texts = []

    def read_all():
        for block in source.blocks():
            texts.extend(documents(block))

    with pytest.raises(readers.DamagedSource, match=f"a.jsonl{compression} is truncated or damaged after"):
        read_all()
    # Two thirds of the file remain; of zstd's second frame, only complete blocks can be read.
    assert len(texts) > 0.45 * len(noise)
    assert texts == [str(i) for i in noise[: len(texts)]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", b"not gzip at all", "is damaged or not a .gz file"),
        ("a.jsonl.zst", b"not zstd at all", "is damaged or not a .zst file"),
        ("a.parquet", b"not parquet", "is damaged or not a Parquet file"),
        ("a.json", b'[{"text": "a"}, {oops', "document 2: invalid JSON"),
        ("a.json", b'["caf\xe9"]', "a.json: not valid UTF-8 at byte 5"),
        ("a.json", b'[{"text": "a"}, {"text": "b"}', "the array is not closed"),
        ("a.exe", b"", "unknown file format: .*a.exe"),
    ],
)
def test_invalid_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_parquet_without_text_column(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column 'text' \\(columns: 'body'\\)"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_field="body") == ["x"]


def test_split_depends_only_on_the_text_and_matches_the_shares():
    splits = [split_of(f"document {i}", 0.1, 0.2) for i in range(10_000)]
    assert splits == [split_of(f"document {i}", 0.1, 0.2) for i in range(10_000)]
    # Five standard deviations of the binomial distribution, which are 30 and 40.
    assert abs(splits.count("validation") - 1000) < 150
    assert abs(splits.count("test") - 2000) < 200
    # A document stays in the validation split when its share increases.
    larger = [split_of(f"document {i}", 0.3, 0.2) for i in range(10_000)]
    assert all(new == "validation" for old, new in zip(splits, larger, strict=True) if old == "validation")


MEASURE = """
import re, sys
from pathlib import Path
from calm.data.corpus import BadDocument, documents, open_sources
from calm.errors import DataError

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000

if sys.argv[1].partition(".")[2].startswith("parquet"):
    import pyarrow.parquet
before = memory("VmRSS")
try:
    for block in open_sources([sys.argv[1]])[0].blocks():
        for text in documents(block):
            print(f"bad: {text.reason}" if isinstance(text, BadDocument) else f"good: {len(text)}")
except DataError as error:
    print(f"error: {error}")
print(memory("VmHWM") - before)
"""


def read_with_memory(path) -> tuple[list[str], float]:
    """The documents of a file, read in another process, and the memory that it took in MB."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *found, memory = done.stdout.splitlines()
    return found, float(memory)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_decompression_bombs(tmp_path, suffix):
    """400 MB in one line; the documents around it are read."""
    path, x = tmp_path / f"a.jsonl{suffix}", b"x" * 10**6
    if suffix == ".zst":
        compressor = pytest.importorskip("zstandard").ZstdCompressor().compressobj()
    else:
        compressor = zlib.compressobj(wbits=31)
    parts = [compressor.compress(part) for part in (b'{"text": "a"}\n', *[x] * 400, b'\n{"text": "bc"}\n')]
    path.write_bytes(b"".join([*parts, compressor.flush()]))
    assert path.stat().st_size < 500_000
    found, memory = read_with_memory(path)
    limit = "larger than 16,777,216 bytes; raise the limit with --max-document-bytes"
    assert found == ["good: 1", f"bad: {path}, line 2: {limit}", "good: 2"]
    assert memory < 120


def test_parquet_bomb(tmp_path):
    """A file of a few hundred bytes with 4 MB in each of 300 rows."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    indices = arrow.array([0] * 300, arrow.int32())
    table = arrow.table({"text": arrow.DictionaryArray.from_arrays(indices, arrow.array(["x" * 4_000_000]))})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 1000
    found, memory = read_with_memory(tmp_path / "a.parquet")
    assert found == ["good: 4000000"] * 300
    assert memory < 150


@pytest.mark.parametrize("file_format", ["jsonl", "json", "parquet", "txt"])
@pytest.mark.parametrize("limit", [40, 10_000])
def test_documents_above_the_limit(tmp_path, file_format, limit, monkeypatch):
    """They are counted in bytes, not in characters, and the documents after them are read."""
    monkeypatch.setattr(readers, "BLOCK_SIZE", 1000)
    texts = ["first", "é" * (limit // 2 - 10), "é" * (limit // 2 + 1), "last", "z" * (3 * limit), "end"]
    path = tmp_path / f"a.{file_format}"
    if file_format == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": texts}), path)
    elif file_format == "txt":
        path.write_text(texts[-2])
    elif file_format == "json":
        path.write_text(json.dumps(texts, ensure_ascii=False))
    else:
        path.write_text("".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts))
    (source,) = open_sources([str(path)], document_size=2 * limit, max_document_bytes=limit)
    found: list = []
    with contextlib.suppress(DataError):
        for block in source.blocks():
            found += documents(block, max_document_bytes=limit)
    problem = f"larger than {limit:,} bytes; raise the limit with --max-document-bytes"
    if file_format == "txt":
        assert found == [BadDocument(f"{path}, document 1: {problem}")]
        return
    unit = "line" if file_format == "jsonl" else "document"
    bad = [BadDocument(f"{path}, {unit} {number}: {problem}") for number in (3, 5)]
    expected = [*texts[:2], bad[0], "last", bad[1], "end"]
    assert found == expected[: 4 if (file_format, limit) == ("json", 10_000) else 6]  # see the next test


def test_parquet_row_groups_above_the_limit_are_not_read(tmp_path):
    """One text of 270 MB in a file of 10 KB, after a row group that is read."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    with parquet.ParquetWriter(tmp_path / "a.parquet", arrow.schema({"text": "string"}), **options) as writer:
        for text in ("first", "x" * 270_000_000):
            writer.write_table(arrow.table({"text": [text]}))
    found, memory = read_with_memory(tmp_path / "a.parquet")
    assert found[0] == "good: 5"
    assert found[1].startswith(f"error: {tmp_path / 'a.parquet'}, row group 2: its texts are larger than 16,777,216")
    assert memory < 100


def test_a_json_document_that_does_not_end_within_the_limit(tmp_path):
    """Later documents cannot be located."""
    (tmp_path / "a.json").write_text(json.dumps(["first", "z" * 5_000_000]))
    (source,) = open_sources([str(tmp_path / "a.json")], max_document_bytes=1_000_000)
    with pytest.raises(DataError, match="document 2: larger than 1,000,000 bytes; .* or invalid JSON; skip the rest"):
        list(source.blocks())


def test_json_values_are_grouped_by_their_size(tmp_path):
    """Lists have a size, too: a block is a few megabytes at most."""
    (tmp_path / "a.json").write_text(json.dumps([[0] * 50_000] * 40))
    (source,) = open_sources([str(tmp_path / "a.json")])
    assert [len(block.values) for block in source.blocks()] == [7, 7, 7, 7, 7, 5]
