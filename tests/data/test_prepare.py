"""`calm prepare`: reproducible output, resuming, and error handling."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm.data import prepare as module
from calm.data.prepare import prepare
from calm.data.shards import MANIFEST, PreparedData, ShardWriter
from calm.data.workers import PrepareOptions
from calm.data.workspace import PROGRESS
from calm.errors import DataError, UserError
from calm.files import locked_directory, sha256_of

OPTIONS = PrepareOptions("bpe:400", validation_share=0.2, test_share=0.1, shard_tokens=300)


def contents(directory) -> dict[str, str]:
    return {str(p.relative_to(directory)): sha256_of(p) for p in sorted(directory.rglob("*")) if p.is_file()}


def decoded(data: PreparedData, split: str) -> list[str]:
    stream = data.split(split)
    ranges = [stream.document_range(i) for i in range(len(stream.document_lengths))]
    for _, last in ranges:
        assert stream[last - 1 : last].tolist() == [data.tokenizer.eos_token_id]
    return [data.tokenizer.decode(stream[first:last].tolist()) for first, last in ranges]


def test_every_document_is_stored_once_and_unchanged(prepared, texts):
    data = PreparedData(prepared)
    splits = {split: decoded(data, split) for split in ("train", "validation", "test")}
    assert sorted(sum(splits.values(), [])) == sorted(texts)
    assert splits["train"] == [text for text in texts if text in splits["train"]]  # in order
    assert all(splits.values())
    assert data.manifest["splits"]["train"]["bytes"] == sum(len(t.encode()) for t in splits["train"])
    assert len(data.manifest["splits"]["train"]["shards"]) > 1


@given(
    st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), max_size=30),
    st.integers(1, 20),
    st.data(),
)
def test_shards_round_trip(tmp_path_factory, documents, shard_tokens, data):
    directory = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(directory, "train", "uint16", shard_tokens)
    rest = list(documents)
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        batch, rest = rest[:count], rest[count:]
        writer.append(np.array(sum(batch, []), np.uint16), np.array([len(d) for d in batch]))
        if data.draw(st.booleans()):  # a crash: data after the saved state is truncated
            writer.sync()
            state = writer.state()
            writer.append(np.array([7, 7, 7], np.uint16), np.array([1, 2]))
            writer.sync()
            writer = ShardWriter(directory, "train", "uint16", shard_tokens)
            writer.restore(json.loads(json.dumps(state)))
    shards = writer.finish()
    tokens = [np.fromfile(s.files(directory)[0], np.uint16).tolist() for s in shards]
    lengths = [np.fromfile(s.files(directory)[1], np.uint32).tolist() for s in shards]
    assert sum(tokens, []) == sum(documents, [])
    assert sum(lengths, []) == [len(d) for d in documents]
    for shard, ids, sizes in zip(shards, tokens, lengths, strict=True):
        assert sum(sizes) == len(ids) == shard.tokens
        assert sum(sizes[:-1]) < shard_tokens
        assert shard.tokens_sha256 == sha256_of(shard.files(directory)[0])
        assert shard.lengths_sha256 == sha256_of(shard.files(directory)[1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Several megabytes, so that there is more than one block."""
    path = tmp_path_factory.mktemp("big") / "big.jsonl.gz"
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 9))) for _ in range(3000)]
    with gzip.open(path, "wt", compresslevel=1) as file:
        for _ in range(2500):
            text = " ".join(words[i] for i in rng.zipf(1.3, 400) % 3000)
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("reference") / "data"
    prepare([str(corpus)], output, OPTIONS_BIG, workers=1)
    return contents(output)


OPTIONS_BIG = PrepareOptions("bpe:1000", validation_share=0.05, shard_tokens=200_000)


def arguments(corpus, output) -> list[str]:
    options = ["--tokenizer", "bpe:1000", "--validation-share", "0.05", "--shard-tokens", "200000"]
    return ["prepare", str(corpus), "--output", str(output), *options]


def start(corpus, output, *more):
    command = [sys.executable, "-m", "calm", *arguments(corpus, output), *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_output_does_not_depend_on_the_number_of_workers(corpus, reference, tmp_path):
    for workers in ("2", "3"):
        assert start(corpus, tmp_path / workers, "--workers", workers).wait() == 0
        assert contents(tmp_path / workers) == reference


def run_until_killed(corpus, output, syncs):
    """Run a preparation that is killed after `syncs` calls of fsync, independent of the speed of the machine."""
    code = (
        "import os, calm.data.prepare as p\n"
        "p.PROGRESS_INTERVAL = 0.0\n"  # save progress after every block
        "left, sync = int(os.environ['SYNCS']), os.fsync\n"
        "def die(descriptor):\n"
        "    global left\n"
        "    left -= 1\n"
        "    os.kill(os.getpid(), 9) if left < 0 else sync(descriptor)\n"
        "os.fsync = die\n"
        "from calm.cli import main; main()"
    )
    command = [sys.executable, "-c", code, *arguments(corpus, output), "--resume", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "SYNCS": str(syncs)}, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_resuming_after_kills_gives_identical_output(corpus, reference, tmp_path):
    """Killed at every stage that writes to disk."""
    output = tmp_path / "data"
    for syncs in (0, 1, 3, 6, 8, 10):
        run_until_killed(corpus, output, syncs)
    final = start(corpus, output, "--resume", "--workers", "2")
    assert final.wait() == 0, final.stderr.read()
    assert contents(output) == reference


def test_ctrl_c_prints_one_line_and_stops_all_workers(corpus, tmp_path):
    process = start(corpus, tmp_path / "data", "--workers", "2")
    while process.poll() is None and not (tmp_path / "data" / PROGRESS).exists():
        time.sleep(0.05)
    time.sleep(0.5)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    if process.returncode == 0:
        pytest.skip("the preparation finished before the signal")
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert stderr.strip().splitlines()[-1].startswith("calm: interrupted")


def test_workers_exit_when_the_parent_is_killed(corpus, tmp_path):
    process = start(corpus, tmp_path / "data", "--workers", "2")
    workers = []
    while len(workers) < 2 and process.poll() is None:
        workers = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def kill_while_overwriting(source, output, deletions):
    """Run --overwrite in a process that is killed after deleting this many files."""
    code = (
        "import os, sys\n"
        "from calm.data.prepare import prepare\n"
        "from calm.data.workers import PrepareOptions\n"
        "left = int(sys.argv[3])\n"
        "def die(event, arguments):\n"
        "    global left\n"
        "    left -= event == 'os.remove'\n"
        "    event == 'os.remove' and left < 0 and os.kill(os.getpid(), 9)\n"
        "sys.addaudithook(die)\n"
        "prepare([sys.argv[1]], sys.argv[2], PrepareOptions('bpe:300'), workers=1, overwrite=True)"
    )
    command = [sys.executable, "-c", code, str(source), str(output), str(deletions)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_interrupted_overwrite_can_be_repeated(jsonl, tmp_path):
    output = tmp_path / "data"
    prepare([str(jsonl)], output, OPTIONS, workers=1)
    expected = contents(output)
    (output / "train-notes.tokens").write_text("mine")
    (output / "notes.tmp").write_text("mine, too")
    for deletions in (1, 4):  # only the manifest; also some shards
        kill_while_overwriting(jsonl, output, deletions)
        with pytest.raises(DataError, match="start over with --overwrite"):
            prepare([str(jsonl)], output, OPTIONS, workers=1, resume=True)
    prepare([str(jsonl)], output, PrepareOptions("bpe:300"), workers=1, overwrite=True)
    assert not list(output.glob("train-0000[1-9].*"))  # with larger shards there is one
    prepare([str(jsonl)], output, OPTIONS, workers=1, overwrite=True)
    assert (output / "train-notes.tokens").read_text() == "mine"
    assert (output / "notes.tmp").read_text() == "mine, too"
    assert {name: sha for name, sha in contents(output).items() if "notes" not in name} == expected
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "progress.json.tmp").write_text("{")  # the state after a kill at the very start
    prepare([str(jsonl)], tmp_path / "new", OPTIONS, workers=1)
    assert contents(tmp_path / "new") == expected


def test_overwriting_an_unfinished_preparation(corpus, jsonl, tmp_path):
    """Shards begun after progress.json was written are deleted as well."""
    output = tmp_path / "data"
    run_until_killed(corpus, output, syncs=10)
    recorded = json.loads((output / PROGRESS).read_text())["writers"]
    later = [path for path in output.glob("*-*.tokens") if path.stem not in json.dumps(recorded)]
    assert later
    (output / "train-notes.tokens").write_text("mine")
    prepare([str(jsonl)], output, OPTIONS, workers=1, overwrite=True)
    expected = tmp_path / "expected"
    prepare([str(jsonl)], expected, OPTIONS, workers=1)
    (output / "train-notes.tokens").unlink()
    assert contents(output) == contents(expected)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest.json", '{"name": "a web app", "version": 1, "icons": []}'),
        ("manifest.json", "[]"),
        ("progress.json", '{"job": "rendering", "done": 0.7}'),
        ("progress.json", "[" * 100_000),
    ],
)
def test_files_of_others_are_kept(jsonl, tmp_path, name, content):
    for path in (name, "tokenizer/tokenizer.json", "train-notes.tokens"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    before = contents(tmp_path)
    for flags in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(DataError, match="contains files that calm prepare did not create"):
            prepare([str(jsonl)], tmp_path, OPTIONS, workers=1, **flags)
    assert contents(tmp_path) == before


def test_a_temporary_file_of_others_is_kept(jsonl, tmp_path):
    (tmp_path / "thesis.tmp").write_text("years of work")
    with pytest.raises(DataError, match=r"did not create \(thesis.tmp\)"):
        prepare([str(jsonl)], tmp_path, OPTIONS, workers=1)
    assert (tmp_path / "thesis.tmp").read_text() == "years of work"


def test_a_manifest_lists_no_files_elsewhere(jsonl, tmp_path):
    """Names that are not those of shards are not deleted."""
    output, other = tmp_path / "data", tmp_path / "other.tokens"
    prepare([str(jsonl)], output, OPTIONS, workers=1)
    other.write_text("mine")
    manifest = json.loads((output / MANIFEST).read_text())
    manifest["splits"]["train"]["shards"].append({"name": "../other"})
    (output / MANIFEST).write_text(json.dumps(manifest))
    prepare([str(jsonl)], output, OPTIONS, workers=1, overwrite=True)
    assert other.read_text() == "mine"


def test_concurrent_preparations_are_refused(corpus, tmp_path):
    with locked_directory(tmp_path / "data", "calm prepare"):
        second = start(corpus, tmp_path / "data", "--resume")
        _, stderr = second.communicate(timeout=60)
    assert second.returncode == 2
    assert "another calm prepare is writing" in stderr


def test_directories_with_other_content_are_refused(jsonl, prepared, tmp_path):
    with pytest.raises(DataError, match="finished preparation; continue it with --resume, or replace it"):
        prepare([str(jsonl)], prepared, OPTIONS)
    assert prepare([str(jsonl)], prepared, OPTIONS, resume=True)["splits"]  # already complete
    with pytest.raises(DataError, match="other sources or with other options"):
        prepare([str(jsonl)], prepared, PrepareOptions("bpe:500"), resume=True)
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.tex").write_text("years of work")
    for flags in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(DataError, match=r"did not create \(chapter.tex\)"):
            prepare([str(jsonl)], foreign, OPTIONS, **flags)
    assert (foreign / "chapter.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file, not a directory"):
        prepare([str(jsonl)], tmp_path / "file", OPTIONS)


def test_overwrite_keeps_other_files(jsonl, tmp_path):
    prepare([str(jsonl)], tmp_path / "data", OPTIONS, workers=1)
    (tmp_path / "data" / "notes.md").write_text("mine")
    prepare([str(jsonl)], tmp_path / "data", PrepareOptions("bpe:300"), workers=1, overwrite=True)
    assert (tmp_path / "data" / "notes.md").read_text() == "mine"
    assert PreparedData(tmp_path / "data").manifest["vocab_size"] == 300


def test_invalid_documents_fail_or_are_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good words here"}\n{"txt": 1}\n{"text": "more good words"}\n')
    with pytest.raises(DataError, match="line 2: no field 'text'.*skip such documents with --on-bad-document skip"):
        prepare([str(path)], tmp_path / "data", PrepareOptions("bpe:260"), workers=1)
    assert not (tmp_path / "data").exists()  # nothing to resume
    warnings = []
    manifest = prepare(
        [str(path)],
        tmp_path / "data",
        PrepareOptions("bpe:260"),
        workers=1,
        on_bad_document="skip",
        warn=warnings.append,
    )
    assert manifest["skipped_documents"] == 1
    assert manifest["splits"]["train"]["documents"] == 2
    assert "line 2" in warnings[0]


def test_truncated_gzip_fails_or_is_read_up_to_the_damage(corpus, tmp_path):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(corpus.read_bytes()[:1_500_000])
    with pytest.raises(DataError, match=r"cut.jsonl.gz is truncated or damaged after .* decompressed bytes"):
        prepare([str(path)], tmp_path / "data", OPTIONS_BIG, workers=1)
    manifest = prepare([str(path)], tmp_path / "data", OPTIONS_BIG, workers=1, on_bad_document="skip", resume=True)
    assert manifest["skipped_documents"] == 1
    assert manifest["splits"]["train"]["documents"] > 500


def test_documents_above_the_limit_fail_or_are_skipped(calm, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in ("good words", "x" * 99, "more good words")))
    command = ["prepare", path, "--tokenizer", "bpe:260", "--output", tmp_path / "data", "--max-document-bytes", "100"]
    done = calm(*command, "--workers", "1")
    assert done.returncode == 2
    assert "line 2: larger than 100 bytes; raise the limit with --max-document-bytes; skip such doc" in done.stderr
    done = calm(*command, "--workers", "1", "--on-bad-document", "skip", "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert manifest["skipped_documents"] == 1
    assert sum(split["documents"] for split in manifest["splits"].values()) == 2
    assert manifest["options"]["max_document_bytes"] == 100


def test_complete_data_of_earlier_versions_need_not_be_prepared_again(jsonl, prepared, tmp_path):
    """Their manifests have no max_document_bytes."""
    copy = copy_of(prepared, tmp_path)
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["options"]["max_document_bytes"]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    assert prepare([str(jsonl)], copy, OPTIONS, resume=True) == manifest


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_empty_sources(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match="no documents in"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "data", PrepareOptions("bpe:260"), workers=1)
    assert not (tmp_path / "data").exists()


def test_resume_refuses_a_changed_source(corpus, tmp_path):
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(corpus.read_bytes())
    output = tmp_path / "data"
    run_until_killed(source, output, syncs=10)
    os.utime(source, (1, 1))
    before = contents(output)
    with pytest.raises(DataError, match="a source has changed"):
        prepare([str(source)], output, OPTIONS_BIG, resume=True)
    assert contents(output) == before  # the unfinished preparation is unchanged


def test_resume_after_simulated_full_disk(corpus, reference, tmp_path, monkeypatch):
    """The disk is full after a few hundred kilobytes. Resuming with free space gives identical output."""
    written = 0
    original = ShardWriter._write

    def write(self, tokens, lengths):
        nonlocal written
        written += len(tokens)
        if written > 400_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, tokens, lengths)

    monkeypatch.setattr(module, "PROGRESS_INTERVAL", 0.0)
    monkeypatch.setattr(ShardWriter, "_write", write)
    with pytest.raises(DataError, match=r"no space left on device for .*free some space and run again with --resume"):
        prepare([str(corpus)], tmp_path / "data", OPTIONS_BIG, workers=1)
    assert not list((tmp_path / "data").rglob("*.tmp"))
    progress = json.loads((tmp_path / "data" / PROGRESS).read_text())
    kept = sum(s["tokens"] for s in [*progress["writers"]["train"]["done"], progress["writers"]["train"]["open"]] if s)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "data").glob("train-*.tokens"))
    assert on_disk == 2 * kept > 0
    monkeypatch.setattr(ShardWriter, "_write", original)
    prepare([str(corpus)], tmp_path / "data", OPTIONS_BIG, workers=1, resume=True)
    assert contents(tmp_path / "data") == reference


def test_full_disk(corpus, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system requires root")
    try:
        process = start(corpus, disk / "data", "--workers", "1")
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "no space left" in stderr
        assert "Traceback" not in stderr
        assert not list(disk.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", disk], check=True)


def copy_of(prepared, tmp_path):
    import shutil

    shutil.copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"


def test_changed_shards_are_reported(prepared, tmp_path):
    copy = copy_of(prepared, tmp_path)
    path = copy / "train-00001.tokens"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"train-00001.tokens has changed since it was prepared: its SHA-256 is [0-9a-f]{64}"
    ):
        PreparedData(copy)
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"has [\d,]+ bytes, but the manifest says"):
        PreparedData(copy, verify=False)
    path.unlink()
    with pytest.raises(DataError, match="train-00001.tokens is missing"):
        PreparedData(copy)


def test_wrong_tokenizer_and_damaged_manifests(prepared, tmp_path):
    copy = copy_of(prepared, tmp_path)
    from calm.data.tokenizer import train_bpe

    train_bpe(["some other words"], 270).save(copy / "tokenizer")
    with pytest.raises(DataError, match="does not match the shards"):
        PreparedData(copy)
    (copy / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"manifest.json is damaged"):
        PreparedData(copy)
    (copy / MANIFEST).write_text('{"version": 99}')
    with pytest.raises(DataError, match="version 99"):
        PreparedData(copy)
    with pytest.raises(DataError, match="no such directory"):
        PreparedData(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no split 'dev'"):
        PreparedData(prepared).split("dev")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_share": 0.6, "test_share": 0.5}, "must sum to less than 1"),
        ({"validation_share": -0.1}, "must not be negative"),
        ({"shard_tokens": 0}, "shard_tokens must be at least 1"),
        ({"document_size": 3}, "document_size must be at least 4"),
        ({"max_document_bytes": 0}, "max_document_bytes must be at least 1"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(DataError, match=message):
        PrepareOptions("bpe:300", **options)


def test_invalid_tokenizer_leaves_no_directory(jsonl, tmp_path):
    for name, message in (("bpe:many", "must have the form bpe:SIZE"), ("bpe:10", "at least 259")):
        with pytest.raises(DataError, match=message):
            prepare([str(jsonl)], tmp_path / "data", PrepareOptions(name), workers=1)
        assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match="workers must be at least 1"):
        prepare([str(jsonl)], tmp_path / "data", OPTIONS, workers=0)
