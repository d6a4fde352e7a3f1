"""Process of `warmup`: reads a base64 pickle of a KernelSpec a line, puts its cubin into the cache, answers a JSON line.

It runs on the pickles of its parent only, over a pipe that nobody else holds."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys

from .warmup import attempt


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a print inside must not reach the answers
    for line in sys.stdin:
        print(json.dumps(attempt(pickle.loads(base64.b64decode(line)))), file=answers, flush=True)


if __name__ == "__main__":
    main()
