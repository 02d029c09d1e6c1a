"""A model of random weights, requests for it, and cbref's executors around it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from cbref.executors.model import ModelExecutor
from gpu.machine import Machine

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Load:
    """So many requests at once, prompts of random ids and lengths, all with the same number of output tokens."""

    counts: tuple[int, ...]
    prompt: tuple[int, int]
    output: int

    def prompts(self, count: int, vocabulary: int) -> list[list[int]]:
        rng = np.random.default_rng(count)
        return [rng.integers(1, vocabulary, n).tolist() for n in rng.integers(*self.prompt, count, endpoint=True)]

    @property
    def num_blocks(self) -> int:
        return max(64, max(self.counts) * -(-(self.prompt[1] + self.output) // BLOCK_SIZE))


def load_of(machine: Machine) -> Load:
    return Load((1, 8, 32, 128), (128, 512), 64) if machine.cuda else Load((1, 3), (5, 20), 5)


def model_of(machine: Machine):
    """Llama 3.2 1B with random weights; on a CPU a tiny one whose logits lie far apart."""
    if "model" not in machine.kept:
        sizes = (
            {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "max_position_embeddings": 4096,
             "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
            if machine.cuda
            else {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128, "max_position_embeddings": 512,
                  "initializer_range": 0.3}
        )  # fmt: skip
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        torch.manual_seed(0)
        with machine.device:  # weights are drawn where they are used
            model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **ids), dtype=machine.dtype)
        machine.kept["model"] = model.eval().requires_grad_(False)
    return machine.kept["model"]


def make_executor(machine: Machine, attention: str, kernels: bool = False, graphs: bool = False) -> ModelExecutor:
    model = model_of(machine)
    if kernels:  # they replace the model's modules for good
        model = copy.deepcopy(model)
    options = {"attention": attention, "use_kernels": kernels, "cuda_graphs": graphs}
    return ModelExecutor(model, block_size=BLOCK_SIZE, num_blocks=load_of(machine).num_blocks, **options)
