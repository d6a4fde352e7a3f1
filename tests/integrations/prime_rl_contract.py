"""What the adapter may rely on in prime-rl, as small stand-ins: configuration, mesh, router, experts, MoE layer (docs/integrations/prime_rl.md).

`eager_moe` is the plain formula, one expert at a time, that autograd differentiates.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

E, K, H, I = 8, 3, 256, 128
LAYOUTS = {"packed": ("gate_up_proj", "down_proj"), "separate": ("gate_proj", "up_proj", "down_proj"), "w123": ("w1", "w3", "w2")}


class Silu:
    @staticmethod
    def apply(gate, up):
        return F.silu(gate) * up


class ClampedSwiglu:
    def __init__(self, limit: float):
        self.limit = limit

    def apply(self, gate, up):
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class Relu2:
    @staticmethod
    def apply(gate, up):
        return F.relu(gate).square() * up


def model_config(*, ep=2, seq_len=16, cp=1, lora=None, compute=None, **dispatch) -> SimpleNamespace:
    """`[trainer.model]` with `[trainer.model.moe.dispatch] type = "mega_moe"`."""
    moe = SimpleNamespace(
        compute=SimpleNamespace(**({"type": "bf16", "backend": "torch", "apply_to": "all"} | (compute or {}))),
        dispatch=SimpleNamespace(**({"type": "mega_moe", "max_tokens_per_rank": None, "num_sms": None} | dispatch)),
    )
    return SimpleNamespace(ep=ep, seq_len=seq_len, cp=cp, lora=lora, moe=moe)


class ParallelDims:
    def __init__(self, mesh: DeviceMesh | None, ep: int):
        self.mesh, self.ep, self.ep_enabled = mesh, ep, ep > 1

    def get_mesh(self, name: str) -> DeviceMesh:
        return self.mesh[name]


class Router(nn.Module):
    def __init__(self, top_k: int = K):
        super().__init__()
        self.gate, self.top_k = nn.Linear(H, E, bias=False), top_k

    def forward(self, x, routed_experts=None):
        scores = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
        ids = scores.topk(self.top_k, dim=-1).indices if routed_experts is None else routed_experts
        return scores.gather(1, ids.long()), ids, None, None


class GroupedExperts(nn.Module):
    def __init__(self, layout: str = "packed", activation=Silu, bias: bool = False, hidden: int = H, intermediate_hidden: int = I):
        super().__init__()
        self.num_experts, self.activation = E, activation
        shapes = {"gate_up_proj": (2 * intermediate_hidden, hidden)}
        shapes |= dict.fromkeys(("down_proj", "w2"), (hidden, intermediate_hidden))
        for name in LAYOUTS[layout]:
            setattr(self, name, nn.Parameter(torch.zeros(E, *shapes.get(name, (intermediate_hidden, hidden)))))
        self.down_proj_bias = nn.Parameter(torch.zeros(E, hidden)) if bias else None

    def forward(self, x, num_tokens_per_expert):
        return x * num_tokens_per_expert  # of another dispatcher: rows that are sorted already


class MoE(nn.Module):
    """Router, dispatcher, experts; `synchronize` before the shared expert is added."""

    def __init__(self, experts: GroupedExperts, *, score_before_experts: bool = False, shared: bool = False, top_k: int = K):
        super().__init__()
        self.router, self.experts, self.score_before_experts = Router(top_k), experts, score_before_experts
        self.shared_expert = nn.Linear(H, H, bias=False) if shared else None

    def set_token_dispatcher(self, dispatcher) -> None:
        self.token_dispatcher = dispatcher

    def forward(self, x, routed_experts=None):
        rows = x.view(-1, H)
        scores, ids, *_ = self.router(rows, routed_experts)
        y = self.token_dispatcher.run(rows, scores, ids, self.experts, score_before_experts=self.score_before_experts)
        shared = None if self.shared_expert is None else self.shared_expert(rows)
        self.token_dispatcher.synchronize()
        return (y if shared is None else y + shared).view(x.shape)


class OldMoE(nn.Module):
    """The layer up to 0.8: no dispatcher; a fused kernel takes rows, ids, scores."""

    def __init__(self, experts: GroupedExperts):
        super().__init__()
        self.router, self.experts, self.score_before_experts, self.fused_kernel = Router(), experts, False, None

    def _run_fused_routed_experts(self, x, selected_experts_indices, top_scores):
        raise AssertionError("the adapter takes the place of this method")

    def forward(self, x):
        rows = x.view(-1, H)
        scores, ids, *_ = self.router(rows)
        assert self.fused_kernel
        return self._run_fused_routed_experts(rows, ids, scores).view(x.shape)


def shard_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter a DTensor, sharded over the expert dimension."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]), requires_grad=parameter.requires_grad)
        experts.register_parameter(name, sharded)


def fill(module: nn.Module, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Normal weights, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module.to(dtype)


def split_weights(experts: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up, down."""
    if hasattr(experts, "gate_up_proj"):
        return (*experts.gate_up_proj.chunk(2, 1), experts.down_proj)
    return next(tuple(getattr(experts, name) for name in names) for names in LAYOUTS.values() if hasattr(experts, names[0]))


def eager_moe(x, ids, scores, gate, up, down, activation=Silu):
    y = torch.zeros(x.shape, dtype=torch.float32 if x.dtype == torch.bfloat16 else x.dtype, device=x.device)
    for expert in range(gate.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        rows = activation.apply(x[token] @ gate[expert].T, x[token] @ up[expert].T) @ down[expert].T
        y = y.index_add(0, token, rows.to(y.dtype) * scores[token, slot, None].to(y.dtype))
    return y.to(x.dtype)


def eager_layer(moe: nn.Module, x, routed_experts=None):
    """The MoE layer without a dispatcher, with all experts here."""
    rows = x.view(-1, H)
    scores, ids, *_ = moe.router(rows, routed_experts)
    y = eager_moe(rows, ids, scores, *split_weights(moe.experts), activation=moe.experts.activation)
    shared = getattr(moe, "shared_expert", None)
    return (y if shared is None else y + shared(rows)).view(x.shape)
