"""`allocscope rules` prints what Prometheus, or its operator, takes."""

import subprocess
from pathlib import Path

import pytest
import yaml

import allocscope.alerts.prometheus
from allocscope.cli.app import main
from tests.needs import promtool

SHIPPED = Path(allocscope.alerts.prometheus.__path__[0])


@pytest.mark.parametrize(
    ("arguments", "name"), [((), "allocscope.rules.yml"), (("--operator",), "allocscope.prometheusrule.yml")]
)
def test_it_prints_the_shipped_files(capsys, monkeypatch, arguments, name):
    monkeypatch.delenv("ALLOCSCOPE_RUNBOOK_ADDRESS", raising=False)
    assert main(["rules", *arguments]) == 0
    assert capsys.readouterr().out == (SHIPPED / name).read_text()


def test_prometheus_takes_what_is_printed_with_another_runbook(capsys, tmp_path):
    assert main(["rules", "--runbook-address", 'https://docs.example/it\'s "x"'.replace(" ", "")]) == 0
    (tmp_path / "rules.yml").write_text(capsys.readouterr().out)
    checked = subprocess.run(
        [promtool(), "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_runbooks_address_may_be_a_variable(capsys, monkeypatch):
    monkeypatch.setenv("ALLOCSCOPE_RUNBOOK_ADDRESS", "https://docs.example")
    assert main(["rules"]) == 0
    assert "runbook_url: 'https://docs.example/docs/runbook/AllocscopeOOM.md'" in capsys.readouterr().out


def test_a_prometheusrule_is_named_and_labelled(capsys):
    arguments = ["--operator", "--name", "watch", "--namespace", "ml", "--label", "release=kube", "--label", "tier=a=b"]
    assert main(["rules", *arguments]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["metadata"] == {
        "name": "watch",
        "namespace": "ml",
        "labels": {"app.kubernetes.io/name": "allocscope", "release": "kube", "tier": "a=b"},
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", "x"], "--name, --namespace and --label are a PrometheusRule's: add --operator"),
        (["--operator", "--name", "Über"], "'Über' is no name in Kubernetes"),
        (["--operator", "--label", "release"], "'release' is no label; it must be NAME=VALUE"),
        (["--runbook-address", "docs.example"], "'docs.example' is no address; it must begin with http:// or https://"),
    ],
)
def test_a_wrong_call_is_told_what_would_be_right(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(["rules", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
