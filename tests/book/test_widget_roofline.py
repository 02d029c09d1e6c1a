"""The interactive "roofline": the same numbers as the simulator's, its page without a kernel, its Python side."""

import itertools
import re
from decimal import ROUND_HALF_UP, Decimal
from types import SimpleNamespace

import pytest
from axe_playwright_python.sync_playwright import Axe
from widget_support import THEMES, WCAG, assert_every_run_writes, comparing_colours, open_widgets

from cbref import strings
from cbref.executors.roofline import RooflineExecutor
from cbref.hardware import HARDWARE, MODELS
from cbref.request import Chunk
from cbref.widgets import roofline
from cbref.widgets.roofline import Roofline
from cbref.widgets.static import source

BASE = {"phase": "decode", "rates": "peak", "requests": 32, "context": 2000, "new": 2048}


def settings():
    """Every model and GPU, both phases and rates, batches and chunks on either side of tiles and ridges."""
    sizes = [
        (1, 0, 2),
        (32, 2000, 128),
        (128, 100, 129),
        (129, 50_000, 257),
        (257, 8000, 2048),
        (1024, 131_072, 131_072),
    ]
    places = itertools.product(MODELS, HARDWARE, ("decode", "prefill"), ("peak", "reached"), sizes)
    return [
        {"model": m, "gpu": g, "phase": p, "rates": r, "requests": size[0], "context": size[1], "new": size[2]}
        for m, g, p, r, size in places
    ]


def python(setting):
    rest = {name: value for name, value in setting.items() if name not in ("model", "gpu")}
    return roofline.parts(MODELS[setting["model"]], HARDWARE[setting["gpu"]], **rest)


# ---- The arithmetic


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", HARDWARE)
def test_python_reckons_as_the_simulated_engine(model, gpu):
    for setting in settings():
        if (setting["model"], setting["gpu"], setting["rates"]) != (model, gpu, "reached"):
            continue
        executor = RooflineExecutor(MODELS[model], HARDWARE[gpu], num_blocks=1)
        decode, start = setting["phase"] == "decode", setting["context"]
        stop = start + (1 if decode else setting["new"])
        ends = SimpleNamespace(num_tokens=stop)  # a request whose last token is computed: one comes out
        chunks = [Chunk(ends, start, stop)] * (setting["requests"] if decode else 1)
        found = python(setting)
        total = executor.step_seconds(chunks)
        assert sum(part["seconds"] for part in found.values()) == pytest.approx(total, rel=1e-12), setting
        assert sum(part["flops"] for part in found.values()) == pytest.approx(executor._work.flops, rel=1e-12)
        assert sum(part["bytes"] for part in found.values()) == pytest.approx(executor._work.bytes, rel=1e-12)


def test_module_reckons_as_python(page, tmp_path):
    file = tmp_path / "measure.html"
    file.write_text(f"<script type=module>{Roofline._esm}\nObject.assign(window, {{measure, memory}});</script>")
    page.goto(file.as_uri())
    data, cases = Roofline().data, settings()
    answers = page.evaluate("([data, cases]) => cases.map(one => measure(data, one))", [data, cases])
    for setting, answer in zip(cases, answers, strict=True):
        for name, part in python(setting).items():
            assert answer[name].pop("bound") == part.pop("bound"), (setting, name)
            assert answer[name] == pytest.approx(part, rel=1e-12), (setting, name)
    for setting, room in zip(
        cases, page.evaluate("([d, c]) => c.map(one => memory(d, one))", [data, cases]), strict=True
    ):
        model, gpu = MODELS[setting["model"]], HARDWARE[setting["gpu"]]
        cached = setting["requests"] * (setting["context"] + 1)
        if setting["phase"] == "prefill":
            cached = setting["context"] + setting["new"]
        try:
            fits = cached <= gpu.kv_capacity(model)
        except ValueError:
            fits = False
        assert (room["count"] == 1) == fits, setting


def test_points_are_on_the_roof_where_no_tile_is_broken():
    for setting in settings():
        gpu = roofline._rated(HARDWARE[setting["gpu"]], setting["rates"])
        for name, part in python(setting).items():
            intensity, attained = part["flops"] / part["bytes"], part["flops"] / part["seconds"]
            roof = min(gpu.flops * gpu.mfu, intensity * gpu.bandwidth * gpu.mbu)
            assert attained <= roof * (1 + 1e-12)
            tokens = setting["requests"] if setting["phase"] == "decode" else setting["new"]
            if name != "linear" or tokens % gpu.tile == 0 or part["bound"] == "memory":
                assert attained == pytest.approx(roof), (setting, name)


def test_what_the_chapter_says():
    """Intensity of the linear layers is the number of tokens (bf16); of a decode's attention, heads per KV head."""
    for name, ratio in (("llama-2-7b", 1), ("llama-3-8b", 4), ("llama-3-70b", 8)):
        for requests, context in ((1, 100), (64, 4000)):
            found = python({**BASE, "model": name, "gpu": "h100", "requests": requests, "context": context})
            assert found["attention"]["flops"] / found["attention"]["bytes"] == ratio
            assert found["linear"]["flops"] / found["linear"]["bytes"] == requests
    # 30 decodes at 2k on an H100 at 70 % and 80 %: 8.1 ms without the LM head
    reached = {**BASE, "model": "llama-3-8b", "gpu": "h100", "requests": 30, "rates": "reached"}
    found = python(reached)
    assert found["linear"]["seconds"] + found["attention"]["seconds"] == pytest.approx(8.1e-3, rel=0.01)


def test_all_gpus_reach_the_same_shares():
    """The control names them once for all."""
    assert len({(gpu.mfu, gpu.mbu) for gpu in HARDWARE.values()}) == 1


# ---- The page without a kernel


def show(page, tmp_path, *widgets, **options):
    open_widgets(page, tmp_path, *widgets, **options)
    return [Screen(page, number) for number in range(len(widgets))]


def short(value):
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


class Screen:
    def __init__(self, page, number):
        self.root = page.locator(".cbp-roofline:not(.cbp-picture)").nth(number)

    def control(self, name):
        return self.root.locator(f"[data-name={name}]")

    def choose(self, name, value):
        if name in ("model", "gpu"):
            self.control(name).select_option(value)
        elif name in ("phase", "rates"):
            self.root.locator(f"label:has-text('{value}')").click()
        else:
            stops = sorted({*roofline._STOPS[name]})
            self.control(name).fill(str(stops.index(value)))

    @property
    def heard(self):
        return self.root.locator("[aria-live=polite]").inner_text()

    def expect(self, **setting):
        setting = {**BASE, "model": "llama-3-8b", "gpu": "h100", **setting}
        found = python(setting)
        total = sum(part["seconds"] for part in found.values())
        for name in ("linear", "attention"):
            part, entry = found[name], self.root.locator(f".cbp-entry[data-part={name}]")
            assert (
                entry.locator("[data-value=intensity]").inner_text()
                == f"{short(part['flops'] / part['bytes'])} FLOP/byte"
            )
            attained = short(part["flops"] / part["seconds"] / 1e12)
            assert entry.locator("[data-value=attained]").inner_text() == f"{attained} TFLOP/s"
            assert entry.locator(".cbp-bound").inner_text() == f"{part['bound']}-bound"
        assert self.root.locator(".cbp-total").inner_text() == f"The step takes {short(1e3 * total)} ms"
        for name, part in found.items():
            line = self.root.locator(f".cbp-times [data-part={name}] b").inner_text()
            share = Decimal(100 * part["seconds"] / total).quantize(Decimal(1), ROUND_HALF_UP)
            assert line == f"{short(1e3 * part['seconds'])} ms ({share}%)"
        weights = short((found["linear"]["bytes"] + found["head"]["bytes"]) / 1e9)
        figures = {at: self.root.locator(f"[data-figure={at}]").inner_text() for at in ("tokens", "weights", "kv")}
        tokens = setting["requests"] if setting["phase"] == "decode" else setting["new"]
        kv = short(found["attention"]["bytes"] / 1e9)
        assert figures == {"tokens": f"{tokens:,}", "weights": f"{weights} GB", "kv": f"{kv} GB"}
        decode = setting["phase"] == "decode"
        assert self.control("requests").is_visible() == decode != self.control("new").is_visible()
        self.expect_points(setting, found)

    def expect_points(self, setting, found):
        """Marks stand where the axes say: both are logarithmic, and the ends are those of the data."""
        where = self.root.evaluate(
            """root => { const svg = root.querySelector(".cbp-chart"), box = svg.viewBox.baseVal;
                const marks = [...svg.querySelectorAll(".cbp-mark")].map(mark =>
                    [mark.dataset.part, mark.getAttribute("transform").match(/[\\d.]+/g).map(Number)]);
                return { width: box.width, height: box.height, marks: Object.fromEntries(marks) } }"""
        )
        left, right, top, bottom = 46, where["width"] - 14, 22, where["height"] - 40
        for name, (x, y) in where["marks"].items():
            part = found[name]
            low, high = roofline._X
            intensity = low * (high / low) ** ((x - left) / (right - left))
            low, high = roofline._Y
            tflops = low * (high / low) ** ((bottom - y) / (bottom - top))
            assert intensity == pytest.approx(part["flops"] / part["bytes"], rel=0.02)
            assert tflops == pytest.approx(part["flops"] / part["seconds"] / 1e12, rel=0.04)


def test_every_control(page, tmp_path):
    (screen,) = show(page, tmp_path, Roofline())
    assert page.locator(".cbp-picture").count() == 0
    screen.expect()
    for requests in (1, 8, 128, 256, 320, 1024):
        screen.choose("requests", requests)
        screen.expect(requests=requests)
    for gpu in HARDWARE:
        screen.choose("gpu", gpu)
        screen.expect(requests=1024, gpu=gpu)
    for model in MODELS:
        screen.choose("model", model)
        screen.expect(requests=1024, gpu=gpu, model=model)
    for context in (0, 100, 131_072):
        screen.choose("context", context)
        screen.expect(requests=1024, gpu=gpu, model=model, context=context)
    screen.choose("rates", "70% MFU, 80% MBU")
    now = {"gpu": gpu, "model": model, "context": context, "rates": "reached"}
    screen.expect(**now, requests=1024)
    screen.choose("phase", "Prefill")
    for new in (2, 256, 257, 50_000, 131_072):
        screen.choose("new", new)
        screen.expect(**now, phase="prefill", new=new)
    screen.choose("rates", "Peak")
    screen.expect(**{**now, "rates": "peak"}, phase="prefill", new=new)
    screen.choose("phase", "Decode")
    screen.expect(**{**now, "rates": "peak"}, requests=1024)


def test_what_it_says(page, tmp_path):
    (screen,) = show(page, tmp_path, Roofline())
    text = screen.root.inner_text
    assert "reading 14.0 GB of weights takes longer than multiplying 32 tokens by them" in text()
    assert "4.00 FLOP per byte at any batch size" in text()
    assert "16.1 GB of weights and 8.39 GB of KV cache fit into 72.0 GB (90% of h100)" in text()
    assert "Nothing was measured" in text() and "peak FLOP/s" in text()
    screen.choose("requests", 320)
    assert "multiplying 320 tokens takes longer than reading the weights" in text()
    assert "tiles of 128 tokens: 320 tokens cost as much as 384" in text()
    screen.choose("model", "bloom-176b")
    assert screen.root.locator("[data-fits]").get_attribute("data-fits") == "false"
    kv = 320 * 2001 * MODELS["bloom-176b"].kv_bytes_per_token
    weights = MODELS["bloom-176b"].linear_params + 2 * MODELS["bloom-176b"].head_params
    assert f"It would take {-(-(2 * weights + kv) // int(0.9 * 80e9))} such GPUs" in text()
    screen.choose("phase", "Prefill")
    screen.choose("rates", "70% MFU, 80% MBU")
    assert "each byte of keys and values serves many tokens of the prompt" in text()
    assert "70% of the FLOP/s, 80% of the bandwidth" in text()
    screen.choose("new", 2)
    assert "Attention: reading" in text()


def test_values_between_the_stops(page, tmp_path):
    (screen,) = show(page, tmp_path, Roofline(requests=30, context=1234, new=777))
    screen.expect(requests=30, context=1234)
    screen.choose("phase", "Prefill")
    screen.expect(phase="prefill", new=777, context=1234)
    assert screen.control("new").get_attribute("aria-valuetext") == "777"
    widget = Roofline()
    widget.requests = 31  # assigned later, as from another cell
    (screen,) = show(page, tmp_path, widget)
    screen.expect(requests=31)
    assert screen.control("requests").get_attribute("aria-valuetext") == "31"


def test_keyboard_alone(page, tmp_path):
    (screen,) = show(page, tmp_path, Roofline())

    def tab():
        page.keyboard.press("Tab")
        return page.evaluate(
            """() => { const at = document.activeElement;
                return at.matches(":focus-visible") && (at.dataset.name ?? at.tagName) }"""
        )

    assert tab() == "model"
    page.keyboard.press("ArrowUp")
    screen.expect(model="llama-2-70b")
    assert tab() == "gpu"
    page.keyboard.press("ArrowDown")
    screen.expect(model="llama-2-70b", gpu="h200")
    assert tab() == "phase"
    outline = page.evaluate("getComputedStyle(document.activeElement.parentElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("ArrowRight")
    now = {"model": "llama-2-70b", "gpu": "h200", "phase": "prefill"}
    screen.expect(**now)
    assert tab() == "rates"
    page.keyboard.press("ArrowRight")
    now["rates"] = "reached"
    screen.expect(**now)
    assert tab() == "new"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    screen.expect(**now, new=4)
    assert tab() == "context"
    page.keyboard.press("End")
    screen.expect(**now, new=4, context=131_072)
    assert tab() == "SUMMARY"
    page.keyboard.press("Enter")
    assert screen.root.locator("table").is_visible()


def test_what_a_screen_reader_gets(page, tmp_path):
    page.clock.install()
    (screen,) = show(page, tmp_path, Roofline())
    assert screen.heard == ""
    for requests in (48, 64, 128):
        screen.choose("requests", requests)
    assert screen.heard == "", "a series is heard at its end"
    page.clock.run_for(500)
    found = python({**BASE, "model": "llama-3-8b", "gpu": "h100", "requests": 128})
    total = short(1e3 * sum(part["seconds"] for part in found.values()))
    expected = (
        "Linear layers: 128 FLOP per byte, 429 TFLOP/s, memory-bound. "
        "Attention: 4.00 FLOP per byte, 13.4 TFLOP/s, memory-bound."
    )
    assert screen.heard == f"Step: {total} ms. {expected}"
    chart = page.get_by_role("img").first
    roof = "Roofline of h100: 3.35 TB/s up to 295 FLOP per byte, 989 TFLOP/s beyond."
    assert chart.get_attribute("aria-label") == f"{roof} {expected}"
    slider = page.get_by_role("slider", name="Batch size (requests)")
    assert slider.get_attribute("aria-valuetext") == "128"
    assert page.get_by_role("combobox", name="Model").input_value() == "llama-3-8b"
    assert page.get_by_role("radio", name="Decode").is_checked()
    page.get_by_text("The step as a table").click()
    rows = {
        row.inner_text().split("\t")[0]: row.inner_text().split("\t")[1:]
        for row in screen.root.locator("tbody tr").all()
    }
    assert rows["Bound"] == ["memory-bound"] * 3 + [""]
    assert rows["ms"] == [short(1e3 * part["seconds"]) for part in found.values()] + [total]
    assert rows["FLOP/byte"][:3] == ["128", "128", "4.00"]


CONTRASTS = comparing_colours("""
    const style = selector => getComputedStyle(root.querySelector(selector));
    const panel = style(".cbp-panel").backgroundColor, surface = getComputedStyle(root).backgroundColor;
    return { dark: luminance(surface) < 0.1, found: [
        ["roof", contrast(style(".cbp-roof").stroke, panel), 3],
        ["select", contrast(style("select").borderTopColor, surface), 3],
        ["axis", contrast(style("svg text.cbp-muted").fill, panel), 4.5],
        ["note", contrast(style("[data-fits]").color, surface), 4.5],
        ...[...root.querySelectorAll(".cbp-chart .cbp-mark")].map(mark =>
            [mark.dataset.part, contrast(getComputedStyle(mark).fill, panel), 3]),
        ...[...root.querySelectorAll(".cbp-split i")].map(bar =>
            [bar.dataset.part, contrast(getComputedStyle(bar).backgroundColor, panel), 3]),
    ] };
""")


@pytest.mark.parametrize("theme", THEMES)
def test_contrast_and_axe(page, tmp_path, theme):
    html, expected = THEMES[theme]
    page.emulate_media(color_scheme="dark" if "system" in theme else "light")
    widget = Roofline(model="bloom-176b", phase="prefill", new=300, rates="reached")
    (screen,) = show(page, tmp_path, widget, html=html)
    screen.root.locator("summary").click()
    pairs = screen.root.evaluate(CONTRASTS)
    assert pairs["dark"] == (expected == "dark")
    assert len(pairs["found"]) == 9
    assert [pair for pair in pairs["found"] if pair[1] < pair[2]] == []
    result = Axe().run(page, options=WCAG)
    assert result.violations_count == 0, result.generate_report()


@pytest.mark.parametrize("width", [320, 360, 1280])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_fits_the_window(page, tmp_path, width, phase):
    page.set_viewport_size({"width": width, "height": 700})
    (screen,) = show(page, tmp_path, Roofline("bloom-176b", "b200", phase, 1024, 131_072, 131_072))
    screen.root.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = screen.root.evaluate(
        """root => [...root.querySelectorAll("select, input[type=range], .cbp-segments label, summary")]
            .filter(node => !node.closest("[hidden]")).map(node => node.getBoundingClientRect())
            .filter(box => box.width < 24 || box.height < 24).length"""
    )
    assert small == 0
    outside = """root => { const box = root.querySelector(".cbp-chart").getBoundingClientRect();
        return [...root.querySelectorAll(".cbp-chart text")].map(n => [n.textContent, n.getBoundingClientRect()])
            .filter(([, at]) => at.left < box.left - 1 || at.right > box.right + 1).map(([text]) => text) }"""
    assert screen.root.evaluate(outside) == []
    page.set_viewport_size({"width": 700, "height": 700})  # drawn anew
    page.wait_for_function("document.querySelector('.cbp-chart').viewBox.baseVal.width > 500")
    screen.expect(model="bloom-176b", gpu="b200", phase=phase, requests=1024, context=131_072, new=131_072)


def test_two_on_one_page(page, tmp_path):
    first, second = show(page, tmp_path, Roofline(), Roofline(gpu="t4", phase="prefill"))
    first.choose("phase", "Prefill")
    first.choose("gpu", "l4")
    second.choose("rates", "70% MFU, 80% MBU")
    first.expect(gpu="l4", phase="prefill")
    second.expect(gpu="t4", phase="prefill", rates="reached")
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids)) > 0


def test_text_cannot_break_out_of_its_script(page, tmp_path):
    widget = Roofline()
    odd = "</script><!--<script>'\"&{step}"
    widget.strings = {**widget.strings, "linear": odd}
    (screen,) = show(page, tmp_path, widget)
    screen.expect()
    assert screen.root.locator(".cbp-entry b").first.inner_text() == odd


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_without_scripts_the_picture_stands(browser, tmp_path, theme):
    context = browser.new_context(java_script_enabled=False, viewport={"width": 360, "height": 700})
    page = context.new_page()
    try:
        show(page, tmp_path, Roofline(), html=f'data-theme="{theme}"')
        picture = page.locator(".cbp-picture")
        caption = picture.locator("caption").inner_text()
        assert caption == "llama-3-8b on h100: decode of 32 requests with a context of 2,000 tokens: 6.99 ms"
        found = python({**BASE, "model": "llama-3-8b", "gpu": "h100"}).values()
        rows = [row.inner_text().split("\t") for row in picture.locator("tbody tr").all()]
        assert rows[4] == ["ms", *(short(1e3 * part["seconds"]) for part in found)]
        assert rows[5] == ["Bound"] + ["memory-bound"] * 3
        assert picture.locator("svg .cbp-mark").count() == 2
        assert picture.locator("svg").get_attribute("aria-label").startswith("Roofline of h100")
        assert page.locator("button, input, select").count() == 0, "no dead controls"
        assert page.locator("main").evaluate("node => node.scrollWidth") <= 360
    finally:
        context.close()


# ---- The Python side


def test_bundle_is_the_same_on_every_run():
    bundle = Roofline()._repr_mimebundle_()[0]
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == (
        "llama-3-8b on h100: decode of 32 requests with a context of 2,000 tokens: 6.99 ms by roofline arithmetic; "
        "linear layers 4.17 ms (memory-bound), attention 2.51 ms (memory-bound)"
    )
    assert len(bundle["text/html"].encode()) <= 150_000
    assert_every_run_writes(bundle["text/html"], "Roofline")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "gpt-5"}, "model must be one of smollm2-135m, .*bloom-176b, got 'gpt-5'"),
        ({"gpu": "H100"}, "gpu must be one of t4, .*h100.*, got 'H100'"),
        ({"phase": "both"}, "phase must be one of decode, prefill, got 'both'"),
        ({"rates": None}, "rates must be one of peak, reached, got None"),
        ({"model": ["llama-3-8b"]}, "model must be one of"),
        ({"requests": 0}, "requests must be an integer from 1 to 1024, got 0"),
        ({"requests": True}, "got True"),
        ({"context": -1}, "context must be an integer from 0 to 131072, got -1"),
        ({"context": 2.5}, "got 2.5"),
        ({"new": 1}, "new must be an integer from 2 to 131072, got 1"),
        ({"new": "9"}, "got '9'"),
        ({"language": "xx"}, "no texts in language 'xx'; there are: en"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Roofline(**arguments)


def test_assignment_is_checked_too():
    widget = Roofline()
    with pytest.raises(ValueError, match="1 to 1024, got 7000"):
        widget.requests = 7000
    with pytest.raises(ValueError, match="one of t4"):
        widget.gpu = "tpu"
    assert (widget.requests, widget.gpu) == (32, "h100")


def test_every_text_is_used():
    text = source("roofline.js", "roofline.py")
    for key in strings.load("roofline"):
        stems = {key.rsplit("_", count)[0] for count in (1, 2)}
        built = any(f"{stem}_{sign}" in text for stem in stems for sign in "${")
        assert built or re.search(rf"\b{key}\b", text) or key.startswith(("phase_", "rates_")), key
