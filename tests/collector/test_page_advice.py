"""What the page makes of advice, as text, over a stand-in for the browser's document."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.test_advise import ADVICE
from tests.collector.test_page import SCRIPT, node

DOCUMENT = """
class Made {
  constructor(tag) { Object.assign(this, { tag, children: [], attributes: {}, dataset: {}, style: {}, heard: {} }); }
  append(...children) { this.children.push(...children); }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(name, heard) { this.heard[name] = heard; }
  set textContent(text) { this.children = [String(text)]; }
}
globalThis.document = { createElement: (tag) => new Made(tag) };
const plain = (made) => made.children === undefined ? String(made)
  : [`${made.tag}${made.attributes.class ? "." + made.attributes.class : ""}${"open" in made.attributes ? ".open" : ""}`, ...made.children.map(plain)];
"""


def shown(code: str) -> Any:
    """What `code` comes to, with all that the script defines."""
    functions = SCRIPT[: SCRIPT.index('document.querySelector("#jobs").addEventListener')]
    said = node("--eval", f"{DOCUMENT}{functions}\nconsole.log(JSON.stringify({code}));")
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)


def test_advice_is_a_row_with_what_was_tried_folded_away():
    row = shown(f"plain(adviceRow({json.dumps(ADVICE)}))")
    tag, kind, whose, made, said = row
    assert (tag, kind) == ("tr", ["td", ["span.state setting", "setting"]])
    assert whose == ["th.name", "llama, rank 3, n7, GPU 2"]
    assert made[0] == "td.when"
    assert said[:5] == [
        "td.name",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: all is served.",
        ["div.faint", "gains: it does not run out"],
        ["div.faint", "costs: more calls to the driver"],
        ["div.faint", "to be known: max_split_size_mb\x1b is ignored"],
    ]
    [tag, summary, table] = said[5]
    assert tag == "details"
    assert summary == [
        "summary",
        "3 replays of 12,345 requests, by the rules of PyTorch 2.14.1; exact: all is explained",
    ]
    [_, _, [_, recorded, advised, blocked]] = table
    assert recorded == [
        "tr", ["th.name", "default (as recorded)"], ["td.name", ""], ["td.name", "runs out at 12,344"], ["td.number", "–"],
        ["td.number", "1.95 GiB"], ["td.number", "900.00 MiB"], ["td.number", "1"], ["td.number", "12"], ["td.name", ""],
    ]  # fmt: skip
    assert advised[1:5] == [
        ["th.name", "expandable_segments:True"],
        ["td.name", ""],
        ["td.name", "served"],
        ["td.number", "1.07 GiB"],
    ]
    assert (blocked[0], blocked[2], blocked[-1]) == (
        "tr.gone",
        ["td.name", "buckets:8"],
        ["td.name", "not advised: not with a MemPool"],
    )


def test_an_estimate_is_called_one_and_without_a_replay_there_is_no_table():
    row = shown(f"plain(adviceRow({json.dumps({**ADVICE, 'is_exact': False, 'exactness': '', 'torch_version': ''})}))")
    assert row[-1][-1][1] == ["summary", "3 replays of 12,345 requests; an estimate"]
    bare = {
        **ADVICE,
        "kind": "unknown",
        "trials": [],
        "gains": [],
        "costs": [],
        "hazards": [],
        "summary": "it was killed",
    }
    assert shown(f"plain(adviceRow({json.dumps(bare)}))")[-1] == ["td.name", "it was killed"]


def test_what_somebody_opened_stays_open():
    told = json.dumps(ADVICE)
    opens = f"(() => {{ const made = trials({told}); made.open = true; made.heard.toggle(); return plain(trials({told})); }})()"
    assert shown(opens)[0] == "details.open"
    shuts = opens.replace("return", "made.open = false; made.heard.toggle(); return")
    assert shown(shuts)[0] == "details"


def test_an_alert_says_what_would_help():
    alert = {
        "severity": "critical", "name": "AllocscopeFragmentationOOMRisk", "labels": {"job": "llama", "rank": "3"},
        "description": "d", "at_us": 1, "summary": "it is about to run out", "advice": "Set it so.",
    }  # fmt: skip
    assert shown(f"plain(alertRow({json.dumps(alert)}))")[-1] == [
        "td.name",
        "it is about to run out",
        ["div.advised", "Set it so."],
    ]
    assert shown(f"plain(alertRow({json.dumps({**alert, 'advice': None})}))")[-1] == [
        "td.name",
        "it is about to run out",
    ]
