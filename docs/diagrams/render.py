"""Draws the diagrams of this folder: the site shows plain images, and needs no script and no other host for them.

In an empty directory: ``npm install mermaid@11.17.2``, then, with Debian's ``chromium``,
``python docs/diagrams/render.py node_modules/mermaid/dist/mermaid.min.js``. Each image ends with the digest of what it
was drawn from, by which a test sees that it is not out of date.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = """<!doctype html><meta charset="utf-8"><body><script src="file://{script}"></script><script>
mermaid.initialize({{startOnLoad: false, theme: "neutral", fontFamily: "sans-serif", htmlLabels: false,
                     flowchart: {{htmlLabels: false}}}});
mermaid.render("drawn", {source}).then(({{svg}}) => {{
  const shown = document.createElement("pre");
  shown.textContent = svg;
  document.body.replaceChildren(shown);
}});
</script>"""


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def draw(source: str, script: Path) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "page.html"
        page.write_text(PAGE.format(script=script, source=json.dumps(source)), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
        done = subprocess.run(["chromium", *options, page.as_uri()], check=True, capture_output=True, text=True)
    (svg,) = re.findall(r"<pre>(&lt;svg.*?)</pre>", done.stdout, re.DOTALL)
    return html.unescape(svg)


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    for path in sorted(FOLDER.glob("*.mmd")):
        source = path.read_text(encoding="utf-8")
        drawn = f"{draw(source, script)}\n<!-- {digest(source)} -->\n"
        path.with_suffix(".svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
