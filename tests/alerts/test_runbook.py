"""The runbook: a page for every alert, in both languages, with links that lead somewhere, commands and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allocscope.alerts.prometheus.expressions import DROPPED, FLUSHES, FORECAST_FIRST, FORECAST_STATE, RAN_OUT
from allocscope.alerts.rules import RULES
from allocscope.cli.app import COMMANDS
from allocscope.model import metrics
from tests.needs import REPO

RUNBOOK = REPO / "docs" / "runbook"
FOLDERS = {"English": RUNBOOK, "中文": RUNBOOK / "zh"}
HEADINGS = {"English": ["Look at", "Do", "It is not"], "中文": ["看什么", "做什么", "它不是"]}
OPENINGS = {"English": "**What it means.** ", "中文": "**含义。** "}
NAMES = sorted({rule.name for rule in RULES})
PAGES = [pytest.param(language, name, id=f"{name} {language}") for language in FOLDERS for name in NAMES]


@pytest.mark.parametrize("language", FOLDERS)
def test_every_alert_has_its_page_and_every_page_its_alert(language: str):
    assert sorted(page.stem for page in FOLDERS[language].glob("*.md")) == sorted([*NAMES, "README"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name} {rule.severity.value}")
def test_an_alert_links_to_its_page(rule):
    assert (REPO / rule.runbook_url).is_file()


@pytest.mark.parametrize(("language", "name"), PAGES)
def test_a_page_says_what_it_means_what_to_look_at_what_to_do_and_what_it_is_not(language: str, name: str):
    text = (FOLDERS[language] / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n\n{OPENINGS[language]}")
    assert re.findall(r"(?m)^## (.+)$", text) == HEADINGS[language]
    _, look, do, not_it = re.split(r"(?m)^## .+$", text)
    assert len(re.findall(r"(?m)^- ", look)) >= 2
    assert len(re.findall(r"(?m)^\d\. ", do)) >= 3
    assert len(re.findall(r"(?m)^- ", not_it)) >= 2


@pytest.mark.parametrize("language", FOLDERS)
def test_the_index_leads_to_every_page_and_to_the_other_language(language: str):
    text = (FOLDERS[language] / "README.md").read_text()
    linked = [name for name, target in re.findall(r"\[(\w+)\]\((\w+)\.md\)", text) if name == target]
    assert linked == list(dict.fromkeys(rule.name for rule in RULES))
    other = "README.md" if language == "English" else "../README.md"
    assert (f"(zh/{other})" if language == "English" else f"({other})") in text


def _linked(page: Path) -> list[Path]:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


@pytest.mark.parametrize("page", sorted(RUNBOOK.rglob("*.md")), ids=lambda page: str(page.relative_to(RUNBOOK)))
def test_no_link_leads_nowhere(page: Path):
    assert [str(target) for target in _linked(page) if not target.is_file()] == []


@pytest.mark.parametrize("page", sorted(RUNBOOK.rglob("*.md")), ids=lambda page: str(page.relative_to(RUNBOOK)))
def test_commands_and_metrics_exist(page: Path):
    text = page.read_text()
    assert set(re.findall(r"\ballocscope ([a-z]+)\b", text)) <= set(COMMANDS)
    assert set(re.findall(r"\ballocscope_\w+", text)) <= set(metrics.BY_NAME)
    recorded = {DROPPED, FLUSHES, FORECAST_FIRST, FORECAST_STATE, RAN_OUT}
    assert set(re.findall(r"\ballocscope:[\w:]+", text)) <= recorded


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_name_the_same_commands_metrics_and_pages(name: str):
    """So that a page that is changed is changed in both."""

    def named(page: Path) -> list[str]:
        code = re.findall(r"`([^`\n]+)`", page.read_text())
        links = re.findall(r"\]\(([^)]+)\)", page.read_text())
        return sorted({one for one in code if one.isascii()} | set(links))

    assert named(FOLDERS["中文"] / f"{name}.md") == named(FOLDERS["English"] / f"{name}.md")
