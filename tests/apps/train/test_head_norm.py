"""The learned weight of the head norm: its gradient, its place in o_proj, resuming, and the options that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.apps.train.checkpoint import last_checkpoint, read_training
from diffbit.apps.train.head_norm import GainedLinear, add_gains, folded
from diffbit.apps.train.initialize import initialize
from diffbit.apps.train.presets import train_config
from diffbit.apps.train.trainer import train
from diffbit.export import export_artifact
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, load
from diffbit.models.families import family_for

from ...configs import resized
from ...export.helpers import Runner, relative_error
from .toy import model, options, stop_at

GAIN = 0.25


def gained(**changes: object) -> Decoder:
    """A model whose gains differ from channel to channel."""
    decoder = Decoder(model(**changes))  # type: ignore[arg-type]
    initialize(decoder, 0)
    add_gains(decoder, GAIN)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("o_proj.gain"):
                assert parameter.shape == (16,) and (parameter == GAIN).all()
                parameter += 0.2 * torch.randn(16, generator=draw)
            elif name.endswith("o_proj.bias"):
                parameter.normal_(generator=draw)
    return decoder


@pytest.mark.parametrize("bias", [False, True])
def test_the_gain_is_that_of_the_official_code_and_folds_exactly(bias: bool) -> None:
    """W_o (gain * norm) with the gain of each channel of a head; saving folds it without rounding anything twice."""
    decoder = gained(o_bias=bias)
    seen: list[torch.Tensor] = []
    layer = decoder.model.layers[1].self_attn
    layer.attn_sub_norm.register_forward_hook(lambda m, i, out: seen.append(out))
    ids = torch.randint(288, (2, 12), generator=torch.Generator().manual_seed(1))
    logits = decoder(ids)
    o_proj = layer.o_proj
    assert isinstance(o_proj, GainedLinear)
    x = seen[0].detach().double()  # [B, S, 2 heads of 16]
    expected = torch.cat([x[..., :16] * o_proj.gain, x[..., 16:] * o_proj.gain], -1) @ o_proj.weight.double().T
    if bias:
        expected += o_proj.bias
    torch.testing.assert_close(o_proj(seen[0]).double(), expected, rtol=1e-5, atol=1e-6)

    plain = folded(decoder)
    assert not any(isinstance(part, GainedLinear) for part in plain.modules())
    assert set(plain.state_dict()) == {name for name in decoder.state_dict() if not name.endswith("gain")}
    assert torch.equal(plain(ids), logits)
    weight = plain.model.layers[1].self_attn.o_proj.weight
    assert torch.equal(weight[:, 16:], o_proj.weight[:, 16:] * o_proj.gain)
    assert folded(plain) is plain


def test_gradients_against_differences() -> None:
    """Of input, weight and gain, in float64."""
    o_proj = gained().double().model.layers[0].self_attn.o_proj
    assert isinstance(o_proj, GainedLinear)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(2)).double().requires_grad_()
    tensors = (x, o_proj.weight.detach().requires_grad_(), o_proj.gain.detach().requires_grad_())

    def product(x: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(o_proj, {"weight": weight, "gain": gain}, (x,))

    assert torch.autograd.gradcheck(product, tensors)


def test_run_with_head_norm_resumes_exactly_and_saves_diffllama(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = options(text, learning_rate=1e-2, head_gain=GAIN, o_proj_init=0.5)
    whole = train(config, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 8)
        train(config, tmp_path / "cut")
    folder = last_checkpoint(tmp_path / "cut")
    assert read_training(folder)["step"] == 6
    assert family_for(load(folder).config).model_type == "diffllama"
    resumed = train(config, tmp_path / "cut", resume=True)
    assert resumed.losses == whole.losses and resumed.eval_loss == whole.eval_loss
    first, second = (load(path) for path in (whole.path, resumed.path))
    assert all(torch.equal(a, second.state_dict()[name]) for name, a in first.state_dict().items())
    ids = torch.randint(288, (4, 12), generator=torch.Generator().manual_seed(3))
    logits = Runner(export_artifact(whole.path, tmp_path / "onnx"), first.config)(
        ids.numpy(), np.ones((4, 12), np.int64)
    )
    assert relative_error(logits, first(ids).detach()).max() < 1e-4
    # A smaller gain lets less of the attention through; nothing else differs at the first step
    weights = [Decoder(config.model) for _ in range(2)]
    for decoder, gain in zip(weights, (GAIN, None), strict=True):
        initialize(decoder, config.seed, 0.5)
        if gain is not None:
            add_gains(decoder, gain)
    ratio = (
        folded(weights[0]).state_dict()["model.layers.0.self_attn.o_proj.weight"]
        / weights[1].state_dict()["model.layers.0.self_attn.o_proj.weight"]
    )
    torch.testing.assert_close(ratio, torch.full_like(ratio, GAIN))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 8)
        train(config, tmp_path / "other")
    with pytest.raises(DiffbitError, match="other values of head_gain"):
        train(replace(config, head_gain=0.5), tmp_path / "other", resume=True)


def test_a_model_without_head_norm_is_one(text: str, tmp_path: Path) -> None:
    """No family but diffbit's own can hold it, and it loads as what it is."""
    config = options(text, model=resized(model(), head_norm=False))
    result = train(config, tmp_path / "out")
    loaded = load(result.path)
    assert not loaded.config.head_norm and family_for(loaded.config).model_type == "diffbit"
    assert loaded.config.layers[0].mixer.symmetries().value_scales
    with pytest.raises(DiffbitError, match=r"head_gain is 0\.25, wanted none"):
        replace(config, head_gain=GAIN)


def test_options(trained: Callable[[str], Path], tmp_path: Path) -> None:
    path, plain = str(trained("diff_v1")), str(trained("softmax"))
    gain = train_config("tiny", "diff_v1").head_gain
    assert gain is not None and gain < 1 and train_config("tiny", "diff_v1", head_norm="learned").head_gain == gain
    assert train_config("tiny", "diff_v1", head_norm="fixed").head_gain is None
    assert train_config("tiny", "diff_v1", qat="ternary").head_gain is None
    assert train_config("tiny", "diff_v1").o_proj_init < train_config("tiny", "softmax").o_proj_init == 1
    larger = train_config("nano", "diff_v1")
    assert larger.head_gain == larger.o_proj_init == 1
    without = train_config("tiny", "diff_v1", head_norm="none")
    assert without.head_gain is None and not without.model.head_norm
    assert train_config("tiny", init=path).head_gain is None
    assert train_config("tiny", init=path, head_norm="learned").head_gain == 1.0
    for arguments, sentence in (
        ({"attention": "softmax", "head_norm": "learned"}, r"of this model \(softmax\) have no norm"),
        ({"init": plain, "head_norm": "fixed"}, r"of this model \(softmax\) have no norm"),
        ({"init": path, "head_norm": "none"}, r"of this model \(diff_v1\) have a norm"),
        ({"attention": "diff_v1", "head_norm": "small"}, "choose one of learned, fixed, none"),
        ({"attention": "diff_v1", "qat": "ternary", "head_norm": "learned"}, "head_gain is .*wanted none"),
        ({"attention": "diff_v1", "sub_norms": True, "head_norm": "learned"}, "head_gain is .*wanted none"),
        ({"attention": "diff_v1", "head_gain": -1.0}, "head_gain is -1.0, wanted a number above 0"),
        ({"attention": "diff_v1", "o_proj_init": -1.0}, "o_proj_init is -1.0, wanted a number of at least 0"),
    ):
        with pytest.raises(DiffbitError, match=sentence):
            train_config("tiny", **arguments)  # type: ignore[arg-type]
