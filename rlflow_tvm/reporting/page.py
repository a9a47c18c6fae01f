"""A report as one HTML page that needs nothing beside it: no network, no server, no other file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

from rlflow_tvm.reporting.contents import Contents

_SCRIPTS = ("charts.js", "graph.js", "tables.js", "page.js")
_MARKER = re.compile(r"@@(\w+)@@")


def page(contents: Contents) -> str:
    """The page. Whatever texts `contents` has, they stay texts: the data stands in a block that no `<` can end, the
    page's policy allows its own script and nothing else to run, and that script makes text nodes only."""
    script = "(() => {\n'use strict';\n" + "\n".join(map(_file, _SCRIPTS)) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "TITLE": html.escape(f"{contents['model']}: report"),
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'",
        "STYLE": _file("page.css"),
        "DATA": embedded(contents),
        "SCRIPT": script,
    }
    # in one pass: what is put in is not looked at again
    return _MARKER.sub(lambda found: parts[found[1]], _file("page.html"))


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: in ASCII, and without the signs that HTML reads."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
