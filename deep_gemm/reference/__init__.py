"""The oracle, which is also the CPU backend.

swiglu.py     the activation and its derivative          experts.py  GEMMs of one rank's experts on dispatched rows, closed-form backward
precision.py  which operands a precision quantises       exchange.py routing plan, dispatch and collect over torch.distributed
moe.py        the whole layer: `forward`, `backward`     backend.py  the `Backend` protocol of `mega/backend.py` on top of it
"""

from .moe import backward, forward
from .precision import PRECISIONS
from .swiglu import dswiglu, swiglu

__all__ = ["PRECISIONS", "backward", "dswiglu", "forward", "swiglu"]
