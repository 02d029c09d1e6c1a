"""The built book as a reader has it: opened from the disk, in a browser without a network."""

import json
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe

ROOT = Path(__file__).resolve().parent.parent
WIDE, NARROW = 1280, 360    # pixels; 360 is a small phone
WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
IMAGE_FILE = re.compile(r"[/\\]|\.(png|svg|jpe?g|gif|webp)$", re.IGNORECASE)


def names_in_toc(entry: dict) -> list[str]:
    names = [entry[key] for key in ("root", "file") if key in entry]
    for key in ("parts", "chapters", "sections"):
        for child in entry.get(key, ()):
            names += names_in_toc(child)
    return names


PAGES = names_in_toc(yaml.safe_load((ROOT / "_toc.yml").read_text()))
every_page = pytest.mark.parametrize("name", PAGES)


def open_page(page, book_html, name, width=WIDE, mode="light"):
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=mode)
    page.goto((book_html / f"{name}.html").as_uri())
    page.evaluate("document.fonts.ready.then(() => true)")
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true })")
    page.wait_for_function("document.getAnimations().every(animation => animation.playState !== 'running')")
    assert page.evaluate("document.documentElement.dataset.theme") == mode


def has_formulas(name: str) -> bool:
    cells = json.loads((ROOT / f"{name}.ipynb").read_text())["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.search(r"(?<!\\)\$[^$]+\$", text) is not None


@every_page
@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_page_is_complete_fits_and_is_accessible(page, book_html, name, width, mode):
    open_page(page, book_html, name, width, mode)

    assert page.locator("h1").count() >= 1
    assert page.locator(".katex-error, .system-message").all_inner_texts() == []
    assert page.locator(".math:not(:has(.katex))").all_inner_texts() == [], "formulas that were not drawn"
    if has_formulas(name):
        assert page.locator("math").count(), "formulas in the source, none on the page"

    overflow = page.evaluate("document.scrollingElement.scrollWidth - innerWidth")
    assert overflow <= 0, f"the page is {overflow} px wider than the window"

    sources = page.locator("script[src], link[href], img[src]").evaluate_all("all => all.map(e => e.src ?? e.href)")
    assert [url for url in sources if not url.startswith(("file:", "data:"))] == []
    assert not any("require" in url or "html-manager" in url for url in sources), "widgets need neither"

    report = Axe().run(page, options={"runOnly": {"type": "tag", "values": WCAG}, "preload": False})
    assert report.violations_count == 0, report.generate_report()


@every_page
def test_images_say_what_they_show(page, book_html, name):
    open_page(page, book_html, name)
    for alt in page.locator("article img").evaluate_all("images => images.map(image => image.alt)"):
        assert alt.strip() and not IMAGE_FILE.search(alt), f"alt text {alt!r}: set mystnb.image.alt in the cell"


@every_page
def test_links_lead_somewhere(page, book_html, name):
    @cache
    def ids(path: Path) -> set[str]:
        return set(re.findall(r"""\bid=["']?([^"'\s>]+)""", path.read_text()))

    open_page(page, book_html, name)
    for url in set(page.locator("a[href]").evaluate_all("links => links.map(link => link.href)")):
        if urlsplit(url).scheme != "file":
            assert urlsplit(url).scheme in ("https", "mailto"), url
            continue
        address, anchor = urldefrag(url)
        target = Path(unquote(urlsplit(address).path))
        assert target.is_file() and target.is_relative_to(book_html), url
        if anchor and target.suffix == ".html":
            assert unquote(anchor) in ids(target), url


@every_page
def test_controls_are_alive(page, book_html, name):
    """Each visible button of the theme does something; those that need a server or a repository are not there."""
    open_page(page, book_html, name)
    assert page.locator(".thebe-launch-button, .dropdown-launch-buttons, .dropdown-source-buttons").count() == 0

    page.locator(".dropdown-download-buttons > button").click()
    assert page.locator(".btn-download-source-button").get_attribute("href").endswith(f"{Path(name).name}.ipynb")
    page.keyboard.press("Escape")

    page.locator(".btn-fullscreen-button").click()
    page.wait_for_function("document.fullscreenElement !== null")


def test_front_page_leads_to_the_first_chapter(page, book_html):
    page.goto((book_html / "index.html").as_uri())
    page.wait_for_url(f"**/{PAGES[0]}.html")


def test_next_and_previous_walk_through_the_toc(page, book_html):
    open_page(page, book_html, PAGES[0])
    for name in PAGES[1:]:
        page.locator(".prev-next-area .right-next").click()
        page.wait_for_url(f"**/{name}.html")
    for name in reversed(PAGES[:-1]):
        page.locator(".prev-next-area .left-prev").click()
        page.wait_for_url(f"**/{name}.html")


def test_theme_switch(page, book_html):
    open_page(page, book_html, PAGES[0])
    background = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for _ in range(3):    # automatic, light, dark, in some order
        page.locator(".theme-switch-button").first.click()
        seen[page.evaluate("document.documentElement.dataset.theme")] = page.evaluate(background)
    assert seen.keys() == {"light", "dark"} and seen["light"] != seen["dark"]

    page.reload()    # the choice is kept
    assert seen[page.evaluate("document.documentElement.dataset.theme")] == page.evaluate(background)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_search(page, book_html, width):
    open_page(page, book_html, PAGES[0], width)
    page.locator(".search-button__button:visible").first.click()
    page.keyboard.type("scheduling")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=scheduling")
    found = page.locator("#search-results li a").first
    found.wait_for()
    found.click()
    page.wait_for_url("**/book/*.html*")
