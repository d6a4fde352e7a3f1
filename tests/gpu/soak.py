"""Long runs of Mega MoE's forward in one launch, every step checked. A run says how many steps it made and what went wrong, and ends by itself if a
step hangs.

    python tests/gpu/soak.py {routing,neighbours,cases} [--ranks N] [--processes] [--seconds 300] [--count N] [--json FILE] [--on-cpu]

routing     random T (0 included), routing and save policy each step: y has the bits of the staged path, every gradient is within STAGED_BOUND of
            its; every ORACLE_EVERY-th step they meet the oracle's bounds too
neighbours  calls beside collectives and SM-filling kernels in random order (neighbours.py)
cases       a random small case each step, with buffers of its own, against the oracle

Ranks are virtual (one GPU), or with --processes one per process and GPU. --seconds and --count: whichever ends first; 0 = no such end.
Not a test module: `scripts/gpu_suite.py` runs it, and test_fused_soak.py takes its parts for a shorter time.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moe_support import make, random_case, small, spread, tiny
from process_support import OneOfRanks, Process, in_group, join

from deep_gemm.mega.checks import SAVE_POLICIES
from deep_gemm.testing import ROUTINGS, assert_bitwise_equal, assert_close, results
from deep_gemm.testing.moe_cases import MoeCase, Ranks, collect, compare, make_inputs, torch_outputs, truth

STEP_LIMIT_S = 120  # a step with kernels to compile takes half a minute
TIMEOUT_S = 15  # DG_TIMEOUT_S of processes
ORACLE_EVERY = 10
ORACLE_BOUND = 1e-2  # relative Frobenius error of y
STAGED_BOUND = 2e-2  # the same between two BF16 results

Step = Callable[[int], None]
Row = dict[str, object]


class Record:
    """What a run has done, as a row of a results file, which goes to `write`. A step that does not end in STEP_LIMIT_S ends the process, after that."""

    def __init__(self, case: str, *, seconds: float = 0.0, count: int = 0, write: Callable[[Row], None] = lambda row: None):
        if not seconds and not count:
            raise ValueError(f"seconds = {seconds}, count = {count}: expected at least one of them above 0")
        self.case, self.steps, self.faults = case, 0, []
        self._seconds, self._count, self._write = seconds or float("inf"), count or float("inf"), write
        self._start = time.monotonic()
        self._step_begin: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def run(self, step: Step, gather: Callable[[object], list] = lambda value: [value]) -> None:
        """Steps to the end of the time or the count. A wrong result is noted; any other error, after which nothing can be trusted, ends the run.

        gather: the value of every process by rank. All make the same steps, as long as rank 0 has time and no rank has an error.
        """
        sound = True
        while sound and gather(self._goes_on())[0]:
            self._step_begin = time.monotonic()
            sound, fault = self._make(step)
            reports = gather((sound, fault))
            self._step_begin = None
            for rank, (_, text) in enumerate(reports):
                if text:
                    self.note(text if len(reports) == 1 else f"rank {rank}: {text}")
            sound = all(report[0] for report in reports)
            self.steps += 1
        self.write()

    def _goes_on(self) -> bool:
        return self.steps < self._count and time.monotonic() - self._start < self._seconds

    def _make(self, step: Step) -> tuple[bool, str | None]:
        try:
            step(self.steps)
        except AssertionError as error:
            return True, str(error)
        except Exception as error:  # noqa: BLE001 - noted
            return False, f"{type(error).__name__}: {error}"
        return True, None

    def note(self, fault: str) -> None:
        self.faults.append(f"step {self.steps}: {fault[:2000]}")
        print(f"{self.case}: {self.faults[-1]}", flush=True)

    def write(self) -> None:
        self._write({"case": self.case, "steps": self.steps, "seconds": round(time.monotonic() - self._start, 1), "faults": self.faults})

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            begin = self._step_begin
            if begin is not None and time.monotonic() - begin > STEP_LIMIT_S:
                self.note(f"did not end in {STEP_LIMIT_S} s")
                faulthandler.dump_traceback(all_threads=True)
                self.write()
                os._exit(1)


@dataclass
class World:
    """Where a run takes place. process: None = virtual ranks in this process. rehearsal: on the CPU, where virtual ranks are one rank."""

    num_ranks: int
    device: torch.device
    rehearsal: bool
    process: Process | None = None

    @property
    def backends(self) -> tuple[str | None, str | None]:
        """Of the call that is looked at, and of the one that it is compared with."""
        return (None, None) if self.rehearsal else ("fused", "cuda")

    def case(self, case: MoeCase) -> MoeCase:
        """The case at a size that this place can bear."""
        return tiny(case) if self.rehearsal else case

    def make(self, case: MoeCase) -> Ranks:
        return OneOfRanks(self.process, case) if self.process else make(case, self.device, self.rehearsal, "fused")

    def share(self, case: MoeCase, tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """What this process makes of tensors over all ranks."""
        return tensors if tensors is None or self.process is None else self.process.share(case, tensors)

    def gather(self, value: object) -> list:
        """The value of every process."""
        if self.process is None:
            return [value]
        values: list = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values


class RandomRouting:
    """See "routing" above. Every process draws the same cases."""

    def __init__(self, world: World, seed: int = 0):
        self.world, self.choose = world, random.Random(seed)
        several_rounds = small(num_experts=32, tokens=spread(512, world.num_ranks), capacity_factor=0.25)
        one_round = MoeCase.of_model("qwen3-30b", spread(384, world.num_ranks))
        self.bases = [world.case(case) for case in (several_rounds, one_round)]
        self.ranks = [world.make(case) for case in self.bases]

    def __call__(self, step: int) -> None:
        which = self.choose.randrange(len(self.bases))
        case, ranks = self._draw(self.bases[which], step), self.ranks[which]
        ranks.load(case, make_inputs(case, self.world.device))
        poison = self.choose.random() < 0.5
        actual, expected = (self._outputs(ranks, backend, poison) for backend in self.world.backends)
        assert_bitwise_equal(actual["y"], expected["y"], name=f"{case.name} y")
        for name, tensor in expected.items():
            if tensor.numel():
                assert_close(actual[name], tensor, rel_frobenius=STAGED_BOUND, name=f"{case.name} {name}")
        if step % ORACLE_EVERY == 0:
            case, inputs = ranks.case, ranks.inputs
            exact, yardstick = (self.world.share(case, outputs(case, inputs)) for outputs in (truth, torch_outputs))
            _, faults = compare(case, actual, exact, yardstick)
            assert not faults, "\n".join(faults)

    def _draw(self, base: MoeCase, step: int) -> MoeCase:
        bound = base.tokens[0]
        tokens = tuple(self.choose.choice([0, 1, self.choose.randint(0, bound), bound]) for _ in base.tokens)
        return replace(base, tokens=tokens, routing=self.choose.choice(list(ROUTINGS)), save=self.choose.choice(SAVE_POLICIES), seed=step)

    @staticmethod
    def _outputs(ranks: Ranks, backend: str | None, poison: bool) -> dict[str, torch.Tensor]:
        if poison:
            ranks.poison()
        forward = ranks.forward(backend)
        if poison:
            ranks.poison()
        grads = ranks.backward([state for _, state in forward])
        for rank in ranks.here:
            ranks.buffers[rank].check()
        return collect([y for y, _ in forward], grads)


class RandomCases:
    """See "cases" above: 1 to 16 virtual ranks, whatever --ranks says."""

    def __init__(self, world: World, seed: int = 7):
        self.world, self.choose = world, random.Random(seed)

    def __call__(self, step: int) -> None:
        ranks = self.world.make(random_case(self.choose, step))
        try:
            ranks.poison()
            y = torch.cat([y for y, _ in ranks.forward()])
            for buffer in ranks.buffers:
                buffer.check()
            assert_close(y, truth(ranks.case, ranks.inputs)["y"], rel_frobenius=ORACLE_BOUND, name=ranks.case.name)
        finally:
            for buffer in ranks.buffers:
                buffer.destroy()


def steps_of(what: str, world: World) -> Step:
    if what == "neighbours":
        from neighbours import Neighbours  # its collectives are kernels of its own

        return Neighbours(world)
    return {"routing": RandomRouting, "cases": RandomCases}[what](world)


def name_of(options: argparse.Namespace) -> str:
    ranks = "EP1-16" if options.what == "cases" else f"EP{options.ranks}"
    return "/".join([options.what, ranks, "processes" if options.processes else "virtual", *(["rehearsal"] if options.on_cpu else [])])


def run(options: argparse.Namespace, world: World, write: Callable[[Row], None]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False  # of the oracle
    step = steps_of(options.what, world)
    Record(name_of(options), seconds=options.seconds, count=options.count, write=write).run(step, world.gather)


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    os.environ["NCCL_MAX_CTAS"] = "8"  # as docs/fused_forward.md asks for
    row = Path(folder, f"row{rank}.json")
    with in_group(rank, options.ranks, "cpu" if options.on_cpu else "cuda", folder, timeout_s=TIMEOUT_S) as process:
        run(options, World(options.ranks, process.device, options.on_cpu, process), lambda made: row.write_text(json.dumps(made)))


def run_processes(options: argparse.Namespace, write: Callable[[Row], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(worker, (options, folder), nprocs=options.ranks, join=False)
        failure = join(context, (options.seconds or 3600) + 2 * STEP_LIMIT_S)
        row = Path(folder, "row0.json")
        made = json.loads(row.read_text()) if row.exists() else {"case": name_of(options), "steps": 0, "seconds": 0.0, "faults": []}
    write({**made, "faults": made["faults"] + ([] if failure is None else [failure])})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["routing", "neighbours", "cases"])
    parser.add_argument("--ranks", type=int, default=None, help="default: 8 (routing), 4 (neighbours); with --processes 2")
    parser.add_argument("--processes", action="store_true", help="a rank per process and GPU")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--on-cpu", action="store_true", help="rehearsal: tiny shapes, the reference backend")
    options = parser.parse_args(arguments)
    options.ranks = options.ranks or (2 if options.processes else {"neighbours": 4}.get(options.what, 8))
    if options.what == "cases" and options.processes:
        parser.error("cases --processes: expected virtual ranks, whose number changes from case to case")
    if options.processes and not options.on_cpu and torch.cuda.device_count() < options.ranks:
        parser.error(f"--processes --ranks {options.ranks}: this machine shows {torch.cuda.device_count()} GPUs")
    return options


def main(arguments: list[str] | None = None) -> int:
    options, rows = parse(arguments), []
    environment = results.environment(num_gpus=options.ranks if options.processes else 1)

    def write(row: Row) -> None:
        rows.append(row)
        print(
            f"{row['case']}: {row['steps']} steps in {row['seconds']} s, {len(row['faults'])} faults", *row["faults"], sep="\n", flush=True
        )
        if options.json:
            results.merge(options.json, [row], key=("case",), env=environment)

    if options.processes:
        run_processes(options, write)
    else:
        device = torch.device("cpu") if options.on_cpu else torch.device("cuda", torch.cuda.current_device())
        run(options, World(options.ranks, device, options.on_cpu), write)
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
