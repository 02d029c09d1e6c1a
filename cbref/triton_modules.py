"""RMSNorm and rotary embedding of a ``transformers`` model, replaced by Triton kernels: cbref's or a learner's."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping

import torch

KINDS = ("rmsnorm", "rope")


def replace_modules(model: torch.nn.Module, kernels: Mapping[str, Callable] | bool = True) -> dict[str, int]:
    """Let this model (and no other of its class) use kernels from now on; how many modules of each kind do.

    ``kernels``: True for those of ``cbref_kernels``, or functions of your own with the signature of
    ``cbref_kernels.rmsnorm.rmsnorm`` ("rmsnorm") and ``cbref_kernels.rope.rope`` ("rope"), one or both.

    A module is replaced only if the kernel's torch twin computes what the module computes, to the last bit or nearly.
    Architectures differ here (Gemma's RMSNorm adds one to its weight), and their code does not say so by a name.
    """
    kernels = _named(kernels)
    counts = dict.fromkeys(kernels, 0)
    for module in model.modules():
        name = type(module).__name__
        if "rmsnorm" in kernels and name.endswith("RMSNorm") and _norm_agrees(module):
            module.forward = types.MethodType(_norm_forward(kernels["rmsnorm"]), module)
            counts["rmsnorm"] += 1
        elif "rope" in kernels and name.endswith("Attention") and _rope_agrees(module, model):
            module.forward = types.MethodType(_with_rope(type(module).forward, kernels["rope"]), module)
            counts["rope"] += 1
    return counts


def _named(kernels) -> Mapping[str, Callable]:
    if kernels is True:
        from cbref_kernels.rmsnorm import rmsnorm
        from cbref_kernels.rope import rope

        return {"rmsnorm": rmsnorm, "rope": rope}
    if not isinstance(kernels, Mapping):
        raise ValueError(f"use_kernels is {kernels!r}; it must be True, False, or functions by name, as {{'rope': f}}")
    for name, kernel in kernels.items():
        if name not in KINDS or not callable(kernel):
            raise ValueError(f"use_kernels has {name!r}: {kernel!r}; it takes functions for {' and '.join(KINDS)}")
    return kernels


def _norm_forward(rmsnorm):
    return lambda self, hidden_states: rmsnorm(hidden_states, self.weight, self.variance_epsilon)


def _norm_agrees(module) -> bool:
    from cbref_kernels.rmsnorm import rmsnorm_torch

    if not hasattr(module, "variance_epsilon") or getattr(module, "weight", None) is None:
        return False
    x = torch.randn(2, len(module.weight), device=module.weight.device).to(module.weight.dtype)
    with torch.inference_mode():
        return torch.equal(type(module).forward(module, x), rmsnorm_torch(x, module.weight, module.variance_epsilon))


def _rope_agrees(module, model) -> bool:
    from cbref_kernels.rope import rope_torch

    theirs = inspect.unwrap(type(module).forward).__globals__.get("apply_rotary_pos_emb")
    dim = getattr(module, "head_dim", None)
    if theirs is None or dim is None:
        return False
    q = torch.randn(2, dim, device=model.device).to(model.dtype)
    cos, sin = torch.randn(2, 2, dim // 2, device=model.device).to(model.dtype).repeat(1, 1, 2)
    try:
        expected, _ = theirs(q[None, None], q[None, None], cos[None], sin[None])
        ours, _ = rope_torch(q[:, None], q[:, None], cos, sin)
    except (RuntimeError, TypeError, ValueError):  # other shapes, other arguments
        return False
    return torch.allclose(ours[:, 0], expected[0, 0], rtol=1e-2, atol=1e-2)


def _with_rope(forward, rope):
    """The same function, for which the name ``apply_rotary_pos_emb`` means this kernel."""

    def apply(q, k, cos, sin, unsqueeze_dim=1):
        """With the shapes of ``transformers``: q [1, Hq, T, D], k [1, Hkv, T, D], cos and sin [1, T, D]."""
        q, k = rope(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return q.transpose(0, 1)[None], k.transpose(0, 1)[None]

    plain = inspect.unwrap(forward)
    names = {**plain.__globals__, "apply_rotary_pos_emb": apply}
    ours = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    ours.__kwdefaults__ = plain.__kwdefaults__
    return ours
