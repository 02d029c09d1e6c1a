"""The numeric answers of the quiz on memory, computed with cbref."""

from cbref import Engine, SamplingParams
from cbref.hardware import MODELS
from cbref.kv_cache import BlockPool
from cbref.request import Request


def memory_blocks():
    engine = Engine.simulated("vllm_v1", max_num_batched_tokens=512)
    engine.add_request(range(100), SamplingParams(max_tokens=29, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return engine.steps[-1].kv_reserved // engine.pool.block_size


def memory_bytes():
    return 8192 * MODELS["llama-3-8b"].kv_bytes_per_token / 2**30


def memory_shared():
    pool, first = BlockPool(8, 16), Request("first", list(range(60)), SamplingParams())
    pool.grow("first", 60)
    first.num_computed = 60
    pool.publish(first)
    second = [*range(40), *range(100, 120)]
    return len(pool.find_prefix(second)) * pool.block_size
