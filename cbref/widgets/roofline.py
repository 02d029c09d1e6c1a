"""The interactive "roofline": where the linear layers and the attention of one step stand, and what bounds them."""

import html
import math
from dataclasses import replace

import traitlets

from cbref import strings as texts
from cbref.hardware import HARDWARE, MODELS, Hardware, ModelShape
from cbref.widgets.static import StaticTwin, integer, source

LIMITS = {"requests": (1, 1024), "context": (0, 131_072), "new": (2, 131_072)}
UTILISATION = 0.9  # of the GPU's memory: what Hardware.kv_capacity takes
# fmt: off
_STOPS = {
    "requests": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
    "context": (0, 100, 200, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 6000, 8000, 12_000, 16_000, 24_000, 32_000,
                50_000, 65_536, 100_000, 131_072),
    "new": (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 257, 320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
            12_288, 16_384, 24_576, 32_768, 50_000, 65_536, 100_000, 131_072),
}
# fmt: on
_ROWS = {
    "flop": lambda part: part["flops"] / 1e9,
    "bytes": lambda part: part["bytes"] / 1e9,
    "intensity": lambda part: part["flops"] / part["bytes"],
    "attained": lambda part: part["flops"] / part["seconds"] / 1e12,
    "ms": lambda part: part["seconds"] * 1e3,
}
_X, _Y = (0.5, 1e6), (0.1, 5e3)  # the chart: FLOP per byte, TFLOP/s


class Roofline(StaticTwin):
    """One step of a model on a GPU, by arithmetic: intensity, attainable FLOP/s, time, what it waits for.

    Args:
        model: a name in `cbref.hardware.MODELS`.
        gpu: a name in `cbref.hardware.HARDWARE`.
        phase: "decode", a token for each of `requests`; or "prefill", `new` tokens of one prompt.
        requests: batch size in decode.
        context: tokens in the cache before this step, of each request.
        new: prompt tokens in this step, in prefill.
        rates: "peak", or "reached": the shares of the peak rates that the simulated engine reckons with.
        language: of the texts; see `cbref.strings.load`.

    Raises:
        ValueError: a value is out of range; the message names it and the limit.
    """

    kind = "roofline"
    _esm = source("dom.js", "parts.js", "roofline.js")
    _css = source("theme.css", "parts.css", "roofline.css")

    model = traitlets.Unicode().tag(sync=True)
    gpu = traitlets.Unicode().tag(sync=True)
    phase = traitlets.Unicode().tag(sync=True)
    rates = traitlets.Unicode().tag(sync=True)
    requests = traitlets.Int().tag(sync=True)
    context = traitlets.Int().tag(sync=True)
    new = traitlets.Int().tag(sync=True)
    data = traitlets.Dict().tag(sync=True)
    strings = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        model: str = "llama-3-8b",
        gpu: str = "h100",
        phase: str = "decode",
        requests: int = 32,
        context: int = 2000,
        new: int = 2048,
        rates: str = "peak",
        language: str | None = None,
    ):
        setting = {"model": model, "gpu": gpu, "phase": phase, "rates": rates}
        setting |= {"requests": requests, "context": context, "new": new}
        setting = {name: _checked(name, value) for name, value in setting.items()}
        super().__init__(**setting, data=_data(setting), strings=texts.load("roofline", language))

    @traitlets.validate("model", "gpu", "phase", "rates", *LIMITS)
    def _check(self, proposal):
        return _checked(proposal["trait"].name, proposal["value"])

    def setting(self) -> dict:
        return {name: getattr(self, name) for name in ("phase", "rates", *LIMITS)}

    def parts(self) -> dict[str, dict]:
        return parts(MODELS[self.model], HARDWARE[self.gpu], **self.setting())

    def summary(self) -> str:
        found = self.parts()
        values = {"total": _short(1e3 * sum(part["seconds"] for part in found.values()))}
        for name, part in found.items():
            values |= {name: _short(1e3 * part["seconds"]), f"{name}_bound": self.strings[part["bound"]]}
        return self.strings["summary"].format(setting=self._setting_text(), **values)

    def picture(self) -> str:
        say, found = self.strings, self.parts()
        columns = "".join(f'<th scope="col">{html.escape(say[name])}</th>' for name in found)
        rows = []
        for name, value in _ROWS.items():
            cells = "".join(f"<td>{_short(value(part))}</td>" for part in found.values())
            rows.append(f'<tr><th scope="row">{html.escape(say[f"table_{name}"])}</th>{cells}</tr>')
        bounds = "".join(f"<td>{html.escape(say[part['bound']])}</td>" for part in found.values())
        rows.append(f'<tr><th scope="row">{html.escape(say["table_bound"])}</th>{bounds}</tr>')
        total = _short(1e3 * sum(part["seconds"] for part in found.values()))
        caption = html.escape(say["caption"].format(setting=self._setting_text(), total=total))
        gpu = _rated(HARDWARE[self.gpu], self.rates)
        chart = say["chart"].format(
            gpu=self.gpu, bandwidth=_short(gpu.bandwidth * gpu.mbu / 1e12), tflops=_short(gpu.flops * gpu.mfu / 1e12),
            ridge=_short(gpu.flops * gpu.mfu / gpu.bandwidth / gpu.mbu), points="",
        )  # fmt: skip
        rates = say[f"say_rates_{self.rates}"].format(mfu=f"{gpu.mfu:.0%}", mbu=f"{gpu.mbu:.0%}")
        return "\n".join(
            [
                '<div class="cbp cbp-roofline cbp-picture">',
                _svg(gpu, found, html.escape(chart.strip()), html.escape(say["axis_x"]), html.escape(say["axis_y"])),
                f"<p>{html.escape(chart.strip())}</p>",
                f'<table><caption>{caption}</caption><thead><tr><th scope="col">{html.escape(say["table_part"])}</th>'
                f"{columns}</tr></thead><tbody>",
                *rows,
                "</tbody></table>",
                f'<p class="cbp-muted">{html.escape(rates)} {html.escape(say["arithmetic"])}</p>',
                "</div>",
            ]
        )

    def _setting_text(self) -> str:
        numbers = {name: f"{getattr(self, name):,}" for name in LIMITS}
        return self.strings[f"setting_{self.phase}"].format(model=self.model, gpu=self.gpu, **numbers)


def parts(
    model: ModelShape, gpu: Hardware, *, phase: str, requests: int, context: int, new: int, rates: str = "peak"
) -> dict[str, dict]:
    """{"linear" | "head" | "attention": {flops, bytes, seconds, bound}} of a step that produces tokens.

    The seconds are those of the engine's simulator. In prefill the step ends the prompt, so that one token comes out.
    """
    gpu = _rated(gpu, rates)
    tokens, rows = (requests, requests) if phase == "decode" else (new, 1)
    stop = context + (1 if phase == "decode" else new)
    if phase == "decode":
        pairs = read = requests * stop  # each new token with all up to itself; all of that is read
        attention = gpu.decode_seconds(model, requests, read)
    else:
        pairs, read = (context + 1 + stop) * new / 2, stop
        attention = gpu.chunk_attention_seconds(model, context, stop)
    work = {
        "linear": (model.linear_params, tokens, gpu.linear_seconds(model, tokens)),
        "head": (model.head_params, rows, gpu.head_seconds(model, rows)),
    }
    found = {
        name: _part(gpu, 2 * weights * count, weights * model.dtype_bytes, seconds)
        for name, (weights, count, seconds) in work.items()
    }
    flops = 4 * model.layers * model.heads * model.head_dim * pairs
    found["attention"] = _part(gpu, flops, model.kv_bytes_per_token * read, attention)
    return found


def _part(gpu: Hardware, flops: float, moved: int, seconds: float) -> dict:
    waits = seconds <= moved / (gpu.bandwidth * gpu.mbu)
    return {"flops": flops, "bytes": moved, "seconds": seconds, "bound": "memory" if waits else "compute"}


def _rated(gpu: Hardware, rates: str) -> Hardware:
    return replace(gpu, mfu=1.0, mbu=1.0) if rates == "peak" else gpu


def _data(setting: dict) -> dict:
    """What the module computes with. It has no number of its own."""
    models = {
        name: {
            "linear": m.linear_params, "head": m.head_params, "kv": m.kv_bytes_per_token, "bytes": m.dtype_bytes,
            "pair": 4 * m.layers * m.heads * m.head_dim,
        } for name, m in MODELS.items()
    }  # fmt: skip
    fields = ("flops", "bandwidth", "memory", "mfu", "mbu", "tile")
    return {
        "models": models,
        "order": {"model": list(MODELS), "gpu": list(HARDWARE)},  # a page stores dictionaries sorted
        "gpus": {name: {field: getattr(gpu, field) for field in fields} for name, gpu in HARDWARE.items()},
        "stops": {name: sorted({*stops, setting[name]}) for name, stops in _STOPS.items()},
        "utilisation": UTILISATION,
        "chart": {"x": list(_X), "y": list(_Y)},
    }


def _checked(name: str, value):
    if name in LIMITS:
        return integer(name, value, *LIMITS[name])
    known = {"model": MODELS, "gpu": HARDWARE, "phase": ("decode", "prefill"), "rates": ("peak", "reached")}[name]
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value


def _short(value: float) -> str:
    """Three digits or more: 0.25, 3.35, 29.1, 989, 12,345."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _svg(gpu: Hardware, found: dict[str, dict], text: str, across: str, up: str) -> str:
    """The roof and both points, 360 by 220; the texts are HTML already."""
    left, right, top, bottom = 38, 348, 18, 178

    def at(intensity: float, tflops: float) -> str:
        share = [math.log(v / low) / math.log(high / low) for v, (low, high) in ((intensity, _X), (tflops, _Y))]
        return f"{left + share[0] * (right - left):.1f} {bottom - share[1] * (bottom - top):.1f}"

    flat, slope = gpu.flops * gpu.mfu / 1e12, gpu.bandwidth * gpu.mbu / 1e12
    roof = f"M{at(_X[0], _X[0] * slope)}L{at(flat / slope, flat)}L{at(_X[1], flat)}"
    lines = [f'<svg viewBox="0 0 360 220" role="img" aria-label="{text}">']
    lines.append(f'<text class="cbp-muted" x="2" y="10">{up}</text>')
    lines.append(f'<text class="cbp-muted" text-anchor="end" x="{right}" y="{bottom + 34}">{across}</text>')
    for x in (1, 10, 100, 1e3, 1e4, 1e5, 1e6):
        h, v = at(x, _Y[0]).split()
        label = f"{x:.0f}" if x < 1e3 else f"{x / 1e3:.0f}K" if x < 1e6 else "1M"
        lines.append(f'<text class="cbp-muted" text-anchor="middle" x="{h}" y="{float(v) + 15:.1f}">{label}</text>')
    for y in (0.1, 1, 10, 100, 1000):
        h, v = at(_X[0], y).split()
        lines.append(f'<path class="cbp-gridline" d="M{h} {v}H{right}"/>')
        lines.append(f'<text class="cbp-muted" text-anchor="end" x="{left - 4}" y="{float(v) + 4:.1f}">{y:g}</text>')
    lines.append(f'<path class="cbp-roof" d="{roof}"/>')
    for name in ("linear", "attention"):
        part = found[name]
        h, v = at(part["flops"] / part["bytes"], part["flops"] / part["seconds"] / 1e12).split()
        lines.append(f'<path class="cbp-mark" data-part="{name}" transform="translate({h} {v})" d="{MARKS[name]}"/>')
    return "\n".join([*lines, "</svg>"])


MARKS = {"linear": "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0", "attention": "M0-8 8 0 0 8-8 0Z"}  # a disc, a diamond
