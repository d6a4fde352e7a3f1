"""What a run leaves behind: loss.json, with commit and machine as every results file, and loss.png where matplotlib is installed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from deep_gemm.testing import results


@dataclass(frozen=True)
class Report:
    """heldout_before, heldout_after: nats per byte; gradient_error: relative, against autograd of the plain formula."""

    settings: dict
    train_loss: list[float]
    heldout_before: float
    heldout_after: float
    gradient_error: float
    gradient_threshold: float
    seconds: float

    @property
    def gradients_agree(self) -> bool:
        return self.gradient_error <= self.gradient_threshold  # False for NaN

    def lines(self) -> list[str]:
        verdict = "ok" if self.gradients_agree else "FAILED"
        trained = f"{len(self.train_loss)} steps, {self.seconds:.0f} s"
        compared = f"relative error {self.gradient_error:.2e}, threshold {self.gradient_threshold:.0e}: {verdict}"
        return [
            f"held-out loss: {self.heldout_before:.3f} -> {self.heldout_after:.3f} nats/byte ({trained})",
            f"MoE gradients against autograd of the plain formula: {compared}",
        ]

    def save(self, folder: Path) -> list[str]:
        """Write into `folder`, which is made if missing; one line for each file, or for why there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".loss.json.{os.getpid()}"
        partial.write_text(json.dumps({**results.environment(), **asdict(self)}, indent=1) + "\n")
        os.replace(partial, folder / "loss.json")
        return [f"wrote {folder / 'loss.json'}", self._plot(folder / "loss.png")]

    def _plot(self, path: Path) -> str:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return "no loss.png: matplotlib is not installed (pip install matplotlib)"
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)  # its own canvas: no display, no global pyplot state
        axes = figure.add_subplot(xlabel="step", ylabel="nats per byte", title="Training on the Python standard library")
        axes.plot(self.train_loss, linewidth=1, label="training batch")
        axes.plot([0, len(self.train_loss)], [self.heldout_before, self.heldout_after], "o", label="held-out files")
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        return f"wrote {path}"
