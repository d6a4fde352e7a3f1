"""Mega MoE: dispatch, two grouped GEMMs with SwiGLU between them, combine, and the backward of it all, behind one call.

api.py      the public calls                         forward_only.py  DeepGEMM's forward-only names
checks.py   arguments -> Problem                     ops.py           torch.library operators and autograd
buffer.py   shared settings, symmetric memory        state.py         what forward hands to backward
groups.py   who the ranks are                        backend.py       what a backend promises; staged/ is the CUDA one
memory.py   what a layer costs, in bytes             backward_only.py the backward of those names, as trainers call it
"""
