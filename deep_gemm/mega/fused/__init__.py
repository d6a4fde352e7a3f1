"""Mega MoE on CUDA in one launch per direction (docs/fused_forward.md, docs/fused_backward.md).

config.py     the variants of the kernels, and which one serves a shape
launch.py     arguments that both directions take
forward.py    one launch: its arguments from a problem and the buffer's memory
backward.py   the same for the backward
backend.py    FusedBackend
"""
