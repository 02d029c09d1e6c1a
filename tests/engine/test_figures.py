"""The figures of the source document, by the engine; and where its own code arrives at others, why."""

import pytest
from engine_support import greedy

from cbref import Engine


def run(policy, slots, outputs, prompt_tokens=1):
    """Serve requests A, B, C, ... that all arrive at time 0. A step of the simulator takes one second."""
    engine = Engine.simulated(policy, max_batch_size=slots)
    requests = [engine.add_request(range(prompt_tokens), greedy(n), chr(65 + i)) for i, n in enumerate(outputs)]
    while engine.has_work:
        engine.step()
    assert [len(r.output) for r in requests] == list(outputs)
    return engine, requests


def spans(engine):
    """{request: (first step, step after the last)}, with the claim that it was computed for in every step between."""
    steps = {}
    for step in engine.steps:
        for share in step.shares:
            steps.setdefault(share.request_id, []).append((step.index, share.slot))
    for name, seen in steps.items():
        assert [i for i, _ in seen] == list(range(seen[0][0], seen[-1][0] + 1)), f"{name} was interrupted"
        assert len({slot for _, slot in seen}) == 1, f"{name} changed lanes"
    return {name: (seen[0][0], seen[-1][0] + 1) for name, seen in steps.items()}


def lanes(engine, slots):
    """What each slot computes, step by step; a dot is a wasted slot-iteration."""
    grid = [["."] * len(engine.steps) for _ in range(slots)]
    for step in engine.steps:
        for share in step.shares:
            assert grid[share.slot][step.index] == "."
            grid[share.slot][step.index] = share.request_id
    return ["".join(lane) for lane in grid]


def test_four_requests_waste_250_of_400_slot_iterations():
    """The document: for 90 iterations only D is worked for. In fact A idles 90, B 75, C 85, all three at once 75."""
    engine, requests = run("static", 4, (10, 25, 15, 100))
    figures = engine.summary(requests)
    assert (figures["steps"], figures["slot_iterations"], figures["wasted_slot_iterations"]) == (100, 400, 250)
    assert figures["occupancy"] == 150 / 400
    idle = [lane.count(".") for lane in lanes(engine, 4)]
    assert idle == [90, 75, 85, 0]
    assert sum(len(step.shares) == 1 for step in engine.steps) == 75
    assert {r.finished for r in requests} == {100.0}, "nobody has an answer before the longest is done"
    assert all(step.held_slots == 4 for step in engine.steps)

    engine, requests = run("orca", 4, (10, 25, 15, 100))
    assert [r.finished for r in requests] == [10.0, 25.0, 15.0, 100.0]


SIX = (4, 2, 6, 3, 5, 2)


@pytest.mark.parametrize(
    ("policy", "slots", "steps", "expected"),
    [
        ("static", 2, 15, {"A": (0, 4), "B": (0, 2), "C": (4, 10), "D": (4, 7), "E": (10, 15), "F": (10, 12)}),
        ("static", 3, 11, {"A": (0, 4), "B": (0, 2), "C": (0, 6), "D": (6, 9), "E": (6, 11), "F": (6, 8)}),
        ("static", 4, 11, {"A": (0, 4), "B": (0, 2), "C": (0, 6), "D": (0, 3), "E": (6, 11), "F": (6, 8)}),
        ("orca", 2, 12, {"A": (0, 4), "B": (0, 2), "C": (2, 8), "D": (4, 7), "E": (7, 12), "F": (8, 10)}),
        ("orca", 3, 9, {"A": (0, 4), "B": (0, 2), "C": (0, 6), "D": (2, 5), "E": (4, 9), "F": (5, 7)}),
        ("orca", 4, 7, {"A": (0, 4), "B": (0, 2), "C": (0, 6), "D": (0, 3), "E": (2, 7), "F": (3, 5)}),
    ],
)
def test_the_interactives_six_requests(policy, slots, steps, expected):
    engine, requests = run(policy, slots, SIX)
    figures = engine.summary(requests)
    assert len(engine.steps) == engine.num_steps == figures["steps"] == steps
    assert spans(engine) == expected
    assert figures["slot_iterations"] == slots * steps
    assert figures["wasted_slot_iterations"] == slots * steps - sum(SIX)
    assert [r.token_times[-1] for r in requests] == [stop for _, stop in expected.values()]


def test_the_interactives_lanes():
    assert lanes(run("static", 3, SIX)[0], 3) == ["AAAA..DDD..", "BB....EEEEE", "CCCCCCFF..."]
    assert lanes(run("orca", 3, SIX)[0], 3) == ["AAAAEEEEE", "BBDDDFF..", "CCCCCC..."]


FIVES = (5, 10, 15, 20, 25, 30)


def test_the_documents_six_requests():
    engine, requests = run("orca", 4, FIVES, prompt_tokens=100)
    assert engine.num_steps == 40
    assert spans(engine) == {"A": (0, 5), "B": (0, 10), "C": (0, 15), "D": (0, 20), "E": (5, 30), "F": (10, 40)}
    assert engine.summary(requests)["occupancy"] == 105 / 160  # "always full", says the document
    assert run("static", 4, FIVES, prompt_tokens=100)[0].num_steps == 50


def document(outputs, slots, prefill_yields_a_token):
    """Its section 5, the same decisions in other words: passes, steps that hold each request, turns of the loop."""
    waiting = [{"name": chr(65 + i), "want": n, "have": 0, "status": "waiting"} for i, n in enumerate(outputs)]
    running, passes, turns, held = [], 0, 0, {}
    while waiting or running:
        turns += 1
        running = [r for r in running if r["have"] < r["want"]]  # those that the last turn finished leave now
        while len(running) < slots and waiting:
            running.append(waiting.pop(0) | {"status": "prefill"})
        if not running:
            continue
        passes += 1
        for r in running:
            held[r["name"]] = held.get(r["name"], 0) + 1
            if r["status"] == "prefill":
                r["status"] = "decode"
                r["have"] += prefill_yields_a_token
            else:
                r["have"] += 1
    return passes, held, turns


def test_the_documents_own_code_takes_42_because_its_prefill_yields_no_token():
    passes, held, turns = document(FIVES, 4, prefill_yields_a_token=False)
    assert (passes, turns) == (42, 43)  # the last turn only notices that all is done
    assert list(held.values()) == [n + 1 for n in FIVES], "each request holds its slot one step too long"
    passes, held, turns = document(FIVES, 4, prefill_yields_a_token=True)
    assert (passes, turns) == (40, 41)
    assert list(held.values()) == list(FIVES)


def test_the_longest_first_takes_30():
    """The order of arrival matters more than the rule: this is the lower bound, the longest request's own length."""
    assert run("orca", 4, FIVES[::-1])[0].num_steps == 30


def test_memory_that_is_reserved_and_memory_that_is_used():
    """One request, prompt 5, 4 outputs, blocks of 4: 8 tokens are ever stored, reserved from the first step on."""
    engine = Engine.simulated(block_size=4)
    engine.add_request(range(5), greedy(4))
    while engine.has_work:
        engine.step()
    assert [(s.kv_reserved, s.kv_live, s.num_tokens, s.waiting) for s in engine.steps] == [
        (8, 5, 5, 0),
        (8, 6, 1, 0),
        (8, 7, 1, 0),
        (8, 8, 1, 0),
    ]
    assert [s.shares[0].prefill for s in engine.steps] == [True, False, False, False]
    assert engine.summary([])["kv_utilisation"] == 26 / 32
