"""Routers of transformers' models, in the sizes of their default configuration, for a GPU."""

import importlib
import inspect

import pytest
import torch
from table import BF16, need

import qinductor

# (family, class) -> what its contract says; in bf16, and each returns its logits.
LOWERED = {
    ("deepseek_v3", "DeepseekV3TopkRouter"):
        "sigmoid in fp32, top 8 of 256, 4 of 8 groups by top2, bias for the choice, normalised",
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter"):
        "softmax in fp32, top 6 of 64, bias for the choice, normalised, -> bf16",
    ("flex_olmo", "FlexOlmoTopKRouter"): "softmax in fp32, top 5 of 7, -> bf16",
    ("glm4_moe", "Glm4MoeTopkRouter"):
        "sigmoid in fp32, top 8 of 128, bias for the choice, normalised",
    ("gpt_oss", "GptOssTopKRouter"): "top 4 of 128, softmax in fp32, -> bf16",
    ("jamba", "JambaTopKRouter"): "softmax in fp32, top 2 of 16, -> bf16",
    ("lfm2_moe", "Lfm2MoeTopKRouter"): "sigmoid in bf16, top 4 of 32, bias for the choice",
    ("llama4", "Llama4Router"): "bf16 logits, top 1 of 16, -> bf16",
    ("longcat_flash", "LongcatFlashTopkRouter"):
        "softmax in fp32, top 12 of 768, bias for the choice, * 6",
    ("minimax", "MiniMaxTopKRouter"): "softmax in fp32, top 2 of 8, normalised",
    ("minimax_m2", "MiniMaxM2TopKRouter"): "sigmoid in fp32, top 8 of 256, bias for the choice",
    ("mixtral", "MixtralTopKRouter"): "softmax in fp32, top 2 of 8, normalised",
    ("olmoe", "OlmoeTopKRouter"): "softmax in fp32, top 8 of 64, -> bf16",
    ("qwen2_moe", "Qwen2MoeTopKRouter"): "softmax in fp32, top 4 of 60, -> bf16",
    ("qwen3_moe", "Qwen3MoeTopKRouter"): "softmax in fp32, top 8 of 128",
    ("qwen3_next", "Qwen3NextTopKRouter"): "softmax in fp32, top 10 of 512, normalised",
}  # fmt: skip
LEFT = {
    ("nllb_moe", "NllbMoeTop2Router"): "is one maximum after the other",
    ("phimoe", "PhimoeTopKRouter"): "is one maximum after the other",
}


def built(family: str, name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A router and its arguments; skips the test where transformers has none of this name."""
    need("transformers")
    from transformers import PreTrainedConfig

    found = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if not hasattr(found, name):
        pytest.skip(f"transformers has no {name}")
    made = None
    for config in vars(found).values():
        if inspect.isclass(config) and issubclass(config, PreTrainedConfig):
            try:
                made = getattr(found, name)(config())
            except (AttributeError, TypeError):  # of another part of the model
                continue
            break
    assert made is not None
    made = made.to(BF16).eval().requires_grad_(False)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    experts, hidden = next(p for p in made.parameters() if p.dim() == 2).shape
    x = torch.randn(6, hidden, dtype=BF16)
    bias = any("bias" in parameter for parameter in inspect.signature(made.forward).parameters)
    return made, (x, torch.zeros(experts)) if bias else (x,)


def explained(family: str, name: str) -> qinductor.Report:
    made, args = built(family, name)
    with torch.no_grad():
        report = qinductor.explain(made, *args, options={"target": "sm_90"})
    assert [site.pattern for site in report.sites] == ["router"], report
    return report


@pytest.mark.parametrize("family, name", LOWERED)
def test_lowered(family, name):
    (site,) = explained(family, name).sites
    assert site.lowered and LOWERED[family, name] in site.contract, site


@pytest.mark.parametrize("family, name", LEFT)
def test_left_alone(family, name):
    (site,) = explained(family, name).sites
    assert not site.lowered and LEFT[family, name] in site.reason, site
