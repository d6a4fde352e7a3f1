"""The one-launch forward of Mega MoE on CUDA (docs/fused_forward.md).

config.py     the variants of the kernel, and which one serves a shape
forward.py    one launch: its arguments from a problem and the buffer's memory
backend.py    FusedBackend: forward in one launch, backward of the staged backend
"""
