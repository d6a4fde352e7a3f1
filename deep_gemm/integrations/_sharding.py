"""Experts as DTensors over an expert-parallel mesh, FSDP2 over what remains, and state dicts of the whole. No trainer is imported.

mesh_and_group(group, ...)         a process group or a mesh of one dimension -> both
sharded(parameter, mesh)           this rank's experts as a DTensor parameter, Shard(0)
fsdp_over_experts(module, ...)     FSDP2 over the "fsdp" dimension for parameters that are sharded over "ep"
DivideGradient                     the identity, whose backward divides
full_state_dict, load_full_state_dict
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard


def mesh_and_group(group: dist.ProcessGroup | DeviceMesh, device_type: str) -> tuple[DeviceMesh, dist.ProcessGroup]:
    if not isinstance(group, DeviceMesh):
        return DeviceMesh.from_group(group, device_type), group
    if group.ndim != 1:
        raise ValueError(
            f"group = DeviceMesh with dimensions {group.mesh_dim_names or group.ndim}: expected one dimension, such as mesh['ep']"
        )
    return group, group.get_group()


def sharded(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """[E, ...] of all experts -> DTensor of the same global shape that holds this rank's. A copy, so that the rest is freed."""
    local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False), requires_grad=parameter.requires_grad)


def fsdp_over_experts(
    experts: nn.Module, num_local_experts: int, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy, reshard_after_forward: bool
) -> None:
    """One FSDP2 unit over `mesh` ("fsdp"). Its inputs are never cast: routing weights stay as they are. Gradients become means over `mesh`."""
    dim = 0 if num_local_experts % mesh.size() == 0 else 1  # fewer experts than ranks: cut their rows
    fully_shard(
        experts,
        mesh=mesh,
        shard_placement_fn=lambda _: Shard(dim),
        mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False),
        reshard_after_forward=reshard_after_forward,
    )


class DivideGradient(torch.autograd.Function):
    """weight -> weight; gradient -> gradient / factor.

    What FSDP2 leaves of the mean over all ranks, for weights whose gradients are sums over `factor` ranks already. Its own
    set_gradient_divide_factor is not used: torch 2.13 divides twice where sums are plain and the mesh has one rank, and gloo has plain sums only.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient / ctx.factor, None


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the unsharded model, on the CPU of rank 0; empty on the other ranks. Collective over all ranks."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_full_state_dict(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Each rank takes its part of the unsharded model's state dict, which every rank passes."""
    set_model_state_dict(model, state_dict, options=StateDictOptions(full_state_dict=True))
