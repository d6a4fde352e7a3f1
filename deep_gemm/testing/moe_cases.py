"""One Mega MoE call of R ranks, its truth from the oracle, and the torch path's own error on the same input: what accuracy means here.

`truth` and `torch_outputs` see all tokens and all experts as one rank, which R ranks must equal. Tensors by name: y, dx, dp over the
tokens of all ranks, dw13, dw2 (db13, db2) over all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

import deep_gemm
from deep_gemm import reference
from deep_gemm.activation import resolve_activation
from deep_gemm.mega.backend import CUDA_BACKENDS
from deep_gemm.testing import generators, numeric, results
from deep_gemm.testing.torch_path import torch_moe

GRADIENT_NAMES = {"dx": "x", "dp": "topk_weights", "dw13": "w13", "dw2": "w2", "db13": "b13", "db2": "b2"}
ERROR_RATIO = 1.1  # of our relative Frobenius error to the torch path's
ROW_ERROR_RATIO = 3.0  # of the largest row errors; an extreme value of many rows, so looser
WITHOUT_TORCH_PATH = 1e-2  # relative Frobenius bound where the torch path lacks the feature (biases)


@dataclass(frozen=True)
class MoeCase:
    """tokens: of each rank, so its length is R. model: name in case labels; the rest as the API."""

    model: str
    hidden: int
    intermediate_hidden: int
    num_experts: int
    num_topk: int
    tokens: tuple[int, ...]
    routing: str = "uniform"
    save: str = "recompute"
    capacity_factor: float = 1.25
    activation: str = "swiglu"
    activation_clamp: float | None = None
    bias: bool = False
    pair: bool = False
    idx_dtype: torch.dtype = torch.int64
    wgrad_dtype: torch.dtype = torch.float32
    seed: int = 0

    @classmethod
    def of_model(cls, model: str, tokens: tuple[int, ...], *, num_experts: int | None = None, **options) -> MoeCase:
        """One of `generators.MODEL_SHAPES`, with fewer experts if asked (the weight gradients of all do not fit beside their truth)."""
        shape = generators.MODEL_SHAPES[model]
        label = model if num_experts in (None, shape.num_experts) else f"{model}-E{num_experts}"
        return cls(label, shape.hidden, shape.intermediate_hidden, num_experts or shape.num_experts, shape.num_topk, tokens, **options)

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def name(self) -> str:
        """`qwen3-30b/T1024/EP2/bf16/uniform`, then what differs from the defaults."""
        parts = [self.model, f"T{'+'.join(map(str, sorted(set(self.tokens))))}", f"EP{self.num_ranks}", "bf16", self.routing]
        extras = {"preact": self.save == "preact", "pair": self.pair, "bias": self.bias, "int32": self.idx_dtype == torch.int32}
        extras |= {f"cf{self.capacity_factor:g}": self.capacity_factor != 1.25, "dw-bf16": self.wgrad_dtype == torch.bfloat16}
        extras |= {self.activation: self.activation != "swiglu", f"clamp{self.activation_clamp}": self.activation_clamp is not None}
        return "/".join(parts + [name for name, present in extras.items() if present])

    def as_one_rank(self) -> MoeCase:
        return replace(self, tokens=(sum(self.tokens),))

    def call_options(self) -> dict:
        return {"activation": self.activation, "activation_clamp": self.activation_clamp, "save": self.save}


@dataclass(frozen=True)
class MoeInputs:
    """x, topk_idx, topk_weights, dy: a list over the ranks; w13 [E, 2I, H], w2 [E, H, I], b13 [E, 2I], b2 [E, H] of all experts."""

    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    dy: list[torch.Tensor]
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    def as_one_rank(self) -> MoeInputs:
        return replace(self, **{name: [torch.cat(getattr(self, name))] for name in ("x", "topk_idx", "topk_weights", "dy")})


def make_inputs(case: MoeCase, device: torch.device | str) -> MoeInputs:
    """Everything from case.seed, BF16. Entries without an expert have a NaN weight: it must have no effect."""
    routed = [
        generators.routing(
            case.routing,
            tokens,
            case.num_experts,
            case.num_topk,
            num_ranks=case.num_ranks,
            rank=rank,
            seed=case.seed,
            device=device,
            dtype=case.idx_dtype,
        )
        for rank, tokens in enumerate(case.tokens)
    ]
    x, dy = (
        [generators.rows(t, case.hidden, seed=1000 * case.seed + 2 * r + which, device=device) for r, t in enumerate(case.tokens)]
        for which in (0, 1)
    )
    w13, w2 = generators.expert_weights(range(case.num_experts), case.hidden, case.intermediate_hidden, seed=case.seed, device=device)
    biases = {}
    if case.bias:
        biases["b13"] = generators.rows(case.num_experts, 2 * case.intermediate_hidden, seed=case.seed + 7, device=device)
        biases["b2"] = generators.rows(case.num_experts, case.hidden, seed=case.seed + 8, device=device)
    weights = [p.masked_fill(idx < 0, torch.nan) for idx, p in routed]
    return MoeInputs(x, [idx for idx, _ in routed], weights, dy, w13, w2, **biases)


def truth(case: MoeCase, inputs: MoeInputs, *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The oracle in `dtype`; TF32 must be off."""
    whole = inputs.as_one_rank()
    call = (whole.x[0], whole.topk_idx[0], whole.topk_weights[0], inputs.w13, inputs.w2)
    options = {"b13": inputs.b13, "b2": inputs.b2, "activation": resolve_activation(case.activation, case.activation_clamp), "dtype": dtype}
    grads = reference.backward(whole.dy[0], *call, **options)
    return {"y": reference.forward(*call, **options)} | {name: grads[key] for name, key in GRADIENT_NAMES.items() if key in grads}


def torch_outputs(case: MoeCase, inputs: MoeInputs) -> dict[str, torch.Tensor] | None:
    """The trainer-style path on the same input (gradients in BF16, as it makes them); None where it has no such feature."""
    if case.bias:
        return None
    whole = inputs.as_one_rank()
    leaves = [t.detach().clone().requires_grad_() for t in (whole.x[0], whole.topk_weights[0], inputs.w13, inputs.w2)]
    x, p, w13, w2 = leaves
    act = resolve_activation(case.activation, case.activation_clamp)
    y = torch_moe(x, whole.topk_idx[0], p, w13, w2, activation=act)
    grads = torch.autograd.grad(y, leaves, whole.dy[0])
    return dict(zip(("y", "dx", "dp", "dw13", "dw2"), (y.detach(), *grads), strict=True))


class Ranks:
    """The R ranks of a case: their buffers, and calls on all of them.

    group: a VirtualGroup of case.num_ranks, or None: one rank, which has the tokens and experts of all (how the tests run without a GPU).
    backend: of the buffers; None = the device's.
    """

    def __init__(self, case: MoeCase, inputs: MoeInputs, device: torch.device | str, group=None, backend: str | None = None):
        self.group, self.backend = group, backend
        self.load(case, inputs)
        self.device = torch.device(device)
        self.buffers = [self._make_buffer(rank) for rank in range(self.case.num_ranks)]

    def load(self, case: MoeCase, inputs: MoeInputs) -> None:
        """What the next calls are made with. The buffers stay: sizes as before, and no more tokens on a rank than the first case had on any."""
        self.case, self.inputs = (case, inputs) if self.group is not None else (case.as_one_rank(), inputs.as_one_rank())

    @property
    def here(self) -> list[int]:
        """The ranks of this process, in the order of all results."""
        return list(range(self.case.num_ranks))

    def _make_buffer(self, rank: int):
        case = self.case
        return deep_gemm.get_symm_buffer_for_mega_moe(
            None if self.group is None else self.group.rank(rank),
            case.num_experts,
            max(1, *case.tokens),
            case.num_topk,
            case.hidden,
            case.intermediate_hidden,
            device=self.device,
            capacity_factor=case.capacity_factor,
            backend=self.backend,
        )

    def run(self, fn: Callable[[int], object]) -> list:
        return [fn(0)] if self.group is None else self.group.run(fn)

    def poison(self) -> None:
        """NaN into everything that must hold nothing between calls. The reference backend holds nothing at all."""
        for buffer in self.buffers:
            if buffer.backend_name in CUDA_BACKENDS:
                buffer.backend(buffer.backend_name).poison()

    def experts_of(self, rank: int, tensor: torch.Tensor | None):
        """This rank's part of a tensor over all experts; a (gate, up) pair of its second dimension if the case wants pairs."""
        count = self.case.num_local_experts
        return None if tensor is None else tensor[rank * count : (rank + 1) * count]

    def split(self, tensor: torch.Tensor | None):
        if tensor is None or not self.case.pair:
            return tensor
        return tuple(part.contiguous() for part in tensor.chunk(2, 1))

    def arguments(self, rank: int) -> tuple:
        i = self.inputs
        weights = self.split(self.experts_of(rank, i.w13)), self.experts_of(rank, i.w2)
        return i.x[rank], i.topk_idx[rank], i.topk_weights[rank], *weights, self.buffers[rank]

    def biases(self, rank: int) -> dict:
        if self.inputs.b2 is None:
            return {}
        return {"b13": self.split(self.experts_of(rank, self.inputs.b13)), "b2": self.experts_of(rank, self.inputs.b2)}

    def targets(self, rank: int, fill: float = float("nan")) -> dict:
        """Weight gradients to write into, full of `fill`; made beforehand, because memory is not allocated while ranks wait for each other."""
        whole = {"dw13": self.inputs.w13, "dw2": self.inputs.w2, "db13": self.inputs.b13, "db2": self.inputs.b2}
        made = {}
        for name, tensor in whole.items():
            if tensor is not None:
                shape = self.experts_of(rank, tensor)
                grad = torch.full(shape.shape, fill, dtype=self.case.wgrad_dtype, device=self.device)
                made[name] = self.split(grad) if name in ("dw13", "db13") else grad
        return made

    def forward(self, backend: str | None = None) -> list[tuple[torch.Tensor, object]]:
        """backend: of the calls; None = the buffers' own."""
        arguments, biases = ({rank: get(rank) for rank in self.here} for get in (self.arguments, self.biases))
        options = {**self.case.call_options(), "backend": backend}
        return self.run(lambda rank: deep_gemm.mega_moe_fwd(*arguments[rank], **biases[rank], **options))

    def backward(
        self, states: list, *, needs: Collection[str] | None = None, targets: list[dict] | None = None, accumulate: bool = False
    ) -> list:
        """[MegaMoeGradients]; needs None = all. Gradients not in `needs` have no target."""
        needs = tuple(GRADIENT_NAMES.values()) if needs is None else needs
        targets = [self.targets(rank) for rank in self.here] if targets is None else targets
        given = [{name: t for name, t in target.items() if GRADIENT_NAMES[name] in needs} for target in targets]
        call = dict(zip(self.here, zip(states, given, strict=True), strict=True))
        return self.run(
            lambda rank: deep_gemm.mega_moe_bwd(self.inputs.dy[rank], call[rank][0], needs=needs, accumulate=accumulate, **call[rank][1])
        )

    def outputs(self, *, needs: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """One forward and backward with NaN in all buffers before each, over all ranks; raises a fault that the device recorded."""
        self.poison()
        forward = self.forward()
        self.poison()
        grads = self.backward([state for _, state in forward], needs=needs)
        for buffer in self.buffers:
            buffer.check()
        return collect([y for y, _ in forward], grads)


def collect(ys: list[torch.Tensor], grads: list) -> dict[str, torch.Tensor]:
    """What all ranks made, in the form of `truth`; gradients that were not asked for are missing."""
    out = {"y": torch.cat(ys)}
    for name, attribute in {"dx": "dx", "dp": "dtopk_weights", "dw13": "dw13", "dw2": "dw2", "db13": "db13", "db2": "db2"}.items():
        parts = [getattr(grad, attribute) for grad in grads]
        if parts[0] is not None:
            out[name] = torch.cat([torch.cat(part, 1) if isinstance(part, tuple) else part for part in parts])
    return out


def compare(
    case: MoeCase, actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], torch_path: dict[str, torch.Tensor] | None
) -> tuple[list[dict], list[str]]:
    """(accuracy rows, one line for each tensor that is off). Bound: ERROR_RATIO times the torch path's error."""
    rows, faults = [], []
    for name, tensor in exact.items():
        floor = 1.0 if name in ("dp", "db13", "db2") else 0.0  # few elements a row: its norm may vanish by chance
        errors = numeric.measure_errors(actual[name], tensor, row_floor=floor)
        bounds, torch_error = {"rel_frobenius": WITHOUT_TORCH_PATH}, None
        if torch_path is not None:
            yardstick = numeric.measure_errors(torch_path[name], tensor, row_floor=floor)
            torch_error = yardstick.rel_frobenius
            bounds = {"rel_frobenius": ERROR_RATIO * torch_error, "max_row_rel": ROW_ERROR_RATIO * yardstick.max_row_rel}
        rows.append(results.accuracy_row(case.name, name, errors, torch_error))
        try:
            numeric.check_errors(errors, name=f"{case.name} {name}", **bounds)
        except AssertionError as fault:
            faults.append(str(fault))
    return rows, faults
