"""The simulator's step times against those of the engine: calibrated on this machine, and from its peaks alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from cbref import Engine, SamplingParams, calibrate
from cbref.executors.roofline import RooflineExecutor
from cbref.hardware import Hardware, ModelShape
from cbref.workloads import Workload, serve
from gpu.machine import NO_GPU, Machine
from gpu.model import make_executor, model_of
from gpu.parts import Row, attempt, figure, not_run


def _workload(machine: Machine, vocabulary: int) -> tuple[Workload, int]:
    """More requests than slots, and outputs of different lengths: so decodes and prompts meet in a step."""
    rng = np.random.default_rng(0)
    count, slots, prompt, output = (48, 16, (128, 512), (16, 64)) if machine.cuda else (8, 3, (4, 30), (2, 12))
    prompts = [rng.integers(1, vocabulary, n).tolist() for n in rng.integers(*prompt, count)]
    params = [SamplingParams(max_tokens=int(n), temperature=0, ignore_eos=True) for n in rng.integers(*output, count)]
    return Workload(prompts, params, [0.0] * count), slots


def _steps(executor, work: Workload, slots: int) -> list:
    engine = Engine(executor, "orca", max_num_seqs=slots)
    serve(engine, work, progress=False)
    return engine.steps


def _durations(steps) -> np.ndarray:
    """From begin to begin: a step and what the engine does until the next."""
    return np.array([b.begin - a.begin for a, b in pairwise(steps)])


def _calibration(machine: Machine) -> dict:
    if machine.cuda:
        chunks = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024)
        return {"chunks": chunks, "contexts": (128, 512), "batch_sizes": (1, 2, 4, 8, 16)}
    return {"chunks": (2, 4, 8, 16), "contexts": (8, 32), "batch_sizes": (1, 2, 4), "repeat": 2}


def fidelity(machine: Machine) -> Iterator[Row]:
    ways = {"triton + graphs": ("triton", True), "triton": ("triton", False), "torch": ("torch", False)}
    for name, (attention, graphs) in ways.items():
        if machine.cuda or name == "torch":
            yield from attempt(name, _fidelity(machine, name, attention, graphs))
            machine.release()
        else:
            yield not_run(name, NO_GPU)


def _fidelity(machine: Machine, name: str, attention: str, graphs: bool) -> Iterator[Row]:
    model = model_of(machine)
    work, slots = _workload(machine, model.config.vocab_size)
    shape = ModelShape.from_config(model.config, dtype_bytes=machine.dtype.itemsize)
    executor = make_executor(machine, attention, graphs=graphs)
    _steps(executor, work, slots)  # compiles and captures
    predictors = {"calibrated": calibrate(executor, progress=False, **_calibration(machine))}
    if machine.cuda:
        peaks = {"flops": machine.matmul_rate, "bandwidth": machine.copy_bandwidth, "mfu": 1.0, "mbu": 1.0}
        predictors["from peaks"] = Hardware("this machine", memory=0.0, **peaks)
    real = _steps(executor, work, slots)
    for how, hardware in predictors.items():
        sizes = {"num_blocks": executor.num_blocks, "max_model_len": executor.max_model_len}
        twin = RooflineExecutor(shape, hardware, block_size=executor.block_size, **sizes)
        yield from _errors(f"{name}, {how}", real, _steps(twin, work, slots))
    if not machine.cuda:
        yield not_run(f"{name}, from peaks", NO_GPU)


def _errors(name: str, real, predicted) -> Iterator[Row]:
    """Median and 90th percentile of |predicted - measured| / measured over steps, and the error of the whole run."""
    if [s.shares for s in real] != [s.shares for s in predicted]:
        raise RuntimeError("the simulator planned other steps than the engine")
    measured, forecast = _durations(real), _durations(predicted)
    decodes = np.array([all(s.stop - s.start == 1 for s in step.shares) for step in real[:-1]])
    for kind, chosen in (("steps of decodes", decodes), ("steps with chunks", ~decodes)):
        errors = np.abs(forecast[chosen] / measured[chosen] - 1)
        raw = {"steps": int(chosen.sum()), "p90": float(np.percentile(errors, 90))}
        raw |= {"measured": measured[chosen].tolist(), "predicted": forecast[chosen].tolist()}
        yield figure(f"{name}: median error, {kind}", 100 * float(np.median(errors)), "%", **raw)
        yield figure(f"{name}: p90 error, {kind}", 100 * raw["p90"], "%")
    yield figure(f"{name}: error of the whole run", 100 * float(forecast.sum() / measured.sum() - 1), "%")
