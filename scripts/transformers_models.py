"""Which models of the installed transformers fit experts_implementation="mega_moe": the tables of docs/integrations/transformers.md.

    python scripts/transformers_models.py [--write]

Every module class of the experts interface is made on the meta device with the default configuration of its model and asked by
`deep_gemm.integrations.transformers.why_not`. Needs deep_gemm installed, or PYTHONPATH=. in the checkout.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

import deep_gemm.integrations.transformers as integration

PAGE = Path(__file__).resolve().parents[1] / "docs" / "integrations" / "transformers.md"
# Models whose smallest member is dense have no sizes for experts in their default configuration.
_OFF_BY_DEFAULT = {"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 128, "top_k_experts": 2}
BEGIN, END = "<!-- models -->", "<!-- /models -->"


def interface_classes() -> Iterator[tuple[str, type[nn.Module]]]:
    """(folder of the model, class) of all that use the decorator."""
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        if "@use_experts_implementation" not in path.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for _, value in sorted(vars(module).items()):
            if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "_apply_gate"):
                yield path.parent.name, value


def configurations(folder: str) -> Iterator[PreTrainedConfig]:
    """Default configurations of the model, those of text models first."""
    root = Path(transformers.__file__).parent / "models" / folder
    classes = []
    for path in sorted(root.glob("configuration_*.py")):
        module = importlib.import_module(f"transformers.models.{folder}.{path.stem}")
        classes += [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__]
    for value in sorted(classes, key=lambda value: ("Vision" in value.__name__ or "Audio" in value.__name__, "Text" not in value.__name__)):
        if issubclass(value, PreTrainedConfig):
            try:
                config = value()
            except (TypeError, ValueError, AttributeError):  # a configuration without defaults
                continue
            for name, size in _OFF_BY_DEFAULT.items():
                if getattr(config, name, size) is None:
                    setattr(config, name, size)
            yield config


def on_meta(folder: str, experts_class: type[nn.Module]) -> nn.Module:
    """The experts of the first configuration that has what they read."""
    for config in configurations(folder):
        sizes = getattr(config, "moe_intermediate_size", None)
        of_text = sizes[:1] if isinstance(sizes, (list, tuple)) else []  # of text and of vision experts: an argument of theirs
        try:
            with torch.device("meta"):
                experts = experts_class(config, *of_text)
        except (AttributeError, TypeError, KeyError):  # the configuration of another part of the model
            continue
        return experts
    raise LookupError(f"{folder}: none of its configurations makes a {experts_class.__name__}")


def verdicts() -> list[tuple[str, str, str | None]]:
    """(folder, class, why not) of all, by name."""
    return [(folder, cls.__name__, integration.why_not(on_meta(folder, cls))) for folder, cls in interface_classes()]


def tables() -> str:
    found = verdicts()
    fits = sorted({folder for folder, _, reason in found if reason is None})
    lines = [
        f"transformers {transformers.__version__}. {len(fits)} models fit, by the name of their folder under `transformers/models`:",
        "",
    ]
    lines += [", ".join(f"`{folder}`" for folder in fits) + ".", "", "| does not fit | property |", "| --- | --- |"]
    lines += [f"| `{folder}` | {reason.partition('; expected')[0]} |" for folder, _, reason in found if reason is not None]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write them into {PAGE.relative_to(PAGE.parents[2])}")
    text = tables()
    if not parser.parse_args().write:
        print(text)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
