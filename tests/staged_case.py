"""Inputs of all ranks of one Mega MoE call, the oracle's answer, and the comparison; for the staged backend's tests on CPU and GPU."""

from __future__ import annotations

import copy

import torch

from deep_gemm import reference
from deep_gemm.activation import SwiGLU, resolve_activation
from deep_gemm.mega.backend import GRADIENTS
from deep_gemm.testing import assert_close

PLAIN = SwiGLU()


class Case:
    """Random inputs of all ranks, and the oracle's answer."""

    def __init__(self, num_ranks=1, num_experts=8, tokens=(37,), *, hidden=128, width=128, topk=4, pair=False, biases=False, idx=torch.int64,
                 activation=PLAIN, seed=0, skew=False):  # fmt: skip
        """skew: all tokens want the experts of rank 0."""
        gen = torch.Generator().manual_seed(seed)
        self.num_ranks, self.num_experts, self.tokens = num_ranks, num_experts, tokens
        self.hidden, self.width, self.topk = hidden, width, topk
        self.activation, self.pair = activation, pair

        def bf16(*shape, scale=1.0):
            return (torch.randn(*shape, generator=gen) * scale).to(torch.bfloat16)

        self.w13 = bf16(num_experts, 2 * width, hidden, scale=hidden**-0.5)
        self.w2 = bf16(num_experts, hidden, width, scale=width**-0.5)
        self.b13 = bf16(num_experts, 2 * width, scale=0.5) if biases else None
        self.b2 = bf16(num_experts, hidden, scale=0.5) if biases else None
        self.x = [bf16(t, hidden) for t in tokens]
        self.dy = [bf16(t, hidden) for t in tokens]
        high = max(1, num_experts // num_ranks) if skew else num_experts
        self.idx = []
        for t in tokens:  # fewer experts than slots: a token names one twice
            ids = (
                torch.rand(t, high, generator=gen).argsort(dim=1)[:, :topk]
                if high >= topk
                else torch.randint(high, (t, topk), generator=gen)
            )
            self.idx.append(ids.masked_fill(torch.rand(ids.shape, generator=gen) < 0.2, -1).to(idx).contiguous())
        self.p = [torch.rand(t, topk, generator=gen) for t in tokens]

    def parts(self, tensor, experts=slice(None)):
        if tensor is None:
            return None
        tensor = tensor[experts]
        return (tensor[:, : self.width].contiguous(), tensor[:, self.width :].contiguous()) if self.pair else (tensor.contiguous(),)

    def inputs(self, rank):
        each = self.num_experts // self.num_ranks
        mine = slice(rank * each, (rank + 1) * each)
        return {"x": self.x[rank], "topk_idx": self.idx[rank], "topk_weights": self.p[rank], "w13": self.parts(self.w13, mine), "w2": self.w2[mine].contiguous(),
                    "b13": self.parts(self.b13, mine), "b2": None if self.b2 is None else self.b2[mine].contiguous()}  # fmt: skip

    def oracle_y(self, rank):
        options = {"b13": self.b13, "b2": self.b2, "activation": self.activation, "dtype": torch.float32}
        return reference.forward(self.x[rank], self.idx[rank], self.p[rank], self.w13, self.w2, **options).double()

    def oracle(self):
        """([y], {gradient: per rank})."""
        ys, grads = [], {name: [] for name in ("x", "topk_weights")}
        sums = {}
        options = {"b13": self.b13, "b2": self.b2, "activation": self.activation, "dtype": torch.float64}
        for x, dy, ids, p in zip(self.x, self.dy, self.idx, self.p):
            ys.append(reference.forward(x, ids, p, self.w13, self.w2, **options))
            made = reference.backward(dy, x, ids, p, self.w13, self.w2, **options)
            for name, value in made.items():
                if name in grads:
                    grads[name].append(value)
                else:
                    value = torch.cat(value, dim=1) if isinstance(value, tuple) else value
                    sums[name] = sums.get(name, 0) + value
        grads.update({name: list(value.chunk(self.num_ranks)) for name, value in sums.items()})
        return ys, grads

    @property
    def shape(self):
        """What a buffer is made for."""
        return {"num_experts": self.num_experts, "num_max_tokens_per_rank": max(*self.tokens, 1), "num_topk": self.topk, "hidden": self.hidden,
                "intermediate_hidden": self.width}  # fmt: skip

    def to(self, device):
        """The same case with its tensors on `device`."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(moved, name, value.to(device))
            elif isinstance(value, list):
                setattr(moved, name, [tensor.to(device) for tensor in value])
        return moved

    @property
    def needs(self):
        return [name for name in GRADIENTS if self.b2 is not None or not name.startswith("b")]


CASES = {
    "one_rank": Case(),
    "one_rank_pair_biases": Case(pair=True, biases=True, idx=torch.int32),
    "gpt_oss": Case(biases=True, activation=resolve_activation("swiglu_oai", clamp=1.0)),
    "two_ranks": Case(2, tokens=(19, 37), biases=True),
    "four_ranks_one_empty": Case(4, tokens=(5, 0, 64, 33), pair=True, idx=torch.int32),
    "three_ranks_all_to_one": Case(3, 12, tokens=(90, 70, 110), skew=True, biases=True),
    "one_expert": Case(1, 1, tokens=(3,), topk=1),
    "one_expert_and_token_a_rank": Case(3, 3, tokens=(1, 1, 1), topk=3),
    "most_slots": Case(2, 38, tokens=(21, 3), topk=16),
}

WEIGHTS = ("dw13", "dw2", "db13", "db2")


def like_ones(value):
    return tuple(map(torch.ones_like, value)) if isinstance(value, tuple) else torch.ones_like(value)


def joined(value):
    return torch.cat(value, dim=1) if isinstance(value, tuple) else value


def compare(case, results, truth_y, truth, tolerance=2e-2):
    for rank, (y, made) in enumerate(results):
        assert_close(y.double(), truth_y[rank], rel_frobenius=1e-2, name=f"y of rank {rank}")
        for name in case.needs:
            value = joined(getattr(made, {"x": "dx", "topk_weights": "dtopk_weights"}.get(name, f"d{name}")))
            assert_close(value.double(), truth[name][rank].double(), rel_frobenius=tolerance, name=f"gradient of {name}, rank {rank}")
