"""A JupyterLab server on loopback and the system's Chromium; skipped by name without them."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
START_LIMIT_S = 90


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(600))


@dataclass
class Seen:
    """What a page asked for and complained about."""

    requests: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lab:
    """A running server: its address, its token, and the folder it shows."""

    url: str
    token: str
    folder: Path

    def ask(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.url}{path}")
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def page_of(self, notebook: str) -> str:
        return f"{self.url}/lab/tree/notebooks/{notebook}?token={self.token}"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium, driven by playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Any, seen: Seen) -> Iterator[Any]:
    """A new page in a context of its own; what it asks for is noted in `seen`."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    opened = context.new_page()
    watch(opened, seen)
    yield opened
    context.close()


def watch(page: Any, seen: Seen) -> None:
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("requestfailed", lambda request: seen.failed.append(request.url))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("console", lambda said: seen.errors.append(said.text) if said.type == "error" else None)


@pytest.fixture(scope="module")
def lab_folder(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A folder with copies of the notebooks, the data, and room for results."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(PROJECT / "notebooks", folder / "notebooks")
    (folder / "data").symlink_to(data_dir, target_is_directory=True)
    (folder / "results").mkdir()
    return folder


@pytest.fixture(scope="module")
def lab(lab_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on loopback with a token, without news, and with its own settings."""
    token, port = secrets.token_hex(16), free_port()
    home = tmp_path_factory.mktemp("home")
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={lab_folder}", "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=None",
    ]  # fmt: skip
    with open(home / "log", "w") as log:
        server = subprocess.Popen(
            command, cwd=lab_folder, env=environment(home), stdout=log, stderr=log
        )
        found = Lab(f"http://127.0.0.1:{port}", token, lab_folder)
        try:
            wait_until_up(found, server, home / "log")
            yield found
        finally:
            server.terminate()
            server.wait(30)


def environment(home: Path) -> dict[str, str]:
    """An environment in which nobody's own settings count."""
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    return os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "LABHELPERS_RUN_DIR": "",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_up(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            lab.ask("/api/status")
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab does not start: {log.read_text()}")


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where the screenshots go that a person looks at."""
    folder = Path(os.environ.get("LABHELPERS_PICTURES", PROJECT / "build" / "browser"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
