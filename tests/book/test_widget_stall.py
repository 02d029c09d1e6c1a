"""The interactive "stall": its traces against arithmetic and other runs, its page without a kernel, its Python side."""

import re
from itertools import pairwise

import pytest
from axe_playwright_python.sync_playwright import Axe
from widget_support import THEMES, WCAG, assert_every_run_writes, comparing_colours, open_widgets

from cbref import strings
from cbref.hardware import HARDWARE, MODELS
from cbref.widgets import stall
from cbref.widgets.stall import BUDGETS, CONTEXT, DECODES, PROMPT, Stall
from cbref.widgets.static import source

TRACES = {trace["budget"]: trace for trace in Stall().data["traces"]}
SIZES = BUDGETS[1:]


# ---- The traces


@pytest.mark.parametrize("budget", SIZES)
def test_steps_follow_from_budget_and_roofline(budget):
    """Each step by hand: the decodes and a chunk through the linear layers, attention of both, the LM head."""
    gpu, model, trace = HARDWARE["h100"], MODELS["llama-3-8b"], TRACES[budget]
    sizes = [size for *_, size in trace["chunks"]]
    assert sum(sizes) == PROMPT and len(sizes) == trace["steps"] == -(-PROMPT // (budget - DECODES))
    assert set(sizes[:-1]) == {budget - DECODES}
    assert trace["chunks"][0][0] == 0 and trace["chunks"][-1][1] == trace["ttft"]
    start, context, total = 0, None, 0.0
    for begin, end, size in trace["chunks"]:
        context = context or CONTEXT + 2 + stall.BEFORE + _warm(trace)
        seconds = gpu.linear_seconds(model, size + DECODES) + gpu.chunk_attention_seconds(model, start, start + size)
        seconds += gpu.decode_seconds(model, DECODES, DECODES * context)
        start, context = start + size, context + 1
        seconds += gpu.head_seconds(model, DECODES + (start == PROMPT))
        total += seconds
        assert (end - begin) / 1e4 == pytest.approx(seconds, rel=0.01, abs=1.5e-4)
    assert trace["ttft"] / 1e4 == pytest.approx(total, rel=0.003)
    during = [gap for time, gap in zip(trace["times"], trace["gaps"], strict=True) if 0 < time <= trace["ttft"]]
    assert during == pytest.approx([end - begin for begin, end, _ in trace["chunks"]], abs=1)
    assert trace["worst"] == max(during)


def _warm(trace):
    """About how many tokens each decode has said while the prompts of the others were computed."""
    return (CONTEXT * DECODES) // trace["budget"] // 2


def test_without_a_budget_the_decodes_stand_still():
    trace = TRACES[None]
    gpu, model = HARDWARE["h100"], MODELS["llama-3-8b"]
    alone = (
        gpu.linear_seconds(model, PROMPT) + gpu.chunk_attention_seconds(model, 0, PROMPT) + gpu.head_seconds(model, 1)
    )
    assert trace["chunks"] == [[0, trace["ttft"], PROMPT]]
    assert trace["ttft"] / 1e4 == pytest.approx(alone, rel=1e-4)
    assert trace["worst"] / 1e4 == pytest.approx(alone + 11e-3, rel=1e-3), "the prompt's step, and then the decodes'"
    assert trace["extra"] == 0
    assert [time for time in trace["times"] if 0 < time <= trace["ttft"]] == []


@pytest.mark.parametrize(("budget", "tbt", "ttft"), [(512, 33e-3, 2.30), (1024, 62e-3, 2.13), (2048, 119e-3, 2.04)])
def test_the_table_of_the_chapter(budget, tbt, ttft):
    """Chunks of so many tokens beside the decodes, without tiles; a budget has the decodes in it (test_stall.py)."""
    trace = TRACES[budget]
    assert trace["worst"] / 1e4 == pytest.approx(tbt, rel=0.05)
    assert trace["ttft"] / 1e4 == pytest.approx(ttft, rel=0.05)


@pytest.mark.parametrize("budget", BUDGETS)
def test_traces_are_whole(budget):
    trace = TRACES[budget]
    assert len(trace["times"]) == len(trace["gaps"])
    steps = [b - a for a, b in pairwise(trace["times"])]
    assert steps == pytest.approx(trace["gaps"][1:], abs=1)
    assert sum(time > trace["ttft"] for time in trace["times"]) == stall.AFTER
    assert sum(time <= 0 for time in trace["times"]) == stall.BEFORE + 1
    stops, stop = [], 0
    for *_, size in trace["chunks"]:
        stop += size
        stops.append(stop)
    assert trace["extra"] == sum(stops[:-1]), "every chunk but the last is read again by all that follow"
    numbers = [trace[name] for name in ("ttft", "worst", "extra", "alone")] + trace["times"] + trace["gaps"]
    assert all(type(number) is int for number in numbers)


def test_smaller_budgets_trade_ttft_for_gaps():
    ordered = [TRACES[budget] for budget in BUDGETS]
    for less, more in pairwise(ordered):
        assert more["worst"] < less["worst"] and more["ttft"] > less["ttft"] and more["extra"] > less["extra"]


def test_module_judges_as_python(page, tmp_path):
    file = tmp_path / "judge.html"
    file.write_text(f"<script type=module>{Stall._esm}\nwindow.judge = judge;</script>")
    page.goto(file.as_uri())
    traces = Stall().data["traces"]
    limits = [*range(5, 60), *range(60, 3001, 20)]
    answers = page.evaluate("([traces, limits]) => limits.map(one => judge(traces, one))", [traces, limits])
    for limit, answer in zip(limits, answers, strict=True):
        assert answer["over"] == [sum(gap > 10 * limit for gap in trace["gaps"]) for trace in traces]
        assert answer["best"] == next((i for i, trace in enumerate(traces) if trace["worst"] <= 10 * limit), -1)


# ---- The page without a kernel


def show(page, tmp_path, *widgets, **options):
    open_widgets(page, tmp_path, *widgets, **options)
    return [Screen(page, number) for number in range(len(widgets))]


SLOS = [5, 10, 25, 100, 250, 3000]


class Screen:
    def __init__(self, page, number):
        self.root = page.locator(".cbp-stall:not(.cbp-picture)").nth(number)

    def control(self, name):
        return self.root.locator(f"[data-name={name}]")

    def choose(self, budget=..., slo=...):
        if budget is not ...:
            self.control("budget").fill(str(BUDGETS.index(budget)))
        if slo is not ...:
            self.control("slo").fill(str(sorted(stall._SLO_STOPS).index(slo)))

    @property
    def heard(self):
        return self.root.locator("[aria-live=polite]").inner_text()

    def expect(self, budget, slo):
        trace = TRACES[budget]
        figures = {node.get_attribute("data-figure"): node.inner_text() for node in self.root.locator("dd").all()}
        assert figures == {
            "worst": f"{trace['worst'] / 10:,.1f} ms",
            "ttft": f"{trace['ttft'] / 1e4:.2f} s",
            "steps": str(trace["steps"]),
            "meanwhile": str(0 if budget is None else trace["steps"]),
            "extra": f"{trace['extra'] * 131_072 / 1e9:,.0f} GB",
        }
        over = sum(gap > 10 * slo for gap in trace["gaps"])
        drawn = self.root.evaluate(
            """root => Object.fromEntries(["tokens", "chunks", "within", "beyond"].map(kind =>
                [kind, [...root.querySelectorAll(`path.cbp-${kind}`)].map(path => [Number(path.dataset.count),
                    path.getAttribute("d").split("M").length - 1])]))"""
        )
        tokens, steps = len(trace["times"]), trace["steps"]
        assert drawn == {
            "tokens": [[tokens, tokens]] * 3,
            "chunks": [[steps, steps]],
            "within": [[tokens - over, tokens - over]],
            "beyond": [[over, over]],
        }
        verdict = self.root.locator(".cbp-verdict")
        assert verdict.get_attribute("data-met") == str(over == 0).lower()
        said = verdict.inner_text()
        if over:
            assert said.startswith(f"SLO missed: {over} of {tokens} gaps are longer than {slo:,} ms")
        else:
            assert said.startswith(f"SLO met: no gap is longer than {slo:,} ms.")
        best = next((trace for trace in TRACES.values() if trace["worst"] <= 10 * slo), None)
        if best is None:
            assert ("No budget here meets it" in said) == (10 * slo < TRACES[None]["alone"])
            assert ("A smaller one might" in said) == (10 * slo >= TRACES[None]["alone"])
        elif best["budget"] is None:
            assert "Even without a budget" in said
        elif best["budget"] == budget:
            assert "No larger budget here meets it" in said
        else:
            assert (
                f"is {best['budget']:,} tokens, with the newcomer's first token after {best['ttft'] / 1e4:.2f} s"
                in said
            )
        self.expect_positions(trace, slo)

    def expect_positions(self, trace, slo):
        """The first and the last mark stand at their times, and the line of the SLO at its height."""
        seen = self.root.evaluate(
            """root => { const d = kind => root.querySelector(`path.cbp-${kind}`).getAttribute("d");
                const numbers = text => text.match(/-?[\\d.]+/g).map(Number);
                const marks = d("tokens").split("M").slice(1).map(one => numbers(one)[0]);
                return { marks, slo: numbers(d("slo"))[1],
                    width: root.querySelector("[data-chart=lanes]").viewBox.baseVal.width } }"""
        )
        low = min(one["times"][0] for one in TRACES.values())
        high = max(one["times"][-1] for one in TRACES.values())
        left, right = 68, seen["width"] - 8
        expected = [left + (time - low) / (high - low) * (right - left) for time in trace["times"]]
        assert seen["marks"] == pytest.approx(expected, abs=0.06)
        floor, roof = 152, 12
        value = 3 * (3000 / 3) ** ((floor - seen["slo"]) / (floor - roof))
        assert value == pytest.approx(slo, rel=0.02)


def test_every_setting(page, tmp_path):
    (screen,) = show(page, tmp_path, Stall())
    assert page.locator(".cbp-picture").count() == 0
    screen.expect(None, 100)
    for budget in BUDGETS:
        screen.choose(budget=budget)
        for slo in SLOS:
            screen.choose(slo=slo)
            screen.expect(budget, slo)


def test_the_table_of_all_budgets(page, tmp_path):
    (screen,) = show(page, tmp_path, Stall(budget=512, slo=77))
    screen.expect(512, 77)
    screen.root.locator("summary").click()
    screen.choose(slo=50)  # one of the stops; 77 stays among them, hence one further
    assert screen.control("slo").get_attribute("aria-valuetext") == "50 ms"
    rows = [row.inner_text().split("\t") for row in screen.root.locator("tbody tr").all()]
    assert len(rows) == 7
    for row, (budget, trace) in zip(rows, TRACES.items(), strict=True):
        over = sum(gap > 500 for gap in trace["gaps"])
        assert row == [
            "none" if budget is None else f"{budget:,}", f"{trace['steps']}", f"{trace['worst'] / 10:,.1f}",
            f"{trace['ttft'] / 1e4:.2f}", f"{trace['extra'] * 131_072 / 1e9:,.0f}", f"{over}",
        ]  # fmt: skip
    assert screen.root.locator("thead th").last.inner_text() == "Gaps over 50 ms"
    widget = Stall()
    widget.budget, widget.slo = 256, 13  # assigned later, as from another cell
    (screen,) = show(page, tmp_path, widget)
    screen.expect(256, 13)


def test_what_it_says(page, tmp_path):
    (screen,) = show(page, tmp_path, Stall())
    text = screen.root.inner_text
    assert "One step computes all 50,000 tokens of the prompt. The 30 decodes stand still until it ends." in text()
    assert "calculated, not measured" in text() and "simulated h100 with llama-3-8b" in text()
    assert "27 more decodes run alike" in text()
    screen.choose(budget=512)
    assert "up to 482 of the prompt" in text()
    assert "338 GB, 51.6 times the prompt's own 6.6 GB" in text()


def test_keyboard_alone(page, tmp_path):
    (screen,) = show(page, tmp_path, Stall())

    def tab():
        page.keyboard.press("Tab")
        return page.evaluate(
            """() => { const at = document.activeElement;
                return at.matches(":focus-visible") && (at.dataset.name ?? at.tagName) }"""
        )

    assert tab() == "budget"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    screen.expect(8192, 100)
    page.keyboard.press("End")
    screen.expect(256, 100)
    page.keyboard.press("ArrowLeft")
    screen.expect(512, 100)
    assert tab() == "slo"
    page.keyboard.press("ArrowLeft")
    screen.expect(512, 80)
    page.keyboard.press("Home")
    screen.expect(512, 5)
    assert tab() == "SUMMARY"
    page.keyboard.press("Enter")
    assert screen.root.locator("table").is_visible()


def test_what_a_screen_reader_gets(page, tmp_path):
    page.clock.install()
    (screen,) = show(page, tmp_path, Stall())
    assert screen.heard == ""
    for budget in (8192, 4096, 2048):
        screen.choose(budget=budget)
    assert screen.heard == "", "a series is heard at its end"
    page.clock.run_for(500)
    trace, best = TRACES[2048], TRACES[1024]
    over = sum(gap > 1000 for gap in trace["gaps"])
    worst, count = trace["worst"] / 10, len(trace["gaps"])
    assert screen.heard == (
        f"Budget: 2,048 tokens. Worst gap {worst:.1f} ms, TTFT {trace['ttft'] / 1e4:.2f} s, 25 prefill steps. "
        f"SLO missed: {over} of {count} gaps are longer than 100 ms, the worst by {worst - 100:.1f} ms. "
        "The largest budget here that meets it is 1,024 tokens, with the newcomer's first token "
        f"after {best['ttft'] / 1e4:.2f} s."
    )
    lanes, gaps = page.get_by_role("img").all()
    assert "the newcomer's 25 prefill steps" in lanes.get_attribute("aria-label")
    assert f"{over} of {len(trace['gaps'])} gaps are longer than 100 ms" in gaps.get_attribute("aria-label")
    slider = page.get_by_role("slider", name="Token budget of a step")
    assert slider.get_attribute("aria-valuetext") == "2,048 tokens"
    screen.choose(budget=None)
    assert slider.get_attribute("aria-valuetext") == "none: the prompt first"
    assert page.get_by_role("slider", name="Limit for the gap").get_attribute("aria-valuetext") == "100 ms"


CONTRASTS = comparing_colours("""
    const style = selector => getComputedStyle(root.querySelector(selector));
    const panel = style(".cbp-panel").backgroundColor, surface = getComputedStyle(root).backgroundColor;
    return { dark: luminance(surface) < 0.1, found: [
        ...["tokens", "within", "beyond", "slo", "arrival", "first"].map(kind =>
            [kind, contrast(style(`.cbp-${kind}`).stroke, panel), 3]),
        ["chunks", contrast(style(".cbp-chunks").fill, panel), 3],
        ["axis", contrast(style("svg text.cbp-muted").fill, panel), 4.5],
        ["verdict", contrast(style(".cbp-verdict").color, panel), 4.5],
    ] };
""")


@pytest.mark.parametrize("theme", THEMES)
def test_contrast_and_axe(page, tmp_path, theme):
    html, expected = THEMES[theme]
    page.emulate_media(color_scheme="dark" if "system" in theme else "light")
    (screen,) = show(page, tmp_path, Stall(512), html=html)
    screen.root.locator("summary").click()
    for slo in (100, 25):  # met, and missed
        screen.choose(slo=slo)
        pairs = screen.root.evaluate(CONTRASTS)
        assert pairs["dark"] == (expected == "dark")
        assert [pair for pair in pairs["found"] if pair[1] < pair[2]] == []
    result = Axe().run(page, options=WCAG)
    assert result.violations_count == 0, result.generate_report()


@pytest.mark.parametrize("width", [320, 360, 1280])
@pytest.mark.parametrize("budget", [None, 256])
def test_fits_the_window(page, tmp_path, width, budget):
    page.set_viewport_size({"width": width, "height": 700})
    (screen,) = show(page, tmp_path, Stall(budget, slo=3000))
    screen.root.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = screen.root.evaluate(
        """root => [...root.querySelectorAll("input, summary")].map(node => node.getBoundingClientRect())
            .filter(box => box.width < 24 || box.height < 24).length"""
    )
    assert small == 0
    outside = """root => [...root.querySelectorAll("svg")].flatMap(svg => { const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("text")].map(n => [n.textContent, n.getBoundingClientRect()])
            .filter(([, at]) => at.left < box.left - 1 || at.right > box.right + 1).map(([text]) => text) })"""
    assert screen.root.evaluate(outside) == []
    page.set_viewport_size({"width": 700, "height": 700})  # drawn anew
    page.wait_for_function("document.querySelector('[data-chart=lanes]').viewBox.baseVal.width > 500")
    screen.expect(budget, 3000)


def test_two_on_one_page(page, tmp_path):
    first, second = show(page, tmp_path, Stall(), Stall(2048, slo=250))
    first.choose(budget=1024)
    second.choose(slo=25)
    first.expect(1024, 100)
    second.expect(2048, 25)
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids)) > 0


def test_text_cannot_break_out_of_its_script(page, tmp_path):
    widget = Stall()
    odd = "</script><!--<script>'\"&{step}"
    widget.strings = {**widget.strings, "newcomer": odd}
    (screen,) = show(page, tmp_path, widget)
    screen.expect(None, 100)
    assert screen.root.locator("svg text", has_text="{step}").text_content() == odd


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_without_scripts_the_picture_stands(browser, tmp_path, theme):
    context = browser.new_context(java_script_enabled=False, viewport={"width": 360, "height": 700})
    page = context.new_page()
    try:
        show(page, tmp_path, Stall(), html=f'data-theme="{theme}"')
        rows = [row.inner_text().split("\t") for row in page.locator(".cbp-picture tbody tr").all()]
        assert [row[0] for row in rows] == ["none", "8,192", "4,096", "2,048", "1,024", "512", "256"]
        assert rows[0][1:4] == ["1", f"{TRACES[None]['worst'] / 10:,.1f}", f"{TRACES[None]['ttft'] / 1e4:.2f}"]
        assert rows[5][5] == "0"
        lanes = page.locator(".cbp-picture path.cbp-tokens").all()
        for lane, trace in zip(lanes, TRACES.values(), strict=True):
            assert lane.get_attribute("d").count("M") == len(trace["times"])
        assert "pauses for 1,966 ms" in page.locator(".cbp-picture svg").get_attribute("aria-label")
        assert page.locator("button, input, select").count() == 0, "no dead controls"
        assert page.locator("main").evaluate("node => node.scrollWidth") <= 360
    finally:
        context.close()


# ---- The Python side


def test_bundle_is_the_same_on_every_run():
    bundle = Stall()._repr_mimebundle_()[0]
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"].startswith(
        "worst gap and TTFT when 50,000 tokens arrive beside 30 decodes: budget none: 1,966.4 ms, 1.96 s; budget 8,192:"
    )
    assert len(bundle["text/html"].encode()) <= 150_000
    assert_every_run_writes(bundle["text/html"], "Stall")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 500}, "budget must be one of None, 8192, 4096, 2048, 1024, 512, 256, got 500"),
        ({"budget": True}, "got True"),
        ({"budget": "512"}, "got '512'"),
        ({"budget": [512]}, "got "),
        ({"slo": 4}, r"slo must be an integer from 5 to 3000 \(ms\), got 4"),
        ({"slo": 0.1}, "got 0.1"),
        ({"slo": None}, "got None"),
        ({"language": "xx"}, "no texts in language 'xx'; there are: en"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Stall(**arguments)


def test_assignment_is_checked_too():
    widget = Stall(1024)
    with pytest.raises(ValueError, match="got 300"):
        widget.budget = 300
    with pytest.raises(ValueError, match="5 to 3000"):
        widget.slo = 1
    widget.budget = None
    assert (widget.budget, widget.slo) == (None, 100)


def test_every_text_is_used():
    text = source("stall.js", "stall.py")
    for key in strings.load("stall"):
        built = any(f"{key.split('_')[0]}_{sign}" in text for sign in "${")
        assert built or re.search(rf"\b{key}\b", text), key
