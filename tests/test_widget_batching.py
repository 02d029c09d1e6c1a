"""The interactive "static vs. continuous batching": its schedule, its page without a kernel, its Python side."""

import json
import random
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from widget_support import THEMES, WCAG, assert_every_run_writes, comparing_colours, open_widgets

from cbref import strings
from cbref.widgets import BatchingWidget, batching
from cbref.widgets.static import source

DEFAULT = [4, 2, 6, 3, 5, 2]


def reference(lengths, slots):
    """{"static" | "continuous": grid}, grid[slot][step] = request or None: played out token by token."""
    grids = {}
    for policy in ("static", "continuous"):
        queue, left = list(range(len(lengths))), list(lengths)
        running, grid = [None] * slots, [[] for _ in range(slots)]
        while queue or any(request is not None for request in running):
            if policy == "continuous" or running == [None] * slots:
                for slot in range(slots):
                    if running[slot] is None and queue:
                        running[slot] = queue.pop(0)
            for slot, request in enumerate(running):
                grid[slot].append(request)
                if request is not None:
                    left[request] -= 1
            running = [request if request is not None and left[request] else None for request in running]
        grids[policy] = grid
    return grids


def grid_of(side, slots):
    grid = [[None] * side["steps"] for _ in range(slots)]
    for span in side["spans"]:
        for step in range(span["start"], span["stop"]):
            assert grid[span["slot"]][step] is None
            grid[span["slot"]][step] = span["request"]
    return grid


def cases():
    rng = random.Random(2022)
    some = [
        ([rng.randint(1, rng.choice((2, 6, 20))) for _ in range(rng.randint(1, 8))], rng.randint(2, 4))
        for _ in range(600)
    ]
    return [([1], 2), ([20] * 8, 2), ([1] * 8, 4), ([20, 1], 4), *((DEFAULT, slots) for slots in (2, 3, 4)), *some]


# ---- The schedule


def test_module_and_python_schedule_as_the_reference(page, tmp_path):
    file = tmp_path / "simulate.html"
    file.write_text(f"<script type=module>{BatchingWidget._esm}\nwindow.simulate = simulate;</script>")
    page.goto(file.as_uri())
    answers = page.evaluate("cases => cases.map(([lengths, slots]) => simulate(lengths, slots))", cases())
    for (lengths, slots), answer in zip(cases(), answers, strict=True):
        assert answer == batching._schedule(lengths, slots), (lengths, slots)
        for policy, grid in reference(lengths, slots).items():
            side = answer[policy]
            assert grid_of(side, slots) == grid, (lengths, slots, policy)
            assert side["useful"] == sum(lengths)
            assert side["wasted"] == sum(row.count(None) for row in grid)
        assert answer["continuous"]["steps"] <= answer["static"]["steps"]


@pytest.mark.parametrize(("slots", "static", "continuous"), [(2, 15, 12), (3, 11, 9), (4, 11, 7)])
def test_the_figures_of_the_document(slots, static, continuous):
    sides = batching._schedule(DEFAULT, slots)
    assert (sides["static"]["steps"], sides["continuous"]["steps"]) == (static, continuous)
    summary = BatchingWidget(slots=slots).summary()
    assert summary == f"static {static} steps, continuous {continuous} steps on {slots} slots"


# ---- The page without a kernel


def show(page, tmp_path, *widgets, **options):
    open_widgets(page, tmp_path, *widgets, **options)
    return [Screen(page, number) for number in range(len(widgets))]


class Screen:
    """One widget as a reader has it before him."""

    def __init__(self, page, number):
        self.root = page.locator(".cbb:not(.cbb-picture)").nth(number)

    def press(self, action):
        self.root.locator(f"[data-action={action}]").first.click()

    def is_off(self, action):
        return self.root.locator(f"[data-action={action}]").first.get_attribute("aria-disabled") == "true"

    def length(self, request):
        return self.root.locator(f"[data-length='{request}']")

    def choose_slots(self, count):
        self.root.locator(".cbb-segments label").filter(has_text=str(count)).click()

    @property
    def heard(self):
        return self.root.locator("[aria-live=polite]").inner_text()

    def expect(self, lengths, slots, step):
        """Everything that is drawn or counted follows from the schedule."""
        seen = self.root.evaluate(
            """root => Object.fromEntries([...root.querySelectorAll("[data-side]")].map(panel => [panel.dataset.side, {
                cells: [...panel.querySelectorAll(".cbb-track")].map(track => [...track.children].map(cell =>
                    cell.dataset.state === "token" ? Number(cell.dataset.request) : cell.dataset.state)),
                stats: [...panel.querySelectorAll("[data-stat]")].map(stat => stat.textContent),
                waiting: [...panel.querySelectorAll("[data-list=waiting] .cbb-chip")].map(chip => chip.textContent),
                finished: [...panel.querySelectorAll("[data-list=finished] .cbb-chip")].map(chip => chip.textContent),
                done: panel.querySelector(".cbb-done").textContent}]))"""
        )
        grids = reference(lengths, slots)
        total = max(len(grid[0]) for grid in grids.values())
        for policy, grid in grids.items():
            end = len(grid[0])
            now = min(step, end)
            rest = ["future" if step < end else "over"] * (total - now)
            cells = [["wasted" if request is None else request for request in row[:now]] + rest for row in grid]
            tokens = sum(request is not None for row in grid for request in row[:now])
            occupancy = f"{(2000 * tokens // (slots * now) + 1) // 2 / 10:g}%" if now else "–"  # halves go up
            started = {request for row in grid for request in row[:now]}
            still = {request for row in grid for request in row[now:]}
            waiting = [f"{chr(65 + r)}{length}" for r, length in enumerate(lengths) if r not in started]
            finished = [chr(65 + r) for r in range(len(lengths)) if r in started and r not in still]
            assert seen[policy]["cells"] == cells
            assert seen[policy]["stats"] == [str(now), str(tokens), str(slots * now - tokens), occupancy]
            assert seen[policy]["waiting"] == waiting
            assert seen[policy]["finished"] == finished
            assert bool(seen[policy]["done"]) == (step >= end)
        assert self.is_off("back") == self.is_off("reset") == (step == 0)
        assert self.is_off("forward") == (step == total)


def test_step_forward_and_back(page, tmp_path):
    (screen,) = show(page, tmp_path, BatchingWidget())
    assert page.locator(".cbref-picture").count() == 0
    for step in range(11):
        screen.expect(DEFAULT, 3, step)
        screen.press("forward")
    screen.expect(DEFAULT, 3, 11)
    assert "9 steps instead of 11" in screen.root.inner_text()
    screen.press("back")
    screen.expect(DEFAULT, 3, 10)
    assert "Static batching still has work: E" in screen.root.inner_text()
    screen.press("reset")
    screen.expect(DEFAULT, 3, 0)
    screen.root.locator("input[type=range]").fill("5")
    screen.expect(DEFAULT, 3, 5)


def test_play_pause_and_play_again(page, tmp_path):
    page.clock.install()
    (screen,) = show(page, tmp_path, BatchingWidget())
    toggle = screen.root.locator("[data-action=play]")
    toggle.click()
    assert toggle.inner_text() == "Pause"
    page.clock.run_for(3 * 700)
    screen.expect(DEFAULT, 3, 3)
    assert screen.heard == "", "a screen reader is left in peace while the schedule plays"
    toggle.click()
    assert toggle.inner_text() == "Play"
    assert "Step 3 of 11" in screen.heard
    page.clock.run_for(5 * 700)
    screen.expect(DEFAULT, 3, 3)
    toggle.click()
    page.clock.run_for(20 * 700)
    screen.expect(DEFAULT, 3, 11)
    assert toggle.inner_text() == "Play"
    assert "Step 11 of 11" in screen.heard
    toggle.click()  # from the end it starts again
    page.clock.run_for(700)
    screen.expect(DEFAULT, 3, 1)
    screen.press("forward")  # any other control stops it
    page.clock.run_for(5 * 700)
    screen.expect(DEFAULT, 3, 2)


def test_edit_the_requests(page, tmp_path):
    (screen,) = show(page, tmp_path, BatchingWidget(step=4))
    screen.expect(DEFAULT, 3, 4)
    for slots in (4, 2):
        screen.choose_slots(slots)
        screen.expect(DEFAULT, slots, 4)
    screen.length(1).fill("20")
    lengths = [4, 20, 6, 3, 5, 2]
    screen.expect(lengths, 2, 4)
    screen.root.locator("input[type=range]").fill("999")
    end = int(screen.root.locator("input[type=range]").get_attribute("max"))
    screen.expect(lengths, 2, end)

    screen.root.locator("[data-action=remove]").nth(1).click()  # at the end one stays at the end
    lengths.pop(1)
    screen.expect(lengths, 2, max(len(grid[0]) for grid in reference(lengths, 2).values()))
    screen.press("reset")
    screen.press("forward")
    for _ in range(3):
        screen.press("add")
        lengths.append(4)
        screen.expect(lengths, 2, 1)
    assert len(lengths) == 8
    assert screen.is_off("add")
    for _ in range(7):
        screen.press("remove")
        lengths.pop(0)
        screen.expect(lengths, 2, 1)
    assert screen.is_off("remove")
    screen.root.locator("[data-action=remove]").click(force=True)
    screen.expect(lengths, 2, 1)


@pytest.mark.parametrize(("typed", "becomes"), [("0", 1), ("99", 20), ("-3", 1), ("", 1), ("2.6", 3), ("1e9", 20)])
def test_a_length_out_of_range_is_corrected_when_one_leaves_the_field(page, tmp_path, typed, becomes):
    (screen,) = show(page, tmp_path, BatchingWidget([7, 2], step=2))
    screen.length(0).fill(typed)
    screen.expect([7, 2], 3, 2)
    screen.length(0).blur()
    assert screen.length(0).input_value() == str(becomes)
    grids = reference([becomes, 2], 3)
    screen.expect([becomes, 2], 3, min(2, max(len(grid[0]) for grid in grids.values())))


def test_keyboard_alone(page, tmp_path):
    (screen,) = show(page, tmp_path, BatchingWidget())

    def focused():
        return page.evaluate(
            """() => { const at = document.activeElement, d = at.dataset;
                return at.matches(":focus-visible") && (d.action ?? (d.length ? "length " + d.length : at.type)) }"""
        )

    def tab(key="Tab", times=1):
        for _ in range(times):
            page.keyboard.press(key)
        return focused()

    assert [tab() for _ in range(4)] == ["reset", "back", "play", "forward"]
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    screen.expect(DEFAULT, 3, 2)
    page.keyboard.press("Enter")
    for _ in range(15):  # past the end: the button keeps the focus
        page.keyboard.press("Enter")
    screen.expect(DEFAULT, 3, 11)
    assert focused() == "forward"
    assert tab() == "radio"
    page.keyboard.press("ArrowRight")
    screen.expect(DEFAULT, 4, 11)
    assert tab() == "range"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    screen.expect(DEFAULT, 4, 1)
    assert tab() == "length 0"
    page.keyboard.press("ArrowUp")
    screen.expect([5, 2, 6, 3, 5, 2], 4, 1)
    page.keyboard.press("Control+A")
    page.keyboard.type("12")
    screen.expect([12, 2, 6, 3, 5, 2], 4, 1)
    assert tab() == "remove"
    page.keyboard.press("Enter")
    screen.expect([2, 6, 3, 5, 2], 4, 1)
    assert focused() == "remove"
    assert tab(times=9) == "add"
    page.keyboard.press("Space")
    screen.expect([2, 6, 3, 5, 2, 4], 4, 1)
    assert focused() == "length 5"
    assert tab(times=3) is False or page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    assert screen.root.locator("table").is_visible()


def test_what_a_screen_reader_gets(page, tmp_path):
    (screen,) = show(page, tmp_path, BatchingWidget())
    assert screen.heard == ""
    heard = set()
    for action in ("forward", "forward", "forward", "back", "reset"):
        screen.press(action)
        heard.add(screen.heard)
    assert len(heard) == 4  # the third step's sentence is not repeated, step 2 is heard twice
    screen.root.locator("input[type=range]").fill("4")
    assert screen.heard == (
        "Step 4 of 11. Static batching: running C; waiting D, E, F; tokens 10; wasted slot-steps 2. "
        "Continuous batching: running C, D; waiting E, F; tokens 12; wasted slot-steps 0. "
        "Static batching: 1 of 3 slots produced nothing in this step while others wait: D, E, F."
    )
    lanes = page.get_by_role("group", name="Continuous batching", exact=True).get_by_role("img")
    assert lanes.nth(1).get_attribute("aria-label") == "Slot 2: B in steps 1–2, D in steps 3–4; wasted steps: 0"
    assert page.get_by_role("slider", name="Step").get_attribute("aria-valuetext") == "Step 4 of 11"
    assert page.get_by_role("radio", name="3 slots").is_checked()
    assert page.get_by_role("spinbutton", name="Tokens of request C").input_value() == "6"
    page.get_by_text("The whole schedule as a table").click()
    rows = [row.inner_text().split() for row in screen.root.locator("tbody tr").all()]
    assert rows[4] == ["E", "5", "2", "7–11", "1", "5–9"]


@pytest.mark.parametrize("theme", THEMES)
def test_contrast_and_axe(page, tmp_path, theme):
    html, expected = THEMES[theme]
    page.emulate_media(color_scheme="dark" if "system" in theme else "light")
    (screen,) = show(page, tmp_path, BatchingWidget([2, 1, 3, 1, 1, 1, 1, 1], slots=4, step=3), html=html)
    if theme in ("light", "book"):
        page.set_viewport_size({"width": 360, "height": 700})
    screen.root.locator("summary").click()
    pairs = screen.root.evaluate(
        comparing_colours("""
            const style = selector => getComputedStyle(root.querySelector(selector));
            const panel = style(".cbb-panel").backgroundColor, surface = getComputedStyle(root).backgroundColor;
            const found = [["wasted", contrast(style("[data-state=wasted]").borderTopColor, panel), 3],
                ["button", contrast(style("[data-action=forward]").borderTopColor, surface), 3],
                ["input", contrast(style("input[type=number]").borderTopColor, panel), 3],
                ["clock", contrast(style(".cbb-clock").backgroundColor, panel), 3]];
            for (const badge of root.querySelectorAll(".cbb-badge, [data-state=token]")) {
                const { color, backgroundColor } = getComputedStyle(badge);
                found.push([badge.textContent, contrast(color, backgroundColor), 4.5]);
                found.push([badge.textContent, contrast(backgroundColor, panel), 3]);
            }
            return { dark: luminance(surface) < 0.1, found };
        """)
    )
    assert pairs["dark"] == (expected == "dark")
    assert len({name for name, *_ in pairs["found"]}) == 12
    assert [pair for pair in pairs["found"] if pair[1] < pair[2]] == []
    result = Axe().run(page, options=WCAG)
    assert result.violations_count == 0, result.generate_report()


@pytest.mark.parametrize("lengths", [DEFAULT, [20] * 8])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_fits_the_window(page, tmp_path, width, lengths):
    page.set_viewport_size({"width": width, "height": 700})
    (screen,) = show(page, tmp_path, BatchingWidget(lengths, slots=2, step=7))
    screen.expect(lengths, 2, 7)
    screen.root.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = screen.root.evaluate(
        """root => [...root.querySelectorAll("button, input:not([type=radio]), label, summary")]
            .map(node => node.getBoundingClientRect()).filter(box => box.width < 24 || box.height < 24).length"""
    )
    assert small == 0
    page.set_viewport_size({"width": 900, "height": 700})  # and is drawn anew when the window changes
    letters = screen.root.locator("[data-side=static] [data-state=token]").all_inner_texts()
    assert letters[:4] == (["A"] * 4 if lengths is DEFAULT else ["A", "", "", ""])


def test_two_on_one_page(page, tmp_path):
    first, second = show(page, tmp_path, BatchingWidget(), BatchingWidget([3, 1], slots=2, step=1))
    first.press("forward")
    first.choose_slots(4)
    second.choose_slots(3)
    second.press("add")
    first.expect(DEFAULT, 4, 1)
    second.expect([3, 1, 4], 3, 1)
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids)) > 0


def test_text_cannot_break_out_of_its_script(page, tmp_path):
    widget = BatchingWidget()
    odd = "</script><!--<script>'\"&{step}"
    widget.strings = {**widget.strings, "static": odd}
    (screen,) = show(page, tmp_path, widget)
    screen.press("forward")
    screen.expect(DEFAULT, 3, 1)
    assert screen.root.locator(".cbb-name").first.inner_text() == odd


def test_without_scripts_the_picture_stands(browser, tmp_path):
    context = browser.new_context(java_script_enabled=False, viewport={"width": 360, "height": 700})
    page = context.new_page()
    try:
        show(page, tmp_path, BatchingWidget())
        static, continuous = page.locator(".cbb-picture table").all()
        caption = static.locator("caption").inner_text()
        assert caption == "Static batching, 3 slots: 11 steps, 11 of 33 slot-steps wasted"
        for policy, table in (("static", static), ("continuous", continuous)):
            rows = [row.inner_text().split()[2:] for row in table.locator("tr").all()]
            assert rows == [["×" if r is None else chr(65 + r) for r in row] for row in reference(DEFAULT, 3)[policy]]
        assert page.locator("button").count() == 0, "no dead controls"
        assert page.locator("main").evaluate("node => node.scrollWidth") <= 360
    finally:
        context.close()


# ---- The Python side


def test_bundle_is_the_same_on_every_run():
    bundle = BatchingWidget()._repr_mimebundle_()[0]
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == "static 11 steps, continuous 9 steps on 3 slots"
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] not in bundle["text/html"]
    assert_every_run_writes(bundle["text/html"], "BatchingWidget")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "1 to 8 requests, got 0"),
        ({"lengths": [1] * 9}, "1 to 8 requests, got 9"),
        ({"lengths": [3, 0]}, r"lengths\[1\] must be an integer from 1 to 20, got 0"),
        ({"lengths": [21]}, "1 to 20, got 21"),
        ({"lengths": [2.5]}, "got 2.5"),
        ({"lengths": ["3"]}, "got '3'"),
        ({"lengths": [True]}, "got True"),
        ({"slots": 1}, "slots must be an integer from 2 to 4, got 1"),
        ({"slots": 5}, "2 to 4, got 5"),
        ({"slots": None}, "got None"),
        ({"step": -1}, "step must be an integer from 0 to 160, got -1"),
        ({"language": "xx"}, "no texts in language 'xx'; there are: en"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchingWidget(**arguments)


def test_assignment_is_checked_too():
    widget = BatchingWidget()
    with pytest.raises(ValueError, match="2 to 4, got 7"):
        widget.slots = 7
    with pytest.raises(ValueError, match="1 to 20, got 0"):
        widget.lengths = [0]
    assert (widget.slots, widget.lengths) == (3, DEFAULT)


# ---- The words


def test_every_text_is_used():
    text = source("batching.js", "batching.py")
    for key in strings.load("batching"):
        assert re.search(rf"\b{key}\b|`{key.split('_')[0]}_\$", text), key


def test_texts_fall_back_to_english(tmp_path, monkeypatch):
    for language, texts in {"en": {"a": "one", "b": "two"}, "ko": {"b": "둘"}}.items():
        (tmp_path / language).mkdir()
        (tmp_path / language / "group.json").write_text(json.dumps(texts))
    (tmp_path / "en" / "later.json").write_text('{"c": "three"}')
    monkeypatch.setattr(strings, "_ROOT", tmp_path)
    assert strings.load("group") == {"a": "one", "b": "two"}
    assert strings.load("group", "ko") == {"a": "one", "b": "둘"}
    monkeypatch.setenv("CBREF_LANG", "ko")
    assert strings.load("group")["b"] == "둘"
    assert strings.load("later") == {"c": "three"}
    with pytest.raises(ValueError, match="no group of texts 'nothing'; there are: group, later"):
        strings.load("nothing")
    with pytest.raises(ValueError, match="no texts in language 'de'; there are: en, ko"):
        strings.load("group", "de")
