"""Text that every machine with Python has: the sources of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "turtledemo"}
_HELD_OUT_OF = 10  # one file in so many, chosen by a checksum of its name


@dataclass(frozen=True)
class Corpus:
    """train, heldout: uint8 bytes of whole files, in the order of their names; no file is in both."""

    train: torch.Tensor
    heldout: torch.Tensor
    source: str

    def batch(self, step: int, seed: int, size: int, length: int) -> torch.Tensor:
        """[size, length + 1] int64: windows at random places of the training text. Depends on the arguments only, so every rank draws the same."""
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        starts = torch.randint(len(self.train) - length - 1, (size,), generator=generator)
        return _windows(self.train, starts, length)

    def heldout_batches(self, count: int, size: int, length: int) -> list[torch.Tensor]:
        """`count` batches [size, length + 1] of evenly spaced windows of the held-out text."""
        starts = torch.linspace(0, len(self.heldout) - length - 1, count * size, dtype=torch.float64).long()
        return [_windows(self.heldout, part, length) for part in starts.split(size)]


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length + 1)].long()


def is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % _HELD_OUT_OF == 0


def load_corpus(root: str | Path | None = None) -> Corpus:
    """The *.py files under `root` (default: the standard library of this Python), without tests and installed packages.

    Raises RuntimeError if there is too little text, as in a Python that keeps its library in an archive.
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    names = sorted(
        path.relative_to(root).as_posix() for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts[:-1])
    )
    for name in names:
        parts[is_held_out(name)].append((root / name).read_bytes())
    train, heldout = (torch.frombuffer(bytearray(b"".join(parts[kind]) or b"\0"), dtype=torch.uint8) for kind in (False, True))
    if min(len(train), len(heldout)) < 100_000:
        raise RuntimeError(
            f"text: {len(train)} bytes to train on and {len(heldout)} held out under {root}; expected at least 100000 of each"
        )
    source = f"{root}: {len(parts[False])} files, {len(train) / 1e6:.1f} MB; held out {len(parts[True])} files, {len(heldout) / 1e6:.1f} MB"
    return Corpus(train, heldout, source)
