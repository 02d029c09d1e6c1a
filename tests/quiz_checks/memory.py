"""The numeric answers of the quiz on memory, computed with cbref."""

from cbref import Engine, SamplingParams
from cbref.hardware import ModelShape
from cbref.kv_cache import BlockPool
from cbref.request import Request


def memory_blocks():
    engine = Engine.simulated("vllm_v1", max_num_batched_tokens=512)
    engine.add_request(range(100), SamplingParams(max_tokens=29, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return engine.steps[-1].kv_reserved // engine.pool.block_size


def memory_bytes():
    shape = ModelShape("", layers=48, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=0, vocab=0)
    return 4096 * shape.kv_bytes_per_token / 2**30


def memory_shared():
    pool, first = BlockPool(8, 16), Request("first", list(range(60)), SamplingParams())
    pool.grow("first", 60)
    first.num_computed = 60
    pool.publish(first)
    second = [*range(40), *range(100, 120)]
    return len(pool.find_prefix(second)) * pool.block_size
