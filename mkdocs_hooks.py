"""Pages of the site that are files of the repository's root: their links are changed to where the site has them."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = PAGES.get(page.file.src_uri)
    if source is None:
        return markdown
    text = (ROOT / source).read_text("utf-8").replace("](docs/", "](")
    for name, file in PAGES.items():
        text = text.replace(f"]({file})", f"]({name})")
    return text
