"""The numeric answers of quiz_orca.json, computed by the engine."""

from cbref import Engine, SamplingParams
from cbref.workloads import of_lengths


def steps(policy):
    engine = Engine.simulated(policy, max_batch_size=2)
    work = of_lengths([3, 5, 2, 4])
    engine.generate(work.prompts, work.params)
    return engine.num_steps


def orca_steps():
    return steps("orca")


def orca_static():
    return steps("static")


def orca_packed():
    engine = Engine.simulated("orca", max_batch_size=8)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for _ in range(7):
        engine.add_request([1], params)
    engine.step()
    engine.add_request(range(20), params)
    engine.step()
    return engine.steps[-1].num_tokens
