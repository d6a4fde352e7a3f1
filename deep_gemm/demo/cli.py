"""python -m deep_gemm.demo [--steps N] [--ep N] [--device auto|cpu|cuda] [--seed N] [--out DIR]

Not in __main__.py, whose functions spawned processes could not find. Exit status: 0 if the MoE gradients agree with autograd, 1 if not, 2 for a fault in the flags or the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deep_gemm.demo.data import load_corpus
from deep_gemm.demo.model import ModelConfig
from deep_gemm.demo.report import Report
from deep_gemm.demo.training import Ranks, Trainer, TrainingConfig
from deep_gemm.mega.backend import cuda_missing

_POSTFIX_EVERY = 10  # steps between readings of the loss, each of which waits for the device


class UsageError(Exception):
    """The flags and the machine do not fit; the text says what to change."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(
        "python -m deep_gemm.demo", description="Train a small mixture-of-experts language model on real text."
    )
    parser.add_argument("--steps", type=int, default=defaults.steps, help=f"AdamW steps (default {defaults.steps})")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel processes; on CUDA one GPU each (default 1)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of loss.json and loss.png (default demo-out)")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.ep < 1:
        parser.error(f"--steps {options.steps} --ep {options.ep}: expected at least 1")
    return options


def check_needs() -> None:
    """Before any process is started: what is missing, once and in one sentence."""
    if importlib.util.find_spec("tqdm") is None:
        raise UsageError("the progress bar needs tqdm, which is not installed: pip install tqdm")
    try:
        load_corpus()
    except RuntimeError as error:
        raise UsageError(str(error)) from error


def check_ep(ep: int) -> None:
    batch, num_experts = TrainingConfig().batch, ModelConfig().num_experts
    if batch % ep or num_experts % ep:
        raise UsageError(f"--ep {ep}: expected a divisor of the batch ({batch} windows) and of the number of experts ({num_experts})")


def choose_device(wanted: str, ep: int) -> tuple[str, str]:
    """(device type, why)."""
    missing = "it was asked for" if wanted == "cpu" else cuda_missing(torch.device("cuda"))
    if missing is None and torch.cuda.device_count() < ep:
        missing = f"--ep {ep} needs {ep} GPUs, this machine shows {torch.cuda.device_count()}"
    if missing is None:
        return "cuda", torch.cuda.get_device_name()
    if wanted == "cuda":
        raise UsageError(f"--device cuda: {missing}")
    return "cpu", missing


def _progress(trainer: Trainer, show: bool) -> list[float]:
    from tqdm import tqdm

    losses = []
    with tqdm(trainer.train(), total=trainer.training.steps, disable=not show, unit="step") as bar:
        for step, loss in bar:
            losses.append(loss)
            if step % _POSTFIX_EVERY == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}")
    return torch.stack(losses).tolist()


def run(options: argparse.Namespace, ranks: Ranks, device: torch.device) -> Report:
    """Train and check on this rank; rank 0 prints and saves."""
    from deep_gemm.demo.check import gradient_error

    show = ranks.rank == 0
    config, training = ModelConfig(), replace(TrainingConfig(), steps=options.steps, seed=options.seed)
    corpus = load_corpus()
    trainer = Trainer(config, training, corpus, ranks, device)
    if show:
        print(f"text: {corpus.source}")
        count = sum(p.numel() for p in trainer.dense) + ranks.size * sum(p.numel() for p in trainer.experts)
        print(
            f"model: {count / 1e6:.2f} M parameters, {config.num_layers} layers of {config.num_experts} experts, top {config.num_topk}",
            flush=True,
        )
    before = trainer.heldout_loss()
    start = time.perf_counter()
    losses = _progress(trainer, show)
    seconds = time.perf_counter() - start
    after = trainer.heldout_loss()
    error, threshold = gradient_error(trainer)
    settings = {"model": asdict(config), "training": asdict(training), "ep": ranks.size, "device": str(device), "text": corpus.source}
    report = Report(settings, losses, before, after, error, threshold, seconds)
    if show:
        print("\n".join(report.save(options.out) + report.lines()), flush=True)
    return report


def _worker(rank: int, options: argparse.Namespace, device_type: str, folder: str) -> None:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
        backend = {"backend": "nccl", "device_id": device}
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ep))
        backend = {"backend": "gloo"}
    dist.init_process_group(init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ep, **backend)
    try:
        report = run(options, Ranks(rank, options.ep, dist.group.WORLD), device)
        if rank == 0:
            Path(folder, "verdict").write_text("ok" if report.gradients_agree else "failed")
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        check_needs()
        check_ep(options.ep)
        device_type, why = choose_device(options.device, options.ep)
        print(f"device: {device_type} ({why}), {options.ep} process(es)", flush=True)
        if options.ep == 1:
            return 0 if run(options, Ranks(), torch.device(device_type)).gradients_agree else 1
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_worker, (options, device_type, folder), nprocs=options.ep)
            return 0 if Path(folder, "verdict").read_text() == "ok" else 1
    except UsageError as error:
        print(f"python -m deep_gemm.demo: {error}", file=sys.stderr)
        return 2
