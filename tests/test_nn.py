"""nn.MegaMoE: leading dimensions, shared and own buffers, biases, state dict, meta device, compile and training a few steps."""

from __future__ import annotations

import copy

import pytest
import torch
from api_inputs import E, H, I, K, T, make_buffer, make_inputs, plain_moe

from deep_gemm.mega.groups import SingleGroup
from deep_gemm.nn import MegaMoE


def make(**options):
    options = {"num_max_tokens_per_rank": T, "dtype": torch.float64, "device": "cpu", **options}
    return MegaMoE(H, I, E, K, **options)


def as_inputs(module, inputs):
    inputs.w13, inputs.w2, inputs.b13, inputs.b2 = module.w13, module.w2, module.b13, module.b2
    return inputs


@pytest.mark.parametrize("bias", [False, True])
def test_matches_the_formula(bias):
    inputs, module = make_inputs(), make(bias=bias, activation="swiglu_oai", activation_clamp=0.4)
    y = module(inputs.x, inputs.topk_idx, inputs.topk_weights)
    torch.testing.assert_close(y, plain_moe(as_inputs(module, inputs), alpha=1.702, up_offset=1.0, clamp=0.4))
    assert len(list(module.parameters())) == (4 if bias else 2)


def test_leading_dimensions_and_strides():
    inputs, module = make_inputs(tokens=12), make()
    flat = module(inputs.x, inputs.topk_idx, inputs.topk_weights)
    shaped = [value.view(3, 4, -1).transpose(0, 1) for value in (inputs.x, inputs.topk_idx, inputs.topk_weights)]
    y = module(*shaped)
    assert y.shape == (4, 3, H)
    torch.testing.assert_close(y.transpose(0, 1).reshape(12, H), flat)


@pytest.mark.parametrize(
    ("name", "spoil", "exception", "message"),
    [
        # Twice as wide and half as many: the same number of elements.
        ("x", lambda x: x.view(-1, 2 * H), ValueError, r"x.shape = \(6, 20\): expected \(T, 10\)"),
        ("topk_idx", lambda idx: idx.view(-1, 2 * K), ValueError, r"topk_idx.shape = \(6, 6\): expected \(12, 3\)"),
        ("topk_weights", lambda p: p.view(-1, 2 * K), ValueError, r"topk_weights.shape = \(6, 6\): expected \(12, 3\)"),
        ("x", lambda x: x.sum(), ValueError, r"x.shape = \(\): expected \(T, 10\)"),
        ("x", lambda x: x.tolist(), TypeError, "x = list: expected a torch.Tensor"),
    ],
)
def test_wrong_width_is_not_folded_into_rows(name, spoil, exception, message):
    inputs = make_inputs(tokens=12)
    arguments = {key: getattr(inputs, key) for key in ("x", "topk_idx", "topk_weights")}
    with pytest.raises(exception, match=message):
        make()(**(arguments | {name: spoil(arguments[name])}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_deep_copy_shares_group_and_buffer(device):
    class Uncopyable(SingleGroup):
        """As a torch.distributed.ProcessGroup."""

        def __reduce_ex__(self, protocol):
            raise TypeError("cannot pickle 'ProcessGroup' object")

    module = make(group=Uncopyable(), device=device)
    other = copy.deepcopy(torch.nn.ModuleList([module]))[0]
    assert type(other) is MegaMoE and other.group is module.group and other.buffer is module.buffer
    assert other.options == module.options and other.options is not module.options
    assert all(a is not b and a.shape == b.shape for a, b in zip(module.parameters(), other.parameters(), strict=True))
    if device == "cpu":
        with torch.no_grad():
            other.w2.zero_()
        assert module.w2.any() and not other(*make_inputs().args[:3]).any()


def test_layers_share_a_buffer():
    buffer, inputs = make_buffer(), make_inputs()
    layers = [MegaMoE(H, I, E, K, buffer=buffer, dtype=torch.float64) for _ in range(2)]
    assert layers[0].buffer is layers[1].buffer is copy.deepcopy(layers[0]).buffer
    x = inputs.x
    for layer in layers:
        x = x + layer(x, inputs.topk_idx, inputs.topk_weights)
    x.sum().backward()
    assert all(parameter.grad.any() for layer in layers for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_max_tokens_per_rank": None}, "num_max_tokens_per_rank = None: expected the bound on T"),
        ({"buffer": "made", "num_max_tokens_per_rank": T}, "buffer was given together with group or num_max_tokens_per_rank"),
        ({"buffer": "made", "num_max_tokens_per_rank": None, "num_topk": 2}, "num_topk = 2, but the buffer was made with num_topk = 3"),
        ({"precision": "int4"}, "precision = 'int4'"),
        ({"buffer": 3, "num_max_tokens_per_rank": None}, "buffer = int: expected a MegaMoeBuffer"),
    ],
)
def test_bad_arguments(options, message):
    options = {"num_max_tokens_per_rank": T, "num_topk": K, "device": "cpu", **options}
    if options.get("buffer") == "made":
        options["buffer"] = make_buffer()
    with pytest.raises((ValueError, TypeError), match=message):
        MegaMoE(H, I, E, options.pop("num_topk"), **options)


def test_parameters_are_drawn_within_their_bounds_and_state_dict_round_trips():
    torch.manual_seed(0)
    module, other = make(bias=True), make(bias=True)
    assert module.w13.abs().max() <= H**-0.5 and 0.5 * I**-0.5 < module.w2.abs().max() <= I**-0.5 and module.b2.any()
    assert set(module.state_dict()) == {"w13", "w2", "b13", "b2"} and not torch.equal(module.w2, other.w2)
    other.load_state_dict(module.state_dict())
    inputs = make_inputs()
    assert torch.equal(*(m(inputs.x, inputs.topk_idx, inputs.topk_weights) for m in (module, other)))


def test_meta_device_makes_its_buffer_late():
    module = make(device="meta")
    assert module.buffer is None and module.w2.shape == (E, H, I)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    inputs = make_inputs()
    y = module(inputs.x, inputs.topk_idx, inputs.topk_weights)
    assert module.buffer is not None
    torch.testing.assert_close(y, plain_moe(as_inputs(module, inputs)))


def test_main_grads():
    module, inputs = make(dtype=torch.float32), make_inputs(dtype=torch.float32)
    main_grads = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    module(inputs.x, inputs.topk_idx, inputs.topk_weights).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    module(inputs.x, inputs.topk_idx, inputs.topk_weights, main_grads=main_grads).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(main_grads[name], gradient) for name, gradient in expected.items())


def test_extra_repr():
    text = repr(make(save="preact"))
    assert "hidden=10, intermediate_hidden=7, num_experts=6, num_topk=3, num_local_experts=6, bias=False" in text and "save='preact'" in text


def test_compiles_and_trains():
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, inputs = make(dtype=torch.float32), make_inputs(dtype=torch.float32)
    target = torch.randn(T, H) * 0.1
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = (compiled(inputs.x, inputs.topk_idx, inputs.topk_weights) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.25 * losses[0]
