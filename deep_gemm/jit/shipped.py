"""All kernels in use: what warm-up, CI (registers, spills, SASS) and a kernel pack go through."""

from __future__ import annotations

import importlib

from .spec import KernelSpec

# "module:function"; the function takes nothing and returns every KernelSpec that its module can ask for.
PROVIDERS: list[str] = ["deep_gemm.gemm:shipped_specs", "deep_gemm.mega.staged.kernels:shipped_specs", "deep_gemm.mega.fused.config:shipped_specs"]


def register_shipped(provider: str) -> None:
    """Adds a "module:function" to the list; the module is imported only when the list is read."""
    module, _, function = provider.partition(":")
    if not module or not function:
        raise ValueError(f"provider = {provider!r}, expected 'module:function'")
    if provider not in PROVIDERS:
        PROVIDERS.append(provider)


def shipped_specs(arch: str | None = None) -> list[KernelSpec]:
    """The specs of all providers, without duplicates; `arch` ("sm_90a") keeps those of one architecture."""
    found: dict[KernelSpec, None] = {}
    for provider in PROVIDERS:
        module, _, function = provider.partition(":")
        found.update(dict.fromkeys(getattr(importlib.import_module(module), function)()))
    return [spec for spec in found if arch in (None, spec.arch)]
