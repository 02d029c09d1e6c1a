"""The interactive "policy race": its runs against second ones, its page without a kernel, its Python side."""

import math
import re
from functools import cache

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from widget_support import THEMES, WCAG, assert_every_run_writes, comparing_colours, open_widgets

from cbref import strings
from cbref.engine import Engine
from cbref.widgets import race
from cbref.widgets.race import POLICIES, RATES, REQUESTS, SLOTS, Race
from cbref.widgets.static import source
from cbref.workloads import AZURE, serve

NAMES = {"static": "Static", "orca": "Orca", "prefill_first": "Prefill first", "sarathi": "Sarathi-Serve"}
RUNS = [(policy, int(rate)) for policy in POLICIES for rate in RATES]
BUDGET = {"sarathi": {"max_num_batched_tokens": 512}}


@cache
def run(policy, rate):
    """The same requests, served once more: (requests, summary). Times are seconds."""
    engine = Engine.simulated(policy, SLOTS, model="llama-3-8b", hardware="a100", **BUDGET.get(policy, {}))
    requests = serve(engine, race._work(float(rate)), progress=False)
    return requests, engine.summary(requests)


def count(policy, rate, now):
    """What can be counted at `now` seconds; None where a rounded time could fall on either side."""
    requests, _ = run(policy, rate)
    near = [t for r in requests for t in (r.arrival, r.admitted, r.finished, *r.token_times)]
    if 0 < min((abs(t - now) for t in near if t > 0), default=1) < race.UNIT:
        return None
    gaps = [b - a for r in requests for a, b in zip(r.token_times, r.token_times[1:], strict=False) if b <= now]
    return {
        "tokens": sum(t <= now for r in requests for t in r.token_times),
        "running": sum(r.admitted <= now < r.finished for r in requests),
        "waiting": sum(r.arrival <= now < r.admitted for r in requests),
        "finished": sum(r.finished <= now for r in requests),
        "worst": max(gaps, default=None),
    }


def end_of(rate, *policies):
    longest = max(run(policy, rate)[1]["seconds"] for policy in policies) * 1000
    tick = 10 * math.ceil(longest / 2000)
    return tick, tick * math.ceil(longest / tick)


# ---- The runs


@pytest.mark.parametrize(("policy", "rate"), RUNS)
def test_the_compact_run_is_the_engines(policy, rate):
    trace, (requests, summary) = Race().traces[str(rate)][policy], run(policy, rate)
    assert trace["figures"] == [
        summary["ttft"]["p50"], summary["ttft"]["p99"], summary["tbt"]["p99"], summary["seconds"]
    ]  # fmt: skip
    assert all(r.preemptions == 0 for r in requests)
    for row, times, r in zip(trace["requests"], race._times(trace), requests, strict=True):
        assert times == [round(t / race.UNIT) for t in r.token_times]
        assert [row[0], row[1], row[3]] == [round(t / race.UNIT) for t in (r.arrival, r.admitted, r.finished)]


def test_module_unpacks_and_counts_as_the_engine(page, tmp_path):
    file = tmp_path / "count.html"
    file.write_text(f"<script type=module>{Race._esm}\nObject.assign(window, {{unpack, stateAt}});</script>")
    page.goto(file.as_uri())
    traces, checked = Race().traces, 0
    for policy, rate in RUNS:
        times = [round(0.01 + 0.0371 * i, 5) for i in range(190)]
        script = "([run, times]) => { const all = unpack(run); return times.map(now => stateAt(all, now)); }"
        answers = page.evaluate(script, [traces[str(rate)][policy], [round(t / race.UNIT) for t in times]])
        for now, answer in zip(times, answers, strict=True):
            expected = count(policy, rate, now)
            if expected is None:
                continue
            checked += 1
            worst = answer.pop("worst")
            gap = expected.pop("worst")
            assert answer == expected, (policy, rate, now)
            assert (worst is None) == (gap is None)
            if gap is not None:
                assert worst["gap"] * race.UNIT == pytest.approx(gap, abs=1.01 * race.UNIT)
                assert worst["to"] - worst["from"] == worst["gap"]
    assert checked > 1900


def test_the_requests_are_drawn_from_the_trace():
    prompts, outputs = zip(*race._lengths(), strict=True)
    assert len(prompts) == REQUESTS
    assert AZURE["conv"]["prompt"][0] <= min(prompts) and max(prompts) <= AZURE["conv"]["prompt"][-1]
    assert max(outputs) <= round(AZURE["conv"]["output"][-1] / 4)
    for rate in RATES:
        arrivals = race._work(rate).arrivals
        assert (REQUESTS - 1) / arrivals[-1] == pytest.approx(rate)


@pytest.mark.parametrize(("policy", "twin"), [("prefill_first", "sglang"), ("orca", "trtllm")])
@pytest.mark.parametrize("rate", RATES)
def test_why_two_policies_are_left_out(policy, twin, rate):
    """The widget says so: with these requests their defaults serve exactly as another policy does."""
    first, second = run(policy, int(rate))[0], run(twin, int(rate))[0]
    assert [list(r.token_times) for r in first] == [list(r.token_times) for r in second]


def test_the_race_shows_what_the_chapter_says():
    for rate in map(int, RATES):
        figures = {policy: run(policy, rate)[1] for policy in POLICIES}
        assert max(figures, key=lambda p: figures[p]["ttft"]["p50"]) == "static"
        assert max(figures, key=lambda p: figures[p]["seconds"]) == "static"
        assert (
            figures["sarathi"]["tbt"]["p99"]
            < 0.05
            < figures["orca"]["tbt"]["p99"]
            < figures["prefill_first"]["tbt"]["p99"]
        )
        assert figures["static"]["tbt"]["p99"] < figures["sarathi"]["tbt"]["p99"], "nobody's prompt disturbs a batch"


# ---- The page without a kernel


def show(page, tmp_path, *widgets, **options):
    open_widgets(page, tmp_path, *widgets, **options)
    return [Screen(page, number) for number in range(len(widgets))]


class Screen:
    """One widget as a reader has it before him."""

    def __init__(self, page, number):
        self.page, self.root = page, page.locator(".cbr:not(.cbr-picture)").nth(number)

    def press(self, action):
        self.root.locator(f"[data-action={action}]").click()

    def rate(self, rate):
        self.root.locator(".cbp-choice label").filter(has_text=re.compile(rf"^{rate}$")).click()

    def policy(self, side, policy):
        self.root.locator(f"select[data-name={side}]").select_option(policy)

    def move(self, ticks):
        self.root.locator("input[type=range]").fill(str(ticks))

    @property
    def heard(self):
        self.page.wait_for_timeout(350)  # it waits for the end of a quick series
        return self.root.locator("[aria-live=polite]").inner_text()

    def expect(self, left, right, rate, ticks=None):
        """Everything that is drawn or counted follows from the runs. `ticks` None: the clock is at its end."""
        seen = self.root.evaluate(
            """root => ({
                sides: Object.fromEntries([...root.querySelectorAll("[data-side]")].map(panel => [panel.dataset.side, {
                    name: panel.querySelector(".cbr-name").textContent,
                    done: panel.querySelector(".cbr-done").textContent,
                    figures: [...panel.querySelectorAll("[data-figure]")].map(one => one.textContent),
                    tokens: [...panel.querySelectorAll(".cbr-token")].map(one => one.getAttribute("d")
                        .split("M").slice(1).map(parseFloat)),
                    width: panel.querySelector(".cbr-chart").viewBox.baseVal.width,
                    open: panel.querySelector("clipPath rect").width.baseVal.value,
                    label: panel.querySelector(".cbr-chart").ariaLabel }])),
                results: [...root.querySelectorAll(".cbr-results tbody tr")].map(row =>
                    [...row.children].map(cell => cell.textContent)),
                chosen: [...root.querySelectorAll("select")].map(one => one.value),
                rate: root.querySelector("input[type=radio]:checked").value,
                off: Object.fromEntries([...root.querySelectorAll("[data-action]")].map(one =>
                    [one.dataset.action, one.getAttribute("aria-disabled") === "true"])),
                position: root.querySelector(".cbr-position").textContent })"""
        )
        tick, end = end_of(rate, left, right)
        clock = end if ticks is None else min(end, ticks * tick)
        assert seen["chosen"] == [left, right] and seen["rate"] == str(rate)
        assert seen["position"] == f"{clock / 1000:.2f} s of {end / 1000:.2f} s"
        assert seen["off"] == {"reset": clock == 0, "back": clock == 0, "play": False, "forward": clock == end}
        for policy, side in ((left, seen["sides"]["left"]), (right, seen["sides"]["right"])):
            requests, summary = run(policy, rate)
            assert side["name"] == NAMES[policy]
            assert side["open"] == pytest.approx(side["width"] * clock / end, abs=0.1)
            for drawn, r in zip(side["tokens"], requests, strict=True):
                assert drawn == pytest.approx([side["width"] * t * 1000 / end for t in r.token_times], abs=0.15)
            expected = count(policy, rate, clock / 1000)
            if expected is None:
                continue
            worst = expected.pop("worst")
            assert side["figures"][:4] == [f"{value:,}" for value in expected.values()]
            shown = side["figures"][4]
            if worst is None:
                assert shown == "–"
            else:
                assert float(shown.removesuffix(" ms").replace(",", "")) == pytest.approx(worst * 1000, abs=0.52)
            assert f"{shown}." in side["label"] and f"finished: {expected['finished']};" in side["label"]
            over = expected["finished"] == REQUESTS
            assert side["done"] == (f"Done after {summary['seconds']:.2f} s" if over else "")
        for row, policy in zip(seen["results"], NAMES, strict=True):
            _, summary = run(policy, rate)
            values = [1000 * summary["ttft"]["p50"], 1000 * summary["ttft"]["p99"], 1000 * summary["tbt"]["p99"]]
            assert row[0] == NAMES[policy] + (" (shown)" if policy in (left, right) else "")
            assert [float(cell.replace(",", "")) for cell in row[1:4]] == pytest.approx(values, abs=0.51)
            assert float(row[4]) == pytest.approx(summary["seconds"], abs=0.0051)


@pytest.mark.parametrize("rate", [int(rate) for rate in RATES])
def test_every_pair_at_every_load(page, tmp_path, rate):
    (screen,) = show(page, tmp_path, Race())
    assert page.locator(".cbref-picture").count() == 0
    screen.expect("prefill_first", "sarathi", 8)
    screen.rate(rate)
    left, right = "prefill_first", "sarathi"
    for policy in POLICIES:
        for other in POLICIES:
            if other == policy:
                continue
            for side, value in (("left", policy), ("right", other)):
                screen.policy(side, value)
                if side == "left":
                    left, right = value, left if right == value else right
                else:
                    left, right = right if left == value else left, value
            assert (left, right) == (policy, other)
            screen.expect(policy, other, rate)  # who was at the end is at the end
            for ticks in (0, 37, 110):
                screen.move(ticks)
                screen.expect(policy, other, rate, ticks)
            screen.move(999)
            screen.expect(policy, other, rate)


def test_step_and_choose_in_the_middle(page, tmp_path):
    (screen,) = show(page, tmp_path, Race(("static", "orca"), 16, clock=0))
    screen.expect("static", "orca", 16, 0)
    assert "Nothing has been computed yet" in screen.root.inner_text()
    screen.press("forward")
    screen.press("forward")
    screen.expect("static", "orca", 16, 2)
    screen.press("back")
    screen.expect("static", "orca", 16, 1)
    screen.press("reset")
    screen.move(60)
    screen.expect("static", "orca", 16, 60)
    clock = 60 * end_of(16, "static", "orca")[0]
    assert re.search(r"Tokens so far: Static \d+, Orca \d+\.", screen.root.inner_text())
    screen.policy("right", "static")  # they change places, and the clock stays
    screen.expect("orca", "static", 16, 60)
    screen.policy("left", "sarathi")
    screen.expect("sarathi", "static", 16, clock / end_of(16, "sarathi", "static")[0])


def test_play_pause_and_play_again(page, tmp_path):
    page.clock.install(time=0)
    (screen,) = show(page, tmp_path, Race(clock=0))
    page.clock.pause_at(60_000)  # or time goes by on its own, too
    toggle = screen.root.locator("[data-action=play]")
    toggle.click()
    assert toggle.inner_text() == "Pause"
    page.clock.run_for(3 * 400)  # motion is reduced here: five ticks at a time
    screen.expect("prefill_first", "sarathi", 8, 15)
    assert screen.root.locator("[aria-live=polite]").inner_text() == "", "left in peace while the race runs"
    toggle.click()
    assert toggle.inner_text() == "Play"
    page.clock.run_for(5 * 400)
    assert "Tokens so far" in screen.root.locator("[aria-live=polite]").inner_text()
    screen.expect("prefill_first", "sarathi", 8, 15)
    toggle.click()
    page.clock.run_for(60 * 400)
    screen.expect("prefill_first", "sarathi", 8)
    assert toggle.inner_text() == "Play"
    toggle.click()  # from the end it starts again
    page.clock.run_for(400)
    screen.expect("prefill_first", "sarathi", 8, 5)
    screen.rate(4)  # any other control stops it
    clock = 5 * end_of(8, "prefill_first", "sarathi")[0]
    page.clock.run_for(5 * 400)
    screen.expect("prefill_first", "sarathi", 4, clock / end_of(4, "prefill_first", "sarathi")[0])


def test_with_motion_the_clock_goes_tick_by_tick(page, tmp_path):
    page.emulate_media(reduced_motion="no-preference")
    page.clock.install(time=0)
    (screen,) = show(page, tmp_path, Race(clock=0))
    page.clock.pause_at(60_000)  # or time goes by on its own, too
    screen.press("play")
    page.clock.run_for(7 * 80)
    screen.expect("prefill_first", "sarathi", 8, 7)


def test_keyboard_alone(page, tmp_path):
    (screen,) = show(page, tmp_path, Race(clock=0))

    def focused():
        return page.evaluate(
            """() => { const at = document.activeElement, d = at.dataset;
                return at.matches(":focus-visible") && (d.action ?? d.name ?? at.type
                    ?? at.className) }"""
        )

    def tab():
        page.keyboard.press("Tab")
        return focused()

    assert tab() == "left"
    page.keyboard.press("ArrowUp")
    screen.expect("orca", "sarathi", 8, 0)
    assert tab() == "right"
    page.keyboard.press("ArrowUp")
    screen.expect("orca", "prefill_first", 8, 0)
    assert tab() == "rate"
    page.keyboard.press("ArrowRight")
    screen.expect("orca", "prefill_first", 16, 0)
    assert [tab() for _ in range(4)] == ["reset", "back", "play", "forward"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    screen.expect("orca", "prefill_first", 16, 2)
    assert tab() == "range"
    page.keyboard.press("ArrowRight")
    screen.expect("orca", "prefill_first", 16, 3)
    page.keyboard.press("End")
    screen.expect("orca", "prefill_first", 16)
    assert "cbr-results" in tab()
    tab()
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    assert screen.root.locator("details table").is_visible()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Home")
    assert screen.root.locator("details table").is_visible(), "the table stays open"


def test_what_a_screen_reader_gets(page, tmp_path):
    (screen,) = show(page, tmp_path, Race())
    assert screen.heard == ""
    screen.move(40)
    tick, end = end_of(8, "prefill_first", "sarathi")
    now = 40 * tick / 1000
    a, b = (count(policy, 8, now) for policy in ("prefill_first", "sarathi"))
    heard = screen.heard
    assert heard.startswith(
        f"{now:.2f} s of {end / 1000:.2f} s. Prefill first after {now:.2f} s, a lane for each request. "
    )
    assert (
        f"Tokens out: {a['tokens']}; running: {a['running']}; waiting: {a['waiting']}; finished: {a['finished']};"
        in heard
    )
    assert heard.endswith(f"Tokens so far: Prefill first {a['tokens']}, Sarathi-Serve {b['tokens']}.")
    chart = page.get_by_role("group", name="Sarathi-Serve", exact=True).get_by_role("img")
    assert f"finished: {b['finished']}" in chart.get_attribute("aria-label")
    slider = page.get_by_role("slider", name="Time")
    assert slider.get_attribute("aria-valuetext") == f"{now:.2f} s of {end / 1000:.2f} s"
    assert page.get_by_role("combobox", name="Above").input_value() == "prefill_first"
    assert page.get_by_role("group", name="Requests a second").get_by_role("radio", name="8").is_checked()


def test_each_request_as_a_table(page, tmp_path):
    (screen,) = show(page, tmp_path, Race())
    for left, right, rate in (("prefill_first", "sarathi", 8), ("static", "orca", 16)):
        screen.policy("left", left)
        screen.policy("right", right)
        screen.rate(rate)
        rows = screen.root.locator("details tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => Number(cell.textContent.replace(',', ''))))"
        )
        for number, row in enumerate(rows):
            a, b = run(left, rate)[0][number], run(right, rate)[0][number]
            expected = [number + 1, len(a.prompt), a.params.max_tokens, 1000 * a.arrival]
            for r in (a, b):
                times = [r.token_times[0] - r.arrival, np.diff(r.token_times).max(), r.finished - r.arrival]
                expected += [1000 * time for time in times]
            assert row == pytest.approx(expected, abs=0.53)
        assert len(rows) == REQUESTS


@pytest.mark.parametrize("theme", THEMES)
def test_contrast_and_axe(page, tmp_path, theme):
    html, expected = THEMES[theme]
    page.emulate_media(color_scheme="dark" if "system" in theme else "light")
    (screen,) = show(page, tmp_path, Race(("static", "sarathi"), clock=2), html=html)
    if theme in ("light", "book"):
        page.set_viewport_size({"width": 360, "height": 700})
    screen.root.locator("summary").click()
    seen = screen.root.evaluate(
        comparing_colours("""
            const panel = getComputedStyle(root.querySelector(".cbp-panel")).backgroundColor;
            const surface = getComputedStyle(root).backgroundColor;
            return { dark: luminance(surface) < 0.1, found: ["wait", "prefill", "token", "held", "worst", "clock"]
                .map(name => [name, contrast(getComputedStyle(root.querySelector(`.cbr-${name}`)).stroke, panel)]) };
        """)
    )
    assert seen["dark"] == (expected == "dark")
    assert [pair for pair in seen["found"] if pair[1] < 3] == []
    if theme in ("light", "book"):
        result = Axe().run(page, options=WCAG)
        assert result.violations_count == 0, result.generate_report()


@pytest.mark.parametrize("rate", [4, 16])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_fits_the_window(page, tmp_path, width, rate):
    page.set_viewport_size({"width": width, "height": 700})
    (screen,) = show(page, tmp_path, Race(("static", "orca"), rate))
    screen.expect("static", "orca", rate)
    screen.root.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = screen.root.evaluate(
        """root => [...root.querySelectorAll("button, select, input:not([type=radio]), label[for*=choice], summary")]
            .map(node => node.getBoundingClientRect()).filter(box => box.width < 24 || box.height < 24).length"""
    )
    assert small == 0
    page.set_viewport_size({"width": 700, "height": 700})  # and is drawn anew when the window changes
    page.wait_for_function("document.querySelector('.cbr-chart').viewBox.baseVal.width > 550")
    screen.expect("static", "orca", rate)


def test_two_on_one_page(page, tmp_path):
    first, second = show(page, tmp_path, Race(), Race(("orca", "static"), 16, clock=0))
    first.press("back")
    second.rate(4)
    first.policy("left", "orca")
    second.expect("orca", "static", 4, 0)
    first.press("reset")
    first.expect("orca", "sarathi", 8, 0)
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids)) > 0


def test_text_cannot_break_out_of_its_script(page, tmp_path):
    widget = Race()
    odd = "</script><!--<script>'\"&{step}"
    widget.strings = {**widget.strings, "rule_orca": odd}
    (screen,) = show(page, tmp_path, widget)
    screen.policy("left", "orca")
    screen.expect("orca", "sarathi", 8)
    assert odd in screen.root.inner_text()


def test_without_scripts_the_picture_stands(browser, tmp_path):
    context = browser.new_context(java_script_enabled=False, viewport={"width": 360, "height": 700})
    page = context.new_page()
    try:
        show(page, tmp_path, Race())
        _, end = end_of(8, "prefill_first", "sarathi")
        for chart, policy in zip(page.locator(".cbr-picture svg").all(), ("prefill_first", "sarathi"), strict=True):
            requests, summary = run(policy, 8)
            assert chart.get_attribute("aria-label") == f"{NAMES[policy]}: done after {summary['seconds']:.2f} s"
            for path, r in zip(chart.locator(".cbr-token").all(), requests, strict=True):
                drawn = [float(one.split()[0]) for one in path.get_attribute("d").split("M")[1:]]
                assert drawn == pytest.approx([640 * 1000 * t / end for t in r.token_times], abs=0.1)
        rows = [row.inner_text().split("\t") for row in page.locator(".cbr-picture tbody tr").all()]
        for row, policy in zip(rows, NAMES, strict=True):
            _, summary = run(policy, 8)
            values = [*(1000 * summary[k][p] for k, p in race.FIGURES), summary["seconds"]]
            assert row == [NAMES[policy], *(f"{value:,.0f}" for value in values[:3]), f"{values[3]:.2f}"]
        assert page.locator("button, select, input").count() == 0, "no dead controls"
        assert page.locator("main").evaluate("node => node.scrollWidth") <= 360
    finally:
        context.close()


# ---- The Python side


def test_bundle_is_the_same_on_every_run():
    bundle = Race()._repr_mimebundle_()[0]
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == (
        "20 requests at 8 a second: Prefill first 3.54 s, worst gap between tokens 292 ms; "
        "Sarathi-Serve 3.38 s, worst gap between tokens 38 ms"
    )
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] not in bundle["text/html"]
    assert len(bundle["text/html"].encode()) <= 150_000
    assert_every_run_writes(bundle["text/html"], "Race")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": ("orca",)}, r"policies must be two of static, orca, prefill_first, sarathi, got \('orca',\)"),
        ({"policies": "orca"}, "policies must be two of .*, got 'orca'"),
        ({"policies": None}, "policies must be two of .*, got None"),
        ({"policies": ("orca", "orca")}, "two different ones, got"),
        ({"policies": ("orca", "sglang")}, "one of static, orca, prefill_first, sarathi, got 'sglang'"),
        ({"policies": ("orca", ["static"])}, r"got \['static'\]"),
        ({"rate": 5}, "rate must be one of 4, 8, 16, got 5"),
        ({"rate": "8"}, "got '8'"),
        ({"rate": True}, "got True"),
        ({"clock": -1}, "clock must be from 0 to 60 seconds, got -1"),
        ({"clock": 61}, "0 to 60 seconds, got 61"),
        ({"clock": "1"}, "got '1'"),
        ({"clock": float("nan")}, "got nan"),
        ({"language": "xx"}, "no texts in language 'xx'; there are: en"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Race(**arguments)


def test_assignment_is_checked_too():
    widget = Race()
    for name, value in (("left", "vllm"), ("rate", 5), ("clock", -1)):
        with pytest.raises(ValueError, match="must be"):
            setattr(widget, name, value)
    assert (widget.left, widget.rate) == ("prefill_first", 8)
    assert Race(clock=1.5).clock == 1500 and Race(clock=60).clock == Race().clock


# ---- The words


def test_every_text_is_used():
    text = source("race.js", "race.py")
    for key in strings.load("race"):
        built = {
            "policy": "`policy_$",
            "rule": "`rule_$",
            "figure": "`figure_$",
            "legend": "`legend_$",
            "column": "`column_$",
        }
        assert re.search(rf"\b{key}\b", text) or built.get(key.split("_")[0], "\0") in text, key
