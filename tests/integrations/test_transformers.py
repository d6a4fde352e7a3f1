"""transformers' Qwen3-MoE with experts_implementation="mega_moe" on one rank: values, gradients, every training option, every model that fits."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers (the test extra of pyproject.toml)")

import torch
from hf_models import EXPERTS, SEQUENCE, assert_gradients, batch, loss_of, make_model, mean_gradients, relative
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import deep_gemm.integrations.transformers as hf
from deep_gemm.integrations._buffers import release_buffers
from deep_gemm.reference.backend import ReferenceBackend

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def released():
    yield
    release_buffers()


@pytest.fixture(scope="module")
def expected():
    return mean_gradients(make_model("eager"), [batch(0)])


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def experts_of(model, layer: int = 0):
    return model.model.layers[layer].mlp.experts


def test_import_registers_the_implementation():
    assert ALL_EXPERTS_FUNCTIONS["mega_moe"] is hf.mega_moe_experts_forward
    assert make_model("mega_moe").config._experts_implementation == "mega_moe"


@pytest.mark.parametrize("save", ["recompute", "preact"])
def test_fp32_logits_and_gradients_equal_the_eager_models(expected, save):
    model = make_model("mega_moe")
    hf.configure(model, save=save)
    torch.testing.assert_close(model(input_ids=batch(0)).logits, make_model("eager")(input_ids=batch(0)).logits, rtol=1e-5, atol=1e-5)
    loss_of(model, batch(0)).backward()
    assert_gradients(gradients(model), expected)


def test_bf16_errors_are_those_of_the_eager_model(expected):
    """Against the FP32 model, of the same rounded weights."""
    reference = make_model("eager", dtype=torch.bfloat16).float()
    truth = mean_gradients(reference, [batch(0)])
    errors = {}
    for implementation in ("eager", "mega_moe"):
        model = make_model(implementation, dtype=torch.bfloat16)
        made = mean_gradients(model, [batch(0)]) | {"logits": model(input_ids=batch(0)).logits.detach()}
        errors[implementation] = {
            name: relative(made[name], ({"logits": reference(input_ids=batch(0)).logits} | truth)[name]) for name in made
        }
    wrong = {
        name: (error, errors["eager"][name])
        for name, error in errors["mega_moe"].items()
        if not error <= 1.5 * errors["eager"][name] + 2e-3
    }
    assert not wrong


def test_implementations_can_be_switched_on_a_model():
    model = make_model("eager")
    before = model(input_ids=batch(0)).logits
    model.set_experts_implementation("mega_moe")
    torch.testing.assert_close(model(input_ids=batch(0)).logits, before, rtol=1e-5, atol=1e-5)
    assert getattr(experts_of(model), hf._STATE).buffer is getattr(experts_of(model, 1), hf._STATE).buffer is not None


def test_sentinel_ids_are_no_expert():
    """Ids of num_experts and above: not mine. Nothing of them reaches y or a gradient."""
    torch.manual_seed(0)
    eager, ours = experts_of(make_model("eager")), experts_of(make_model("mega_moe"))
    x, weights = torch.randn(7, 32), torch.rand(7, 2)
    ids = torch.randint(EXPERTS, (7, 2))
    ids[0], ids[3, 1], ids[5, 0] = EXPERTS, EXPERTS, EXPERTS
    made = []
    for experts in (eager, ours):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = experts(leaves[0], ids, leaves[1])
        y.square().sum().backward()
        made.append([y, *(leaf.grad for leaf in leaves), experts.gate_up_proj.grad, experts.down_proj.grad])
    for theirs, mine in zip(*made):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert not made[1][0][0].any() and not made[1][2][ids == EXPERTS].any()


def test_longer_batches_make_a_larger_buffer():
    model = make_model("mega_moe")
    for rows in (1, 40, 2):
        ids = batch(0, rows=rows)
        torch.testing.assert_close(model(input_ids=ids).logits, make_model("eager")(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert getattr(experts_of(model), hf._STATE).buffer.num_max_tokens_per_rank >= 40 * SEQUENCE


def test_a_given_bound_is_kept(expected):
    model = make_model("mega_moe")
    hf.configure(model, num_max_tokens_per_rank=2 * SEQUENCE)
    loss_of(model, batch(0)).backward()
    assert_gradients(gradients(model), expected)
    with pytest.raises(ValueError, match=f"T = {3 * SEQUENCE} tokens, expected at most num_max_tokens_per_rank = {2 * SEQUENCE}"):
        model(input_ids=batch(0, rows=3))


def test_generation_gives_the_eager_models_tokens():
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ids = batch(2)
    assert torch.equal(make_model("mega_moe").generate(ids, **options), make_model("eager").generate(ids, **options))


@pytest.mark.parametrize("main_grads", [False, True])
def test_compiles_as_one_graph(expected, main_grads):
    model = make_model("mega_moe")
    hf.configure(model, num_max_tokens_per_rank=2 * SEQUENCE)
    if main_grads:
        hf.enable_main_grads(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss_of(compiled, batch(0)).backward()
    if main_grads:
        hf.publish_main_grads(model)
    assert_gradients(gradients(model), expected)


def test_compiling_without_a_buffer_is_refused_only_with_fullgraph(expected):
    model = make_model("mega_moe", num_hidden_layers=1)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"configure\(model, num_max_tokens_per_rank"):
        torch.compile(model, fullgraph=True, backend="eager")(input_ids=batch(0))
    torch._dynamo.reset()
    y = torch.compile(model, backend="eager")(input_ids=batch(0)).logits
    torch.testing.assert_close(y, make_model("eager", num_hidden_layers=1)(input_ids=batch(0)).logits, rtol=1e-5, atol=1e-5)


def keep_experts(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in hf.SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("options", "gemm1"),
    [({}, 4), ({"context_fn": functools.partial(create_selective_checkpoint_contexts, keep_experts)}, 2)],
    ids=["full", "selective"],
)
def test_activation_checkpointing(expected, monkeypatch, options, gemm1):
    """Full: GEMM 1 runs twice in each of 2 layers, GEMM 2 once. Selective with SAVED_OPS: each once."""
    counts = {"gemm1": 0, "gemm2": 0}
    for name in counts:
        original = getattr(ReferenceBackend, name)

        def counted(self, *args, name=name, original=original):
            counts[name] += 1
            return original(self, *args)

        monkeypatch.setattr(ReferenceBackend, name, counted)
    model = make_model("mega_moe").train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False, **options})
    loss_of(model, batch(0)).backward()
    assert_gradients(gradients(model), expected)
    assert counts == {"gemm1": gemm1, "gemm2": 2}


@pytest.mark.parametrize("frozen", [("experts",), ("gate.weight",), ("down_proj",), ("embed_tokens", "experts", "gate.weight")])
def test_frozen_parameters_get_no_gradient(expected, frozen):
    model = make_model("mega_moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    loss_of(model, batch(0)).backward()
    assert_gradients(gradients(model), {name: value for name, value in expected.items() if not any(part in name for part in frozen)})


def test_main_gradients_accumulate_over_micro_batches():
    batches = [batch(index) for index in range(3)]
    model = make_model("mega_moe")
    hf.enable_main_grads(model)
    for _ in range(2):
        model.zero_grad()
        for ids in batches:
            (loss_of(model, ids) / 3).backward()
        assert all(weight.grad is None for weight in experts_of(model).parameters())
        hf.publish_main_grads(model)
        assert_gradients(gradients(model), mean_gradients(make_model("eager"), batches))
        hf.zero_main_grads(model)
    with torch.no_grad():
        model(input_ids=batches[0])  # evaluation needs no main gradient and leaves them
    assert not experts_of(model).down_proj.main_grad.any()


def test_main_gradients_of_a_frozen_half():
    model = make_model("mega_moe")
    experts_of(model).gate_up_proj.requires_grad_(False)
    hf.enable_main_grads(model)
    loss_of(model, batch(0)).backward()
    hf.publish_main_grads(model)
    assert experts_of(model).gate_up_proj.grad is None and experts_of(model).down_proj.grad.any()


def test_autocast_computes_in_bf16_and_returns_fp32_gradients(expected):
    errors = {}
    for implementation in ("eager", "mega_moe"):
        model = make_model(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch(0))
        loss.backward()
        errors[implementation] = {name: relative(value, expected[name]) for name, value in gradients(model).items()}
        assert experts_of(model).down_proj.grad.dtype == torch.float32
    assert min(errors["mega_moe"].values()) > 1e-4  # it did round
    assert all(error <= 1.5 * errors["eager"][name] + 2e-3 for name, error in errors["mega_moe"].items())


def test_copies_and_pickles_work_on():
    model = make_model("mega_moe")
    logits = model(input_ids=batch(0)).logits
    hf.enable_main_grads(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert getattr(experts_of(other), hf._STATE).main_grads is None
        torch.testing.assert_close(other(input_ids=batch(0)).logits, logits)


def test_fifty_steps_follow_the_eager_model():
    losses = {}
    for implementation in ("eager", "mega_moe"):
        model = make_model(implementation)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses[implementation] = []
        for step in range(50):
            loss = loss_of(model, batch(step))
            loss.backward()
            hf.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[implementation].append(loss.item())
    torch.testing.assert_close(torch.tensor(losses["mega_moe"]), torch.tensor(losses["eager"]), rtol=1e-3, atol=0)
    assert losses["mega_moe"][-1] < 0.7 * losses["mega_moe"][0]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_is_that_of_torch(norm_type):
    models = [make_model("eager") for _ in range(2)]
    for model in models:
        loss_of(model, batch(0)).backward()
    ours = hf.clip_grad_norm_(models[0].parameters(), 0.1, norm_type)
    torch.testing.assert_close(ours, torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.1, norm_type))
    assert_gradients(gradients(models[0]), gradients(models[1]))


def test_clipping_without_any_gradient_is_norm_zero():
    assert hf.clip_grad_norm_([], 1.0) == 0
    assert hf.clip_grad_norm_([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)], 1.0) == 0


def test_clipping_names_a_norm_that_is_not_finite():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(RuntimeError, match="total norm of the gradients is nan"):
        hf.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("version", ["missing", "5.6.1"])
def test_a_missing_or_old_transformers_is_named(tmp_path, version):
    if version != "missing":
        (tmp_path / "transformers" / "integrations").mkdir(parents=True)
        (tmp_path / "transformers" / "__init__.py").write_text(f"__version__ = {version!r}")
        for name in ("integrations/__init__.py", "integrations/moe.py", "modeling_layers.py"):
            (tmp_path / "transformers" / name).write_text("ALL_EXPERTS_FUNCTIONS = GradientCheckpointingLayer = None")
        setup = f"sys.path.insert(0, {str(tmp_path)!r})"
    else:
        setup = "sys.modules['transformers'] = None"
    code = f"import sys; {setup}; import deep_gemm.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=SCRIPTS.parent)
    assert done.returncode == 1
    assert "ImportError: deep_gemm.integrations.transformers needs transformers >= 5.7 (tested: 5.24.0)" in done.stderr


def test_misuse_is_named():
    with pytest.raises(ValueError, match="model = Linear: expected a model with modules of transformers' experts interface"):
        hf.configure(torch.nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="Qwen3MoeExperts has weights of torch.float16; expected torch.bfloat16"):
        make_model("mega_moe", dtype=torch.float16)(input_ids=batch(0))
    with pytest.raises(NotImplementedError, match=r"Qwen3MoeExperts has a gate other than SwiGLU \(act_fn = GELUActivation\)"):
        make_model("mega_moe", hidden_act="gelu")(input_ids=batch(0))


def loaded(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models_script():
    return loaded(SCRIPTS / "transformers_models.py")


def test_the_benchmark_measures_both_systems_and_their_curves_agree(tmp_path, monkeypatch):
    bench = loaded(SCRIPTS / "bench" / "trainer.py")
    sizes = "--shape tiny --layers 1 --vocab 256 --tokens 64 --sequence 32 --steps 2 --warmups 1 --loss-steps 4 --loss-tokens 32"
    monkeypatch.setattr(sys, "argv", ["trainer.py", *sizes.split(), "--json", str(tmp_path / "made.json")])
    bench.main()
    rows = json.loads((tmp_path / "made.json").read_text())["rows"]
    assert [(row["case"], row["system"], row["direction"]) for row in rows] == [
        (f"tiny-1l/T{tokens}/EP1/bf16", system, direction)
        for tokens, direction in ((64, "step"), (32, "loss"))
        for system in ("mega_moe", "grouped_mm")
    ]
    assert all(row["median_ms"] > 0 for row in rows[:2])
    ours, theirs = (torch.tensor(row["losses"]) for row in rows[2:])
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)


def test_the_documented_table_of_models_is_that_of_this_release(models_script):
    page = models_script.PAGE.read_text()
    assert page.partition(models_script.BEGIN)[2].partition(models_script.END)[0].strip() == models_script.tables()


def test_every_model_that_fits_computes_what_its_eager_experts_do(models_script):
    """And every other one raises, naming its property: all classes of the experts interface, with small weights."""
    torch.manual_seed(0)
    seen = {"fits": 0, "refused": 0}
    for folder, experts_class in models_script.interface_classes():
        experts = models_script.on_meta(folder, experts_class)
        shapes = {name: parameter.shape for name, parameter in experts.named_parameters()}
        reason = hf.why_not(experts)
        x, ids, weights = torch.randn(5, 16), torch.tensor([[0, 1], [1, 3], [2, 0], [3, 4], [4, 4]]), torch.rand(5, 2)
        experts.config._experts_implementation = "mega_moe"
        if reason is not None:
            seen["refused"] += 1
            with pytest.raises(NotImplementedError, match=experts_class.__name__):
                experts(x, ids, weights)
            continue
        assert set(shapes) == {"gate_up_proj", "down_proj"}, folder
        experts.num_experts = 4
        experts.gate_up_proj, experts.down_proj = (torch.nn.Parameter(4 * torch.randn(shape)) for shape in ((4, 24, 16), (4, 16, 12)))
        ours = experts(x, ids, weights)
        experts.config._experts_implementation = "eager"
        torch.testing.assert_close(ours, experts(x, ids, weights), rtol=1e-4, atol=1e-3, msg=lambda text: f"{folder}: {text}")  # noqa: B023
        seen["fits"] += 1
    assert seen["fits"] > 40 and seen["refused"] > 5
