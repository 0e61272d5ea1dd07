"""`calm prepare --shard` and `calm merge`: the same files as on one machine, and every way to get the parts wrong."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calm.data import prepare as module
from calm.data import readers
from calm.data.corpus import open_sources, part_of
from calm.data.merge import merge
from calm.data.prepare import prepare
from calm.data.shards import MANIFEST, PreparedData, ShardWriter
from calm.data.workers import PrepareOptions
from calm.data.workspace import PROGRESS
from calm.errors import DataError
from calm.files import sha256_of


def contents(directory: Path) -> dict[str, str]:
    return {str(p.relative_to(directory)): sha256_of(p) for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture
def options(prepared, monkeypatch) -> PrepareOptions:
    """With blocks of a few documents, so that a small corpus has many parts."""
    monkeypatch.setattr(readers, "BLOCK_SIZE", 300)
    return PrepareOptions(
        str(prepared / "tokenizer"), validation_share=0.2, test_share=0.1, document_size=80, shard_tokens=300
    )


@pytest.fixture
def corpora(jsonl, texts, tmp_path) -> dict[str, list[str]]:
    """Sources of several forms."""
    directory = tmp_path / "corpora"
    directory.mkdir()
    lines = jsonl.read_text().splitlines(keepends=True)
    (directory / "text.txt").write_text("\n\n".join(texts))
    (directory / "array.json").write_text(json.dumps([{"text": text} for text in texts]))
    (directory / "empty.jsonl").write_text("")
    (directory / "one.jsonl").write_text(lines[0])
    with gzip.open(directory / "lines.jsonl.gz", "wt") as file:
        file.writelines(lines)
    return {
        "jsonl": [str(jsonl)],
        "text": [str(directory / "text.txt")],
        "several files": [
            str(directory / name) for name in ("text.txt", "empty.jsonl", "lines.jsonl.gz", "array.json")
        ],
        "empty first and last": [str(directory / "empty.jsonl"), str(jsonl), str(directory / "empty.jsonl")],
        "one document": [str(directory / "one.jsonl")],
    }


def prepare_parts(sources, directory, options, count, **kwargs) -> list[Path]:
    parts = [directory / str(number) for number in range(1, count + 1)]
    for number, part in enumerate(parts, 1):
        prepare(sources, part, options, shard=f"{number}/{count}", workers=1, **kwargs)
    return parts


@pytest.fixture
def parts(jsonl, options, tmp_path) -> list[Path]:
    return prepare_parts([str(jsonl)], tmp_path / "parts", options, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("corpus", ["jsonl", "text", "several files", "empty first and last", "one document"])
def test_merged_parts_have_the_same_bytes_as_one_preparation(corpora, corpus, count, options, tmp_path):
    prepare(corpora[corpus], tmp_path / "whole", options, workers=1)
    parts = prepare_parts(corpora[corpus], tmp_path, options, count)
    before = [contents(part) for part in parts]
    manifest = merge(list(reversed(parts)), tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert [contents(part) for part in parts] == before
    assert PreparedData(tmp_path / "merged").manifest == manifest
    documents = [json.loads((part / MANIFEST).read_text())["splits"]["train"]["documents"] for part in parts]
    assert sum(documents) == manifest["splits"]["train"]["documents"]
    if corpus in ("jsonl", "text", "several files") and count <= 3:
        assert min(documents) > 0


def test_skipped_documents_are_counted(jsonl, options, tmp_path):
    """Bad lines, and a file that is damaged after the first or the second part."""
    path = tmp_path / "bad.jsonl"
    path.write_text(jsonl.read_text().replace('{"text"', '{"txt"', 3))
    damaged = tmp_path / "cut.jsonl.gz"
    damaged.write_bytes(gzip.compress(jsonl.read_bytes())[:-100])
    (tmp_path / "bad.json").write_text("no array")
    for sources in (
        [path],
        [damaged],
        [damaged, jsonl],
        [jsonl, tmp_path / "bad.json"],
        [tmp_path / "bad.json", jsonl],
    ):
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        names = [str(source) for source in sources]
        whole = prepare(names, tmp_path / "work" / "whole", options, workers=1, on_bad_document="skip")
        assert whole["skipped_documents"] in (1, 3)
        parts = prepare_parts(names, tmp_path / "work", options, 3, on_bad_document="skip")
        merge(parts, tmp_path / "work" / "merged")
        assert contents(tmp_path / "work" / "merged") == contents(tmp_path / "work" / "whole")


def test_parts_are_balanced_and_read_only_the_files_they_need(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_SIZE", 100)
    for name in "abcd":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "four words of text"}\n' * 100)
    sources = open_sources([str(tmp_path / f"{name}.jsonl") for name in "abcd"])
    assert part_of(sources, "1/2") == {"number": 1, "of": 2, "begin": [0, 1], "end": [2, 1]}
    (tmp_path / "a.jsonl").unlink()  # other parts do not need it
    assert part_of(sources, "2/2") == {"number": 2, "of": 2, "begin": [2, 1], "end": [4, 1]}
    (source, first), end = (part_of(sources, "3/5")[side] for side in ("begin", "end"))
    assert source == 1
    assert 55 < first < 66
    assert end[0] == 2
    assert 35 < end[1] < 46


def test_a_part_is_resumed_and_only_as_the_same_part(jsonl, options, tmp_path, monkeypatch):
    (expected,) = prepare_parts([str(jsonl)], tmp_path / "a", options, 3)[1:2]
    output = tmp_path / "b"
    original, calls = ShardWriter.append, 0

    def append(self, tokens, lengths):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        original(self, tokens, lengths)

    monkeypatch.setattr(module, "PROGRESS_INTERVAL", 0.0)
    monkeypatch.setattr(ShardWriter, "append", append)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(jsonl)], output, options, shard="2/3", workers=1)
    for shard in ("1/3", "2/4", None):
        with pytest.raises(DataError, match="unfinished preparation with other sources or options"):
            prepare([str(jsonl)], output, options, shard=shard, workers=1, resume=True)
    prepare([str(jsonl)], output, options, shard="2/3", workers=1, resume=True)
    assert contents(output) == contents(expected)
    with pytest.raises(DataError, match="other sources or with other options"):
        prepare([str(jsonl)], output, options, shard="1/3", workers=1, resume=True)
    assert prepare([str(jsonl)], output, options, shard="2/3", workers=1, resume=True)["part"]["number"] == 2


@pytest.mark.parametrize("shard", ["2", "0/3", "4/3", "a/b", "1/0", "-1/3", "1/2/3", ""])
def test_invalid_shards(jsonl, options, tmp_path, shard):
    with pytest.raises(DataError, match=f"must have the form I/N with I from 1 to N, for example 2/8, not '{shard}'"):
        prepare([str(jsonl)], tmp_path / "data", options, shard=shard, workers=1)
    assert not (tmp_path / "data").exists()


def test_parts_need_a_tokenizer_and_files(jsonl, options, tmp_path):
    with pytest.raises(DataError, match="bpe:400 trains a tokenizer, but all parts must use the same one; train it"):
        prepare([str(jsonl)], tmp_path / "data", PrepareOptions("bpe:400"), shard="1/2", workers=1)
    with pytest.raises(DataError, match="embedded has no size on disk.*prepare it without --shard"):
        prepare([str(jsonl), "embedded"], tmp_path / "data", options, shard="1/2", workers=1)
    assert not (tmp_path / "data").exists()


def test_a_part_is_not_opened_for_training(parts):
    with pytest.raises(DataError, match="2 is part 2 of 3 of a corpus; combine all parts with calm merge"):
        PreparedData(parts[1])
    assert PreparedData(parts[1], allow_part=True).manifest["part"]["number"] == 2


def test_missing_and_duplicate_parts(parts, tmp_path):
    output = tmp_path / "merged"
    shutil.copytree(parts[1], tmp_path / "copy")
    for given in (parts[:2], parts[1:], [parts[0], parts[1], parts[1]], [*parts, tmp_path / "copy"]):
        with pytest.raises(
            DataError, match=r"parts 1 to 3 are needed, each once, but the parts given are \d \("
        ) as info:
            merge(given, output)
        assert all(str(part) in str(info.value) for part in given)
    assert not output.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_share": 0.3}, "their validation_share is 0.2 and 0.3; prepare all parts with the same settings"),
        ({"shard_tokens": 200}, "their shard_tokens is 300 and 200"),
        ({"shard": "2/4"}, "their number of parts is 3 and 4"),
        ({"tokenizer": True}, r"their tokenizer SHA-256 is '[0-9a-f]{64}' and '[0-9a-f]{64}'"),
        ({"source": True}, r"their source 1 is \['.*texts.jsonl', \d+\] and \['.*other.jsonl', \d+\]"),
    ],
)
def test_parts_of_another_preparation(jsonl, prepared, options, tmp_path, change, message):
    tokenizer, source = tmp_path / "tokenizer", tmp_path / "other.jsonl"
    shutil.copytree(prepared / "tokenizer", tokenizer)
    shutil.copy(jsonl, source)
    settings = {**vars(options), "tokenizer": str(tokenizer)}
    first, second, third = prepare_parts([str(jsonl)], tmp_path, PrepareOptions(**settings), 3)
    if "tokenizer" in change:
        content = json.loads((tokenizer / "tokenizer.json").read_text())
        content["model"]["merges"].pop()
        (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    settings |= {name: value for name, value in change.items() if name in ("validation_share", "shard_tokens")}
    sources = [str(source if "source" in change else jsonl)]
    shard = change.get("shard", "2/3")
    prepare(sources, second, PrepareOptions(**settings), shard=shard, workers=1, overwrite=True)
    with pytest.raises(DataError, match=f"{first} and {second} are parts of different preparations: {message}"):
        merge([third, second, first], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_parts_that_do_not_meet(parts, tmp_path):
    """The sources have the same names and sizes on two machines, but other contents."""
    manifest = json.loads((parts[1] / MANIFEST).read_text())
    manifest["part"]["begin"][1] += 1
    (parts[1] / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="2 does not begin where .*1 ends"):
        merge(parts, tmp_path / "merged")


def test_directories_that_are_not_finished_parts(parts, prepared, tmp_path):
    output = tmp_path / "merged"
    with pytest.raises(DataError, match="was prepared without --shard"):
        merge([*parts, prepared], output)
    with pytest.raises(DataError, match="is not a prepared dataset"):
        merge([*parts, tmp_path], output)
    with pytest.raises(DataError, match="no such directory"):
        merge([*parts, tmp_path / "nowhere"], output)
    (parts[2] / MANIFEST).rename(parts[2] / PROGRESS)
    with pytest.raises(DataError, match="3 contains an unfinished preparation; continue it with calm prepare --resume"):
        merge(parts, output)
    assert not output.exists()


def test_existing_output_is_kept(parts, options, jsonl, prepared, tmp_path):
    before = contents(tmp_path / "parts")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="2 is one of the parts; use another output directory"):
            merge(parts, tmp_path / "parts" / "x" / ".." / "2", overwrite=overwrite)
        with pytest.raises(DataError, match="contains files that calm prepare did not create"):
            merge(parts, tmp_path / "parts", overwrite=overwrite)
    assert contents(tmp_path / "parts") == before
    output = tmp_path / "data"
    shutil.copytree(prepared, output)
    with pytest.raises(DataError, match="finished preparation; continue it with --resume, or replace it"):
        merge(parts, output)
    with pytest.raises(DataError, match="other sources or with other options"):
        merge(parts, output, resume=True)
    assert contents(output) == contents(prepared)
    merge(parts, output, overwrite=True)
    merged = contents(output)
    merge(parts, output, resume=True)  # already complete
    prepare([str(jsonl)], tmp_path / "whole", options, workers=1)
    assert contents(output) == merged == contents(tmp_path / "whole")


def test_a_merge_without_documents(options, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 100)
    parts = prepare_parts([str(tmp_path / "a.jsonl")], tmp_path, options, 2)
    with pytest.raises(DataError, match="no documents in"):
        merge(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_damaged_part_is_named_and_the_merge_resumes_after_its_repair(parts, options, jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PROGRESS_INTERVAL", 0.0)
    damaged = parts[2] / "train-00000.tokens"
    content = damaged.read_bytes()
    damaged.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DataError, match="3/train-00000.tokens has changed since it was prepared"):
        merge(parts, tmp_path / "merged")
    damaged.write_bytes(content[1:])
    with pytest.raises(DataError, match=r"has [\d,]+ bytes, but the manifest says"):
        merge(parts, tmp_path / "merged", resume=True)
    damaged.write_bytes(content)
    with pytest.raises(DataError, match="unfinished preparation; continue it with --resume"):
        merge(parts, tmp_path / "merged")
    merge(parts, tmp_path / "merged", resume=True)
    prepare([str(jsonl)], tmp_path / "whole", options, workers=1)
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_a_killed_merge_resumes(parts, options, jsonl, tmp_path):
    """Killed by SIGKILL at every stage that writes to disk."""
    code = (
        "import os, sys, calm.data.prepare as p\n"
        "p.PROGRESS_INTERVAL = 0.0\n"  # save progress after every shard
        "left, sync = int(sys.argv.pop(1)), os.fsync\n"
        "def die(descriptor):\n"
        "    global left\n"
        "    left -= 1\n"
        "    os.kill(os.getpid(), 9) if left < 0 else sync(descriptor)\n"
        "os.fsync = die\n"
        "from calm.cli import main; main()"
    )
    before = contents(tmp_path / "parts")
    arguments = ["merge", *map(str, parts), "--output", str(tmp_path / "merged"), "--resume"]
    for syncs in (0, 3, 8, 20, 1000):
        done = subprocess.run([sys.executable, "-c", code, str(syncs), *arguments], capture_output=True, text=True)
        assert done.returncode == (0 if syncs == 1000 else -signal.SIGKILL), done.stderr
    prepare([str(jsonl)], tmp_path / "whole", options, workers=1)
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert contents(tmp_path / "parts") == before


def test_a_full_disk_keeps_the_parts_and_the_merge_resumes(parts, options, jsonl, tmp_path, monkeypatch):
    original, left = ShardWriter._write, 5

    def write(self, tokens, lengths):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, os.strerror(28))
        original(self, tokens, lengths)

    before = contents(tmp_path / "parts")
    monkeypatch.setattr(module, "PROGRESS_INTERVAL", 0.0)
    monkeypatch.setattr(ShardWriter, "_write", write)
    with pytest.raises(DataError, match="no space left on device .*run again with --resume"):
        merge(parts, tmp_path / "merged")
    monkeypatch.setattr(ShardWriter, "_write", original)
    merge(parts, tmp_path / "merged", resume=True)
    prepare([str(jsonl)], tmp_path / "whole", options, workers=1)
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert contents(tmp_path / "parts") == before


def test_commands(calm, jsonl, prepared, tmp_path):
    """The commands of docs/data.md."""
    tokenizer = ["--tokenizer", prepared / "tokenizer"]
    for number in (1, 2):
        part = ["--shard", f"{number}/2", "--output", number]
        done = calm("prepare", jsonl, *tokenizer, "--workers", number, *part, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"Part {number} of 2 is in {number}. Combine all parts with calm merge." in done.stdout
        assert "warning" not in done.stderr
    done = calm("merge", "1", "--output", "merged", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "calm: parts 1 to 2 are needed, each once, but the parts given are 1 (1)\n"
    assert "Ready in merged" in calm("merge", "1", "2", "--output", "merged", cwd=tmp_path).stdout
    manifest = calm("merge", "2", "1", "--output", "merged", "--resume", "--json", cwd=tmp_path).stdout
    assert json.loads(manifest)["splits"]["train"]["documents"] > 0
    calm("prepare", jsonl, *tokenizer, "--output", "whole", cwd=tmp_path)
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
