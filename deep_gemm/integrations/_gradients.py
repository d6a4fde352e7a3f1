"""Gradients of models whose experts are sharded: FP32 main gradients and clipping by one norm over everything. No trainer is imported.

attach_main_grads(parameters)           parameter.main_grad, FP32 zeros in the shape of the local part
publish_main_grads(parameters, ...)     parameter.grad from parameter.main_grad, once per optimizer step
zero_main_grads(parameters)             after the optimizer step
clip_grad_norm_(parameters, max_norm)   as torch.nn.utils.clip_grad_norm_, for plain tensors and DTensors of any meshes together
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, differentiable; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def attach_main_grads(parameters: Iterable[nn.Parameter]) -> None:
    """`parameter.main_grad`: FP32 zeros in the shape of this rank's part. Pass it to `mega_moe(main_grads=...)`."""
    for parameter in parameters:
        local = local_part(parameter.detach())
        parameter.main_grad = torch.zeros(local.shape, dtype=torch.float32, device=local.device)


def publish_main_grads(parameters: Iterable[nn.Parameter], divide_factor: float = 1.0) -> None:
    """`parameter.grad` = `parameter.main_grad` / divide_factor, in the parameter's dtype; FP32 parameters share the memory.

    The main gradient itself is divided, so call it once per optimizer step, after the last backward.
    """
    for parameter in parameters:
        main_grad = parameter.main_grad
        if divide_factor != 1.0:
            main_grad.div_(divide_factor)
        grad = main_grad.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            grad = DTensor.from_local(
                grad, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        parameter.grad = grad


def zero_main_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Main gradients to zero, and `parameter.grad` to None."""
    for parameter in parameters:
        parameter.main_grad.zero_()
        parameter.grad = None


def _sharding_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups whose ranks hold different parts of it."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    partial = [str(placement) for placement in parameter.placements if placement.is_partial()]
    if partial:
        raise ValueError(
            f"a parameter has placements {parameter.placements}: expected sharded or replicated ones, a partial sum has no norm"
        )
    return tuple(
        mesh.get_group(dim) for dim, placement in enumerate(parameter.placements) if not placement.is_replicate() and mesh.size(dim) > 1
    )


def _accumulated(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """sum |g|^p of these parts, FP32; the largest |g| for the infinite norm."""
    if not grads:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch.stack(
        [
            torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) if grad.numel() else grad.new_zeros((), dtype=torch.float32)
            for grad in grads
        ]
    )
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their total norm is at most `max_norm`; returns the total norm before, FP32, the same on every rank.

    parameters  plain tensors (every rank holds all of them, with equal gradients) and DTensors, on as many meshes as there are: experts
                over `ep` and FSDP, the rest over FSDP. A part that several ranks hold counts once
    Collective over the groups of the sharded parameters: every rank passes the same parameters. Those that require no gradient are
    ignored; one without .grad counts as zero. No gradient at all gives norm 0.
    Raises      ValueError (partial placements); RuntimeError for a norm that is not finite, if error_if_nonfinite
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        return torch.zeros(())
    device = parameters[0].device
    # By parameter, not by gradient: every rank must take part in the same reductions.
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        grads = by_groups.setdefault(_sharding_groups(parameter), [])
        if parameter.grad is not None:
            grads.append(local_part(parameter.grad))
    totals = []
    for groups, grads in by_groups.items():
        total = _accumulated(grads, norm_type, device)
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
        totals.append(total)
    total_norm = torch.stack(totals).max() if math.isinf(norm_type) else torch.stack(totals).sum().pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total_norm)):
        raise RuntimeError(f"the total norm of the gradients is {total_norm.item()}: expected a finite number")
    scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for grads in by_groups.values():
        for grad in grads:
            grad.mul_(scale.to(grad.device))
    return total_norm
