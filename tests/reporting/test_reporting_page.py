"""The page as text: self-contained, no text of a file becomes markup, and its size."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser

import pytest
from report_parts import planned, told_of, trained
from small_models import transformer_block

from rlflow_tvm.reporting import page
from rlflow_tvm.reporting.drawing import whole
from rlflow_tvm.reporting.page import embedded

NASTY = "</script><script>window.broken = 1</script><img src=x onerror=window.broken=1> <!-- @@DATA@@ \u2028 ' \" & \\"


class Parts(HTMLParser):
    """Elements that could load or run something, the texts of scripts, and the title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._inside, []).append(data)


@pytest.fixture(scope="module")
def told():
    state = planned()
    return told_of(state, training=trained(state))


def test_data_comes_back_whole(told):
    data, script = Parts(page(told)).texts["script"]
    assert json.loads(data) == json.loads(json.dumps(told))
    assert "lineChart" in script


def test_nothing_is_loaded(told):
    parts = Parts(page(told))
    for tag, attributes in parts.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")], attributes
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in "".join(parts.texts["style"])
    assert "@import" not in "".join(parts.texts["style"])


def test_policy_allows_the_script_that_is_there_and_no_other(told):
    parts = Parts(page(told))
    (policy,) = [a["content"] for _, a in parts.elements if a.get("http-equiv") == "Content-Security-Policy"]
    script = parts.texts["script"][1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_texts_of_files_are_no_markup(told):
    nasty = {
        **told,
        "model": NASTY,
        "target": NASTY,
        "curves": [{"name": NASTY, "points": [[0, 1]]}],
        "rules": {"columns": [NASTY], "rows": [{"rule": NASTY, "counts": [1]}]},
    }
    plain, changed = Parts(page(told)), Parts(page(nasty))
    assert [tag for tag, _ in changed.elements] == [tag for tag, _ in plain.elements]
    assert changed.texts["title"] == [f"{NASTY}: report"]
    assert json.loads(changed.texts["script"][0])["model"] == NASTY
    assert changed.texts["script"][1] == plain.texts["script"][1]


def test_embedded_json_has_no_sign_that_html_reads():
    text = embedded({"a": NASTY})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": NASTY}


def test_numbers_that_json_has_not_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        embedded([float("inf")])


def test_same_contents_give_the_same_page(told):
    assert page(told) == page(json.loads(json.dumps(told)))


def test_size_for_a_model_of_500_nodes(told):
    """Drawings are most of a page: 900 nodes before and after, and as many steps as there are in the longest plans."""
    graph = planned(transformer_block(), 2).graph
    drawing = whole(graph, {})
    times = -(-900 // len(drawing["nodes"]))
    large = {**drawing, "nodes": drawing["nodes"] * times, "edges": drawing["edges"] * times}
    heavy = {**told, "graphs": {"before": large, "after": large}, "steps": (told["steps"] * 200)[:200]}
    assert len(large["nodes"]) >= 900
    assert len(page(heavy).encode()) < 5_000_000
