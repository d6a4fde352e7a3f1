"""Which installed distributions own the package folder `deep_gemm`.

`sgl-deep-gemm` and DeepGEMM itself install files of the same name: installed beside this library they overwrite a part of it, and what runs
then is a mixture. No dependency resolver sees that, because the distributions' names differ."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

_NAMED_ALIKE = re.compile(r"deep[-_.]?gemm", re.IGNORECASE)


@dataclass(frozen=True)
class Distribution:
    """name: normalised as by PEP 503; folder: the one on sys.path that holds its dist-info."""

    name: str
    version: str
    folder: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def _owns_package(info: str) -> bool:
    """From what the installer wrote down: RECORD lists the files; an editable install has none there, but says so in top_level.txt."""
    for name, owns in (("RECORD", lambda line: line.startswith("deep_gemm/")), ("top_level.txt", lambda line: line.strip() == "deep_gemm")):
        try:
            with open(os.path.join(info, name), encoding="utf-8", errors="replace") as file:
                if any(map(owns, file)):
                    return True
        except OSError:
            pass
    return False


def owners(folder: str | os.PathLike[str], *, any_name: bool = False) -> list[Distribution]:
    """The distributions in `folder` (a site-packages) that own `deep_gemm`, in order of name.

    Only names like deep_gemm are looked into, which takes one listing of the folder; `any_name` reads the record of every distribution."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))
    except OSError:
        return []
    found = []
    for entry in names:
        name, _, version = entry.removesuffix(".dist-info").rpartition("-")
        if (any_name or _NAMED_ALIKE.search(name)) and _owns_package(os.path.join(folder, entry)):
            found.append(Distribution(re.sub(r"[-_.]+", "-", name).lower(), version, str(folder)))
    return found


def owners_on_path(path: Iterable[str]) -> list[Distribution]:
    """As `owners`, for all folders of `path` (sys.path), and whatever the distributions are called."""
    folders = dict.fromkeys(os.path.realpath(entry or ".") for entry in path)
    return [owner for folder in folders for owner in owners(folder, any_name=True)]


def remedy(found: Iterable[Distribution]) -> str:
    """What to do when these share the folder: uninstalling one also removes the files that the other still needs."""
    names = " ".join(dict.fromkeys(owner.name for owner in found))
    return f"pip uninstall {names}, then install deep_gemm again from its own index (docs/installing.md)"


def warn_if_shared(folder: str | os.PathLike[str]) -> None:
    """RuntimeWarning when two distributions in `folder` own the package. Called once, at import, with the package's own."""
    found = owners(folder)
    if len(found) > 1:
        warnings.warn(
            f"{' and '.join(map(str, found))} all install the package `deep_gemm` into {folder}: files of one overwrite those of the other. "
            f"Remedy: {remedy(found)}",
            RuntimeWarning,
            stacklevel=4,  # past deep_gemm/__init__.py: the line that imports it
        )
