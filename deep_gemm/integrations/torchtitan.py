"""Mega MoE for TorchTitan: overrides of its RoutedExperts and SelectiveAC config nodes, as docs/integrations/torchtitan.md says.

    --override.imports 'deep_gemm.integrations.torchtitan.mega_moe={"num_max_tokens_per_rank": 16384}'
                       deep_gemm.integrations.torchtitan.selective_ac

Parameters (`inner_experts.w1_EFD`, `w2_EDF`, `w3_EFD`), their initialisation, their sharding and so checkpoints stay TorchTitan's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

try:
    import spmd_types as spmd
    from torchtitan.config import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        DeepEPTokenDispatcher,
        HybridEPTokenDispatcher,
        LocalTokenDispatcher,
    )
except ImportError as error:
    raise ImportError(
        f"deep_gemm.integrations.torchtitan needs torchtitan 0.3.0 and triton (pip install torchtitan==0.3.0 triton): {error}"
    ) from error

from deep_gemm.integrations._buffers import shared_buffer
from deep_gemm.mega import ops
from deep_gemm.mega.api import mega_moe as _mega_moe
from deep_gemm.mega.buffer import MegaMoeBuffer
from deep_gemm.mega.checks import SAVE_POLICIES

# Each hands every token to its experts and scales what they return, which is what one call computes.
_DISPATCHERS = (LocalTokenDispatcher, AllToAllTokenDispatcher, DeepEPTokenDispatcher, HybridEPTokenDispatcher)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class MegaMoeRoutedExperts(RoutedExperts):
    """RoutedExperts whose dispatch, experts and combine are one `deep_gemm.mega_moe` call.

    num_max_tokens_per_rank  bound on the tokens of one forward on a rank: local_batch_size * seq_len / (cp * tp), tp only with ep > 1
    dtype                    the experts' arithmetic; "float32" on the reference backend alone. TorchTitan's own experts know BF16 only
    save, capacity_factor, precision, backend  as deep_gemm.mega_moe and get_symm_buffer_for_mega_moe

    `parallelize` takes the `ep` mesh. The buffer is made with the module's other states by `init_states`, which Trainer calls after sharding
    and before a checkpoint is loaded; collective over `ep`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        num_max_tokens_per_rank: int
        dtype: str = "bfloat16"
        save: str = "recompute"
        capacity_factor: float = 1.25
        precision: str = "bf16"
        backend: str | None = None

        def __post_init__(self):
            if not isinstance(self.num_max_tokens_per_rank, int) or self.num_max_tokens_per_rank < 1:
                raise ValueError(f"num_max_tokens_per_rank = {self.num_max_tokens_per_rank!r}: expected an int of at least 1")
            if self.dtype not in _DTYPES:
                raise ValueError(f"dtype = {self.dtype!r}: expected one of {list(_DTYPES)}")
            if self.save not in SAVE_POLICIES:
                raise ValueError(f"save = {self.save!r}: expected one of {list(SAVE_POLICIES)}")

    def __init__(self, config: Config):
        super().__init__(config)
        self.config = config
        self.group: torch.distributed.ProcessGroup | None = None
        self.tensor_parallel = 1  # ranks that the experts' intermediate width is split over
        self.buffer: MegaMoeBuffer | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        ep = parallel_dims.get_optional_mesh("ep")
        self.group = None if ep is None else ep.get_group()
        self.tensor_parallel = parallel_dims.tp if ep is None else 1

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        device = self.inner_experts.w1_EFD.device if buffer_device is None else torch.device(buffer_device)
        if device.type != "meta":
            self.make_buffer(device)

    def make_buffer(self, device: torch.device | str) -> MegaMoeBuffer:
        """The buffer of this shape on `device`, shared by all layers. Collective over `ep`; called by init_states."""
        experts = self.config.inner_experts
        self.buffer = shared_buffer(
            self.group,
            experts.num_experts,
            self.config.num_max_tokens_per_rank,
            self.config.token_dispatcher.top_k,
            experts.dim,
            experts.hidden_dim // self.tensor_parallel,
            device=device,
            precision=self.config.precision,
            capacity_factor=self.config.capacity_factor,
            backend=self.config.backend,
        )
        return self.buffer

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Local tensors, as in the base class: x [B, L, D], scores and ids [B, L, K] -> [B, L, D] in the dtype of x.

        The counts are MoE's statistics; Mega MoE counts for itself. Scores are applied to the experts' outputs, in FP32.
        """
        # TorchTitan's checker of types (debug.spmd_typechecking) has no rule for the operators; this region's boundary states the result's.
        with spmd.no_typecheck():
            if self.buffer is None:
                raise RuntimeError("buffer = None: expected init_states (or make_buffer) before the first forward")
            dtype = _DTYPES[self.config.dtype]
            w1, w2, w3 = (_local(getattr(self.inner_experts, name)).to(dtype) for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
            y = _mega_moe(
                _rows(x_BLD).to(dtype),
                _rows(topk_expert_ids_BLK),
                _rows(topk_scores_BLK),
                (w1, w3),
                w2,
                self.buffer,
                save=self.config.save,
            )
            return y.to(x_BLD.dtype).view(x_BLD.shape)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


@override(target=RoutedExperts.Config, description="Mega MoE: dispatch, experts and combine as one call")
def mega_moe(cfg: RoutedExperts.Config, *, num_max_tokens_per_rank: int | None = None, **options) -> MegaMoeRoutedExperts.Config:
    """Override factory. options: fields of the Config.

    num_max_tokens_per_rank  default: what a DeepEP or HybridEP dispatcher of the config was given
    Raises NotImplementedError for experts or a dispatcher that compute something else, ValueError for a setting.
    """
    _require_fit(cfg)
    dispatcher = cfg.token_dispatcher
    if num_max_tokens_per_rank is None:
        num_max_tokens_per_rank = getattr(dispatcher, "num_max_tokens_per_rank", None)
    if num_max_tokens_per_rank is None:
        raise ValueError(
            "num_max_tokens_per_rank = None: expected the bound on the tokens of a rank, local_batch_size * seq_len / (cp * tp), as "
            "'deep_gemm.integrations.torchtitan.mega_moe={\"num_max_tokens_per_rank\": 16384}'"
        )
    # The dispatcher's config stays for its top_k; one that allocates or imports a communication library must not be built.
    local = LocalTokenDispatcher.Config(num_experts=dispatcher.num_experts, top_k=dispatcher.top_k)
    return derive(cfg, MegaMoeRoutedExperts.Config, token_dispatcher=local, num_max_tokens_per_rank=num_max_tokens_per_rank, **options)


def _require_fit(cfg: RoutedExperts.Config) -> None:
    def refuse(field: str, value: object, expected: str) -> None:
        raise NotImplementedError(f"{field} = {type(value).__qualname__}: expected {expected}; Mega MoE would compute something else")

    if type(cfg) is not RoutedExperts.Config:
        refuse("routed_experts", cfg, "RoutedExperts.Config itself")
    if type(cfg.inner_experts) is not GroupedExperts.Config:  # GPT-OSS, quantised, or of another override
        refuse("inner_experts", cfg.inner_experts, "GroupedExperts.Config itself (SwiGLU without biases, BF16)")
    if type(cfg.token_dispatcher) not in [dispatcher.Config for dispatcher in _DISPATCHERS]:
        refuse(
            "token_dispatcher",
            cfg.token_dispatcher,
            f"one of {[dispatcher.__name__ for dispatcher in _DISPATCHERS]}, which score after the experts",
        )
    if getattr(cfg.token_dispatcher, "non_blocking_capacity_factor", None) is not None:
        raise NotImplementedError("non_blocking_capacity_factor is set: expected None; HybridEP then may drop tokens, Mega MoE never does")


def save_ops(*, keep_activations: bool = True) -> set:
    """The operators that a selective activation checkpointing policy saves, so that backward runs nothing of the experts again.

    keep_activations  True: both operators; a layer keeps y [T, H] and the activated rows, about 1.25 * T * K * I elements on CUDA
                      False: the second alone; a layer keeps y, and dispatch and GEMM 1 run again
    """
    return {ops.gemm1, ops.gemm2} if keep_activations else {ops.gemm2}


class MegaMoeSelectiveAC(SelectiveAC):
    """SelectiveAC that saves the operators of Mega MoE too; `keep_activations` as `save_ops`."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        keep_activations: bool = True

    def get_save_ops(self) -> set:
        return super().get_save_ops() | save_ops(keep_activations=self.config.keep_activations)


@override(target=SelectiveAC.Config, description="Selective activation checkpointing that saves the operators of Mega MoE")
def selective_ac(cfg: SelectiveAC.Config, *, keep_activations: bool = True) -> MegaMoeSelectiveAC.Config:
    """Override factory. Raises NotImplementedError for a policy of your own: add `save_ops()` to its get_save_ops instead."""
    if type(cfg) is not SelectiveAC.Config:
        raise NotImplementedError(
            f"activation_checkpoint = {type(cfg).__qualname__}: expected SelectiveAC.Config itself; "
            "add deep_gemm.integrations.torchtitan.save_ops() to what its get_save_ops returns"
        )
    return derive(cfg, MegaMoeSelectiveAC.Config, keep_activations=keep_activations)
