"""No model fails because of us: odd graphs, our own errors, options, threads, caches, `explain`."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import qinductor
from qinductor.__main__ import main
from qinductor.patterns.dequant_matmul import DequantMatmulPattern

N = K = 64
ROOT = Path(__file__).parents[1]
X = torch.randn(4, K, generator=torch.Generator().manual_seed(1))
REQUIRE = {"patterns": {"dequant_matmul": "require"}}
# Inductor calls the eager operator for what is not lowered, which spares a C++ compile.
EAGER_REST = {"inductor": {"fallback_by_default": True}}


class Int8(torch.nn.Module):
    """x . (codes * scale)^T, one scale a row."""

    def __init__(self, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        codes = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8)
        self.register_buffer("codes", codes)
        scale = torch.rand(N, 1, generator=g) * 0.002 + 0.001
        self.scale = torch.nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        return x @ (self.codes.to(x.dtype) * self.scale.to(x.dtype)).t()


class Elementwise(torch.nn.Module):
    """A weight that is refused: each element has a scale of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randint(-128, 128, (N, K), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(N, K) * 0.002)

    def forward(self, x):
        return x @ (self.codes.to(x.dtype) * self.scale.to(x.dtype)).t()


class Broken(torch.nn.Module):
    """Two quantised products with a graph break between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Int8(1), Int8(2)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def compiled(model, **options):
    return torch.compile(model, backend="qinductor", **options)


def check(run, model, *args, **kwargs):
    """The result is eager's but for the order of summation and, in bf16, one rounding."""
    out, expected = run(*args, **kwargs), model(*args, **kwargs)
    largest = max(map(abs, expected.flatten().tolist()), default=0)
    torch.testing.assert_close(out, expected, rtol=0, atol=0.01 * largest)


def outcomes():
    """(lowered, reason) of every site of the last report."""
    return [(site.lowered, site.reason) for site in qinductor.last_report().sites]


def comparable(report):
    """The report as data, without what may differ: times, and evaluations that were shared."""
    data = report.to_dict()
    del data["matching_seconds"]
    for site in data["sites"]:
        del site["evaluations"]
    return data


# Graphs


def test_graph_without_a_product():
    def add(x):
        return x + 1

    check(compiled(add, options=EAGER_REST), add, X)
    assert outcomes() == []


def test_graph_without_inputs():
    def ones():
        return torch.ones(3) + 1

    check(compiled(ones, options=EAGER_REST), ones)
    assert outcomes() == []


def test_product_of_constants_alone():
    model = Int8()

    def constant():
        return model(torch.ones(2, K))

    check(compiled(constant, options=EAGER_REST), constant)
    assert outcomes() == [(True, None)]


def test_only_the_outermost_graph_is_rewritten():
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.outside = Int8(1), Int8(2)

        def forward(self, x, which):
            def true(x):
                return self.inside(x)

            def false(x):
                return self.inside(x) * 2

            return self.outside(torch.cond(which, true, false, (x,)))

    model = Branches()
    run = compiled(model, options=EAGER_REST)
    for which in (True, False):
        check(run, model, X, torch.tensor(which))
    sites = qinductor.last_report().sites
    assert {site.lowered for site in sites if "outside" in site.where} == {True}
    inside = [site for site in sites if "inside" in site.where]
    assert len(inside) == 2
    for site in inside:
        assert not site.lowered and "higher-order operator" in site.reason


def test_one_dynamic_graph_serves_every_m():
    model, run = Int8(), compiled(Int8(), dynamic=True)
    for m in (2, 3, 17, 64, 1, 0):
        check(run, model, torch.randn(m, K, dtype=torch.bfloat16))
        assert outcomes() == [(True, None)]
        assert len(qinductor.reports()) == {1: 2, 0: 3}.get(m, 1)  # Dynamo takes 0 and 1 apart


def test_unbacked_m():
    model, run = Int8(), compiled(Int8())
    for m in (5, 0, 1, 2, 17, 64):
        x = torch.randn(m, K, dtype=torch.bfloat16)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        check(run, model, x)
    assert len(qinductor.reports()) == 1
    assert outcomes() == [(True, None)]


def test_three_dimensional_x():
    model, run = Int8(), compiled(Int8(), options=EAGER_REST)
    for shape in ((2, 3, K), (5, 2, K)):
        check(run, model, torch.randn(shape))
        assert outcomes() == [(True, None)]


def test_a_weight_that_is_expanded_by_a_symbolic_batch_is_a_row():
    """For a transposed x, eager's matmul is a bmm."""
    model, run = Int8(), compiled(Int8(), dynamic=True, options=EAGER_REST)
    check(run, model, torch.randn(3, K, 2).transpose(1, 2))
    assert outcomes() == [(True, None)]


def test_tensor_attributes_whose_sizes_are_symbolic_are_a_row():
    """Under dynamic=True, Dynamo gives symbolic sizes to tensors that are no buffers."""

    class Attributes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = torch.randint(-128, 128, (N, K), dtype=torch.int8)
            self.scale = torch.rand(N, 1)

        def forward(self, x):
            return x @ (self.codes.float() * self.scale).t()

    model = Attributes()
    check(compiled(model, dynamic=True, options=EAGER_REST), model, X)
    ((lowered, reason),) = outcomes()
    assert not lowered and "the weight's sizes must be numbers; arg" in reason


def test_keyword_arguments():
    class Keywords(Int8):
        def forward(self, *, x, times=1):
            return super().forward(x * times)

    model = Keywords()
    run = compiled(model, options=EAGER_REST)
    check(run, model, x=X)
    check(run, model, times=3, x=X)
    assert outcomes() == [(True, None)]


def test_autocast():
    model, run = Int8(), compiled(Int8())
    check(run, model, X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(X).dtype == torch.bfloat16
        check(run, model, X)
    assert outcomes() == [(True, None)]
    assert qinductor.last_report().sites[0].contract.startswith("bf16 x int8")
    check(run, model, X)
    assert len(qinductor.reports()) == 2


def test_inference_mode():
    model, run = Int8(), compiled(Int8())
    with torch.inference_mode():
        check(run, model, X)
    assert outcomes() == [(True, None)]
    check(run, model, X)


def test_a_training_graph_is_left_alone():
    model = Int8().requires_grad_(True)
    run = compiled(model, options=EAGER_REST)
    gradients = []
    for forward in (run, model):
        forward(X).square().sum().backward()
        gradients.append(model.scale.grad)
        model.scale.grad = None
    torch.testing.assert_close(*gradients)
    ((lowered, reason),) = outcomes()
    assert not lowered and "a training graph" in reason
    with torch.no_grad():
        check(run, model, X)
    assert outcomes() == [(True, None)]


def test_a_gradient_flows_through_a_frozen_weight():
    model, run = Int8(), compiled(Int8(), options=EAGER_REST)
    gradients = []
    for forward in (run, model):
        x = X.clone().requires_grad_()
        forward(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    assert outcomes()[0][0] is False


def test_an_input_on_another_device_fails_as_it_does_without_us():
    model, x, errors = Int8(), X.to("meta"), []
    for backend in ("eager", "qinductor"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="meta(,| and) cpu") as error:
            torch.compile(model, backend=backend)(x)
        errors.append(error.type)
    assert errors[0] is errors[1]
    check(compiled(model), model, X)
    assert outcomes() == [(True, None)]


def test_fake_tensors_through_a_compiled_model():
    model = Int8()
    run = compiled(model)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert run(torch.randn(4, K)).shape == (4, N)
    check(run, model, X)


TRACING = "using FX to symbolically trace a dynamo-optimized function"


def test_two_threads_compile_two_models():
    start, failed = threading.Barrier(2), []
    contracts = {torch.bfloat16: "bf16 x int8", torch.float32: "fp32 x int8"}

    def work(dtype):
        try:
            model, x = Int8(), X.to(dtype)
            run = compiled(model)
            start.wait()
            for _ in range(20):
                check(run, model, x)
            assert qinductor.last_report().sites[0].contract.startswith(contracts[dtype])
            assert len(qinductor.reports()) == 1
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in contracts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(TRACING in str(error) for error in failed) and torch.__version__ < "2.14":
        pytest.skip("before 2.14 torch may take another thread's tracing for one's own")
    assert not failed
    assert qinductor.last_report() is None  # of this thread


# Errors of our own


def fails(*args, **kwargs):
    raise ZeroDivisionError("a slip of ours")


@pytest.mark.parametrize("method", ["lower", "candidates"])
def test_an_error_of_ours_is_reported(monkeypatch, method):
    monkeypatch.setattr(DequantMatmulPattern, method, fails)
    check(compiled(Int8(), options=EAGER_REST), Int8(), X)
    report = qinductor.last_report()
    assert report.lowered == 0
    assert "a slip of ours" in str(report)


@pytest.mark.parametrize("method", ["lower", "candidates"])
def test_an_error_of_ours_is_raised_under_require(monkeypatch, method):
    monkeypatch.setattr(DequantMatmulPattern, method, fails)
    with pytest.raises(BackendCompilerFailed, match="a slip of ours") as error:
        compiled(Int8(), options={**REQUIRE, **EAGER_REST})(X)
    assert isinstance(error.value.inner_exception, qinductor.RequiredPatternError)


def test_require_raises_with_the_table_of_sites():
    with pytest.raises(
        BackendCompilerFailed, match="NOT LOWERED.*one entry for each element"
    ) as error:
        compiled(Elementwise(), options={**REQUIRE, **EAGER_REST})(X)
    assert isinstance(error.value.inner_exception, qinductor.RequiredPatternError)
    check(compiled(Int8(), options=REQUIRE), Int8(), X)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": {}}, "unknown option 'pattern'; did you mean 'patterns'?"),
        ({"patterns": {"dequant_matmull": "on"}}, "did you mean 'dequant_matmul'?"),
        ({"patterns": {"dequant_matmul": "yes"}}, "is 'yes'; wanted one of on, off, require"),
        ({"target": "sm90"}, "option target is 'sm90'; wanted one of cpu, sm_80, sm_90"),
        ({"mode": "max-autotun"}, "option mode is 'max-autotun'; wanted one of default"),
        ({"patterns": 3}, "patterns must be a dict, got 3"),
        ("patterns", "options must be a dict, got 'patterns'"),
    ],
)
def test_what_the_user_sees_of_a_bad_option(options, message):
    with pytest.raises(BackendCompilerFailed) as error:
        compiled(Int8(), options=options)(X)
    assert isinstance(error.value.inner_exception, qinductor.OptionError)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "options", [{"target": "sm90"}, {"patterns": {"dequant_matmull": "on"}}, {"pattern": {}}]
)
def test_explain_raises_option_errors_as_they_are(options):
    with pytest.raises(qinductor.OptionError):
        qinductor.explain(Int8(), X, options=options)


@pytest.mark.parametrize("make", [dict, qinductor.Options])
def test_options_as_dict_and_as_options(make):
    off = make(patterns={"dequant_matmul": "off"}, **EAGER_REST)
    check(compiled(Int8(), options=off), Int8(), X)
    assert outcomes() == []
    torch._dynamo.reset()
    on = make(patterns={"dequant_matmul": "require"}, mode="max-autotune-no-cudagraphs")
    check(compiled(Int8(), options=on), Int8(), X)
    assert outcomes() == [(True, None)]


def test_mode_as_torch_compiles_own_argument():
    check(compiled(Int8(), mode="max-autotune-no-cudagraphs"), Int8(), X)
    assert outcomes() == [(True, None)]


def test_mode_lite_warns_once_and_refuses_every_site():
    model = torch.nn.Sequential(Int8(1), Int8(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(compiled(model, options={"mode": "lite"}), model, X)
    assert sum("qinductor" in str(warning.message) for warning in caught) == 1
    for lowered, reason in outcomes():
        assert not lowered and "runs no joint passes (mode 'lite')" in reason
    assert len(outcomes()) == 2


class Named(CustomGraphPass):
    """A user's pass: notes which operators it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append({str(node.target) for node in graph.nodes if node.op == "call_function"})

    def uuid(self):
        return "Named"


@pytest.mark.parametrize("kind", ["a function", "a CustomGraphPass"])
@pytest.mark.parametrize("place", ["options", "config"])
def test_the_users_own_pass_runs_before_ours(place, kind):
    own = Named()
    given = {"joint_custom_pre_pass": own if kind == "a CustomGraphPass" else own.__call__}
    patch = inductor_config.patch(given) if place == "config" else contextlib.nullcontext()
    options = {"inductor": given} if place == "options" else None
    with patch:
        check(compiled(Int8(), options=options), Int8(), X)
    assert outcomes() == [(True, None)]
    assert len(own.seen) == 1 and "aten.mm.default" in own.seen[0]


def test_no_setting_of_inductor_outlives_a_compile():
    before = inductor_config.save_config()
    check(compiled(Int8(), options={"mode": "max-autotune-no-cudagraphs"}), Int8(), X)
    assert inductor_config.save_config() == before


# Reports


def test_report_as_data():
    report = qinductor.explain(Int8(), X)
    data = json.loads(json.dumps(report.to_dict()))
    assert set(data) == {
        "target", "sites", "matching_seconds", "packed_bytes", "dense_bytes", "freed_bytes",
        "graphs", "variants", "notes", "lowered",
    }  # fmt: skip
    (site,) = data["sites"]
    assert set(site) == {
        "where", "pattern", "lowered", "contract", "provider", "reason", "cost", "evaluations",
        "variant", "rung",
    }  # fmt: skip
    assert (data["lowered"], site["lowered"], data["target"]) == (1, True, "cpu")


def test_the_report_of_a_model_is_the_same_every_time():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lowered, self.refused = Int8(), Elementwise()

        def forward(self, x):
            return self.lowered(x) + self.refused(x)

    model, found = Two(), []
    for _ in range(3):
        torch._dynamo.reset()
        check(compiled(model, options=EAGER_REST), model, X)
        found.append(comparable(qinductor.last_report()))
    assert found[0] == found[1] == found[2]
    assert (found[0]["lowered"], len(found[0]["sites"])) == (1, 2)


# explain


@pytest.fixture
def no_kernel(monkeypatch):
    """Compiling anything fails."""
    for module in ("qinductor.backend", "torch._inductor.compile_fx"):
        monkeypatch.setattr(f"{module}.compile_fx_inner", fails)


def test_explain_compiles_no_kernel(no_kernel):
    report = qinductor.explain(torch.nn.Sequential(Int8(), Elementwise()), X)
    assert [site.lowered for site in report.sites] == [True, False]
    assert not qinductor.reports()


def test_explain_twice_in_a_row(no_kernel):
    model = Int8()
    first, second = (qinductor.explain(model, X) for _ in range(2))
    assert comparable(first) == comparable(second)
    assert first.lowered == 1
    assert qinductor.explain(model, X[:2], dynamic=True).lowered == 1


def test_explain_joins_graphs(no_kernel):
    report = qinductor.explain(Broken(), X)
    assert (report.graphs, report.lowered) == (2, 2)
    assert [site.where.split()[0] for site in report.sites] == ["first", "second"]


@pytest.mark.parametrize("way", ["torch.compile", "in place", "its layers", "a function"])
def test_explain_of_what_is_compiled_already(monkeypatch, way):
    model = Broken()
    plain = run = model
    if way == "torch.compile":
        run = compiled(model)
    elif way == "in place":
        model.compile(backend="qinductor")
    elif way == "its layers":
        model.first.compile(backend="qinductor")
        model.second.compile(backend="qinductor")
    else:
        run = compiled(lambda x: plain(x))
    out = run(X)
    kept = list(qinductor.reports())
    with monkeypatch.context() as patch:
        for module in ("qinductor.backend", "torch._inductor.compile_fx"):
            patch.setattr(f"{module}.compile_fx_inner", fails)
        report = qinductor.explain(run, X)
    assert (report.graphs, report.lowered) == (2, 2)
    torch.testing.assert_close(run(X), out)
    assert list(qinductor.reports()) == kept, "the compiled model was compiled again"


def test_explain_leaves_a_compiled_model_its_recompiles():
    model = Int8()
    run = compiled(model)
    run(X)
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        qinductor.explain(model, X)
    run(X)
    assert len(qinductor.reports()) == 1
    check(run, model, torch.randn(9, K))
    assert len(qinductor.reports()) == 2, "the new shape ran eagerly"


def test_reset_then_run_again():
    model = Int8()
    run = compiled(model)
    for count in (1, 2):
        check(run, model, X)
        assert len(qinductor.reports()) == count
        torch._dynamo.reset()


# Processes

MODELS = textwrap.dedent(
    """
    import torch


    class Int8(torch.nn.Module):
        def __init__(self, elementwise):
            super().__init__()
            g = torch.Generator().manual_seed(0)
            codes = torch.randint(0, 128, (32, 64), generator=g, dtype=torch.int8)
            self.register_buffer("codes", codes)
            shape = (32, 64) if elementwise else (32, 1)
            self.register_buffer("scale", torch.rand(shape, generator=g).bfloat16())

        def forward(self, x):
            return x @ (self.codes.bfloat16() * self.scale).t()


    def good():
        return Int8(False), (torch.ones(2, 64, dtype=torch.bfloat16),), {}


    def module():
        return torch.nn.Sequential(Int8(False), Int8(True))


    def bare_argument():
        return Int8(False), torch.ones(2, 64), {}


    def no_keywords():
        return Int8(False), (torch.ones(2, 64),), None


    def broken():
        raise RuntimeError("no weights here")
    """
)

CHILD = textwrap.dedent(
    """
    import json
    import sys

    import torch
    from models_of_the_child import Int8
    from torch._dynamo.utils import counters

    import qinductor

    found = []
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    for elementwise, pattern in json.loads(sys.argv[1]):
        torch._dynamo.reset()
        counters.clear()
        qinductor.reports().clear()
        model, error = Int8(elementwise), ""
        options = {
            "patterns": {"dequant_matmul": pattern}, "inductor": {"fallback_by_default": True}
        }
        try:
            out = torch.compile(model, backend="qinductor", options=options)(x)
            torch.testing.assert_close(out, model(x), rtol=0.02, atol=0)
        except torch._dynamo.exc.BackendCompilerFailed as failure:
            error = type(failure.inner_exception).__name__
        report = qinductor.last_report().to_dict()
        del report["matching_seconds"]
        for site in report["sites"]:
            del site["evaluations"]
        hit = counters["inductor"]["fxgraph_cache_hit"]
        miss = counters["inductor"]["fxgraph_cache_miss"]
        found.append({"report": report, "hit": hit, "miss": miss, "error": error})
    print(json.dumps(found))
    """
)


def python(*arguments, cwd, **environment):
    """A Python process; the repository is on its path, wherever it runs."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_a_second_process_hits_the_cache_and_reports_the_same(tmp_path):
    (tmp_path / "models_of_the_child.py").write_text(MODELS)
    (tmp_path / "child.py").write_text(CHILD)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    cases = [(False, "on"), (True, "on"), (True, "require")]

    def run(cases):
        child = python("child.py", json.dumps(cases), cwd=tmp_path, **environment)
        assert child.returncode == 0, child.stderr
        return json.loads(child.stdout.splitlines()[-1])

    cold, warm = run(cases), run([*cases, (False, "off")])
    # A provider may compile code of its own, which is counted as well.
    assert all(case["hit"] == 0 and case["miss"] for case in cold)
    assert [case["report"]["lowered"] for case in cold] == [1, 0, 0]
    assert [case["error"] for case in cold] == ["", "", "RequiredPatternError"]
    assert all(case["hit"] and case["miss"] == 0 for case in warm[:2])
    assert [case["report"] for case in warm[:3]] == [case["report"] for case in cold]
    assert [case["error"] for case in warm[:3]] == [case["error"] for case in cold]
    assert warm[3]["report"]["sites"] == []
    assert warm[3]["hit"] == 0 and warm[3]["miss"], "another option must be another key"


def test_command_line_explain(tmp_path):
    (tmp_path / "toy.py").write_text(MODELS)
    child = python("-m", "qinductor", "explain", "toy.py:good", cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert "1 of 1 sites lowered" in child.stdout and "int8[32,64]" in child.stdout
    child = python("-m", "qinductor", "explain", "missing.py:good", cwd=tmp_path)
    assert (child.returncode, child.stdout) == (2, "")
    assert child.stderr.startswith("error: ") and "missing.py" in child.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("missing.py:good", "existing file"),
        ("toy.py", "FILE.py:FACTORY"),
        (":good", "FILE.py:FACTORY"),
        ("toy.py:goood", "no function 'goood'"),
        ("toy.py:module", "must return (module, args, kwargs)"),
        ("toy.py:bare_argument", "must return (module, args, kwargs)"),
        ("toy.py:no_keywords", "must return (module, args, kwargs)"),
    ],
)
def test_command_line_errors_are_one_line(tmp_path, monkeypatch, capsys, given, says):
    (tmp_path / "toy.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["explain", given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and says in err
    assert err.count("\n") == 1, err


def test_command_line_options(tmp_path, monkeypatch, capsys):
    (tmp_path / "toy.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["explain", "toy.py:good", "--dynamic"]) == 0
    assert "1 of 1 sites lowered for cpu" in capsys.readouterr().out
    assert main(["explain", "toy.py:good", "--target", "sm_80"]) == 0
    assert "for sm_80" in capsys.readouterr().out
    assert main(["explain", "toy.py:good", "--target", "sm80"]) == 2
    assert "wanted one of cpu, sm_80" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="no weights here"):  # the user's own traceback
        main(["explain", "toy.py:broken"])


def test_a_target_that_is_not_the_graphs_is_refused():
    model = Int8()
    check(compiled(model, options={**EAGER_REST, "target": "sm_90"}), model, X)
    ((lowered, reason),) = outcomes()
    assert not lowered and "the target is sm_90, yet the graph is on cpu" in reason


def test_explain_says_that_a_model_would_be_compiled_for_training():
    model = torch.nn.Sequential(Int8(), torch.nn.Linear(N, N))
    with torch.enable_grad():
        assert "training" in qinductor.explain(model, X).notes[0]
    with torch.no_grad():
        assert not qinductor.explain(model, X).notes
