"""`MegaMoE`: the experts of a Mixture-of-Experts layer as a module. The router stays with the caller."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deep_gemm.mega.api import WeightOrPair, get_symm_buffer_for_mega_moe, mega_moe
from deep_gemm.mega.buffer import MegaMoeBuffer


class MegaMoE(nn.Module):
    """y[t] = sum_k topk_weights[t,k] * expert(topk_idx[t,k])(x[t]) with this rank's experts as parameters.

    hidden, intermediate_hidden, num_experts, num_topk  H, I, E, K (of the whole group)
    group                    as get_symm_buffer_for_mega_moe; None = all experts here
    num_max_tokens_per_rank  bound on the tokens of one forward; makes a buffer (collective over `group`)
    buffer                   one made already, to share between the layers of one shape; then neither group nor num_max_tokens_per_rank
    bias                     adds expert biases b13 [E_l, 2I], b2 [E_l, H]
    activation, activation_clamp, activation_alpha, save, precision, backend  as mega_moe
    device, dtype            of the parameters; dtype BF16 on CUDA. On device="meta" the buffer is made by `make_buffer(device)` or the first forward

    Parameters: w13 [E_l, 2I, H] (gate rows, then up rows), w2 [E_l, H, I]; E_l = E / R. They are read inside forward, so FSDP2 can shard them
    and activation checkpointing and torch.compile(fullgraph=True) apply. FSDP2's MixedPrecisionPolicy casts the inputs of forward to param_dtype
    unless cast_forward_inputs=False: topk_weights then arrive rounded to BF16.
    """

    def __init__(
        self,
        hidden: int,
        intermediate_hidden: int,
        num_experts: int,
        num_topk: int,
        group: Any = None,
        *,
        num_max_tokens_per_rank: int | None = None,
        buffer: MegaMoeBuffer | None = None,
        bias: bool = False,
        activation: str = "swiglu",
        activation_clamp: float | None = None,
        activation_alpha: float | None = None,
        save: str = "recompute",
        precision: str | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        self.hidden, self.intermediate_hidden = hidden, intermediate_hidden
        self.num_experts, self.num_topk = num_experts, num_topk
        self.group, self.num_max_tokens_per_rank = group, num_max_tokens_per_rank
        self.options = {
            "activation": activation,
            "activation_clamp": activation_clamp,
            "activation_alpha": activation_alpha,
            "save": save,
            "precision": precision,
            "backend": backend,
        }
        self.buffer: MegaMoeBuffer | None = self._checked(buffer)
        if self.buffer is not None and device is None:
            device = self.buffer.device
        device = torch.device(torch.get_default_device() if device is None else device)
        if self.buffer is None and device.type != "meta":
            self.make_buffer(device)
        num_local_experts = self.buffer.num_local_experts if self.buffer is not None else num_experts // _group_size(group)
        shapes = {"w13": (2 * intermediate_hidden, hidden), "w2": (hidden, intermediate_hidden)}
        shapes |= {"b13": (2 * intermediate_hidden,), "b2": (hidden,)} if bias else {}
        for name in ("w13", "w2", "b13", "b2"):
            tensor = torch.empty(num_local_experts, *shapes[name], device=device, dtype=dtype) if name in shapes else None
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
        self.reset_parameters()

    def _checked(self, buffer: MegaMoeBuffer | None) -> MegaMoeBuffer | None:
        if buffer is None:
            if self.num_max_tokens_per_rank is None:
                raise ValueError("num_max_tokens_per_rank = None: expected the bound on T to make a buffer from, or a buffer")
            return None
        if self.group is not None or self.num_max_tokens_per_rank is not None:
            raise ValueError("buffer was given together with group or num_max_tokens_per_rank: expected one or the other, a buffer has both")
        if not isinstance(buffer, MegaMoeBuffer):
            raise TypeError(f"buffer = {type(buffer).__name__}: expected a MegaMoeBuffer (get_symm_buffer_for_mega_moe)")
        for name in ("hidden", "intermediate_hidden", "num_experts", "num_topk"):
            if getattr(buffer, name) != getattr(self, name):
                raise ValueError(f"{name} = {getattr(self, name)}, but the buffer was made with {name} = {getattr(buffer, name)}; expected the same")
        return buffer

    def make_buffer(self, device: torch.device | str | None = None) -> MegaMoeBuffer:
        """Make the buffer on `device` (default: the parameters'). Collective over the group; once, after leaving the meta device."""
        self.buffer = get_symm_buffer_for_mega_moe(
            self.group,
            self.num_experts,
            self.num_max_tokens_per_rank,
            self.num_topk,
            self.hidden,
            self.intermediate_hidden,
            precision=self.options["precision"] or "bf16",
            device=self.w13.device if device is None else device,
            backend=self.options["backend"],
        )
        return self.buffer

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan-in), as nn.Linear; biases too. Experts of different ranks differ only if the ranks' generators do."""
        bounds = {"w13": 1 / math.sqrt(self.hidden), "w2": 1 / math.sqrt(self.intermediate_hidden)}
        bounds |= {"b13": bounds["w13"], "b2": bounds["w2"]}
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.uniform_(parameter, -bounds[name], bounds[name])

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, main_grads: Mapping[str, WeightOrPair] | None = None) -> Tensor:
        """x [..., H], topk_idx [..., K] (-1 = no expert), topk_weights [..., K] -> [..., H]; main_grads as mega_moe."""
        if self.buffer is None:
            self.make_buffer()
        y = mega_moe(
            _rows(x),
            _rows(topk_idx),
            _rows(topk_weights),
            self.w13,
            self.w2,
            self.buffer,
            b13=self.b13,
            b2=self.b2,
            main_grads=main_grads,
            **self.options,
        )
        return y.view(x.shape)

    def __deepcopy__(self, memo: dict) -> MegaMoE:
        """Parameters are copied, the group and the buffer shared: neither can be copied, and averaged or reference models are made so."""
        memo[id(self.group)] = self.group
        other = memo[id(self)] = self.__class__.__new__(self.__class__)
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def extra_repr(self) -> str:
        text = f"hidden={self.hidden}, intermediate_hidden={self.intermediate_hidden}, num_experts={self.num_experts}, num_topk={self.num_topk}"
        text += f", num_local_experts={self.w2.shape[0]}, bias={self.b2 is not None}"
        return text + "".join(f", {name}={value!r}" for name, value in self.options.items() if value is not None)


def _rows(tensor: Tensor) -> Tensor:
    """[..., W] -> [rows, W]. By the tensor's own width: a wrong one must reach the checks, not be folded into more rows."""
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return tensor  # for the checks too
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _group_size(group: Any) -> int:
    """Without a collective: a layer on the meta device has no buffer yet."""
    if group is None:
        return 1
    return group.size() if callable(group.size) else group.size
