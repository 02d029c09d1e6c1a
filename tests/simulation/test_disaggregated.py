"""Prefill and decode on GPUs of their own: who computes what, when it arrives, and that nothing is lost."""

import numpy as np
import pytest

from cbref import Engine, SamplingParams
from cbref.disaggregated import DecodeScheduler, send, serve_colocated, serve_disaggregated
from cbref.hardware import MODELS
from cbref.metrics import RequestMetrics
from cbref.request import Request
from cbref.workloads import Workload, azure, of_lengths, serve

GPU = {"model": "llama-3-8b", "hardware": "a100"}
FAST = 1e30  # bytes/s: as good as no time


def alone(prompt: int, answer: int) -> Workload:
    return of_lengths([answer], prompt_length=prompt)


def test_a_request_alone_takes_as_long_as_on_one_gpu_if_the_link_takes_no_time():
    work = alone(1000, 20)
    [apart] = serve_disaggregated(work, 1, 1, link=FAST, **GPU)
    [together] = serve_colocated(work, 1, "orca", **GPU)
    assert np.allclose(apart.token_times, together.token_times)
    assert apart.finished == apart.token_times[-1]


def test_the_link_delays_the_second_token_by_bytes_over_bandwidth():
    work, link = alone(1000, 20), 1e9
    [fast] = serve_disaggregated(work, 1, 1, link=FAST, **GPU)
    [slow] = serve_disaggregated(work, 1, 1, link=link, **GPU)
    later = np.subtract(slow.token_times, fast.token_times)
    assert later[0] == 0
    assert np.allclose(later[1:], 1000 * MODELS["llama-3-8b"].kv_bytes_per_token / link)


def test_each_sender_sends_one_after_the_other():
    def done(prompt, at):
        return Request("r", range(prompt), SamplingParams(), finished=at)

    requests = [done(10, 5.0), done(10, 5.0), done(4, 6.0), done(10, 99.0)]
    requests = dict(enumerate(requests))
    assert send(requests, 2, 1.0) == {0: 15.0, 1: 15.0, 2: 19.0, 3: 109.0}
    assert send(requests, 4, 1.0) == {0: 15.0, 1: 15.0, 2: 10.0, 3: 109.0}


def test_who_is_done_with_the_first_token_does_not_use_the_link():
    work, link = of_lengths([1, 20], prompt_length=1000), 1e9
    _, fast = serve_disaggregated(work, 1, 1, link=FAST, **GPU)
    done, slow = serve_disaggregated(work, 1, 1, link=link, **GPU)
    assert len(done.token_times) == 1
    later = slow.tbt[0] - fast.tbt[0]
    assert np.isclose(later, 1000 * MODELS["llama-3-8b"].kv_bytes_per_token / link)


def test_everybody_gets_all_tokens_in_order():
    work = azure("code", 60, rate=20)
    work.params[7] = work.params[20] = SamplingParams(max_tokens=1, ignore_eos=True)
    metrics = serve_disaggregated(work, 2, 2, link=25e9, **GPU)
    assert [len(m.token_times) for m in metrics] == [p.max_tokens for p in work.params]
    assert [m.arrival for m in metrics] == work.arrivals
    assert all((m.tbt > 0).all() and m.ttft > 0 and m.finished == m.token_times[-1] for m in metrics)


def test_a_workload_of_prompts_alone_never_reaches_the_decode_engine():
    metrics = serve_disaggregated(of_lengths([1, 1, 1], prompt_length=50), 1, 1, link=1.0, **GPU)
    assert [len(m.token_times) for m in metrics] == [1, 1, 1]


def test_the_decode_engine_computes_one_token_a_request():
    engine = Engine.simulated(DecodeScheduler(4), **GPU)
    requests = serve(engine, of_lengths([5, 9, 2, 7, 3, 3], prompt_length=300), progress=False)
    engine.audit()
    assert {s.stop - s.start for step in engine.steps for s in step.shares} == {1}
    assert [len(r.output) for r in requests] == [5, 9, 2, 7, 3, 3]
    assert max(len(step.shares) for step in engine.steps) == 4


def test_who_is_preempted_is_computed_again_where_it_is():
    engine = Engine.simulated(DecodeScheduler(4), num_blocks=10, block_size=4)
    work = of_lengths([16] * 4, prompt_length=8)
    for prompt, params in zip(work.prompts, work.params, strict=True):
        engine.add_request(prompt, params)
    lengths = set()
    while engine.has_work:
        engine.step()
        engine.audit()
        lengths |= {s.stop - s.start for s in engine.steps[-1].shares}
    assert engine.scheduler.num_preemptions > 0
    assert max(lengths) > 8  # the prompt, and what had been said


def test_one_gpu_is_one_engine_and_more_share_in_turn():
    work = azure("conv", 30, rate=5)
    engine = Engine.simulated("sarathi", 64, **GPU)
    one = [RequestMetrics.of(r) for r in serve(engine, work, progress=False)]
    metrics = serve_colocated(work, 1, "sarathi", max_batch_size=64, **GPU)
    assert [list(m.token_times) for m in metrics] == [list(m.token_times) for m in one]
    more = serve_colocated(work, 3, "sarathi", max_batch_size=64, **GPU)
    assert [m.arrival for m in more] == work.arrivals
    assert np.mean([m.e2e for m in more]) < np.mean([m.e2e for m in metrics])


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [((0, 1), {"link": 1.0}, "prefill_gpus"), ((1, 1.5), {"link": 1.0}, "decode_gpus"), ((1, 1), {"link": 0}, "link")],
)
def test_bad_arguments_are_refused(arguments, options, word):
    with pytest.raises(ValueError, match=word):
        serve_disaggregated(alone(5, 5), *arguments, **options, **GPU)


def test_options_about_prompts_are_refused():
    with pytest.raises(ValueError, match="about prompts"):
        DecodeScheduler(prefix_caching=True)
    with pytest.raises(ValueError, match="gpus"):
        serve_colocated(alone(5, 5), True, "orca", **GPU)
