"""The numeric answers of quiz_convoy.json, computed by the engine."""

from cbref import Engine
from cbref.workloads import of_lengths


def served(lengths, slots):
    engine = Engine.simulated("static", max_batch_size=slots)
    work = of_lengths(lengths)
    return engine, engine.generate(work.prompts, work.params)


def convoy_wasted():
    engine, done = served([3, 8, 5], 3)
    return engine.summary(done)["wasted_slot_iterations"]


def convoy_queue():
    _, done = served([10, 4, 6], 2)
    return done[2].metrics.finished
