"""`python -m deep_gemm` and the console script `deep-gemm`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ._version import __version__


def _doctor(arguments: argparse.Namespace) -> int:
    from . import doctor

    lines = doctor.diagnose()
    report = doctor.as_json(lines)
    print(json.dumps(report, indent=1) if arguments.json else doctor.as_text(lines))
    return 0 if report["ok"] else 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="deep-gemm", description="Tools of the deep_gemm library.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="what this machine has and lacks to run the kernels",
        description="Prints OK, WARN or FAIL for each part that the kernels need, and what to do about it. Exit status 1 if anything is FAIL.",
    )
    doctor.add_argument("--json", action="store_true", help="the same as JSON")
    doctor.set_defaults(run=_doctor)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parser().parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
