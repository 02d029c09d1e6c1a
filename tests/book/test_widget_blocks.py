"""The interactive "block tables": its run against a second one, its page without a kernel, its Python side."""

import re
from functools import cache

import pytest
from axe_playwright_python.sync_playwright import Axe
from widget_support import THEMES, WCAG, assert_every_run_writes, comparing_colours, open_widgets

from cbref import strings
from cbref.engine import Engine
from cbref.request import SamplingParams, Status
from cbref.widgets.blocks import BLOCK, POOLS, REQUESTS, SLOTS, SYSTEM, Blocks
from cbref.widgets.static import source

SETTINGS = [(size, caching) for size in POOLS for caching in (True, False)]
NAMES = "ABCDEF"


@cache
def reference(num_blocks, caching):
    """The same run by the engine as it is: what the pool and the requests say after each step."""
    options = {"admission": "optimistic", "prefix_caching": caching, "num_blocks": num_blocks, "block_size": BLOCK}
    engine = Engine.simulated("orca", SLOTS, **options)
    requests = []
    for name, (shared, own, output, arrival) in zip(NAMES, REQUESTS, strict=True):
        prompt = [*SYSTEM * shared, *range(100 * (NAMES.index(name) + 1), 100 * (NAMES.index(name) + 1) + own)]
        requests.append(engine.add_request(prompt, SamplingParams(max_tokens=output), name, arrival=float(arrival)))
    steps, computed, hits, again, furthest = [], 0, 0, 0, dict.fromkeys(NAMES, 0)

    def look():
        pool, now = engine.pool, engine.executor.now()
        rows = []
        for r in requests:
            here = r in engine.scheduler.waiting or r in engine.scheduler.running or r.status is Status.FINISHED
            state = {"prefill": "running", "decode": "running"}.get(r.status.value, r.status.value)
            rows.append([state if here else "future", r.num_computed, len(r.output), list(pool.table(r.id))])
        held = [pool.holders(b) for b in range(num_blocks)]
        counts = [computed, again, hits, engine.scheduler.num_preemptions]
        steps.append(
            {"rows": rows, "held": held, "idle": set(pool._idle), "known": set(pool._labels), "counts": counts}
        )
        assert now == len(steps) - 1

    look()
    while engine.has_work:
        waited = {r.id for r in requests if r.status is Status.WAITING}
        engine.step()
        for share in engine.steps[-1].shares:
            computed += share.stop - share.start
            again += len(set(range(share.start, share.stop)) & set(range(furthest[share.request_id])))
            furthest[share.request_id] = max(furthest[share.request_id], share.stop)
        hits += sum(r.num_cached for r in requests if r.id in waited and r.status is not Status.WAITING)
        engine.audit()
        look()
    return steps


# ---- The run


@pytest.mark.parametrize(("num_blocks", "caching"), SETTINGS)
def test_the_recorded_run_is_the_engines(num_blocks, caching):
    frames, steps = Blocks().traces[f"{num_blocks}-{int(caching)}"], reference(num_blocks, caching)
    assert len(frames) == len(steps)
    for frame, step in zip(frames, steps, strict=True):
        assert frame["requests"] == step["rows"]
        assert (set(frame["idle"]), set(frame["known"])) == (step["idle"], step["known"])
        assert frame["counts"] == step["counts"]


@pytest.mark.parametrize(("num_blocks", "caching"), SETTINGS)
def test_the_sentences_tell_what_happens(num_blocks, caching):
    frames, steps = Blocks().traces[f"{num_blocks}-{int(caching)}"], reference(num_blocks, caching)
    for before, now, frame in zip(steps, steps[1:], frames[1:], strict=False):
        said = " ".join(frame["say"])
        for name, was, row in zip(NAMES, before["rows"], now["rows"], strict=True):
            gone = row[0] == "finished" != was[0]
            assert (f"{name} is done" in said) == gone
            assert (f"{name} was admitted last" in said) == (was[0] == "running" and row[0] == "waiting")
            came = was[0] in ("waiting", "future") and row[0] == "running"
            assert (f"{name} is admitted" in said) == (came or (gone and was[0] != "running"))
            if row[0] == "running" and not came:
                fresh = [block for block in row[3] if block not in was[3]]
                assert all(f"{name}: #{block}" in said for block in fresh)
        hits = sum(map(int, re.findall(r"Its first (\d+) tokens", said)))
        assert hits == now["counts"][2] - before["counts"][2]
        lost = before["known"] - now["known"]
        forgotten = re.search(r"what was kept in ([#\d, ]+)", said)
        assert lost <= {int(n) for n in re.findall(r"\d+", forgotten[1] if forgotten else "")}
        waits = {name for name, row in zip(NAMES, now["rows"], strict=True) if row[0] == "waiting"}
        assert bool(re.search(r"[A-F] waits[.:]", said)) == bool(waits)


def test_the_settings_teach_what_they_are_for():
    last = {setting: reference(*setting)[-1] for setting in SETTINGS}
    for setting, step in last.items():
        assert all(row[0] == "finished" for row in step["rows"])
        assert step["counts"][0] - step["counts"][1] + (8 * 3 if setting[1] else 0) >= 104, "no token was left out"
    assert last[12, True]["counts"] == [83, 3, 36, 1]
    assert last[16, True]["counts"][3] == 0 and last[10, True]["counts"][3] > 1, "memory decides"
    for size in POOLS:
        (with_cache, *_), (without, _, hits, _) = last[size, True]["counts"], last[size, False]["counts"]
        assert with_cache < without and hits == 0
    shared = [held for step in reference(12, True) for held in step["held"] if len(held) > 1]
    assert max(map(len, shared)) == 3
    assert any("#0, #1, which nobody held" in " ".join(f["say"]) for f in Blocks().traces["12-1"])


def test_a_preemption_and_its_way_back_in_words():
    say = [frame["say"] for frame in Blocks().traces["12-1"]]
    assert say[9][0] == (
        "Preemption: a running request needs a block, and none is free. D was admitted last, so it gives up "
        "#0, #1, #8, #10 and waits. Stored tokens it loses: 15."
    )
    assert say[10][:2] == [
        "Forgotten, because the space is needed: what was kept in #4.",
        "D is admitted again. Its first 12 tokens are still stored, in #0, #1, #8. Left to compute: 4, into #4.",
    ]
    assert say[10][-1] == "E waits. Blocks it needs to be admitted: 3; to be had: 1."


# ---- The page without a kernel


def show(page, tmp_path, *widgets, **options):
    open_widgets(page, tmp_path, *widgets, **options)
    return [Screen(page, number) for number in range(len(widgets))]


class Screen:
    """One widget as a reader has it before him."""

    def __init__(self, page, number):
        self.root = page.locator(".cbk:not(.cbk-picture)").nth(number)

    def press(self, action):
        self.root.locator(f"[data-action={action}]").click()

    def choose(self, name, text):
        self.root.locator(f".cbp-choice:has([data-name={name}]) label").filter(has_text=text).click()

    def move(self, step):
        self.root.locator("input[type=range]").fill(str(step))

    @property
    def heard(self):
        return self.root.locator("[aria-live=polite]").inner_text()

    def expect(self, num_blocks, caching, step):
        """Everything that is drawn or counted follows from the run."""
        seen = self.root.evaluate(
            """root => ({
                tiles: [...root.querySelectorAll(".cbk-tile")].map(tile => ({ state: tile.dataset.state,
                    names: [...tile.querySelectorAll(".cbk-badge")].map(badge => badge.textContent),
                    filled: tile.querySelectorAll("[data-on=true]").length, known: tile.dataset.known === "true",
                    fresh: tile.dataset.fresh === "true", label: tile.ariaLabel })),
                rows: [...root.querySelectorAll(".cbk-row")].map(row => [row.dataset.state,
                    [...row.querySelectorAll(".cbk-entry")].map(entry => [Number(entry.dataset.block),
                        entry.querySelectorAll("[data-on=true]").length])]),
                figures: [...root.querySelectorAll("[data-figure]")].map(one => one.textContent),
                said: [...root.querySelectorAll(".cbk-note li")].map(one => one.textContent),
                off: Object.fromEntries([...root.querySelectorAll("[data-action]")].map(one =>
                    [one.dataset.action, one.getAttribute("aria-disabled") === "true"])),
                position: root.querySelector(".cbk-position").textContent })"""
        )
        steps = reference(num_blocks, caching)
        now, before = steps[step], steps[step - 1] if step else None
        fill = lambda index, computed: min(max(computed - BLOCK * index, 0), BLOCK)  # noqa: E731
        tokens = {}
        for row in now["rows"]:
            for index, block in enumerate(row[3]):
                tokens[block] = max(tokens.get(block, 0), fill(index, row[1]))
        for block, (tile, names) in enumerate(zip(seen["tiles"], now["held"], strict=True)):
            state = "idle" if block in now["idle"] else "free"
            assert tile["state"] == (("shared" if len(names) > 1 else "held") if names else state)
            assert sorted(tile["names"]) == sorted(names)
            assert tile["filled"] == (BLOCK if block in now["idle"] else tokens.get(block, 0))
            assert tile["known"] == (block in now["known"])
            assert tile["fresh"] == (before is not None and not set(names) <= set(before["held"][block]))
            expected = f"held by {', '.join(sorted(names))}; {tokens.get(block)} of 4 tokens" if names else state
            assert tile["label"].startswith(f"Block {block}: {expected}")
        assert [row[0] for row in seen["rows"]] == [row[0] for row in now["rows"]]
        for row, (_, computed, _, table) in zip(seen["rows"], now["rows"], strict=True):
            assert row[1] == [[block, fill(index, computed)] for index, block in enumerate(table)]
        used = sum(bool(names) for names in now["held"])
        figures = [f"{used} of {num_blocks}", str(sum(tokens.values())), *map(str, now["counts"])]
        assert seen["figures"] == figures
        assert seen["said"] == Blocks().traces[f"{num_blocks}-{int(caching)}"][step]["say"]
        total = len(steps) - 1
        assert seen["off"] == {"reset": step == 0, "back": step == 0, "play": False, "forward": step == total}
        assert seen["position"] == f"Step {step} of {total}"


@pytest.mark.parametrize(("num_blocks", "caching"), SETTINGS)
def test_every_step_of_every_setting(page, tmp_path, num_blocks, caching):
    (screen,) = show(page, tmp_path, Blocks())
    assert page.locator(".cbref-picture").count() == 0
    screen.choose("num_blocks", str(num_blocks))
    screen.choose("prefix_caching", "on" if caching else "off")
    total = len(reference(num_blocks, caching)) - 1
    for step in range(total):
        screen.expect(num_blocks, caching, step)
        screen.press("forward") if num_blocks == 12 else screen.move(step + 1)
    screen.expect(num_blocks, caching, total)
    screen.press("back")
    screen.expect(num_blocks, caching, total - 1)
    screen.press("reset")
    screen.expect(num_blocks, caching, 0)
    screen.move(9)
    screen.expect(num_blocks, caching, 9)
    rows = screen.root.locator(".cbk-all tbody tr")
    assert rows.count() == total + 1
    cells = rows.nth(9).evaluate("row => [...row.children].map(cell => cell.textContent)")
    for cell, (_, computed, _, table) in zip(cells[1:7], reference(num_blocks, caching)[9]["rows"], strict=True):
        assert cell == (f"{', '.join(f'#{b}' for b in table)} ({computed})" if table else "–")


def test_another_pool_keeps_the_step(page, tmp_path):
    (screen,) = show(page, tmp_path, Blocks(step=11))
    screen.expect(12, True, 11)
    screen.choose("prefix_caching", "off")
    screen.expect(12, False, 11)
    assert not screen.root.locator("[data-key=idle]").is_visible()
    screen.choose("num_blocks", "10")
    screen.expect(10, False, 11)
    screen.move(26)
    screen.choose("num_blocks", "16")  # a shorter run: its end
    screen.expect(16, False, 20)


def test_play_pause_and_play_again(page, tmp_path):
    page.clock.install(time=0)
    (screen,) = show(page, tmp_path, Blocks())
    page.clock.pause_at(60_000)  # or time goes by on its own, too
    toggle = screen.root.locator("[data-action=play]")
    toggle.click()
    assert toggle.inner_text() == "Pause"
    page.clock.run_for(3 * 1500)
    screen.expect(12, True, 3)
    assert screen.heard == "", "a screen reader is left in peace while the run plays"
    toggle.click()
    assert toggle.inner_text() == "Play"
    assert screen.heard.startswith("Step 3 of 20. C is admitted")
    page.clock.run_for(5 * 1500)
    screen.expect(12, True, 3)
    toggle.click()
    page.clock.run_for(30 * 1500)
    screen.expect(12, True, 20)
    assert toggle.inner_text() == "Play"
    toggle.click()  # from the end it starts again
    page.clock.run_for(1500)
    screen.expect(12, True, 1)
    screen.choose("num_blocks", "16")  # any other control stops it
    page.clock.run_for(5 * 1500)
    screen.expect(16, True, 1)


def test_keyboard_alone(page, tmp_path):
    (screen,) = show(page, tmp_path, Blocks())

    def focused():
        return page.evaluate(
            """() => { const at = document.activeElement, d = at.dataset;
                return at.matches(":focus-visible") && (d.action ?? d.name ?? at.type ?? at.tagName) }"""
        )

    def tab(times=1):
        for _ in range(times):
            page.keyboard.press("Tab")
        return focused()

    assert [tab() for _ in range(4)] == ["reset", "back", "play", "forward"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    screen.expect(12, True, 2)
    for _ in range(25):  # past the end: the button keeps the focus
        page.keyboard.press("Enter")
    screen.expect(12, True, 20)
    assert focused() == "forward"
    assert tab() == "num_blocks"
    page.keyboard.press("ArrowRight")
    screen.expect(16, True, 20)
    assert tab() == "prefix_caching"
    page.keyboard.press("ArrowRight")
    screen.expect(16, False, 20)
    assert tab() == "range"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    screen.expect(16, False, 1)
    assert tab() == "SUMMARY"
    page.keyboard.press("Enter")
    assert screen.root.locator("table").is_visible()


def test_what_a_screen_reader_gets(page, tmp_path):
    (screen,) = show(page, tmp_path, Blocks())
    assert screen.heard == ""
    screen.move(2)
    assert screen.heard == (
        "Step 2 of 20. B is admitted. Its first 8 tokens are stored already, in #0, #1: it shares these blocks. "
        "Left to compute: 2, into #3. One more token for A."
    )
    assert page.get_by_role("slider", name="Step").get_attribute("aria-valuetext") == "Step 2 of 20"
    assert page.get_by_role("radio", name="12", exact=True).is_checked()
    assert page.get_by_role("group", name="Prefix caching").get_by_role("radio", name="on").is_checked()
    pool = page.get_by_role("list", name="The pool: 12 blocks of 4 tokens").get_by_role("img")
    assert pool.nth(0).get_attribute("aria-label") == "Block 0: held by A, B; 4 of 4 tokens; content known"
    assert pool.nth(3).get_attribute("aria-label") == "Block 3: held by B; 2 of 4 tokens"
    assert pool.nth(11).get_attribute("aria-label") == "Block 11: free"
    entries = page.get_by_role("list", name="Blocks of request B").get_by_role("listitem")
    assert [entry.inner_text().split("Block")[1] for entry in entries.all()] == [
        " 0: 4 of 4 tokens", " 1: 4 of 4 tokens", " 3: 2 of 4 tokens"
    ]  # fmt: skip
    screen.move(20)
    assert pool.nth(0).get_attribute("aria-label") == "Block 0: idle, its content can be found again"


@pytest.mark.parametrize("theme", THEMES)
def test_contrast_and_axe(page, tmp_path, theme):
    html, expected = THEMES[theme]
    page.emulate_media(color_scheme="dark" if "system" in theme else "light")
    (screen,) = show(page, tmp_path, Blocks(step=10), html=html)
    if theme in ("light", "book"):
        page.set_viewport_size({"width": 360, "height": 700})
    screen.root.locator("summary").click()
    seen = screen.root.evaluate(
        comparing_colours("""
            const style = (selector, pseudo) => getComputedStyle(root.querySelector(selector), pseudo);
            const panel = style(".cbp-panel").backgroundColor, surface = getComputedStyle(root).backgroundColor;
            const found = [["idle", contrast(style(".cbk-tile[data-state=idle]").borderTopColor, panel), 3],
                ["known", contrast(style(".cbk-tile[data-known]", "::after").backgroundColor, surface), 3],
                ["fresh", contrast(style("[data-fresh=true]").outlineColor, panel), 3],
                ["empty", contrast(style(".cbk-cells i:not([data-on])").borderTopColor, surface), 3]];
            for (const badge of root.querySelectorAll(".cbk-holders .cbk-badge")) {
                const { color, backgroundColor } = getComputedStyle(badge);
                found.push([badge.textContent, contrast(color, backgroundColor), 4.5]);
                found.push([badge.textContent, contrast(backgroundColor, surface), 3]);
            }
            for (const cell of root.querySelectorAll("[data-on=true]"))
                found.push(["cell", contrast(getComputedStyle(cell).backgroundColor, surface), 3]);
            return { dark: luminance(surface) < 0.1, found };
        """)
    )
    assert seen["dark"] == (expected == "dark")
    assert {"B", "C", "D"} <= {name for name, *_ in seen["found"]}
    assert [pair for pair in seen["found"] if pair[1] < pair[2]] == []
    if theme in ("light", "book"):
        result = Axe().run(page, options=WCAG)
        assert result.violations_count == 0, result.generate_report()


@pytest.mark.parametrize("num_blocks", [12, 16])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_fits_the_window(page, tmp_path, width, num_blocks):
    page.set_viewport_size({"width": width, "height": 700})
    (screen,) = show(page, tmp_path, Blocks(num_blocks, step=7))
    screen.expect(num_blocks, True, 7)
    screen.root.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = screen.root.evaluate(
        """root => [...root.querySelectorAll("button, input:not([type=radio]), label, summary")]
            .map(node => node.getBoundingClientRect()).filter(box => box.width < 24 || box.height < 24).length"""
    )
    assert small == 0
    cut = screen.root.evaluate(
        """root => [...root.querySelectorAll(".cbk-tile, .cbk-entry, .cbk-row")]
            .filter(node => node.scrollWidth > node.clientWidth).length"""
    )
    assert cut == 0


def test_two_on_one_page(page, tmp_path):
    first, second = show(page, tmp_path, Blocks(), Blocks(16, False, step=5))
    first.press("forward")
    second.choose("num_blocks", "10")
    first.choose("prefix_caching", "off")
    first.expect(12, False, 1)
    second.expect(10, False, 5)
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids)) > 0


def test_text_cannot_break_out_of_its_script(page, tmp_path):
    widget = Blocks()
    odd = "</script><!--<script>'\"&{step}"
    widget.strings = {**widget.strings, "tables": odd}
    (screen,) = show(page, tmp_path, widget)
    screen.press("forward")
    screen.expect(12, True, 1)
    assert odd in screen.root.inner_text()


def test_without_scripts_the_picture_stands(browser, tmp_path):
    for num_blocks, caching in SETTINGS:
        context = browser.new_context(java_script_enabled=False, viewport={"width": 360, "height": 700})
        page = context.new_page()
        try:
            show(page, tmp_path, Blocks(num_blocks, caching))
            table = page.locator(".cbk-picture table")
            assert table.locator("caption").inner_text() == Blocks(num_blocks, caching).summary()
            rows = table.locator("tbody tr").evaluate_all(
                "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => cell.textContent))"
            )
            steps = reference(num_blocks, caching)[1:]
            assert rows == [
                [
                    "".join(sorted(names)) or ("~" if block in step["idle"] else "·")
                    for block, names in enumerate(step["held"])
                ]
                for step in steps
            ]
            assert page.locator(".cbk-picture li").count() == len(steps)
            assert page.locator("button").count() == 0, "no dead controls"
            assert page.locator("main").evaluate("node => node.scrollWidth") <= 360
            cut = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth).length"
            assert table.locator("td").evaluate_all(cut) == 0
        finally:
            context.close()


# ---- The Python side


def test_bundle_is_the_same_on_every_run():
    bundle = Blocks()._repr_mimebundle_()[0]
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == (
        "12 blocks of 4 tokens, prefix caching on: 20 steps, 83 tokens computed (3 of them again), "
        "36 found in the cache, preemptions: 1"
    )
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] not in bundle["text/html"]
    assert len(bundle["text/html"].encode()) <= 150_000
    assert_every_run_writes(bundle["text/html"], "Blocks")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 11}, "num_blocks must be one of 10, 12, 16, got 11"),
        ({"num_blocks": "12"}, "got '12'"),
        ({"num_blocks": [12]}, r"got \[12\]"),
        ({"num_blocks": True}, "got True"),
        ({"prefix_caching": 1}, "prefix_caching must be True or False, got 1"),
        ({"step": -1}, "step must be an integer from 0 to 100, got -1"),
        ({"step": 101}, "0 to 100, got 101"),
        ({"step": 2.5}, "got 2.5"),
        ({"language": "xx"}, "no texts in language 'xx'; there are: en"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Blocks(**arguments)


def test_assignment_is_checked_too():
    widget = Blocks()
    for name, value in (("num_blocks", 11), ("step", -1)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            setattr(widget, name, value)
    assert (widget.num_blocks, widget.step) == (12, 0)


# ---- The words


def test_every_text_is_used_and_none_is_in_the_code():
    text = source("blocks.js", "blocks.py")
    for key in strings.load("blocks"):
        stem = key.split("_")[0]
        built = {"state": "`state_$", "tile": "`tile_$", "figure": "`figure_$", "legend": "`legend_$",
                 "event": 'f"event_', "finish": 'f"finish_'}  # fmt: skip
        assert re.search(rf"\b{key}\b", text) or built.get(stem, "\0") in text, key
    assert strings.load("blocks")["lang"] == "en"
