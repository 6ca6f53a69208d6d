"""Serving: warm-up of a compiled model, and replay of its recorded calls."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from qinductor.caches.disk import caches, record
from qinductor.errors import OptionError, QinductorError
from qinductor.report import reports
from qinductor.serving import padding as policies
from qinductor.serving.account import MIB, Account, progress
from qinductor.serving.examples import Call, between, calls_of, devices
from qinductor.serving.padding import Padding
from qinductor.serving.session import ROUNDS, Session, packed_bytes

_sessions: dict[int, tuple[Any, Session]] = {}  # id of a model -> (what keeps or watches it, ...)


def warmup(
    model: Callable[..., Any],
    *example: Any,
    batch_sizes: Sequence[int] | None = None,
    shapes: Sequence[Any] | None = None,
    padding: Padding = None,
    kwargs: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Account:
    """Prepares a compiled model for serving: compiles for every size, records CUDA graphs.

    model        what `torch.compile(..., backend="qinductor")` gave, or a function that calls it
    example      arguments of one call; or one function, size -> (args, kwargs), that makes them
    kwargs       keyword arguments of that call
    batch_sizes  sizes of the first axis of those tensors of the example that have one of the first
                 tensor's size; the others stay as they are. By default the example's own
    shapes       instead: shapes of the first tensor, or tuples of shapes, one for each tensor
    padding      what rows hold that are added to reach a recorded size: "repeat" (the last row, the
                 default), a number, or {name of an argument: one of these}. A graph that writes to
                 its inputs is padded only if this is given: its added rows are written, too
    quiet        no progress bar, nothing printed

    Four phases: (1) every size runs: all weights are matched, proved and packed, all is compiled;
    (2) buffers for inputs are made, of the largest size, shared by all; (3) every size runs on them
    until a run compiles nothing; (4) every size is recorded, the largest first, in one pool, and
    padded calls are held against plain ones. Later calls that fit are replayed: in sizes, in
    addresses of parameters and states, in packed weights. Others run as they did. The model really
    runs; states that it writes to are restored, up to 64 MiB. Call it as the model is called,
    within `no_grad` or `inference_mode` or not. On a CPU all sizes are compiled and run, and
    nothing is recorded.
    Returns the account, which is printed, too.
    Errors: OptionError for bad arguments, or while this model is warmed up already; QinductorError
    if no graph of this backend ran, or something was compiled while a graph was recorded; what the
    model raises.
    """
    policies.check(padding)
    calls = calls_of(example, kwargs or {}, batch_sizes, shapes)
    session = _session(model)
    more = between(calls)
    total = 4 * len(calls) + 2 * len(more)
    with session.warming(padding), caches(), progress(total, quiet) as said:

        def run(mode: str, calls: Sequence[Call]) -> None:
            for call in calls:
                said(f"{mode} {call.size}")
                args, named = call()
                with session.calling(mode, call.size):
                    model(*args, **named)

        _phases(session, run, calls, more, devices(calls[0]))
    record()
    if not session.runners:
        release(model)
        raise QinductorError(
            "no graph of qinductor ran; wanted a model of torch.compile(model, backend='qinductor')"
            " without Inductor's own CUDA graphs"
        )
    if not quiet:
        print(session.account)
    return session.account


def _phases(
    session: Session,
    run: Callable[[str, Sequence[Call]], None],
    calls: Sequence[Call],
    more: Sequence[Call],
    devices: Sequence[torch.device],
) -> None:
    session.account.phases.clear()
    session.account.outcomes.clear()
    session.account.notes.clear()
    for device in devices:
        session.gpu(device)
    known, already = set(map(id, reports())), packed_bytes()
    with session.phase("weights: match, prove, pack, compile", None) as phase:
        calls = [call for call in calls if _works(run, call, session)]
        more = [call for call in more if session.grows() and _works(run, call, session)]
        freed = sum(report.freed_bytes for report in reports() if id(report) not in known)
        phase.predicted = packed_bytes() - already - freed
    session.check_names()
    with session.phase("buffers of inputs", session.buffers.predicted()):
        session.buffers.allocate()
    with session.phase("runs until nothing compiles", 0):
        for _ in range(ROUNDS):
            before = session.compiles.count
            run("rehearse", calls)
            pool = session.drop()
            if session.compiles.count == before:
                break
        else:
            session.account.note(f"something is compiled in each of {ROUNDS} runs")
    held, beside = session.pools(), session.beside()
    with session.phase("CUDA graphs", pool) as phase:
        run("record", calls)
        session.spread()
        run("prove", more)
        phase.used = session.pools() - held
    if taken := session.beside() - beside:
        session.account.note(f"beside tensors, CUDA graphs take {taken / MIB:.1f} MiB")


def _works(run: Callable[..., Any], call: Call, session: Session) -> bool:
    """Whether the model takes a size. One that was not asked for may fail."""
    try:
        run("run", [call])
    except Exception as error:
        if call.asked:
            raise
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        session.account.note(f"a call of size {call.size} was tried, too: {said}")
        return False
    return True


def release(model: Callable[..., Any] | None = None) -> None:
    """Gives the memory back that warm-up took: recordings, their pool, buffers. The model goes on
    without them; its packed weights stay, as its compiled code needs them.

    model: as given to `warmup` (of a function the same object); None for all. Of a module that dies
    they are released, too. Errors: OptionError for what cannot be called.
    """
    for key in list(_sessions) if model is None else [id(_owner(model))]:
        _released(key)


def _released(key: int) -> None:
    _, session = _sessions.pop(key, (None, None))
    if session is not None:
        session.release()


def _session(model: Any) -> Session:
    owner = _owner(model)
    if id(owner) not in _sessions:
        held = owner  # a function, made for this one call perhaps: until it is released
        if isinstance(owner, torch.nn.Module):
            held = weakref.finalize(owner, _released, id(owner))
            held.atexit = False
        _sessions[id(owner)] = held, Session()
    return _sessions[id(owner)][1]


def _owner(model: Any) -> Any:
    """The module or object behind a compiled one or behind its method; else the function itself."""
    if not callable(model):
        raise OptionError(f"{model!r} cannot be called; wanted a compiled model, or its caller")
    model = getattr(model, "__self__", model)
    model = getattr(model, "_torchdynamo_orig_callable", model)
    return getattr(model, "__self__", getattr(model, "_orig_mod", model))


__all__ = ["Account", "release", "warmup"]
