"""The numeric answers of the quiz on the scheduler, computed by the engine."""

from cbref import Engine, SamplingParams, Status
from cbref.workloads import of_lengths


def tokens(n):
    return SamplingParams(max_tokens=n, ignore_eos=True)


def scheduler_log():
    engine = Engine.simulated("orca", 5)
    for length, arrival in ((3, 0), (3, 0), (3, 0), (2, 2), (3, 2)):
        engine.add_request([1], tokens(length), arrival=arrival)
    while engine.has_work:
        engine.step()
    ran = [len(step.shares) for step in engine.steps]
    printed = [0, *ran]  # a line before each pass, and one at the end: the batch that the step before left behind
    assert printed == [0, 3, 3, 5, 2, 1]
    return ran[printed.index(5)]


def scheduler_passes():
    engine, work = Engine.simulated("orca", max_batch_size=2), of_lengths([3, 4, 5])
    engine.generate(work.prompts, work.params)
    return engine.num_steps


def scheduler_chunks():
    engine = Engine.simulated("sarathi", 8, max_num_batched_tokens=256)
    decodes = [engine.add_request(range(4), tokens(99)) for _ in range(6)]
    while not all(r.status is Status.DECODE for r in decodes):
        engine.step()
    newcomer, before = engine.add_request(range(1024), tokens(2)), engine.num_steps
    while not newcomer.output:
        engine.step()
    return engine.num_steps - before


def scheduler_recompute():
    engine = Engine.simulated("sarathi", 2)
    request = engine.add_request(range(40), tokens(99))
    while len(request.output) < 25:
        engine.step()
    engine.scheduler.preempt(request, engine.executor.now())
    computed = engine.totals.computed_tokens
    while len(request.output) < 26:
        engine.step()
    return engine.totals.computed_tokens - computed
