"""The CI workflows, the Makefile they call, and what it installs."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from labhelpers import cli
from labhelpers.references import PROJECT

WORKFLOWS = sorted((PROJECT / ".github" / "workflows").glob("*.yml"))
LOCK = (PROJECT / "requirements-ci.txt").read_text()
MAKEFILE = (PROJECT / "Makefile").read_text()


def content(workflow: Path) -> dict[str, Any]:
    """Return a workflow; YAML 1.1 reads its key `on` as true."""
    found: dict[Any, Any] = yaml.safe_load(workflow.read_text())
    return {"on" if key is True else key: value for key, value in found.items()}


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in content(workflow)["jobs"].values() for step in job["steps"]]


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=PROJECT, capture_output=True, text=True,
        env=os.environ | environment, check=False,
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actionlint_finds_nothing(workflow):
    done = subprocess.run(["actionlint", workflow], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_step_is_a_target_of_the_makefile_or_a_pinned_action(workflow):
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
            continue
        # Values of a form must never become text of a script.
        assert re.fullmatch(r"make [a-z-]+", step["run"])
        done = make("--dry-run", step["run"].split()[1], RUN="results/x", HASHED="1")
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read(workflow):
    assert content(workflow)["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"] == {"persist-credentials": False}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_sets_is_an_option_of_a_command(workflow):
    names = {
        f"LABHELPERS_{command}_{option.name}".upper()
        for command in ("report", "compare")
        for option in cli.group.commands[command].params
    }
    asked = {name for name in content(workflow)["env"] if name.startswith("LABHELPERS_")}
    assert asked
    assert asked <= names


def test_the_gpu_runner_never_sees_a_pull_request_and_never_falls_back_to_the_cpu():
    gpu = content(PROJECT / ".github" / "workflows" / "gpu.yml")
    assert set(gpu["on"]) == {"workflow_dispatch", "schedule"}
    assert gpu["env"]["LABHELPERS_REPORT_REQUIRE_GPU"] == "true"
    assert "fromJSON(inputs.runner" in gpu["jobs"]["report"]["runs-on"]


def test_options_are_taken_from_the_environment(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["labhelpers", "report"])
    monkeypatch.setenv("LABHELPERS_REPORT_REPEATS", "")
    monkeypatch.setenv("LABHELPERS_REPORT_QUICK", "true")
    monkeypatch.setenv("LABHELPERS_REPORT_BATCH_SIZES", "$(touch harm)")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "batch_sizes: got '$(touch harm)'" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_jobs_summary_has_what_is_there(tmp_path):
    run, summary = tmp_path / "run", tmp_path / "summary"
    (run / "comparison").mkdir(parents=True)
    (run / "summary.md").write_text("the run\n")
    done = make("job-summary", RUN=str(run), GITHUB_STEP_SUMMARY=str(summary))
    assert (done.returncode, summary.read_text()) == (0, "the run\n")
    (run / "comparison" / "summary.md").write_text("the comparison\n")
    make("job-summary", RUN=str(run), GITHUB_STEP_SUMMARY=str(summary))
    assert summary.read_text() == "the run\nthe comparison\nthe run\n"


def test_compare_needs_a_run():
    done = make("compare", "--old-file", ".venv/.ready", RUN="")
    assert done.returncode == 2
    assert done.stdout == "Name a run: make compare RUN=results/<run>\n"


# What is installed


def pinned(text: str) -> dict[str, str]:
    """Return names with versions, written as package indexes write names."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.M)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_every_package_of_the_lock_has_hashes_and_is_the_tested_version():
    entries = re.split(r"\n(?=[A-Za-z0-9])", LOCK.strip())
    assert len(entries) == len(pinned(LOCK)) > 100
    for entry in entries:
        assert re.search(r" --hash=sha256:[0-9a-f]{64}", entry), entry
    tested = pinned((PROJECT / "constraints.txt").read_text())
    different = {n: v for n, v in pinned(LOCK).items() if tested.get(n, v) != v}
    assert different == {}


def test_the_lock_holds_everything_that_is_needed_and_names_no_host():
    import tomllib

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    needed = [
        *project["project"]["dependencies"], *project["build-system"]["requires"],
        *project["project"]["optional-dependencies"]["test"],
    ]  # fmt: skip
    names = {re.split(r"[>=<\[]", line)[0].lower() for line in needed}
    assert names <= set(pinned(LOCK))
    assert "://" not in LOCK
    assert " @ " not in LOCK


def test_the_project_itself_is_installed_apart_from_what_is_hashed():
    commands = make("--dry-run", "--always-make", "environment", HASHED="1").stdout
    assert "--require-hashes --requirement requirements-ci.txt\n" in commands
    assert "--no-deps --no-build-isolation --editable .\n" in commands
    assert "--upgrade" not in commands


def test_nothing_needs_elevated_rights_and_jupyterlab_stays_on_loopback():
    assert "sudo apt-get" in MAKEFILE  # as advice to the reader only
    recipes = make("--dry-run", "--always-make", "report", "test", "lab", "doctor").stdout
    assert "sudo" not in re.sub(r'echo "[^"]*"', "", recipes)
    assert "jupyter lab --ip 127.0.0.1 " in recipes
    assert "token" not in recipes
    # JupyterLab refuses root, the only user of many containers, unless told.
    assert ("--allow-root" in recipes) == (os.getuid() == 0)
