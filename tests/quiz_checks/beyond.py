"""The numeric answers of the quiz of the chapter on open questions, computed."""

import itertools

from cbref.disaggregated import serve_disaggregated
from cbref.hardware import MODELS
from cbref.request import Sampled
from cbref.speculation import verify
from cbref.workloads import of_lengths


def beyond_keeps():
    return 1 + len(verify((7, 8, 9), [Sampled(token) for token in (7, 8, 5, 4)]).following)


def beyond_expected():
    """Over all eight ways in which three guesses can be right or wrong, which are equally likely."""
    tokens = []
    for right in itertools.product((True, False), repeat=3):
        answers = [Sampled(1 if ok else 2) for ok in right] + [Sampled(3)]
        tokens.append(1 + len(verify((1, 1, 1), answers).following))
    return sum(tokens) / len(tokens)


def beyond_transfer():
    """What the link adds to the gap before the second token, in milliseconds."""
    assert MODELS["llama-3-8b"].kv_bytes_per_token == 131_072
    gaps = []
    for link in (25e9, 1e30):
        work = of_lengths([2], prompt_length=4000)
        [metrics] = serve_disaggregated(work, 1, 1, model="llama-3-8b", hardware="a100", link=link)
        gaps.append(metrics.tbt[0])
    return round(1e3 * (gaps[0] - gaps[1]), 1)
