"""Building blocks of self-contained HTML pages: style, tables, and embedded images."""

import base64
from html import escape

STYLE = """
:root { color-scheme: light dark; --soft: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--soft); }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { padding: .25rem .9rem; border-bottom: 1px solid var(--soft); }
td { text-align: right; white-space: nowrap; } td:first-child, th:first-child { text-align: left; }
img { max-width: 100%; background: white; border-radius: .4rem; }
.note { color: #888; font-size: .9rem; }
pre { background: var(--soft); padding: .6rem .8rem; border-radius: .4rem; overflow-x: auto; }
"""


def page(title: str, body: str, style: str = "") -> str:
    """A complete HTML page; `body` is inserted without escaping."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>
{body}
</body></html>
"""


def image(png: bytes, description: str) -> str:
    """An <img> element with an embedded PNG."""
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def table(header: list[str], rows: list[list[str]]) -> str:
    """A <table> element; cells are escaped."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in header)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
