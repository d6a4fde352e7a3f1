"""Tiny TorchTitan models, built and parallelised in the order of its Trainer, without its data loader, metrics and tokenizer.

TorchTitan makes its meshes on the accelerator, or on "cuda" where there is none; `Run` tells it the device of its Setup. Its language
models have no attention for CPU tensors either, so inner attention is its ScaledDotProductAttention.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
import torchtitan.models.deepseek_v3 as deepseek
import torchtitan.models.qwen3 as qwen
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, default_adamw, register_moe_load_balancing_hook
from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig, derive, override
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, full_dtensor
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

VOCABULARY, SEQUENCES, LENGTH = 32, 4, 8
MEGA_MOE = "deep_gemm.integrations.torchtitan.mega_moe"
SELECTIVE_AC = "deep_gemm.integrations.torchtitan.selective_ac"


def normal(tensor: Tensor) -> None:
    """Large enough for every part to matter in every gradient, whatever the width."""
    nn.init.normal_(tensor, std=1.2 / math.sqrt(tensor.shape[-1]))


INIT = {"weight": normal, "bias": nn.init.zeros_}
EXPERTS_INIT = {name: normal for name in ("w1_EFD", "w2_EDF", "w3_EFD")}


@dataclass(frozen=True)
class Shape:
    dim: int = 16
    hidden_dim: int = 16  # of an expert
    num_experts: int = 8
    top_k: int = 2
    num_layers: int = 2


def _decoder(config_class: type[Decoder.Config], dim: int, layers: list) -> Decoder.Config:
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = config_class(
        vocab_size=VOCABULARY,
        dim=dim,
        norm=RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_}),
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=dim, param_init=INIT),
        lm_head=Linear.Config(in_features=dim, out_features=VOCABULARY),
        layers=layers,
    )
    for node, init in ((Linear.Config, INIT), (GroupedExperts.Config, EXPERTS_INIT)):
        for _, part, _, _ in config.traverse(node):
            part.param_init = init
    return config


def qwen3(shape: Shape, *, comm_backend: str = "standard") -> Decoder.Config:
    """Softmax router, normalised; no shared expert."""
    layers = qwen._build_qwen3_moe_layers(
        n_layers=shape.num_layers,
        dim=shape.dim,
        n_heads=4,
        n_kv_heads=2,
        fuse_qkv=False,  # its state dict hooks split the weight, which set_model_state_dict does not expect
        head_dim=8,
        moe_hidden_dim=shape.hidden_dim,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        attn_backend="flex",
        rope=CosSinRoPE.Config(dim=8, max_seq_len=LENGTH, theta=1e4),
        moe_comm_backend=comm_backend,
    )
    return _decoder(qwen.Qwen3Model.Config, shape.dim, layers)


def deepseek_v3(shape: Shape) -> Decoder.Config:
    """Sigmoid router in groups, scaled; a shared expert; the first layer dense; latent attention."""
    layers = deepseek.build_mla_moe_layers(
        n_layers=shape.num_layers,
        n_dense_layers=1,
        dim=shape.dim,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        mscale=0.7,
        dense_hidden_dim=24,
        moe_hidden_dim=shape.hidden_dim,
        num_experts=shape.num_experts,
        num_shared_experts=1,
        router_top_k=shape.top_k,
        router_score_func="sigmoid",
        router_num_expert_groups=4,
        router_num_limited_groups=2,
        router_route_scale=1.5,
        router_route_norm=True,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=INIT,
        norm_init={"weight": nn.init.ones_},
        depth_init=lambda layer: INIT,
        depth_experts_init=lambda layer: EXPERTS_INIT,
        rope=ComplexRoPE.Config(dim=8, max_seq_len=LENGTH, theta=1e4),
    )
    return _decoder(deepseek.DeepSeekV3Model.Config, shape.dim, layers)


class Fp32GroupedExperts(GroupedExperts):
    """TorchTitan's experts without its casts to BF16: the truth, in its own dispatch and combine."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        w1, w2, w3 = (p.to_local() if isinstance(p, DTensor) else p for p in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        return torch.cat([(nn.functional.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T for e, x in enumerate(rows)])


@override(target=GroupedExperts.Config, exact=True)
def fp32_experts(cfg: GroupedExperts.Config) -> Fp32GroupedExperts.Config:
    return derive(cfg, Fp32GroupedExperts.Config)


def mega_moe_import(**options) -> tuple[str, dict]:
    return (MEGA_MOE, {"num_max_tokens_per_rank": SEQUENCES * LENGTH, **options})


MODELS = {
    "qwen3": (qwen3, set_qwen3_sharding_config, qwen.parallelize_qwen3),
    "deepseek_v3": (deepseek_v3, set_deepseek_v3_sharding_config, deepseek.parallelize_deepseekv3),
}


class Job(Configurable):
    """The two nodes of Trainer.Config that the overrides claim."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model: Decoder.Config
        activation_checkpoint: ActivationCheckpointing.Config | None


@dataclass(frozen=True)
class Setup:
    """One model on all ranks of the world. parallel=False: the whole model on this rank alone, the eager model of a comparison."""

    device: str = "cpu"
    model: str = "qwen3"
    experts: str = "mega_moe"  # "own" | "mega_moe"
    dtype: str = "float32"  # of the experts' arithmetic and of FSDP's parameters
    parallel: bool = True
    ep: int = 1
    tp: int = 1
    dp_replicate: int = 1
    spmd_backend: str = "partial_dtensor"
    typechecking: bool = False
    ac: str | None = None  # "full" | "selective"
    keep_activations: bool | None = None  # of the SelectiveAC override; None = not overridden
    compile: bool = False
    frozen: str | None = None  # part of the names of frozen parameters
    shape: Shape = Shape()
    balanced: bool = False  # TorchTitan's debug.moe_force_load_balance: routing that no rounding can change
    options: dict[str, Any] = field(default_factory=dict)  # of the mega_moe override

    @property
    def imports(self) -> list:
        imports: list = []
        if self.experts == "mega_moe":
            imports.append(mega_moe_import(dtype=self.dtype, **self.options))
        elif self.dtype == "float32":
            imports.append(f"{__name__}.fp32_experts")
        if self.keep_activations is not None:
            imports.append((SELECTIVE_AC, {"keep_activations": self.keep_activations}))
        return imports


@functools.lru_cache
def parallel_dims(ep: int, tp: int, dp_replicate: int, spmd_backend: str, world_size: int) -> ParallelDims:
    """One per process and arguments: process groups are not freed, and meshes are compared by identity."""
    return ParallelDims(dp_replicate, -1, cp=1, tp=tp, pp=1, ep=ep, world_size=world_size, spmd_backend=spmd_backend)


class Run:
    """A built model with its state, loss and parallel dimensions."""

    def __init__(self, setup: Setup, state: dict[str, Tensor] | None = None, *, seed: int = 0):
        self.setup, self.device = setup, setup.device
        torchtitan.distributed.parallel_dims.device_type = setup.device
        make_config, set_sharding, parallelize = MODELS[setup.model]
        training = TrainingConfig(mixed_precision_param=setup.dtype)
        parallelism = ParallelismConfig(
            expert_parallel_degree=setup.ep,
            tensor_parallel_degree=setup.tp,
            data_parallel_replicate_degree=setup.dp_replicate,
            spmd_backend=setup.spmd_backend,
        )
        dist_utils.set_spmd_backend(setup.spmd_backend)
        world_size = dist.get_world_size() if setup.parallel else 1
        self.dims = parallel_dims(setup.ep, setup.tp, setup.dp_replicate, setup.spmd_backend, world_size)
        policy = {None: None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[setup.ac]
        job = Job.Config(model=make_config(setup.shape), activation_checkpoint=policy)
        if setup.parallel:
            set_sharding(job.model, enable_sp=True, enable_ep=setup.ep > 1)
        for _, router, _, _ in job.model.traverse(TokenChoiceTopKRouter.Config):
            router._debug_force_load_balance = setup.balanced
        apply_overrides(OverrideConfig(imports=setup.imports), job)
        with torch.device("meta"):
            model = job.model.build()
        model.verify_module_protocol()
        if setup.parallel:
            model = parallelize(
                model,
                parallel_dims=self.dims,
                training=training,
                parallelism=parallelism,
                compile_config=CompileConfig(enable=setup.compile, components=["model"], backend="aot_eager"),
                ac_config=job.activation_checkpoint,
                dump_folder="",
            )
            if self.device == "cpu":
                for module in model.modules():
                    if isinstance(module, FSDPModule):  # gloo has no sum with a factor, which TorchTitan sets to 1
                        module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device=self.device)
        torch.manual_seed(seed)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        self.model = model.train()
        if state is not None:
            set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
        for name, parameter in model.named_parameters():
            if setup.frozen is not None and setup.frozen in name:
                parameter.requires_grad_(False)
        self.loss_fn = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY).build()
        self.optimizers: OptimizersContainer | None = None

    def share(self, batch: Tensor) -> Tensor:
        """The rows of a global batch that this rank's data loader would give."""
        if not self.setup.parallel or not self.dims.dp_enabled:
            return batch
        mesh = self.dims.get_mesh("batch")
        return batch.chunk(mesh.size())[mesh.get_local_rank()]

    @contextmanager
    def context(self) -> Iterator[None]:
        if not self.setup.parallel:
            yield
            return
        with dist_utils.get_spmd_context(parallel_dims=self.dims, spmd_typechecking=self.setup.typechecking)():
            yield

    def backward(self, batch: Tensor, *, micro_batches: int = 1) -> Tensor:
        """Forward and backward of a global batch [SEQUENCES, LENGTH + 1]; the loss over all ranks. `self.logits`: the last micro-batch's."""
        total = torch.zeros((), device=self.device)
        valid = torch.tensor(batch[:, 1:].numel(), device=self.device)
        for rows in self.share(batch.to(self.device)).chunk(micro_batches):
            tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            extra = {"positions": torch.arange(LENGTH, device=self.device).expand(tokens.shape).contiguous()}
            if self.setup.parallel and self.setup.spmd_backend == "spmd_types":
                tokens, labels, extra = annotate_input_spmd_types(self.dims, tokens, labels, extra)
            if self.setup.parallel and self.setup.spmd_backend == "full_dtensor":
                tokens, labels, extra = full_dtensor.parallelize_inputs(self.dims, tokens, labels, extra)
            with self.context():
                self.logits = self.model(tokens, **extra)
                loss, _ = self.loss_fn(self.logits, labels, valid)
                with spmd.no_typecheck():
                    loss.backward()
            total += (loss.to_local() if isinstance(loss, DTensor) else loss).detach()
        if self.setup.parallel and self.dims.dp_enabled:
            dist.all_reduce(total, group=self.dims.get_mesh("batch").get_group())
        return total.cpu()

    def parameters(self) -> dict[str, nn.Parameter]:
        return {_canonical(name): parameter for name, parameter in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        grads = {name: parameter.grad for name, parameter in self.parameters().items() if parameter.grad is not None}
        return {name: whole(grad) for name, grad in grads.items()}

    def state(self) -> dict[str, Tensor]:
        return {name: whole(value) for name, value in self.model.state_dict().items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        return {name: whole(value) for name, value in self.optimizers.state_dict().items() if isinstance(value, Tensor)}

    def make_optimizer(self, lr: float = 1e-2) -> None:
        self.optimizers = default_adamw(lr).build(model_parts=[self.model])
        register_moe_load_balancing_hook(self.optimizers, [self.model], self.dims)

    def clip(self, max_norm: float) -> Tensor:
        return dist_utils.clip_grad_norm_(list(self.model.parameters()), max_norm, ep_enabled=self.dims.ep_enabled)

    def step(self, batch: Tensor, **options) -> float:
        self.optimizers.zero_grad()
        loss = self.backward(batch, **options)
        self.clip(1.0)
        self.optimizers.step()
        return float(loss)


def _canonical(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().cpu().clone()


def batches(seed: int = 0) -> Iterator[Tensor]:
    """Sequences with something to learn: token t+1 is 3 * token t + 1 modulo the vocabulary, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    for _ in itertools.count():
        rows = [torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)]
        for _ in range(LENGTH):
            noise = (torch.rand(SEQUENCES, 1, generator=generator) < 0.1).long()
            rows.append((3 * rows[-1] + 1 + noise) % VOCABULARY)
        yield torch.cat(rows, 1)
