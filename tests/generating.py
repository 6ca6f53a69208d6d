"""Tiny language models of transformers, quantised; greedy generation, and how it is judged."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from models import grouped, nibbles
from transformers import CompileConfig, LogitsProcessor, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from qinductor.oracle import errors

VOCABULARY, SLOTS = 512, 64
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EVERY = {  # experts are weighted, not chosen: a choice is a step, which noise in bf16 takes or not
    "mixtral": {"num_experts_per_tok": 4},
    "deepseek": {"num_experts_per_tok": 8, "topk_group": 2},
}
MLA = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
ROUTED = {
    "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("Llama", HEADS),
    "qwen3": ("Qwen3", {**HEADS, "head_dim": 64}),
    "mixtral": ("Mixtral", {**HEADS, "num_local_experts": 4}),
    "deepseek": ("DeepseekV3", {**MLA, **ROUTED}),
}
# nn.Linear in two layers of each: experts and routers are none.
LINEARS = {"llama": 14, "qwen3": 14, "mixtral": 8, "deepseek": 16}


def torchao_int4(model: PreTrainedModel) -> None:
    """Codes of 4 bits, a scale for 64 inputs, in every linear layer but the head."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64))
    quantize_(model, config, filter_fn=_inner)


def torchao_fp8(model: PreTrainedModel) -> None:
    """Codes in e4m3, a scale for each output."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model, Float8WeightOnlyConfig(), filter_fn=_inner)


class Quantised(torch.nn.Module):
    """A linear layer of codes and scales: 4 bits, two a byte, by groups of 64; or e4m3 by rows."""

    def __init__(self, linear: torch.nn.Linear, bits: int) -> None:
        super().__init__()
        w = linear.weight.float()
        groups = w.unflatten(1, (-1, 64 if bits == 4 else w.shape[1]))
        scale = groups.abs().amax(2) / (7 if bits == 4 else 448)
        scaled = (groups / scale[..., None]).flatten(1)
        codes = scaled.to(torch.float8_e4m3fn)
        if bits == 4:
            whole = (scaled.round() + 8).to(torch.uint8)
            codes = whole[:, ::2] | whole[:, 1::2] << 4
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale.to(linear.weight.dtype))

    def weight(self) -> torch.Tensor:
        if self.codes.dtype == torch.uint8:
            return grouped(nibbles(self.codes).to(self.scale.dtype) - 8, self.scale)
        return self.codes.to(self.scale.dtype) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight())


def int4(model: PreTrainedModel) -> None:
    """As torchao's, in plain PyTorch."""
    _replace(model, lambda linear: Quantised(linear, 4))


def fp8(model: PreTrainedModel) -> None:
    """As torchao's, in plain PyTorch."""
    _replace(model, lambda linear: Quantised(linear, 8))


def _replace(model: torch.nn.Module, make: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    for name, module in list(model.named_modules()):
        if _inner(module, name):
            model.set_submodule(name, make(module))


def dense(model: PreTrainedModel) -> None:
    """Not quantised."""


def _inner(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name


def build(
    kind: str,
    dtype: torch.dtype,
    quantise: Callable[[PreTrainedModel], None],
    device: str = "cpu",
    **changed: int,
) -> PreTrainedModel:
    """A model with random weights; it never ends a sequence by itself."""
    name, sizes = KINDS[kind]
    sizes = {**sizes, **changed}
    config = getattr(transformers, f"{name}Config")(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=VOCABULARY,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=None, pad_token_id=0, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    model = model.eval().requires_grad_(False).to(device)
    quantise(model)
    return model


def widened(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same function in another dtype, its weights dequantised."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, Quantised):
            plain = module.weight()
        elif isinstance(module, torch.nn.Linear) and type(module.weight) is not torch.nn.Parameter:
            plain = module.weight.dequantize()
        else:
            continue
        linear = torch.nn.Linear(plain.shape[1], plain.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(plain.detach(), requires_grad=False)
        model.set_submodule(name, linear)
    return model.to(dtype)


def compiled(**options: Any) -> CompileConfig:
    """A configuration that names the backend, for every device."""
    config = CompileConfig(backend="qinductor", mode=None, options=options or None)
    config._compile_all_devices = True  # or a CPU compiles nothing
    return config


def prompts(
    batch: int, longest: int, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask): prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(100 * seed + batch)
    ids = torch.randint(1, VOCABULARY, (batch, longest), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : (3 * row) % longest] = 0
    return (ids * mask).to(device), mask.to(device)


def keyword(model: PreTrainedModel) -> str:
    """What `forward` calls its cache: later versions of transformers have renamed it."""
    names = inspect.signature(type(model).forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in names)


class Forced(LogitsProcessor):
    """Lets generation go along a given path."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens, self.step = tokens, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.tokens[:, self.step, None]
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


@dataclasses.dataclass(frozen=True)
class Generated:
    """tokens [B, T] and the logits [B, T, V] that they were chosen by."""

    tokens: torch.Tensor
    logits: torch.Tensor


def generate(
    model: PreTrainedModel,
    prompt: tuple[torch.Tensor, torch.Tensor],
    new: int,
    config: CompileConfig | None = None,
    path: torch.Tensor | None = None,
    cache: Cache | None = None,
) -> Generated:
    """Greedy generation with a static cache, its own or `cache`; eager without a `config`."""
    ids, mask = prompt
    how: dict[str, Any] = {"compile_config": config} if config else {"disable_compile": True}
    how |= {keyword(model): cache} if cache else {"cache_implementation": "static"}
    how |= {"logits_processor": [Forced(path)]} if path is not None else {}
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
            return_dict_in_generate=True, output_logits=True, **how,
        )  # fmt: skip
    return Generated(found.sequences[:, ids.shape[1] :], torch.stack(found.logits, 1))


def judge(
    model: PreTrainedModel,
    exact: PreTrainedModel,
    prompt: tuple[torch.Tensor, torch.Tensor],
    ours: Generated,
) -> None:
    """Holds a generation to eager's accuracy, along its own path, whose ties may be others.

    `exact` is the model in a wider dtype. Every token is the best by the logits beside it; these
    are as near to the exact ones as eager's are, by the product oracle's limits.
    """
    tokens, steps = ours.tokens, ours.tokens.shape[1]
    assert torch.equal(ours.logits.argmax(-1), tokens)
    eager = generate(model, prompt, steps, path=tokens)
    wanted = generate(exact, prompt, steps, path=tokens)
    assert torch.equal(eager.tokens, tokens) and torch.equal(wanted.tokens, tokens)
    over = errors(ours.logits, eager.logits, wanted.logits.double()).over()
    assert over is None, over


class Rows(StaticLayer):
    """A static layer that writes each sequence at a place of its own."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.positions = keys, values, positions
        self.device, self.dtype, self.is_initialized = keys.device, keys.dtype, True

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [B, heads, T, D] at `positions` and the T - 1 places after; returns all slots."""
        places = self.positions[:, None] + torch.arange(keys.shape[2], device=keys.device)
        for held, new in ((self.keys, keys), (self.values, values)):
            held.scatter_(2, places[:, None, :, None].expand_as(new), new)
        return self.keys, self.values


class Decoder:
    """Decode steps of changing batch sizes, on one static cache of the largest.

    A batch of b has the first b rows of every layer: views that are made once, marked as static,
    all at one address. `buckets` are the sizes that serve. What a step writes and reads of a row
    is the row's own: what other rows hold, and what it held before, does not matter.
    """

    def __init__(self, model: PreTrainedModel, buckets: tuple[int, ...], slots: int) -> None:
        self.model, self.key, self.buckets = model, keyword(model), buckets
        probe = transformers.DynamicCache(config=model.config)
        device, largest = model.device, max(buckets)
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long, device=device), **{self.key: probe})
        shapes = [
            [(largest, t.shape[1], slots, t.shape[3]) for t in (layer.keys, layer.values)]
            for layer in probe.layers
        ]
        self.held = [
            [torch.zeros(shape, dtype=model.dtype, device=device) for shape in pair]
            for pair in shapes
        ]
        self.positions = torch.zeros(largest, dtype=torch.long, device=device)
        self.caches = [self.rows(0, b) for b in range(largest + 1)]
        self.compiled: Callable[..., torch.Tensor] = self.forward

    def rows(self, first: int, last: int) -> Cache:
        """The cache of these rows. `.data`, for Dynamo guards the sizes of a view's base, too."""
        positions = self.positions[first:last].data
        pairs = [[t[first:last].data for t in pair] for pair in self.held]
        for tensor in (t for pair in pairs for t in pair):
            torch._dynamo.mark_static_address(tensor)  # positions are none: inputs, anew each step
        return Cache(layers=[Rows(*pair, positions) for pair in pairs])

    def forward(self, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """ids [B, T] -> logits [B, V] of the last; a row sees its own tokens so far."""
        layer = cache.layers[0]
        steps = torch.arange(ids.shape[1], device=ids.device)
        places = layer.positions[:, None] + steps
        slots = torch.arange(layer.max_cache_len, device=ids.device)
        mask = (slots <= places[:, :, None])[:, None]
        return self.model(
            input_ids=ids, position_ids=places, attention_mask=mask, use_cache=True,
            **{self.key: cache},
        ).logits[:, -1]  # fmt: skip

    def prefill(self, row: int, ids: torch.Tensor) -> torch.Tensor:
        """Puts a prompt [T] into a row, eagerly; returns the logits [V] of its last token."""
        self.positions[row] = 0
        return self.forward(ids[None], self.rows(row, row + 1))[0]

    def step(self, b: int, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The next logits [b, V] for tokens [b, 1] at `positions` [b], in the first b rows."""
        self.positions[:b].copy_(positions)
        return self.compiled(ids, self.caches[b])

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The step of as many rows as there are ids."""
        return self.step(len(ids), ids, positions)

    def move(self, source: int, target: int) -> None:
        """Makes row `target` a copy of row `source`."""
        for tensor in (t for pair in self.held for t in pair):
            tensor[target].copy_(tensor[source])


@dataclasses.dataclass
class Request:
    """A prompt [T], how many tokens are wanted, and those that there are."""

    prompt: torch.Tensor
    wanted: int
    tokens: list[int] = dataclasses.field(default_factory=list)


def requests(count: int, device: str = "cpu") -> list[Request]:
    """Prompts of 3 to 20 tokens that want 2 to 24 more."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(0, 1 << 30, (count, 2), generator=generator).tolist()
    return [
        Request(
            torch.randint(1, VOCABULARY, (3 + a % 18,), generator=generator).to(device), 2 + b % 23
        )
        for a, b in sizes
    ]


def serve(decoder: Decoder, waiting: list[Request], arrivals: int = 2) -> list[int]:
    """Continuous decoding: requests come, `arrivals` a step, and go; returns the buckets used.

    Active requests have the first rows: the last one's moves where one has ended. The smallest
    bucket that holds them runs; rows above them are computed and dropped.
    """
    waiting, active, used = list(waiting), [], []
    device = decoder.positions.device
    while waiting or active:
        for _ in range(min(arrivals, len(waiting), max(decoder.buckets) - len(active))):
            request = waiting.pop(0)
            logits = decoder.prefill(len(active), request.prompt)
            request.tokens.append(int(logits.argmax()))
            active.append(request)
        b = min(bucket for bucket in decoder.buckets if bucket >= len(active))
        used.append(b)
        ids, positions = torch.zeros(2, b, dtype=torch.long)
        for row, request in enumerate(active):
            ids[row] = request.tokens[-1]
            positions[row] = len(request.prompt) + len(request.tokens) - 1
        logits = decoder.step(b, ids[:, None].to(device), positions.to(device))
        for request, token in zip(active, logits.argmax(-1).tolist(), strict=False):
            request.tokens.append(token)
        for row in reversed(range(len(active))):
            if len(active[row].tokens) >= active[row].wanted:
                if row < len(active) - 1:
                    decoder.move(len(active) - 1, row)
                    active[row] = active[-1]
                active.pop()
    return used
