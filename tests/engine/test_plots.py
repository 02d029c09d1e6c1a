"""Every figure says what it draws: captions are metadata, which only the book shows."""

import importlib
import json
import pkgutil
from pathlib import Path

import matplotlib
import pytest
from engine_support import greedy

from cbref import Engine, plots, strings
from cbref.hardware import HARDWARE
from cbref.metrics import SLO
from cbref.request import Status
from cbref.workloads import of_lengths, serve

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SLO_MET = {"attainment": 0.5}
SUMMARY = {"ttft": {"p99": 1.0}, "tbt": {"p99": 0.05}, "slo": SLO_MET, "goodput": 2.0, "tokens_per_second": 300.0}
CURVE = {"a curve": ([1, 2, 4], [1.0, 1.1, 1.4])}
TABLE = {"prompt": {"prompt_size": [128, 256], "ms": [60, 70]}, "decode": {"batch_size": [1, 2], "ms": [30, 31]}}


def served(policy):
    engine = Engine.simulated(policy, 3)
    return engine, serve(engine, of_lengths((4, 2, 6, 3)), progress=False)


def steps():
    return {policy: served(policy)[0].steps for policy in ("static", "orca")}


def completions(number=4):
    engine, requests = served("orca")
    return {policy: [engine.completion(r) for r in requests[:number]] for policy in ("static", "orca")}


def metrics():
    return [c.metrics for c in completions()["orca"]]


def pool(*requests):
    engine = Engine.simulated("orca", 3, num_blocks=16)
    for request in requests:
        engine.add_request(range(20), greedy(8), request)
    engine.step()
    return engine.scheduler.pool


# Module and function -> the calls that draw its figures.
FIGURES = {
    "serving.slot_timeline": (lambda f: f(steps(), 3), lambda f: f(steps(), 3, clock="seconds")),
    "serving.kv_memory": (lambda f: f(steps()),),
    "serving.token_times": (lambda f: f(completions()), lambda f: f(completions(1), clock="step")),
    "serving.batch_scaling": (lambda f: f([1, 2, 4], [1.0, 1.1, 1.4]),),
    "serving.batch_composition": (lambda f: f(steps()),),
    "serving.latencies": (lambda f: f({"static": metrics(), "orca": metrics()}),),
    "serving.load_curve": (lambda f: f({"static": [(1, 0.1), (2, 0.3)]}),),
    "chunks.stall_lanes": (lambda f: f({"orca": ([[0.1, 0.5], [0.2]], 1.0)}),),
    "chunks.trade": (lambda f: f({512: (0.02, 3.0), None: (2.0, 2.0)}, limit=0.05),),
    "chunks.chunk_costs": (lambda f: f([0, 2000], {"linear": [0.1, 0.1], "chunk": [0.1, 0.2]}, 0.01),),
    "chunks.tiles": (lambda f: f([128, 256], [0.5, 1.0], 128, {"A100": ([1, 256], [0.3, 0.9])}),),
    "load.printed_and_ran": (lambda f: f([1, 2, 2], [2, 2, 1]),),
    "load.state_machine": (lambda f: f({(Status.WAITING, Status.PREFILL): 3, (Status.PREFILL, Status.WAITING): 0}),),
    "load.under_load": (lambda f: f({"orca": [(1, SUMMARY), (2, SUMMARY)]}, SLO(2, 0.1)),),
    "load.goodput_curves": (lambda f: f({"orca": [(1, SUMMARY), (2, SUMMARY)]}, SLO(2, 0.1)),),
    "load.waits_by_size": (lambda f: f({"fcfs": ([4, 2, 6, 3], metrics()), "sjf": ([4, 2, 6, 3], metrics())}),),
    "memory.live_share": (lambda f: f({"conv": {"max": 0.1, "paged": 0.9}}),),
    "memory.memory_strips": (lambda f: f({"in pieces": [(0, 10, "a"), (20, 30, "b")]}, 40),),
    "memory.block_size_trade": (lambda f: f([1, 16, 64], [0, 0.1, 0.3], [900, 60, 15]),),
    "memory.pool_map": (lambda f: f(pool("a"), {"a": 20}), lambda f: f(pool(), {}, {0, 1})),
    "memory.capacity": (lambda f: f({"orca": [(1000, 50.0, 2.0), (2000, 90.0, 4.0)]}),),
    "roofline.roofline": (lambda f: f([HARDWARE["h100"], HARDWARE["t4"]], {"attention": 1}),),
    "roofline.intensities": (lambda f: f(CURVE, [HARDWARE["a100"]]),),
    "roofline.relative_times": (lambda f: f(CURVE), lambda f: f(CURVE, "rows"), lambda f: f(CURVE, "layers")),
    "roofline.bytes_read": (lambda f: f({"one request": (16e9, 1e9, 1), "64 requests": (16e9, 64e9, 64)}),),
    "roofline.prompt_and_decode": (lambda f: f({"8 x H100": TABLE}),),
    "speculation.draft_lengths": (lambda f: f({"code": [(1, 0.9, 1.9), (2, 0.8, 2.5)]}),),
    "speculation.chunk_cost": (lambda f: f(CURVE),),
    "speculation.speedups": (lambda f: f({"500 tokens": CURVE}), lambda f: f({"500": CURVE, "4,000": CURVE})),
    "speculation.attainment": (lambda f: f(CURVE, {"a system": ([0.01, 0.1], [0.5, 1.0])}),),
}


def functions():
    """Module and name of every public function that returns a new figure."""
    for module in pkgutil.iter_modules(plots.__path__):
        for name, function in vars(importlib.import_module(f"cbref.plots.{module.name}")).items():
            here = getattr(function, "__module__", "") == f"cbref.plots.{module.name}"
            if here and not name.startswith("_") and getattr(function, "__annotations__", {}).get("return") == "Figure":
                yield f"{module.name}.{name}", function


@pytest.fixture
def marked(tmp_path, monkeypatch):
    """A catalogue whose texts begin with a mark that no text in the code has."""
    folder = Path(strings.__file__).parent / "en"
    (tmp_path / "en").mkdir()
    for file in folder.glob("*.json"):
        texts = {key: f"§{text}" for key, text in json.loads(file.read_text("utf-8")).items()}
        (tmp_path / "en" / file.name).write_text(json.dumps(texts), encoding="utf-8")
    monkeypatch.setattr(strings, "_ROOT", tmp_path)


def test_every_function_that_draws_is_drawn_here():
    assert FIGURES.keys() == dict(functions()).keys() - {"serving.titled"}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_title_from_the_catalogue(name, marked):
    for draw in FIGURES[name]:
        figure = draw(dict(functions())[name])
        title = figure.get_suptitle()
        assert title.startswith("§") and title.count("§") == 1, f"no title, or one from the code: {title!r}"
        assert 0 < len(title[1:]) <= 60, title
        figure.canvas.draw()
        box = figure._suptitle.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, f"wider than the figure: {title}"
        for artist in (*figure.axes, *figure.legends):
            assert not box.overlaps(artist.get_tightbbox()), f"{title} on {artist}"
        plt.close(figure)
