"""Console output of `calm prepare` and `calm merge`: progress, a summary and the first chunks in color."""

from pathlib import Path
from typing import Any

from calm import console
from calm.data.merge import merge as run_merge
from calm.data.prepare import prepare as run
from calm.data.shards import PreparedData
from calm.data.workers import PrepareOptions


def prepare(sources: list[str], output: Path, options: PrepareOptions, as_json: bool, **kwargs: Any) -> None:
    with console.preparation_progress() as report:
        manifest = run(sources, output, options, report=report, warn=console.warn, **kwargs)
    _show(output, manifest, as_json)


def merge(parts: list[Path], output: Path, as_json: bool, **kwargs: Any) -> None:
    with console.preparation_progress() as report:
        manifest = run_merge(parts, output, report=report, **kwargs)
    _show(output, manifest, as_json)


def _show(output: Path, manifest: dict[str, Any], as_json: bool) -> None:
    if as_json:
        console.print_json(manifest)
    else:
        _print_summary(output, manifest)


def _print_summary(output: Path, manifest: dict[str, Any]) -> None:
    if skipped := manifest["skipped_documents"]:
        console.warn(f"skipped {skipped:,} documents that could not be decoded")
    part = manifest.get("part")
    for name, split in manifest["splits"].items():
        if not part and not split["documents"] and manifest["options"].get(f"{name}_share", 1):
            console.warn(f"no document fell into the {name} split; increase its share")
    console.stdout.print(console.preparation_summary(manifest))
    if part:
        console.stdout.print(
            f"Part {part['number']} of {part['of']} is in {output}. Combine all parts with calm merge.", soft_wrap=True
        )
        return
    data = PreparedData(output, verify=False)
    if len(stream := data.split("train")):
        console.stdout.print("First chunks (K = 4 tokens), one color per chunk:")
        console.stdout.print(console.coloured_chunks(data.tokenizer, stream[:80].tolist(), 4))
    console.stdout.print(f"Ready in {output}", soft_wrap=True)
