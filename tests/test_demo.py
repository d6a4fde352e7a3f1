"""The demo: its loss falls, its gradient check passes and can fail, two ranks train the same model as one, and its faults are one clear line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deep_gemm.demo import check, cli
from deep_gemm.demo.data import is_held_out, load_corpus
from deep_gemm.demo.model import ModelConfig
from deep_gemm.demo.training import Ranks, Trainer, TrainingConfig

CPU = torch.device("cpu")
SMALL = ModelConfig(num_layers=1, hidden=32, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4, intermediate_hidden=16)
SHORT = TrainingConfig(steps=8, batch=4, length=32, warmup_steps=2)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


def trainer(corpus, ranks: Ranks | None = None, training: TrainingConfig = SHORT) -> Trainer:
    return Trainer(SMALL, training, corpus, ranks or Ranks(), CPU)


def test_split_is_by_whole_files_and_the_same_every_time(corpus, tmp_path):
    again = load_corpus()
    assert torch.equal(corpus.train, again.train) and torch.equal(corpus.heldout, again.heldout)
    for number in range(60):
        (tmp_path / f"m{number}.py").write_bytes(b"%d\n" % number * 8000)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.py").write_bytes(b"\xff" * 9)
    split = load_corpus(tmp_path)
    expected = {
        held: b"".join(p.read_bytes() for p in sorted(tmp_path.glob("m*.py")) if is_held_out(p.name) == held) for held in (False, True)
    }
    assert bytes(split.train.tolist()) == expected[False] and bytes(split.heldout.tolist()) == expected[True]


def test_too_little_text_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="text: .* expected at least 100000"):
        load_corpus(tmp_path)


def test_batches_depend_on_step_and_seed_only(corpus):
    batch = corpus.batch(3, 0, 4, 16)
    assert batch.shape == (4, 17) and torch.equal(batch, corpus.batch(3, 0, 4, 16))
    assert not torch.equal(batch, corpus.batch(4, 0, 4, 16)) and not torch.equal(batch, corpus.batch(3, 1, 4, 16))


def test_command_trains_saves_and_reports(tmp_path, capsys):
    assert cli.main(["--steps", "30", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "loss.json").read_text())
    assert len(report["train_loss"]) == 30
    assert 5.3 < report["heldout_before"] < 5.7 and report["heldout_after"] < 3.2
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("MoE gradients against autograd of the plain formula: relative error") and last.endswith("ok")


def test_loss_curve_without_matplotlib_says_so(tmp_path, monkeypatch, corpus):
    for name in ("matplotlib", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    report = cli.Report({}, [1.0], 1.0, 1.0, 0.0, 1.0, 0.0)
    assert report.save(tmp_path)[1] == "no loss.png: matplotlib is not installed (pip install matplotlib)"
    assert [path.name for path in tmp_path.iterdir()] == ["loss.json"]


@pytest.mark.parametrize("spoil", ["scale", "nan"])
def test_wrong_gradients_end_with_status_one(tmp_path, monkeypatch, capsys, spoil):
    plain = check.plain_moe
    factor = {"scale": 1.001, "nan": float("nan")}[spoil]
    monkeypatch.setattr(check, "plain_moe", lambda *arguments: plain(*arguments) * factor)
    assert cli.main(["--steps", "1", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.strip().endswith("FAILED")


def test_faults_are_one_line(monkeypatch, capsys):
    assert cli.main(["--ep", "3"]) == 2
    assert "--ep 3: expected a divisor of the batch (16 windows) and of the number of experts (8)" in capsys.readouterr().err
    monkeypatch.setattr(cli, "cuda_missing", lambda device: "no GPU here")
    assert cli.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err.strip() == "python -m deep_gemm.demo: --device cuda: no GPU here"


def test_masters_keep_what_bf16_cannot():
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = cli_optimizer(parameter)
    for _ in range(100):
        optimizer.step([torch.ones(4)], 1e-4)  # 1 - 1e-4 rounds to 1 in BF16: without masters nothing would ever move
    assert parameter.detach().float().mean().item() == pytest.approx(0.99, abs=4e-3)


def cli_optimizer(parameter: torch.nn.Parameter):
    from deep_gemm.demo.training import MasterAdamW

    return MasterAdamW([parameter], replace(SHORT, weight_decay=0.0))


def test_schedule_warms_up_and_decays():
    rates = [SHORT.learning_rate_at(step) for step in range(SHORT.steps)]
    assert rates[0] == SHORT.learning_rate / 2 and max(rates) == SHORT.learning_rate and rates[-1] < 0.3 * SHORT.learning_rate


def _ep_worker(rank: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    try:
        corpus = load_corpus()
        ranks = Ranks(rank, num_ranks, dist.group.WORLD)
        one = trainer(corpus, ranks)
        before = one.heldout_loss()
        loss, gradients = one.gradients(0)
        gradients = [g.clone() for g in gradients]
        one.clip_(clipped := [g.clone() for g in gradients])
        losses = [loss.item() for _, loss in one.train()]
        error, threshold = check.gradient_error(one)
        count = len(one.dense)
        torch.save((before, loss, gradients[:count], gradients[count:], clipped, losses, error <= threshold), f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_ranks_have_the_gradients_and_the_losses_of_one(tmp_path, corpus):
    mp.spawn(_ep_worker, (2, str(tmp_path)), nprocs=2)
    one = trainer(corpus)
    before = one.heldout_loss()
    loss, gradients = one.gradients(0)
    clipped = [g.clone() for g in gradients]
    one.clip_(clipped)
    losses = [loss.item() for _, loss in one.train()]
    count = len(one.dense)
    for rank in range(2):
        ep_before, ep_loss, dense, experts, ep_clipped, ep_losses, agrees = torch.load(Path(tmp_path, f"rank{rank}.pt"))
        mine = [g.chunk(2)[rank] for g in gradients[count:]]
        assert agrees
        torch.testing.assert_close(ep_loss, loss)
        torch.testing.assert_close(dense, gradients[:count], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(experts, mine, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ep_clipped, clipped[:count] + [g.chunk(2)[rank] for g in clipped[count:]], rtol=1e-4, atol=1e-6)
        assert ep_before == pytest.approx(before, rel=1e-5) and ep_losses == pytest.approx(losses, rel=1e-3)
    assert any(g.abs().max() > 1e-4 for g in gradients[count:]), "expert gradients too small for the comparison to mean anything"
