"""Modules of every library whose graphs we know, and code as people write it: what is lowered."""

import collections

import of_bitsandbytes
import of_compressed_tensors
import of_gptqmodel
import of_plain
import of_quanto
import of_torchao
import of_transformers
import pytest
from table import Case, check, check_left, check_routers

MODULES = (
    of_plain, of_torchao, of_compressed_tensors, of_gptqmodel, of_quanto, of_bitsandbytes,
    of_transformers,
)  # fmt: skip
CASES: tuple[Case, ...] = tuple(case for module in MODULES for case in module.CASES)
LOWERED = [case for case in CASES if case.why is None]
LEFT = [case for case in CASES if case.why is not None and case.make is not None]
ROUTED = [case for case in CASES if case.routers]
SHARE = 0.95  # of the rows with a product to lower that must be lowered
# How many graphs of each library were read; a case of ours beyond them is marked `extra`.
CATALOGUE = {
    "plain_pytorch": 42,
    "torchao": 30,
    "compressed_tensors": 22,
    "gptqmodel": 12,
    "optimum_quanto": 9,
    "bitsandbytes": 7,
    "transformers": 22,
}

passed: dict[str, bool] = {}


@pytest.mark.parametrize("case", LOWERED, ids=str)
def test_lowered(case):
    try:
        check(case)
    except pytest.skip.Exception:
        raise
    except BaseException:
        passed[case.name] = False
        raise
    passed[case.name] = True


@pytest.mark.parametrize("case", LEFT, ids=str)
def test_left_alone(case):
    check_left(case)


@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_routers_on_a_gpu(case):
    check_routers(case, "sm_90")


def test_the_table_is_whole():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert collections.Counter(case.library for case in CASES if not case.extra) == CATALOGUE
    for case in CASES:
        assert (case.why is None) == (case.lowered > 0), case
        assert case.why is not None or (case.make and case.says), case


def test_share_of_what_is_lowered():
    if len(passed) < len(LOWERED) // 2:
        pytest.skip("only with the rest of this file")
    left = [name for name, lowered in passed.items() if not lowered]
    share = 1 - len(left) / len(passed)
    print(f"{len(passed) - len(left)} of {len(passed)} cases lowered, not {left}")
    assert share >= SHARE, left
