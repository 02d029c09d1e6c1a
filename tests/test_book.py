"""The built book as a reader has it: opened from the disk, in a browser without a network."""

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe

ROOT = Path(__file__).resolve().parent.parent
WIDE, NARROW = 1280, 360  # pixels; 360 is a small phone
WCAG = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
# What axe looks for. A narrow window changes the layout and no colours, the dark mode the colours and nothing else.
RULES = {
    (WIDE, "light"): {"runOnly": WCAG},
    (NARROW, "light"): {"runOnly": WCAG, "rules": {"color-contrast": {"enabled": False}}},
    (WIDE, "dark"): {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}},
}
SCROLLERS_ARE_TAB_STOPS = """
    [...document.querySelectorAll("pre, div.math, .pst-scrollable-table-container")]
        .every(e => e.scrollWidth <= e.clientWidth || e.tabIndex >= 0)
"""
HEAVIEST = 1_500_000  # bytes of a page and its pictures
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


def source(name: str) -> Path:
    return next(path for path in (ROOT / f"{name}.ipynb", ROOT / f"{name}.md") if path.exists())


def has_formulas(name: str) -> bool:
    text = source(name).read_text()
    if source(name).suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r"(`+).*?\1", "", text, flags=re.DOTALL)
    return re.search(r"(?<!\\)\$[^$]+\$", text) is not None


@every_page
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_page_is_complete_fits_and_is_accessible(page, book_html, name, mode):
    open_page(page, book_html, name, WIDE, mode)

    assert page.locator(".katex-error, .system-message").all_inner_texts() == []
    assert page.locator(".math:not(:has(.katex))").all_inner_texts() == [], "formulas that were not drawn"
    if has_formulas(name):
        assert page.locator("math").count(), "formulas in the source, none on the page"

    sources = page.locator("script[src], link[href], img[src]").evaluate_all("all => all.map(e => e.src ?? e.href)")
    assert [url for url in sources if not url.startswith(("file:", "data:"))] == []
    assert not any("require" in url or "html-manager" in url for url in sources), "widgets need neither"

    for width in (WIDE, NARROW):
        page.set_viewport_size({"width": width, "height": 900})
        overflow = page.evaluate("document.scrollingElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"the page is {overflow} px wider than a window of {width} px"
        if rules := RULES.get((width, mode)):
            page.wait_for_function(SCROLLERS_ARE_TAB_STOPS)  # the theme sees to that a moment after a change of width
            report = Axe().run(page, options=rules | {"preload": False, "resultTypes": ["violations"]})
            assert report.violations_count == 0, f"at {width} px: {report.generate_report()}"


@every_page
def test_images_say_what_they_show_and_headings_are_in_order(page, book_html, name):
    open_page(page, book_html, name)
    for alt in page.locator("article img").evaluate_all("images => images.map(image => image.alt)"):
        assert alt.strip() and not IMAGE_FILE.search(alt), f"alt text {alt!r}: set mystnb.image.alt in the cell"

    headings = page.locator("article :is(h1, h2, h3, h4, h5, h6)").evaluate_all(
        "all => all.filter(e => e.checkVisibility()).map(e => [Number(e.tagName[1]), e.textContent.trim()])"
    )
    levels = [level for level, _ in headings]
    assert levels[:1] == [1] and levels.count(1) == 1, "one title, at the top"
    for (before, _), (level, text) in pairwise(headings):
        assert level <= before + 1, f"heading {text!r} is of level {level}, under one of level {before}"


def test_pages_are_light(page, book_html):
    """Each page with what only it loads: its pictures. Theme, search index and formulas are loaded once for all.

    The weights go into a file, which `make test` prints: what a test prints stays in its process.
    """
    shared, weights = set(), {}
    for name in PAGES:
        open_page(page, book_html, name)
        urls = page.locator("script[src], link[href]:not([rel=next], [rel=prev], [rel=index], [rel=search]), img[src]")
        own = {book_html / f"{name}.html"}
        for url in urls.evaluate_all("all => all.map(e => e.src ?? e.href)"):
            path = Path(unquote(urlsplit(url).path))
            if not url.startswith("data:") and path.is_file():
                (own if "_images" in path.parts else shared).add(path)
        weights[name] = sum(path.stat().st_size for path in own)
    total = sum(path.stat().st_size for path in shared)
    pages = ", ".join(f"{Path(name).name} {weight / 1000:.0f}" for name, weight in weights.items())
    sums = f"all pages {sum(weights.values()) / 1000:.0f}, and {total / 1000:.0f} that they share"
    (book_html.parent / "page_weights.txt").write_text(f"kB a page: {pages}; {sums}\n")
    assert {name: weight for name, weight in weights.items() if weight > HEAVIEST} == {}


@every_page
def test_page_prints(page, book_html, name):
    """On paper there is the chapter alone, with nothing folded away and nothing cut off."""
    open_page(page, book_html, name)
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = false })")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 1000})  # about what fits beside the margins of A4
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.locator("article h1").first.is_visible()
    hidden = (".bd-sidebar-primary", ".bd-sidebar-secondary", ".bd-header-article", ".prev-next-area", ".headerlink")
    for part in hidden:
        assert page.locator(part).evaluate_all("all => all.filter(e => e.checkVisibility()).length") == 0, part
    cut = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 60))"
    assert page.locator("article pre").evaluate_all(cut) == []

    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


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
    assert page.locator(".btn-download-source-button").get_attribute("href").endswith(source(name).name)
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
    for _ in range(3):  # automatic, light, dark, in some order
        page.locator(".theme-switch-button").first.click()
        seen[page.evaluate("document.documentElement.dataset.theme")] = page.evaluate(background)
    assert seen.keys() == {"light", "dark"} and seen["light"] != seen["dark"]

    page.reload()  # the choice is kept
    assert seen[page.evaluate("document.documentElement.dataset.theme")] == page.evaluate(background)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_search(page, book_html, width):
    open_page(page, book_html, PAGES[0], width)
    page.locator(".search-button__button:visible").first.click()
    page.keyboard.type("scheduling")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=scheduling")
    # The line that says so moves the results down: a click before it may hit what was there a moment ago.
    page.get_by_text("Search finished").wait_for()
    page.locator("#search-results li a").first.press("Enter")
    page.wait_for_url("**/book/*.html*")
