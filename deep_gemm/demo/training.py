"""Training with expert parallelism: each rank has a share of every batch, all dense parameters and its experts.

The loss is the mean over the global batch. A rank differentiates the mean over its own share, so
- a dense gradient is the average of the ranks' gradients;
- an expert's gradient, which already holds the rows of all ranks, is divided by the number of ranks.
Both then equal the gradients of one rank with the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from deep_gemm.demo.data import Corpus
from deep_gemm.demo.model import LanguageModel, ModelConfig
from deep_gemm.mega.api import get_symm_buffer_for_mega_moe
from deep_gemm.nn import MegaMoE

_HELDOUT_BATCHES = 4


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; `group` None = alone."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(self.size)[self.rank]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


@dataclass(frozen=True)
class TrainingConfig:
    steps: int = 300
    seed: int = 0
    batch: int = 16  # windows of all ranks together
    length: int = 128  # bytes predicted per window
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def build_model(config: ModelConfig, training: TrainingConfig, ranks: Ranks, device: torch.device) -> LanguageModel:
    """The model on `device`, BF16 on CUDA and FP32 on CPU. Its numbers depend on the seed, not on the number of ranks."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    buffer = get_symm_buffer_for_mega_moe(
        ranks.group,
        config.num_experts,
        training.batch // ranks.size * training.length,
        config.num_topk,
        config.hidden,
        config.intermediate_hidden,
        device=device,
    )
    experts_generator = torch.Generator().manual_seed(training.seed + 1)

    def make_experts() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            experts = MegaMoE(config.hidden, config.intermediate_hidden, config.num_experts, config.num_topk, buffer=buffer, dtype=dtype)
        _fill_experts(experts, config, ranks, experts_generator)
        return experts

    torch.manual_seed(training.seed)
    return LanguageModel(config, make_experts).to(device, dtype)


@torch.no_grad()
def _fill_experts(experts: MegaMoE, config: ModelConfig, ranks: Ranks, generator: torch.Generator) -> None:
    """Normal weights with deviation 1 / sqrt(fan-in): all experts are drawn on every rank, which keeps its own."""
    for parameter, rows, fan_in in (
        (experts.w13, 2 * config.intermediate_hidden, config.hidden),
        (experts.w2, config.hidden, config.intermediate_hidden),
    ):
        weights = torch.randn(config.num_experts, rows, fan_in, generator=generator) * fan_in**-0.5
        parameter.copy_(ranks.share(weights))


class MasterAdamW:
    """AdamW on FP32 masters of BF16 parameters; FP32 parameters are their own masters."""

    def __init__(self, parameters: list[nn.Parameter], training: TrainingConfig):
        self._parameters = parameters
        self._masters = [p.detach() if p.dtype == torch.float32 else p.detach().float() for p in parameters]
        decayed = [m for m in self._masters if m.dim() > 1]
        others = [m for m in self._masters if m.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=(0.9, 0.95))

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor], learning_rate: float) -> None:
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter.dtype != master.dtype:
                parameter.copy_(master)


class Trainer:
    def __init__(self, config: ModelConfig, training: TrainingConfig, corpus: Corpus, ranks: Ranks, device: torch.device):
        self.config, self.training, self.corpus, self.ranks, self.device = config, training, corpus, ranks, device
        self.model = build_model(config, training, ranks, device)
        expert_ids = {id(p) for block in self.model.blocks for p in block.experts.parameters()}
        self.dense = [p for p in self.model.parameters() if id(p) not in expert_ids]
        self.experts = [p for p in self.model.parameters() if id(p) in expert_ids]
        self.optimizer = MasterAdamW(self.dense + self.experts, training)

    def gradients(self, step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(loss of the global batch, FP32 gradients of it in the order dense + experts)."""
        batch = self.corpus.batch(step, self.training.seed, self.training.batch, self.training.length)
        loss = self.model.loss(self.ranks.share(batch).to(self.device))
        dense_and_experts = torch.autograd.grad(loss, self.dense + self.experts)
        gradients = [gradient.float() for gradient in dense_and_experts]
        dense = gradients[: len(self.dense)]
        flat = self.ranks.sum_(torch.cat([gradient.reshape(-1) for gradient in dense] + [loss.detach().reshape(1)])) / self.ranks.size
        averaged = [part.view_as(gradient) for part, gradient in zip(flat.split([g.numel() for g in dense] + [1]), dense)]
        return flat[-1], averaged + [gradient / self.ranks.size for gradient in gradients[len(self.dense) :]]

    def clip_(self, gradients: list[torch.Tensor]) -> None:
        """Scale to a global norm of at most max_grad_norm: experts count once each, wherever they live."""
        dense, experts = (sum(g.square().sum() for g in part) for part in (gradients[: len(self.dense)], gradients[len(self.dense) :]))
        norm = (dense + self.ranks.sum_(experts)).sqrt()
        scale = (self.training.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)

    def train(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (step, training loss on the device) after each step; nothing here waits for the device."""
        for step in range(self.training.steps):
            loss, gradients = self.gradients(step)
            self.clip_(gradients)
            self.optimizer.step(gradients, self.training.learning_rate_at(step))
            yield step, loss

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Nats per byte over fixed windows of files that were not trained on."""
        batches = self.corpus.heldout_batches(_HELDOUT_BATCHES, self.training.batch, self.training.length)
        losses = torch.stack([self.model.loss(self.ranks.share(batch).to(self.device)) for batch in batches])
        return (self.ranks.sum_(losses.mean()) / self.ranks.size).item()

    def first_moe_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x, topk_idx, topk_weights) that the experts of the first block see on held-out text, of this rank."""
        return capture_inputs(self.model.blocks[0].experts, self._run_heldout)

    @torch.no_grad()
    def _run_heldout(self) -> None:
        batch = self.corpus.heldout_batches(1, self.training.batch, self.training.length)[0]
        self.model(self.ranks.share(batch).to(self.device)[:, :-1])


def capture_inputs(module: nn.Module, run: Callable[[], None]) -> tuple[torch.Tensor, ...]:
    """The positional inputs of the first call of `module` inside run()."""
    calls: list[tuple[torch.Tensor, ...]] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: calls.append(inputs))
    try:
        run()
    finally:
        handle.remove()
    return calls[0]
