"""prime-rl: the token dispatcher behind `[trainer.model.moe.dispatch] type = "mega_moe"`.

configure_mega_moe(model, config, parallel_dims)  checks all settings, then gives every MoE layer its dispatcher; at set-up, on every rank
check_settings(config)                            the checks that need the configuration only
MegaMoETokenDispatcher                            dispatch, experts and combine of a layer in one differentiable call
attach(moe, dispatcher)                           gives one layer its dispatcher, of releases with and without `set_token_dispatcher`
bf16_mega_moe, bf16_mega_moe_backward, get_symm_buffer_for_mega_moe, set_num_sms, fp8_mega_moe_backward
                                                  names that prime-rl's own drafts call (the first four are deep_gemm's)

prime-rl is not imported: its configuration, mesh and layers are used by the names of their attributes (docs/integrations/prime_rl.md).
"""

from __future__ import annotations

import socket
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deep_gemm.activation import SwiGLU
from deep_gemm.gemm import set_num_sms
from deep_gemm.integrations._buffers import shared_buffer
from deep_gemm.mega.api import get_symm_buffer_for_mega_moe, mega_moe
from deep_gemm.mega.backward_only import bf16_mega_moe_backward
from deep_gemm.mega.buffer import CUDA_ALIGNMENT
from deep_gemm.mega.checks import SAVE_POLICIES
from deep_gemm.mega.forward_only import bf16_mega_moe
from deep_gemm.mega.groups import resolve_group
from deep_gemm.reference.swiglu import swiglu

__all__ = [
    "MegaMoETokenDispatcher",
    "attach",
    "bf16_mega_moe",
    "bf16_mega_moe_backward",
    "check_settings",
    "configure_mega_moe",
    "fp8_mega_moe_backward",
    "get_symm_buffer_for_mega_moe",
    "set_num_sms",
]

PRECISIONS = {"bf16": "bf16"}  # model.moe.compute.type -> precision of the buffer
# Fields of prime-rl's drafts that ask for FP8, and what they have when they do not.
_FP8_FIELDS = {"fp8": False, "wgrad_tile_scales": False, "fp8_transposed_on_demand": False, "free_bf16_expert_weights": False}
_FP8_FIELDS |= {"fused_wgrad_micro_batches": 1}
# Names of (gate, up) or of both stacked, and of the down projection: packed, separate, and prime-rl up to 0.8.
_WEIGHTS = ((("gate_up_proj",), "down_proj"), (("gate_proj", "up_proj"), "down_proj"), (("w1", "w3"), "w2"))


def check_settings(config: Any, *, ep: int | None = None) -> None:
    """Refuse a model configuration (`[trainer.model]`) that mega_moe cannot run; every error names the setting and what is supported.

    config   .ep, .lora, .moe.compute.{type,backend}, .moe.dispatch.{type,...}; attributes that it lacks count as not set
    ep       the degree of expert parallelism, where config.ep is "auto"
    Raises   ValueError; NotImplementedError for a precision without kernels
    """
    dispatch, compute = config.moe.dispatch, config.moe.compute
    if dispatch.type != "mega_moe":
        raise ValueError(f'model.moe.dispatch.type = {dispatch.type!r}: expected "mega_moe", the only one that this adapter serves')
    if ep is None:
        ep = None if config.ep == "auto" else config.ep
    if ep is not None and ep <= 1:
        raise ValueError(f'model.ep = {ep}: model.moe.dispatch.type = "mega_moe" needs expert parallelism, model.ep > 1')
    if getattr(config, "lora", None) is not None:
        raise ValueError("model.lora is set: mega_moe has no LoRA on the experts; expected none, or another model.moe.dispatch.type")
    _check_precision(compute, dispatch)
    backend = getattr(compute, "backend", "torch")
    if backend != "torch":
        raise ValueError(
            f'model.moe.compute.backend = {backend!r}: mega_moe takes the place of the expert compute; expected "torch", the default'
        )
    save = getattr(dispatch, "save", "recompute")
    if save not in SAVE_POLICIES:
        raise ValueError(f"model.moe.dispatch.save = {save!r}: expected one of {list(SAVE_POLICIES)}")
    tokens = getattr(dispatch, "max_tokens_per_rank", None)
    if tokens is not None and tokens < 1:
        raise ValueError(f"model.moe.dispatch.max_tokens_per_rank = {tokens}: expected at least 1, or none for one from model.seq_len")


def _check_precision(compute: Any, dispatch: Any) -> None:
    supported = f"supported now: model.moe.compute.type = {' or '.join(map(repr, PRECISIONS))} with a BF16 backward"
    if compute.type not in PRECISIONS:
        raise NotImplementedError(f"model.moe.compute.type = {compute.type!r}: mega_moe has no kernels for it yet; {supported}")
    backward = getattr(dispatch, "backward_precision", None)
    if backward not in (None, "bf16"):
        raise NotImplementedError(f"model.moe.dispatch.backward_precision = {backward!r}: mega_moe has no kernels for it yet; {supported}")
    for name, off in _FP8_FIELDS.items():
        value = getattr(dispatch, name, off)
        if value != off:
            raise NotImplementedError(
                f"model.moe.dispatch.{name} = {value!r}: part of an FP8 path that is not there yet, expected {off!r}; {supported}"
            )


def max_tokens_per_rank(config: Any, micro_batch_size: int = 1) -> int:
    """Bound on T of a call: model.moe.dispatch.max_tokens_per_rank, else micro_batch_size sequences of model.seq_len over model.cp ranks."""
    given = getattr(config.moe.dispatch, "max_tokens_per_rank", None)
    if given is not None:
        return given
    cp = getattr(config, "cp", 1)
    padded = config.seq_len if cp == 1 else -(-config.seq_len // (2 * cp)) * 2 * cp  # context parallelism pads to 2 * cp
    return padded // cp * micro_batch_size


def configure_mega_moe(
    model: nn.Module,
    config: Any,
    parallel_dims: Any,
    *,
    micro_batch_size: int = 1,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> list[MegaMoETokenDispatcher]:
    """Give every MoE layer of `model` a dispatcher; where prime-rl's `configure_moe_runtime` makes its own. Collective over the EP group.

    model             its MoE layers have `experts` and `router.top_k`; experts sharded over `ep` on dim 0 already, or later, or on the meta device
    config            ModelConfig (`[trainer.model]`)
    parallel_dims     .ep, and .get_mesh("ep"), whose group becomes the group of the buffers; layers of one shape share a buffer
    micro_batch_size  sequences of model.seq_len in one micro-batch (1 where they are packed), for the bound on T
    device, backend   default: the device type of the mesh, and what belongs to it (as get_symm_buffer_for_mega_moe)
    Returns           the dispatchers, in the order of model.modules()
    Raises            as check_settings; ValueError for a layer that does not fit, naming it, and for an EP group over several hosts, all before
                      a buffer is made; as get_symm_buffer_for_mega_moe
    """
    check_settings(config, ep=parallel_dims.ep)
    layers = {name: module for name, module in model.named_modules() if _is_moe(module)}
    if not layers:
        raise ValueError(
            'model.moe.dispatch.type = "mega_moe": the model has no MoE layers of prime-rl\'s own implementation (model.impl = "custom")'
        )
    mesh = parallel_dims.get_mesh("ep")
    device = torch.device(mesh.device_type if device is None else device)
    on_cuda = device.type == "cuda" if backend is None else backend == "cuda"
    for name, moe in layers.items():
        _check_layer(name, moe, parallel_dims.ep, on_cuda)
    group, dispatch = mesh.get_group(), config.moe.dispatch
    _check_one_host(group)
    options = {
        "precision": PRECISIONS[config.moe.compute.type],
        "save": getattr(dispatch, "save", "recompute"),
        "capacity_factor": getattr(dispatch, "capacity_factor", 1.25),
        "num_sms": getattr(dispatch, "num_sms", None),
        "device": device,
        "backend": backend,
    }
    made = []
    for moe in layers.values():
        _, hidden, intermediate_hidden = _weights(moe.experts)[1].shape
        bound = max_tokens_per_rank(config, micro_batch_size)
        shape = (moe.experts.num_experts, moe.router.top_k, hidden, intermediate_hidden)
        made.append(MegaMoETokenDispatcher(*shape, group, bound, activation_clamp=_activation_clamp(moe.experts), **options))
        attach(moe, made[-1])
    return made


class MegaMoETokenDispatcher:
    """prime-rl's token dispatcher with dispatch, experts and combine as one `mega_moe` call. The shared expert and the router stay with the layer.

    num_experts, top_k, hidden, intermediate_hidden  E (of all ranks), K, H, I; H and I multiples of 128 on CUDA
    group                the expert-parallel process group, of 2 ranks or more; rank r holds experts r*E/R .. (r+1)*E/R - 1
    max_tokens_per_rank  bound on T of every call; dispatchers of one group and shape share a buffer, which is made here, collectively
    activation_clamp     of gate and up, None = none
    save                 "recompute" | "preact", as mega_moe: under full activation checkpointing "preact" keeps one layer's pre-activations alive
    num_sms              SMs of every persistent kernel of the process (set_num_sms), to leave some to overlapping collectives; None = as it is
    precision, capacity_factor, device, backend  as get_symm_buffer_for_mega_moe
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        intermediate_hidden: int,
        group: Any,
        max_tokens_per_rank: int,
        *,
        activation_clamp: float | None = None,
        precision: str = "bf16",
        save: str = "recompute",
        capacity_factor: float = 1.25,
        num_sms: int | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
    ):
        if resolve_group(group).size < 2:
            raise ValueError('group has 1 rank: model.moe.dispatch.type = "mega_moe" needs expert parallelism, model.ep > 1')
        if num_sms is not None:
            set_num_sms(num_sms)
        options = {"precision": precision, "capacity_factor": capacity_factor, "device": device, "backend": backend}
        self.buffer = shared_buffer(group, num_experts, max_tokens_per_rank, top_k, hidden, intermediate_hidden, **options)
        self.options = {"activation_clamp": activation_clamp, "save": save}

    def run(
        self, x: Tensor, top_scores: Tensor, selected_experts_indices: Tensor, experts: nn.Module, *, score_before_experts: bool = False
    ) -> Tensor:
        """y [T, H] = sum_k top_scores[t,k] * experts[selected_experts_indices[t,k]](x[t]).

        x                         [T, H] BF16 (FP32 too on the CPU), any T from 0 to the bound per rank; every rank of the group calls
        top_scores                [T, K] FP32 or BF16
        selected_experts_indices  [T, K] integers, -1 = no expert
        experts                   module with this rank's weights, DTensors sharded over dim 0 or plain; called, so that the hooks of FSDP fire
        """
        if score_before_experts:
            raise ValueError("score_before_experts = True: mega_moe weighs the experts' outputs; expected False")
        if x.shape[0] > self.buffer.num_max_tokens_per_rank:
            raise ValueError(
                f"x.shape = {tuple(x.shape)}: {x.shape[0]} tokens, but model.moe.dispatch.max_tokens_per_rank is {self.buffer.num_max_tokens_per_rank}; raise it"
            )
        _prepare(experts)
        return experts(x, _Routing(self, top_scores, selected_experts_indices))

    def synchronize(self) -> None:
        """Nothing is outstanding after `run`: all work is on the current stream."""

    def _run_experts(self, experts: nn.Module, x: Tensor, top_scores: Tensor, selected_experts_indices: Tensor) -> Tensor:
        w13, w2 = (tuple(map(_local, part)) if isinstance(part, tuple) else _local(part) for part in _weights(experts))
        ids = selected_experts_indices
        if ids.dtype not in (torch.int64, torch.int32):  # replayed routing may come in 16 bits
            ids = ids.long()
        return mega_moe(x.contiguous(), ids.contiguous(), top_scores.contiguous(), w13, w2, self.buffer, **self.options)


class _Routing:
    """In place of the experts' second argument. Not a tuple: FSDP2 casts the tensors that it finds in arguments, and would round the scores."""

    def __init__(self, dispatcher: MegaMoETokenDispatcher, top_scores: Tensor, selected_experts_indices: Tensor):
        self.dispatcher, self.top_scores, self.selected_experts_indices = dispatcher, top_scores, selected_experts_indices


def _experts_forward(experts: nn.Module, x: Tensor, routing: Any, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(routing, _Routing):
        return experts._forward_without_mega_moe(x, routing, *args, **kwargs)
    return routing.dispatcher._run_experts(experts, x, routing.top_scores, routing.selected_experts_indices)


def _prepare(experts: nn.Module) -> None:
    """Weights must be read inside the module's forward, where FSDP has them unsharded: so this instance's forward takes a `_Routing` too."""
    if getattr(experts, "_forward_without_mega_moe", None) is None:
        experts._forward_without_mega_moe = experts.forward
        experts.forward = types.MethodType(_experts_forward, experts)


def attach(moe: nn.Module, dispatcher: MegaMoETokenDispatcher) -> None:
    """`moe` uses `dispatcher` from now on. Releases up to 0.8 have no dispatchers; there it takes the place of their fused kernel."""
    _prepare(moe.experts)
    if hasattr(moe, "set_token_dispatcher"):
        moe.set_token_dispatcher(dispatcher)
    elif hasattr(moe, "_run_fused_routed_experts"):
        moe.token_dispatcher, moe.fused_kernel = dispatcher, "mega_moe"
        moe._run_fused_routed_experts = types.MethodType(_run_as_fused_kernel, moe)
    else:
        raise TypeError(
            f"moe = {type(moe).__name__}: expected an MoE layer of prime-rl, with set_token_dispatcher or _run_fused_routed_experts"
        )


def _run_as_fused_kernel(moe: nn.Module, x: Tensor, selected_experts_indices: Tensor, top_scores: Tensor) -> Tensor:
    return moe.token_dispatcher.run(x, top_scores, selected_experts_indices, moe.experts, score_before_experts=moe.score_before_experts)


def _is_moe(module: nn.Module) -> bool:
    return (
        hasattr(module, "experts")
        and hasattr(module, "router")
        and (hasattr(module, "set_token_dispatcher") or hasattr(module, "fused_kernel"))
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _weights(experts: nn.Module) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
    """(w13 or the pair (gate, up), w2) as the module has them."""
    for w13_names, w2_name in _WEIGHTS:
        *w13, w2 = (getattr(experts, name, None) for name in (*w13_names, w2_name))
        if w2 is not None and all(part is not None for part in w13):
            return (w13[0] if len(w13) == 1 else tuple(w13)), w2
    have = [name for name, _ in experts.named_parameters(recurse=False)]
    raise ValueError(
        f"experts has the parameters {have}: expected gated experts, {' or '.join(str((*first, last)) for first, last in _WEIGHTS)}"
    )


def _check_layer(name: str, moe: nn.Module, ep: int, on_cuda: bool) -> None:
    try:
        if getattr(moe, "score_before_experts", False):
            raise ValueError("score_before_experts = True: mega_moe weighs the experts' outputs; expected False")
        if moe.experts.num_experts % ep:
            raise ValueError(f"num_experts = {moe.experts.num_experts}: expected a multiple of model.ep = {ep}")
        _check_experts(moe.experts, on_cuda)
    except ValueError as error:
        raise ValueError(f"layer {name!r}: {error}") from None


def _check_experts(experts: nn.Module, on_cuda: bool) -> None:
    biases = [name for name, value in experts.named_parameters(recurse=False) if "bias" in name and value is not None]
    if biases:
        raise ValueError(f"experts has the biases {biases}: this adapter takes none")
    w13, w2 = _weights(experts)
    parts = w13 if isinstance(w13, tuple) else (w13,)
    if w2.dim() != 3 or any(part.shape != (w2.shape[0], 2 // len(parts) * w2.shape[2], w2.shape[1]) for part in parts):
        shapes = [tuple(part.shape) for part in (*parts, w2)]
        raise ValueError(
            f"experts has weights of the shapes {shapes}: expected gate and up [E, I, H], or both stacked [E, 2I, H], and down [E, H, I]"
        )
    for label, value in (("hidden", w2.shape[1]), ("intermediate_hidden", w2.shape[2])):
        if on_cuda and value % CUDA_ALIGNMENT:
            raise ValueError(f"{label} = {value}: expected a multiple of {CUDA_ALIGNMENT} on CUDA")
    _activation_clamp(experts)


def _activation_clamp(experts: nn.Module) -> float | None:
    """The clamp of the experts' gated SiLU, found by trying it: activations with one name differ between branches of prime-rl."""
    activation = getattr(experts, "activation", None)
    if activation is None or activation == "silu":
        return None
    limit = getattr(activation, "limit", None)
    grid = torch.linspace(-2, 2, 9, device="cpu") * (limit or 4.0)
    gate, up = (part.reshape(-1) for part in torch.meshgrid(grid, grid, indexing="ij"))
    if hasattr(activation, "apply"):
        with torch.no_grad():
            found = activation.apply(gate, up)
        if torch.allclose(found, swiglu(gate, up, SwiGLU() if limit is None else SwiGLU(clamp=float(limit))), rtol=1e-4, atol=1e-5):
            return None if limit is None else float(limit)
    raise ValueError(
        f"experts.activation = {getattr(activation, '__name__', type(activation).__name__)}: expected silu(gate) * up, "
        "or the same with gate and up clamped at its attribute `limit`"
    )


def _check_one_host(group: Any) -> None:
    hosts = sorted(set(resolve_group(group).all_gather_object(socket.gethostname())))
    if len(hosts) > 1:
        raise ValueError(f"model.ep: the ranks of one expert-parallel group are on {len(hosts)} hosts, {hosts}; mega_moe needs them on one")


def fp8_mega_moe_backward(*args: Any, **kwargs: Any) -> None:
    """Not there yet: always raises. Not among deep_gemm's names, because prime-rl's drafts take its presence for FP8 support."""
    raise NotImplementedError(
        "fp8_mega_moe_backward: there are no FP8 kernels yet; use bf16_mega_moe_backward, or mega_moe with precision 'bf16'"
    )
