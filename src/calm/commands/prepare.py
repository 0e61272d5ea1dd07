"""`calm prepare` for people: progress, what was made, its first chunks in colours."""

from pathlib import Path
from typing import Any

from calm import console
from calm.data.prepare import prepare as run
from calm.data.shards import PreparedData
from calm.data.workers import PrepareOptions


def prepare(sources: list[str], output: Path, options: PrepareOptions, as_json: bool, **how: Any) -> None:
    with console.preparation_progress() as report:
        manifest = run(sources, output, options, report=report, warn=console.warn, **how)
    if as_json:
        console.print_json(manifest)
    else:
        _show(output, manifest)


def _show(output: Path, manifest: dict[str, Any]) -> None:
    if skipped := manifest["skipped_documents"]:
        console.warn(f"{skipped:,} bad documents were left out")
    for name, split in manifest["splits"].items():
        if not split["documents"] and manifest["options"].get(f"{name}_share", 1):
            console.warn(f"no document fell into the {name} split; give it a larger share")
    console.stdout.print(console.preparation_summary(manifest))
    data = PreparedData(output, verify=False)
    if len(stream := data.split("train")):
        console.stdout.print("The first chunks, K = 4 tokens in a colour:")
        console.stdout.print(console.coloured_chunks(data.tokenizer, stream[:80].tolist(), 4))
    console.stdout.print(f"Ready in {output}", soft_wrap=True)
