"""The staged CUDA backend of Mega MoE: several launches a direction.

regions.py    what lies where in symmetric memory and scratch (host side of layout/mega_moe_layout.h)
kernels.py    the kernels around the GEMMs, and one launch by name
call.py       the steps of a call: publish, barrier, plan, dispatch, GEMM 1, activation, push, combine
forward.py    the steps in order, forward: A (through the activation) and B (GEMM 2 and combine)
backward.py   the same, backward
faults.py     what kernels report without a synchronisation, as exceptions
backend.py    StagedBackend: the Backend protocol over all of it
"""
