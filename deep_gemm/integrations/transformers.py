"""Hugging Face transformers: importing this module registers "mega_moe" with its experts interface.

    import deep_gemm.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation="mega_moe")

Experts' weights stay the model's parameters in the model's layout. Which models fit: `why_not`, docs/integrations/transformers.md.

configure(model, ...)        bound on tokens, what to save for backward, backend; optional on one rank
shard_experts(model, ...)    expert parallelism: each rank keeps its slice of the experts (Shard(0) DTensors)
apply_fsdp(model, mesh)      FSDP2 around it, with gradients that are the mean over all ranks
full_state_dict, load_full_state_dict     checkpoints of the unsharded model, both ways
enable_main_grads, publish_main_grads, zero_main_grads     FP32 weight gradients of the experts
clip_grad_norm_              one norm over experts and the rest
SAVED_OPS                    for selective activation checkpointing
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from deep_gemm.activation import resolve_activation
from deep_gemm.integrations import _gradients
from deep_gemm.integrations._buffers import shared_buffer
from deep_gemm.integrations._gradients import clip_grad_norm_, local_part
from deep_gemm.integrations._sharding import (
    DivideGradient,
    fsdp_over_experts,
    full_state_dict,
    load_full_state_dict,
    mesh_and_group,
    sharded,
)
from deep_gemm.mega import ops
from deep_gemm.mega.api import mega_moe
from deep_gemm.mega.buffer import MegaMoeBuffer
from deep_gemm.reference.swiglu import swiglu

try:
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_layers import GradientCheckpointingLayer

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 7):
        raise ImportError(f"transformers {transformers.__version__} accepts no experts implementation but its own")
except ImportError as error:
    raise ImportError(
        f"deep_gemm.integrations.transformers needs transformers >= 5.7 (tested: 5.24.0): pip install 'transformers>=5.7'. {error}"
    ) from error

__all__ = [
    "NAME",
    "SAVED_OPS",
    "apply_fsdp",
    "clip_grad_norm_",
    "configure",
    "enable_main_grads",
    "experts_modules",
    "full_state_dict",
    "load_full_state_dict",
    "mega_moe_experts_forward",
    "publish_main_grads",
    "shard_experts",
    "why_not",
    "zero_main_grads",
]

NAME = "mega_moe"
# Operators whose results a selective checkpoint policy may keep, so that the experts do not run again in backward.
SAVED_OPS = (ops.gemm1, ops.gemm1_main_grad, ops.gemm2)
_WEIGHTS = {"w13": "gate_up_proj", "w2": "down_proj"}
_LAYOUT = {
    "has_gate": (True, "no gate"),
    "is_transposed": (False, "transposed weights"),
    "is_concatenated": (True, "gate and up rows interleaved"),
    "has_bias": (False, "expert biases"),
    "has_post_expert_norm": (False, "a norm after each expert"),
}
_TOPK_NAMES = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_STATE = "_mega_moe"  # attribute of an experts module


@dataclasses.dataclass
class _State:
    """How an experts module calls Mega MoE."""

    activation: dict[str, Any]
    mesh: DeviceMesh | None = None  # of the experts, and its group
    group: Any = None
    num_max_tokens_per_rank: int | None = None  # None: the buffer grows with the calls (one rank only)
    save: str = "recompute"
    buffer_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    buffer: MegaMoeBuffer | None = None
    main_grads: dict[str, Tensor] | None = None
    gradient_divide_factor: int = 1  # of weight gradients that go through autograd

    @property
    def num_ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    def __deepcopy__(self, memo: dict) -> _State:
        """For averaged and reference models: group and buffer are shared, main gradients belong to the original's parameters."""
        return dataclasses.replace(self, main_grads=None)

    def __getstate__(self) -> dict[str, Any]:
        """Without the buffer, which belongs to this process: the next forward makes one."""
        if self.group is not None:
            raise TypeError(
                "a model with sharded experts cannot be pickled: its process group belongs to this process; save full_state_dict(model)"
            )
        return {**self.__dict__, "buffer": None, "main_grads": None, "num_max_tokens_per_rank": None}


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every module of transformers' experts interface in `model`."""
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_bias") and hasattr(module, "_apply_gate"):
            yield name, module


def why_not(experts: nn.Module) -> str | None:
    """Why this module of the experts interface cannot run on Mega MoE, by its property; None if it can."""
    name = type(experts).__name__
    # The decorator's properties; those that came later are missing in older releases.
    properties = {key: getattr(experts, key, expected) for key, (expected, _) in _LAYOUT.items()}
    other = [f"{key} = {value} ({_LAYOUT[key][1]})" for key, value in properties.items() if value != _LAYOUT[key][0]]
    if other:
        return (
            f"{name} is declared with {', '.join(other)}; expected gated experts with gate_up_proj [E, 2I, H] and down_proj [E, H, I] alone"
        )
    missing = [weight for weight in _WEIGHTS.values() if not isinstance(getattr(experts, weight, None), Tensor)]
    if missing:
        return f"{name} lacks {missing}; expected parameters gate_up_proj [E, 2I, H] and down_proj [E, H, I]"
    (num_experts, rows, hidden), down = experts.gate_up_proj.shape, tuple(experts.down_proj.shape)
    if rows % 2 or down != (num_experts, hidden, rows // 2):
        return f"{name} has gate_up_proj {tuple(experts.gate_up_proj.shape)} and down_proj {down}; expected [E, 2I, H] and [E, H, I]"
    if experts.gate_up_proj.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        return f"{name} has weights of {experts.gate_up_proj.dtype}; expected torch.bfloat16 (on CPU also torch.float32)"
    if _activation(experts) is None:
        act_fn = type(getattr(experts, "act_fn", None)).__name__
        return f"{name} has a gate other than SwiGLU (act_fn = {act_fn}); expected silu(gate) * up, or its clamped or gpt-oss form"
    return None


def _number(experts: nn.Module, *names: str) -> float | None:
    """The first of these attributes that is a positive number."""
    values = (getattr(experts, name, None) for name in names)
    return next((value for value in values if isinstance(value, (int, float)) and value > 0), None)


@torch.no_grad()
def _activation(experts: nn.Module) -> dict[str, Any] | None:
    """The options of `mega_moe` that give the module's own gate function, found by its values at some points; None if there are none."""
    limit, alpha = _number(experts, "swiglu_limit", "limit"), _number(experts, "swiglu_alpha", "alpha")
    reach = 3.0 * (limit or 2.0)  # on both sides of the clamp
    device = "cpu" if experts.gate_up_proj.is_meta else experts.gate_up_proj.device
    gate, up = torch.meshgrid(*[torch.linspace(-reach, reach, 25, dtype=torch.float32, device=device)] * 2, indexing="ij")
    gate, up = gate.reshape(1, -1), up.reshape(1, -1)
    actual = experts._apply_gate(torch.cat((gate, up), dim=-1))
    for name in ("swiglu", "swiglu_oai"):
        for options in ({"activation_clamp": limit, "activation_alpha": alpha}, {}):
            expected = swiglu(gate, up, resolve_activation(name, options.get("activation_clamp"), options.get("activation_alpha")))
            if actual.shape == expected.shape and torch.allclose(actual.float(), expected, rtol=1e-4, atol=1e-5):
                return {"activation": name, **options}
    return None


def _state_of(experts: nn.Module) -> _State:
    state = getattr(experts, _STATE, None)
    return _make_state(experts) if state is None else state


_NOT_COMPILED = (
    "experts_implementation='mega_moe' makes its buffer outside of compiled code; with fullgraph=True call "
    "deep_gemm.integrations.transformers.configure(model, num_max_tokens_per_rank=...) before the first forward"
)


@torch.compiler.disable(reason=_NOT_COMPILED)
def _make_state(experts: nn.Module) -> _State:
    reason = why_not(experts)
    if reason is not None:
        raise NotImplementedError(f"experts_implementation='mega_moe': {reason}; choose another experts_implementation for this model")
    state = _State(_activation(experts))
    setattr(experts, _STATE, state)
    return state


@torch.compiler.disable(reason=_NOT_COMPILED)
def _make_buffer(
    experts: nn.Module, state: _State, num_experts: int, num_max_tokens_per_rank: int, num_topk: int, device: Any
) -> MegaMoeBuffer:
    hidden, intermediate = experts.down_proj.shape[1:]
    sizes = (num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate)
    state.buffer = shared_buffer(state.group, *sizes, device=device, **state.buffer_options)
    return state.buffer


def _buffer(experts: nn.Module, state: _State, num_experts: int, num_tokens: int, num_topk: int, device: torch.device) -> MegaMoeBuffer:
    buffer = state.buffer
    if state.num_max_tokens_per_rank is not None:  # made at set-up; `mega_moe` itself says what does not fit it
        return buffer
    if buffer is not None and num_tokens <= buffer.num_max_tokens_per_rank and (num_topk, device) == (buffer.num_topk, buffer.device):
        return buffer
    # On one rank a buffer may be made whenever it is needed: nobody else has to take part. Few sizes, at most an eighth too large.
    grain = max(128, 1 << max(0, num_tokens.bit_length() - 4))
    return _make_buffer(experts, state, num_experts, -(-max(num_tokens, 1) // grain) * grain, num_topk, device)


def mega_moe_experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts function that transformers calls: hidden_states [T, H], top_k_index, top_k_weights [T, K] -> [T, H].

    Ids of num_experts and above ("not mine", transformers' own expert parallelism) are no expert. Under autocast, and with FP32 main
    gradients over FP32 parameters, x and weights are cast to the dtype that F.linear would take.
    """
    state = _state_of(self)
    w13, w2 = local_part(self.gate_up_proj), local_part(self.down_proj)
    x = hidden_states
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w13, w2 = x.to(dtype), w13.to(dtype), w2.to(dtype)
    elif state.main_grads is not None:
        w13, w2 = w13.to(x.dtype), w2.to(x.dtype)
    if state.gradient_divide_factor != 1:
        w13, w2 = (DivideGradient.apply(weight, state.gradient_divide_factor) for weight in (w13, w2))
    num_experts = w2.shape[0] * state.num_ranks
    topk_idx = torch.where(top_k_index < num_experts, top_k_index, -1)
    y = mega_moe(
        x.contiguous(),
        topk_idx.contiguous(),
        top_k_weights.contiguous(),
        w13.contiguous(),
        w2.contiguous(),
        _buffer(self, state, num_experts, x.shape[0], top_k_index.shape[-1], x.device),
        save=state.save,
        main_grads=state.main_grads if torch.is_grad_enabled() else None,
        **state.activation,
    )
    return y.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, mega_moe_experts_forward)


def _found(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = list(experts_modules(model))
    if not found:
        raise ValueError(f"model = {type(model).__name__}: expected a model with modules of transformers' experts interface, found none")
    return found


def _topk_of(experts: nn.Module) -> int:
    for name in _TOPK_NAMES:
        value = getattr(experts.config, name, None)
        if isinstance(value, int):
            return value
    raise ValueError(f"num_topk = None, and {type(experts.config).__name__} has none of {list(_TOPK_NAMES)}: expected num_topk=K")


def _device(experts: nn.Module) -> torch.device:
    """Where its buffer belongs: with the parameters, or where a model on "meta" will most likely go."""
    if experts.down_proj.is_meta:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return experts.down_proj.device


def configure(
    model: nn.Module,
    *,
    num_max_tokens_per_rank: int | None = None,
    num_topk: int | None = None,
    save: str = "recompute",
    **buffer_options: Any,
) -> None:
    """Settings of all experts of `model` on one rank. Optional, but torch.compile(fullgraph=True) needs num_max_tokens_per_rank.

    num_max_tokens_per_rank  bound on the tokens (batch * sequence) of a forward; the buffer is made now. None: the first forward makes it
                             and longer ones make larger ones
    num_topk                 K; default: the config's
    save                     as mega_moe: "recompute" | "preact"
    buffer_options           as get_symm_buffer_for_mega_moe: precision, capacity_factor, backend
    """
    for _, experts in _found(model):
        state = _state_of(experts)
        if state.group is not None:
            raise ValueError("configure() after shard_experts(): expected these settings as arguments of shard_experts")
        state.save, state.buffer_options, state.num_max_tokens_per_rank, state.buffer = save, buffer_options, num_max_tokens_per_rank, None
        if num_max_tokens_per_rank is not None:
            # transformers' own expert parallelism has made num_experts the number of this rank's.
            num_experts = experts.num_experts if getattr(experts, "_is_expert_parallel", False) else experts.down_proj.shape[0]
            _make_buffer(experts, state, num_experts, num_max_tokens_per_rank, num_topk or _topk_of(experts), _device(experts))


def shard_experts(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh,
    *,
    num_max_tokens_per_rank: int,
    num_topk: int | None = None,
    save: str = "recompute",
    device: torch.device | str | None = None,
    **buffer_options: Any,
) -> None:
    """Expert parallelism: rank r of R keeps experts r*E/R .. (r+1)*E/R - 1 of every layer, each rank has its own batch. Collective.

    model                    with experts_implementation="mega_moe" and the same full weights on every rank, or on "meta"; before FSDP
    group                    the expert-parallel process group, or a DeviceMesh of one dimension, as mesh["ep"] (needed for FSDP2 around it)
    num_max_tokens_per_rank  bound on the tokens (batch * sequence) of a forward of any rank
    device                   of the buffer; default: the parameters', of a model on "meta" CUDA where there is a GPU
    num_topk, save, buffer_options   as configure

    Afterwards the experts' parameters are DTensors, Shard(0) over `group`, under their old names and global shapes. Their gradients are sums
    over the tokens of all ranks of the group, nothing divided: `apply_fsdp` divides. Every rank runs every layer in the same order.
    """
    found = _found(model)
    place = torch.device(device) if device is not None else _device(found[0][1])
    mesh, group = mesh_and_group(group, place.type)
    for name, experts in found:
        _check_shardable(name, experts, mesh.size())
    for _, experts in found:
        state = _state_of(experts)
        state.mesh, state.group, state.save, state.buffer_options = mesh, group, save, buffer_options
        state.num_max_tokens_per_rank = num_max_tokens_per_rank
        _make_buffer(experts, state, experts.down_proj.shape[0], num_max_tokens_per_rank, num_topk or _topk_of(experts), place)
        for weight in _WEIGHTS.values():
            setattr(experts, weight, sharded(getattr(experts, weight), mesh))


def _check_shardable(name: str, experts: nn.Module, size: int) -> None:
    implementation = experts.config._experts_implementation
    if implementation != NAME:
        raise ValueError(f"{name}: experts_implementation = {implementation!r}; expected {NAME!r}, no other one runs with sharded experts")
    already = isinstance(experts.down_proj, DTensor)
    if already:
        raise ValueError(
            f"{name}: its parameters are DTensors already; expected a model that is not sharded yet (shard_experts first, then FSDP)"
        )
    num_experts = experts.down_proj.shape[0]
    if num_experts % size:
        raise ValueError(f"{name}: num_experts = {num_experts}; expected a multiple of the number of ranks, {size}")
    _state_of(experts)


def apply_fsdp(
    model: nn.Module, mesh: DeviceMesh, *, mp_policy: MixedPrecisionPolicy | None = None, reshard_after_forward: bool = True
) -> nn.Module:
    """FSDP2 for a model after shard_experts(model, mesh["ep"], ...); returns `model`.

    mesh       dimensions ("fsdp", "ep"), all ranks that train together, as init_device_mesh(type, (N // ep, ep), mesh_dim_names=("fsdp", "ep")).
               Experts are sharded over "ep", then over "fsdp"; each decoder layer and the rest over both together
    mp_policy  of all units; expert inputs are never cast, so that routing weights stay as they are

    Every gradient becomes the mean over the ranks of `mesh`, whatever its EP size, experts' too: FSDP alone would divide those by the size of
    "fsdp" only. Experts with main gradients (enable_main_grads) stay outside of FSDP; that needs "fsdp" of size 1.
    """
    if mesh.mesh_dim_names != ("fsdp", "ep"):
        raise ValueError(f"mesh has dimensions {mesh.mesh_dim_names}: expected ('fsdp', 'ep')")
    mp_policy = mp_policy or MixedPrecisionPolicy()
    dense = {"mesh": mesh._flatten("fsdp_ep"), "mp_policy": mp_policy, "reshard_after_forward": reshard_after_forward}
    own_gradients: set[nn.Parameter] = set()
    for name, experts in _found(model):
        state = _state_of(experts)
        if state.group is None:
            raise ValueError(f"{name} is not sharded: expected shard_experts(model, mesh['ep'], ...) before apply_fsdp")
        if state.main_grads is not None:
            if mesh["fsdp"].size() > 1:
                raise ValueError(
                    f"mesh['fsdp'] has {mesh['fsdp'].size()} ranks: expected 1 with main gradients, or reduce_dtype=torch.float32 in mp_policy instead"
                )
            own_gradients.update(experts.parameters())
            continue
        fsdp_over_experts(experts, experts.down_proj.shape[0] // state.num_ranks, mesh["fsdp"], mp_policy, reshard_after_forward)
        state.gradient_divide_factor = state.num_ranks
    for layer in reversed([module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]):  # inner ones first
        fully_shard(layer, **dense, ignored_params={p for p in layer.parameters() if p in own_gradients})
    return fully_shard(model, **dense, ignored_params=own_gradients)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [weight for _, experts in _found(model) for weight in experts.parameters() if weight.requires_grad]


def enable_main_grads(model: nn.Module) -> None:
    """From now on backward adds the experts' weight gradients in FP32 into `parameter.main_grad`; their `.grad` stays None.

    Micro-batches add without rounding in between. Once per step: publish_main_grads(model, divide_factor), clip, optimizer, zero_main_grads(model).
    Parameters may be FP32 (cast to the dtype of x in each forward) or BF16 (an optimizer with FP32 state reads main_grad itself). Freeze
    parameters before. Experts inside FSDP units are refused: FSDP accumulates their gradients, in reduce_dtype.
    """
    for name, experts in _found(model):
        state = _state_of(experts)
        for weight in experts.parameters():
            if isinstance(weight, DTensor) and weight.device_mesh != state.mesh:
                raise ValueError(
                    f"{name} is inside an FSDP unit: expected experts that are sharded by shard_experts alone; call this before apply_fsdp"
                )
        _gradients.attach_main_grads(weight for weight in experts.parameters() if weight.requires_grad)
        weights = {key: getattr(experts, name) for key, name in _WEIGHTS.items()}
        state.main_grads = {key: weight.main_grad for key, weight in weights.items() if weight.requires_grad}


def publish_main_grads(model: nn.Module, divide_factor: float = 1.0) -> None:
    """`.grad` of the experts from their main gradients, divided (by the number of ranks of apply_fsdp's mesh); once per optimizer step."""
    _gradients.publish_main_grads(_trained(model), divide_factor)


def zero_main_grads(model: nn.Module) -> None:
    """After the optimizer's step."""
    _gradients.zero_main_grads(_trained(model))
