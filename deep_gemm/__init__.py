"""DeepGEMM for training: grouped GEMMs and Mega MoE, forward and backward.

Names are loaded on first use, so that importing the package needs no GPU, driver, toolkit or NVRTC.
"""

from __future__ import annotations

import importlib
import os

_NAMES_BY_MODULE = {
    "_version": ("__version__",),
    "mega.api": ("get_symm_buffer_for_mega_moe", "mega_moe", "mega_moe_bwd", "mega_moe_fwd"),
    "mega.buffer": ("MegaMoeBuffer",),
    "mega.memory": ("MegaMoeBytes", "mega_moe_plan_bytes"),
    "mega.state": ("MegaMoeGradients", "MegaMoeState"),
    "mega.backward_only": ("bf16_mega_moe_backward",),
    "mega.forward_only": ("bf16_mega_moe", "fp8_mega_moe", "transform_weights_for_mega_moe"),
    "errors": ("BackendUnavailable", "CompileError", "PeerTimeoutError"),
    "gemm": (
        "bf16_gemm_nn",
        "bf16_gemm_nt",
        "bf16_gemm_tn",
        "bf16_gemm_tt",
        "get_mk_alignment_for_contiguous_layout",
        "get_num_sms",
        "k_grouped_bf16_gemm_tn_contiguous",
        "m_grouped_bf16_gemm_nn_contiguous",
        "m_grouped_bf16_gemm_nt_contiguous",
        "m_grouped_bf16_gemm_nt_masked",
        "plan_gemm",
        "set_num_sms",
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
_SUBMODULES = ("activation", "environment", "errors", "gemm", "jit", "mega", "nn", "quant", "reference", "testing")

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def _warn_if_shared() -> None:
    """One listing of the folder (0.2 ms); the module that looks closer, and imports of its own (15 ms), only where there is something to see."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        alike = [name for name in os.listdir(folder) if name.endswith(".dist-info") and "gemm" in name.lower()]
    except OSError:  # a zip file, or a folder that may only be entered: nothing can be said
        return
    if len(alike) > 1:
        from .distributions import warn_if_shared

        warn_if_shared(folder)


_warn_if_shared()


def _import(module: str) -> object:
    try:
        return importlib.import_module(f"deep_gemm.{module}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError("deep_gemm needs PyTorch, which is not installed: pip install 'torch>=2.9'", name="torch") from error


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        value = getattr(_import(_MODULE_OF[name]), name)
    elif name in _SUBMODULES:
        value = _import(name)
    else:
        raise AttributeError(f"module 'deep_gemm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
