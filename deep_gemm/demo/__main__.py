"""`python -m deep_gemm.demo`: see cli.py."""

from __future__ import annotations

import sys

from deep_gemm.demo.cli import main

if __name__ == "__main__":
    sys.exit(main())
