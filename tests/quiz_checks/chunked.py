"""The numeric answers of quiz_chunked.json, computed by the engine."""

from cbref import Engine, SamplingParams, Status


def prompt_shares(prompt, budget, decodes):
    """What each step computes of a long prompt that joins so many decodes under a token budget."""
    engine = Engine.simulated("sarathi", decodes + 1, max_num_batched_tokens=budget)
    endless = SamplingParams(max_tokens=10_000, ignore_eos=True)
    others = [engine.add_request([1], endless) for _ in range(decodes)]
    while any(r.status is not Status.DECODE for r in others):
        engine.step()
    first = engine.num_steps
    long = engine.add_request(range(prompt), endless)
    while not long.output:
        engine.step()
    return [share for step in engine.steps[first:] for share in step.shares if share.request_id == long.id]


def chunked_steps():
    return len(prompt_shares(40_000, 1024, 64))


def chunked_reread():
    return sum(share.start for share in prompt_shares(4096, 1024, 0))
