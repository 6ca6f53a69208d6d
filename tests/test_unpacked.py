"""Where a weight cannot be packed after all was proved, the graph is as it was before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import BF16, Holder, Random, nibbles

import qinductor
from qinductor import backend
from qinductor.backend import Matching
from qinductor.op import Plan
from qinductor.testing import text

E, H, INNER = 2, 64, 32
EAGER = {"fallback_by_default": True}  # which spares a C++ compile of what is not lowered
ERRORS = [torch.OutOfMemoryError("no memory is left"), RuntimeError("a kernel's own")]
Tensor = torch.Tensor


def compiled(
    module: torch.nn.Module, args: tuple[Tensor, ...], patterns: dict[str, str], stops: bool = False
) -> tuple[str, str, Any, Tensor | None]:
    """(the graph before our pass, and after it, report, result); `stops` after the pass."""
    found: list[str] = []
    ours = Matching.__call__

    def recorded(self: Matching, graph: torch.fx.Graph) -> None:
        found.append(text(graph))
        ours(self, graph)
        found.append(text(graph))
        found.append(self.report)
        if stops:
            raise KeyboardInterrupt

    torch._dynamo.reset()
    served = torch.compile(
        module, backend="qinductor", options={"patterns": patterns, "inductor": EAGER}
    )
    out = None
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        torch.no_grad(),
    ):
        patch.setattr(Matching, "__call__", recorded)
        try:
            out = served(*args)
        except KeyboardInterrupt:
            assert stops
    before, after, report = found
    return before, after, report, out


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """(error, call from 1 on or None for every one, whose call) -> from now on it fails."""

    def fails(error: Exception, at: int | None, owner: Any = Plan, name: str = "pack") -> None:
        calls, function = [0], getattr(owner, name)

        def called(*args: Any) -> Any:
            calls[0] += 1
            if at in (None, calls[0]):
                raise error
            return function(*args)

        monkeypatch.setattr(owner, name, called)

    return fails


def int4(codes: Tensor, scale: Tensor) -> Tensor:
    return ((nibbles(codes).to(BF16) - 8).unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2)


def looping(m: Holder, x: Tensor, ids: Tensor, wt: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        gate, up = F.linear(x[t], int4(m.up[e], m.up_scale[e])).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, int4(m.down[e], m.down_scale[e]))
        out.index_add_(0, t, y * wt[t, k, None])
    return out


def loop() -> tuple[Holder, tuple[Tensor, ...]]:
    r = Random(3)
    held = {
        "up": r.integers(0, 256, E, 2 * INNER, H // 2),
        "up_scale": r.scales(E, 2 * INNER, H // 32),
        "down": r.integers(0, 256, E, H, INNER // 2),
        "down_scale": r.scales(E, H, INNER // 32),
    }
    ids = torch.tensor([[0, 1], [1, 0], [0, 1], [0, 1], [1, 0]])
    return Holder(looping, **held), (r.normal(5, H), ids, r.normal(5, 2))


def chosen(m: Holder, x: Tensor, ids: Tensor) -> Tensor:
    """Codes of one choice a batch, chosen before they are dequantised."""
    return torch.bmm(x, (m.codes[ids].to(BF16) * m.scale[ids][..., None]).mT)


def of_tokens(m: Holder, x: Tensor, ids: Tensor) -> Tensor:
    """Several choices of a token."""
    w = m.codes[ids].to(BF16) * m.scale[ids][..., None]
    return torch.einsum("teno,to->ten", w, x[:, 0])


def twice(m: Holder, x: Tensor, ids: Tensor) -> Tensor:
    """Two products of one operand, which is moved after it was chosen."""
    w = (m.codes[ids].to(BF16) * m.scale[ids][..., None]).flatten(0, 1).mT
    return torch.bmm(x.repeat(2, 1, 1), w) + torch.bmm(x.repeat(2, 1, 1) * 2, w)


def choice(function: Callable[..., Tensor]) -> tuple[Holder, tuple[Tensor, ...]]:
    r = Random(4)
    ids = torch.tensor([2, 0, 0, 2, 1])
    ids = ids if function is chosen else torch.stack((ids, ids.flip(0)), 1)
    holder = Holder(function, codes=r.float8(3, 48, H), scale=r.scales(3, 48))
    return holder, (r.normal(5, 1, H), ids)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_loop(failing, error):
    module, args = loop()
    failing(error, None)
    before, after, report, out = compiled(module, args, {})
    assert report.lowered == 0 and after == before, f"{report}\n{after}"
    ours = [site.reason for site in report.sites if site.pattern == "expert_loops"]
    assert len(ours) == 2 and all(str(error) in reason for reason in ours), report
    off = dict.fromkeys(("expert_loops", "dequant_matmul"), "off")
    assert torch.equal(out, compiled(module, args, off)[3])


@pytest.mark.parametrize("at", [1, 2])
def test_a_loop_one_of_whose_weights_is_not_packed(failing, at):
    """Its turns are lowered, each by itself, as they are with the pattern off."""
    _, off, report, wanted = compiled(*loop(), {"expert_loops": "off"})
    assert report.lowered == 2 * E
    failing(ERRORS[0], at)
    _, after, report, out = compiled(*loop(), {})
    reasons = [site.reason for site in report.sites if site.pattern == "expert_loops"]
    assert len(reasons) == 2 and all(str(ERRORS[0]) in reason for reason in reasons), report
    assert report.lowered == 2 * E and after == off
    assert torch.equal(out, wanted)


def test_a_loop_that_is_packed():
    """What the tests above would find if nothing failed."""
    before, after, report, _ = compiled(*loop(), {}, stops=True)
    assert [site.pattern for site in report.sites if site.lowered] == ["expert_loops"] * 2
    assert after != before and "nonzero" not in after and "_assert_scalar" not in after


@pytest.mark.parametrize("function", [chosen, of_tokens, twice])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_choice_of_codes(failing, error, function):
    module, args = choice(function)
    _, moved, report, _ = compiled(module, args, {}, stops=True)
    assert report.lowered == (2 if function is twice else 1), report
    qinductor.refresh(module)  # or they would be packed already
    failing(error, None)
    before, after, report, out = compiled(module, args, {})
    assert report.lowered == 0 and after == before != moved, f"{report}\n{after}"
    assert all(str(error) in site.reason for site in report.sites), report
    assert torch.equal(out, compiled(module, args, {"dequant_matmul": "off"})[3])


@pytest.mark.parametrize("at", [1, 2])
def test_a_choice_that_two_products_share(failing, at):
    """One is lowered, the other is as it was."""
    module, args = choice(twice)
    failing(ERRORS[0], at, backend, "seed")
    _, after, report, out = compiled(module, args, {})
    assert [site.lowered for site in report.sites] == [at == 2, at == 1], report
    assert after.count("aten.bmm") == 1 and after.count("qinductor.dequant_gathered_bmm") == 1
    assert "[3, 48, 64]" not in after.replace("float8_e4m3fn[3, 48, 64]", ""), after
    with torch.no_grad():
        torch.testing.assert_close(out, module(*args), rtol=0.02, atol=0.05)
