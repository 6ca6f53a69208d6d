"""Golden graphs: how the text of one test is made and compared."""

import textwrap
from collections.abc import Callable
from typing import Any

import torch
from expecttest import TestCase
from models import CASES

import qinductor
from qinductor.testing import WIDTH, rewritten


class Golden(TestCase):
    """One graph a test: before, what became of its sites, after."""

    maxDiff = None

    def cpu(self, name: str, dynamic: bool | None = None, m: int = 8) -> Callable[[str], None]:
        """Compares the whole text on the CPU."""
        case = CASES[name]
        return self.graph(case.module, case.activation(m), dynamic=dynamic)

    def graph(
        self, module: Callable[[], torch.nn.Module], *args: Any, dynamic: bool | None = None
    ) -> Callable[[str], None]:
        """Compares the whole text of what `module()` does with these arguments, on the CPU."""
        found = rewritten(module, *args, dynamic=dynamic)
        return self.expects(f"{found.before}\n{outcome(found.report)}\n{found.after}\n")

    def cuda(self, name: str, dynamic: bool | None = None, m: int = 8) -> Callable[[str], None]:
        """Compares what CUDA changes: the graph before is the CPU's, but for its device."""
        case = CASES[name]
        here = rewritten(case.module, case.activation(m), dynamic=dynamic)
        found = rewritten(case.module, case.activation(m), target="sm_90", dynamic=dynamic)
        self.assertEqual(found.before.replace("@cuda", ""), here.before)
        return self.expects(f"{outcome(found.report)}\n{found.after}\n")

    def expects(self, text: str) -> Callable[[str], None]:
        return lambda expected: self.assertExpectedInline(text, expected, skip=1)


def outcome(report: qinductor.Report) -> str:
    """How many sites were lowered, and why the others were not."""
    assert not report.notes, report.notes
    lines = [f"---- {report.lowered} of {len(report.sites)} lowered"]
    for site in report.sites:
        lines += textwrap.wrap(site.reason or "", WIDTH, subsequent_indent="  ")
    return "\n".join(lines)
