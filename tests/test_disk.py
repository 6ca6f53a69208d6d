"""Caches on disk: a second process starts warm; what is broken or a stranger's is not used."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import qinductor
from qinductor import store, tables
from qinductor.caches import disk, isa, manifest
from qinductor.caches.manifest import Manifest
from qinductor.op import Plan

ROOT = Path(__file__).parents[1]
EAGER_REST = {"fallback_by_default": True}  # spares a C++ compile
CHILD = """
import hashlib, json, sys, time, warnings
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder, cpu_vec_isa
import qinductor

cpu_vec_isa.x86_isa_checker = lambda: ["avx2"]  # one question of ten: each builds for seconds
builds = []
build = cpp_builder.CppBuilder.build
def counted(self):
    if not self.get_target_file_path().endswith(".i"):  # preprocessed, to see what it includes
        builds.append(self.get_target_file_path())
    build(self)
cpp_builder.CppBuilder.build = counted

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.register_buffer("codes", torch.randint(0, 16, (64, 64), generator=g).to(torch.int8))
        self.register_buffer("scale", torch.rand(64, 2, generator=g) * 0.02 + 0.01)
    def forward(self, x):
        w = ((self.codes.view(64, 2, 32) - 8).to(x.dtype) * self.scale[:, :, None]).view(64, 64)
        return torch.nn.functional.silu(torch.nn.functional.linear(x, w)) + x

torch.set_num_threads(1)
x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
options = {"packed": "disk"}
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("always")
    y = torch.compile(Model(), backend="qinductor", options=options)(x)
print(json.dumps({
    "y": hashlib.sha256(y.numpy().tobytes()).hexdigest(),
    "builds": len(builds),
    "miss": counters["inductor"]["fxgraph_cache_miss"],
    "hit": counters["inductor"]["fxgraph_cache_hit"],
    "lowered": sum(site.lowered for site in qinductor.last_report().sites),
    "said": [str(w.message) for w in caught if str(w.message).startswith("qinductor")],
}))
"""


class Child:
    """A process that compiles the model and calls it once."""

    def __init__(self, cache):
        variables = {k: v for k, v in os.environ.items() if k not in disk.NAMES}
        variables |= {
            "QINDUCTOR_CACHE": str(cache), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], cwd=cache, env=variables,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def result(self):
        out, errors = self.process.communicate()
        assert self.process.returncode == 0, errors
        return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """(what two processes, which started at once on an empty cache, say; the cache)."""
    cache = tmp_path_factory.mktemp("cache")
    both = Child(cache), Child(cache)
    return [child.result() for child in both], cache


@pytest.fixture
def cache(cold, tmp_path):
    """A copy of a cache that is filled."""
    place = tmp_path / "copy"
    shutil.copytree(cold[1], place)
    return place


@pytest.fixture
def root(monkeypatch, tmp_path):
    """A cache that is empty."""
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture
def place(monkeypatch, root):
    """The same, and no variable is set by the user."""
    for name in disk.NAMES:
        monkeypatch.delenv(name, raising=False)
    return root


def version(root):
    (found,) = root.glob(f"v{disk.VERSION}-*")
    return found


def files(folder):
    """{path: inode} of what is checked."""
    return {path: status.st_ino for path, status in Manifest(folder)._files()}


def put(folder, text, path, at=None):
    path = folder / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if at is not None:
        os.utime(path, (at, at))


@contextlib.contextmanager
def said():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        messages = []
        yield messages
    messages += [str(w.message) for w in caught if str(w.message).startswith("qinductor")]


# Processes.


def test_two_processes_on_one_cache(cold):
    (one, two), root = cold
    assert one["y"] == two["y"] and one["lowered"] == two["lowered"] == 1
    assert one["said"] == two["said"] == []
    assert one["builds"] + two["builds"] > 0 and one["miss"] + two["miss"] > 0
    assert [path.name for path in root.iterdir()] == [disk.name()]
    places = {path.split("/")[0] for path in files(version(root))}
    assert places - {"triton"} == {"inductor", "isa.json"}  # Inductor makes the first of a GPU
    listed = json.loads((version(root) / manifest.LIST).read_text())
    assert set(listed) == set(files(version(root))), "a file was not recorded"


def test_a_second_process_compiles_nothing(cold, cache):
    before, weights = files(version(cache)), packed_files(cache)
    warm = Child(cache).result()
    assert (warm["builds"], warm["miss"], warm["said"]) == (0, 0, [])
    assert warm["hit"] > 0 and warm["y"] == cold[0][0]["y"] and warm["lowered"] == 1
    assert files(version(cache)) == before, "a file was written again"
    assert packed_files(cache) == weights and len(weights) == 1, "a weight was packed again"


def test_every_second_file_broken(cold, tmp_path):
    """Whichever they are, what they held is compiled again where it is needed."""
    running, built = [], []
    for odd in (0, 1):
        copy = tmp_path / str(odd)
        shutil.copytree(cold[1], copy)
        folder = version(copy)
        broken = sorted(p for p in files(folder) if (folder / p).stat().st_size)[odd::2]
        for i, path in enumerate(broken):
            data = bytearray((folder / path).read_bytes())
            if i % 2:
                del data[len(data) // 2 :]
            else:
                data[len(data) // 2] ^= 1
            (folder / path).write_bytes(data)
        running.append((folder, len(broken), Child(copy)))
    for folder, count, child in running:
        again = child.result()
        (message,) = again["said"]
        assert f"{count} files that are not as written" in message and str(folder) in message
        assert again["y"] == cold[0][0]["y"] and again["lowered"] == 1
        assert Manifest(folder).open() == ""
        built.append(again["builds"])
    assert sum(built) > 0, "no library was broken"


@pytest.mark.parametrize("kind", [".so", ".py", ".cpp", "isa.json", ""])
def test_a_broken_file_of_each_kind_among_whole_ones(cold, cache, kind):
    folder = version(cache)
    known = set(files(folder))
    path = next(p for p in known if (Path(p).suffix or "") == kind or p == kind)
    (folder / path).write_bytes((folder / path).read_bytes()[:-1])
    found = Manifest(folder)
    assert found.open() == f"1 files that are not as written ({path})"
    assert set(files(folder)) == known - {path}
    found.close()
    assert Manifest(folder).open() == ""


@pytest.mark.parametrize("text", ['{"isa.json": [1', "[1]", '{"a": 1}', '{"a": [1, 2, 3]}', ""])
def test_a_broken_manifest(cache, text):
    folder = version(cache)
    count = len(files(folder))
    (folder / manifest.LIST).write_text(text)
    removed = Manifest(folder).open()
    assert removed.startswith("the manifest cannot be read; ")
    assert f"{count} files that are not known to be whole" in removed and not files(folder)


# The manifest.


def opened(folder):
    made = Manifest(folder)
    return made, made.open()


def test_every_byte_counts(tmp_path):
    first, _ = opened(tmp_path)
    put(tmp_path, "whole", "inductor/ab/x.so")
    put(tmp_path, "", "inductor/ab/empty")
    first.record()
    first.close()
    for i in range(5):
        text = bytearray(b"whole")
        text[i] ^= 1
        with open(tmp_path / "inductor/ab/x.so", "r+b") as file:
            status = os.fstat(file.fileno())
            file.write(text)
        os.utime(file.name, ns=(status.st_atime_ns, status.st_mtime_ns))
        second, removed = opened(tmp_path)
        assert removed == "1 files that are not as written (inductor/ab/x.so)"
        assert sorted(files(tmp_path)) == ["inductor/ab/empty"]
        put(tmp_path, "whole", "inductor/ab/x.so")
        second.close()
    assert opened(tmp_path)[1] == ""


def test_what_a_killed_process_leaves_is_removed(tmp_path):
    first, _ = opened(tmp_path)
    put(tmp_path, "whole", "inductor/whole")
    first.record()
    put(tmp_path, "half", "inductor/half")
    put(tmp_path, "half", "packed/tmp123")
    os.close(first.alive)  # as the system does
    _, removed = opened(tmp_path)
    assert not (tmp_path / "packed/tmp123").exists()
    assert removed == "1 files that are not known to be whole (inductor/half)"
    assert sorted(files(tmp_path)) == ["inductor/whole"]


def test_what_another_process_writes_is_not_broken(tmp_path):
    first, _ = opened(tmp_path)
    put(tmp_path, "whole", "inductor/old")
    put(tmp_path, "whole", "inductor/rewritten")
    first.record()
    start = os.stat(first.name).st_mtime
    put(tmp_path, "in the making", "inductor/new", at=start + 1)
    put(tmp_path, "other", "inductor/rewritten", at=start + 1)
    put(tmp_path, "broken", "inductor/old", at=start - 1)
    second, removed = opened(tmp_path)
    assert removed == "1 files that are not as written (inductor/old)"
    assert sorted(files(tmp_path)) == ["inductor/new", "inductor/rewritten"]
    second.close()
    first.close()
    assert os.listdir(tmp_path / manifest.LIVE) != [], "removed by the next process"
    third, _ = opened(tmp_path)
    assert [tmp_path / manifest.LIVE / name for name in os.listdir(tmp_path / manifest.LIVE)] == [
        Path(third.name)
    ]


def test_a_file_is_replaced_but_not_changed_in_place(tmp_path):
    first, _ = opened(tmp_path)
    put(tmp_path, "one", "inductor/replaced")
    put(tmp_path, "one", "inductor/changed")
    first.record()
    put(tmp_path, "two!", "inductor/new")
    os.replace(tmp_path / "inductor/new", tmp_path / "inductor/replaced")
    put(tmp_path, "two!", "inductor/changed")
    first.close()
    assert opened(tmp_path)[1] == "1 files that are not known to be whole (inductor/changed)"
    assert sorted(files(tmp_path)) == ["inductor/replaced"]


def test_what_others_record_meanwhile_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "SETTLED", 5.0)
    (first, _), (second, _) = opened(tmp_path), opened(tmp_path)
    old = time.time() - 10
    put(tmp_path, "one", "inductor/one", at=old)
    first.record()
    put(tmp_path, "two", "inductor/two", at=old)
    second.record()
    put(tmp_path, "half", "inductor/fresh")  # the other may be writing it
    first.record()
    listed = json.loads((tmp_path / manifest.LIST).read_text())
    assert sorted(listed) == ["inductor/one", "inductor/two"]
    for process in (first, second):
        process.close()
    assert opened(tmp_path)[1] == "" and len(files(tmp_path)) == 3


@pytest.mark.parametrize("fault", ["broken", "gone", "more"])
def test_triton_s_folder_of_a_kernel_goes_as_a_whole(tmp_path, fault):
    first, _ = opened(tmp_path)
    for name in ("k.cubin", "k.json", "__grp__k.json"):
        put(tmp_path, name, f"triton/KEY/{name}")
        put(tmp_path, name, f"triton/OTHER/{name}")
    first.close()
    if fault == "gone":
        (tmp_path / "triton/KEY/k.cubin").unlink()
    else:
        put(tmp_path, "", "triton/KEY/k.cubin" if fault == "broken" else "triton/KEY/l.cubin")
    assert opened(tmp_path)[1]
    assert not (tmp_path / "triton/KEY").exists() and len(files(tmp_path)) == 3


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_only_plain_files(tmp_path, kind):
    first, _ = opened(tmp_path)
    put(tmp_path, "whole", "inductor/x")
    first.close()
    path = tmp_path / "inductor/x"
    if kind == "link":
        path.rename(tmp_path.parent / f"{tmp_path.name} elsewhere")
        path.symlink_to(tmp_path.parent / f"{tmp_path.name} elsewhere")
    else:
        path.unlink()
        os.mkfifo(path)
    assert "not as written (inductor/x)" in opened(tmp_path)[1] and not path.is_symlink()


def test_a_manifest_that_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "PATIENCE", 0.05)
    with Manifest(tmp_path)._locked(), pytest.raises(TimeoutError, match="is locked"):
        Manifest(tmp_path).open()


def test_recordings_are_rare(tmp_path):
    first, _ = opened(tmp_path)
    assert not first.is_recent()
    first.record()
    first.took = 10.0
    assert first.is_recent()


# The folder and the environment.


def variables():
    return {name: os.environ.get(name) for name in disk.NAMES}


def test_the_environment_within_and_after(place):
    with disk.caches():
        folder = version(place)
        assert variables() == {n: str(folder / part) for n, part in disk.NAMES.items()}
        with disk.caches():
            pass
        assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
        os.environ["TRITON_CACHE_DIR"] = "as Inductor does"
    assert variables() == dict.fromkeys(disk.NAMES)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(place.stat().st_mode) == 0o700


def test_the_environment_after_an_error(place):
    ask = cpu_vec_isa.VecISA.check_build
    with pytest.raises(ZeroDivisionError), disk.caches():
        assert cpu_vec_isa.VecISA.check_build is not ask
        raise ZeroDivisionError
    assert variables() == dict.fromkeys(disk.NAMES)
    assert cpu_vec_isa.VecISA.check_build is ask


def test_a_compile_that_fails_restores_the_environment(place):
    def breaks(graph):
        raise ZeroDivisionError

    options = {"inductor": {"joint_custom_pre_pass": breaks, **EAGER_REST}}
    with pytest.raises(Exception, match="ZeroDivisionError"):
        torch.compile(torch.sin, backend="qinductor", options=options)(torch.ones(4))
    assert not any(str(place) in (value or "") for value in variables().values())
    assert version(place).is_dir()


def test_explaining_makes_no_folder(place):
    qinductor.explain(torch.nn.Linear(4, 4), torch.ones(1, 4))
    assert not place.exists()


def test_threads_share_the_environment(place):
    inside, leave = threading.Event(), threading.Event()

    def compiles():
        with disk.caches():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=compiles)
    with disk.caches():
        thread.start()
        inside.wait()
    assert os.environ["TRITON_CACHE_DIR"] == str(version(place) / "triton")
    leave.set()
    thread.join()
    assert variables() == dict.fromkeys(disk.NAMES)


@pytest.mark.parametrize("variable", disk.NAMES)
def test_what_the_user_has_set_stays(place, monkeypatch, variable):
    monkeypatch.setenv(variable, "/mine")
    with disk.caches():
        assert os.environ[variable] == "/mine"
        assert len({os.environ[name] for name in disk.NAMES}) == 3
    assert os.environ[variable] == "/mine"


def test_what_torch_has_set_is_not_the_user_s(place, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{default_cache_dir()}/triton/0")
    with disk.caches():
        assert os.environ["TRITON_CACHE_DIR"] == str(version(place) / "triton")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(version(place) / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == f"{default_cache_dir()}/triton/0"


def test_a_cleared_folder_is_made_again(place):
    with disk.caches():
        shutil.rmtree(place)
    with said() as messages, disk.caches():
        assert stat.S_IMODE(version(place).stat().st_mode) == 0o700
    assert messages == []


def test_the_name_changes_with_what_the_files_depend_on(monkeypatch):
    names = {disk.name()}
    for change in (
        lambda: monkeypatch.setattr(torch, "__version__", "9"),
        lambda: monkeypatch.setattr(disk.importlib.metadata, "version", lambda name: "9"),
        lambda: monkeypatch.setattr(disk, "sources", lambda: "changed"),
        lambda: monkeypatch.setattr(tables, "cpu_name", lambda: "another"),
        lambda: monkeypatch.setattr(disk, "VERSION", 2),
    ):
        change()
        disk.name.cache_clear()
        names.add(disk.name())
    disk.name.cache_clear()
    assert len(names) == 6


def world(place):
    place.mkdir()
    place.chmod(0o777)


def group(place):
    place.mkdir()
    place.chmod(0o770)
    os.chown(place, -1, 65533) if os.geteuid() == 0 else None


def inner(place):
    path = place / disk.name()
    path.mkdir(parents=True)
    path.chmod(0o720)


def parent(place):
    place.parent.chmod(0o777)


def link(place):
    place.mkdir()
    (place.parent / "elsewhere").mkdir()
    (place / disk.name()).symlink_to(place.parent / "elsewhere")


def a_file(place):
    place.mkdir()
    (place / disk.name()).write_text("")


STRANGE = [
    (world, "written to by everybody"), (group, "written to by group"),
    (inner, "written to by group"), (parent, "written to by everybody"),
    (link, "no folder, or a link"), (a_file, "no folder"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), STRANGE, ids=lambda v: getattr(v, "__name__", ""))
def test_a_folder_of_strangers_is_not_used(place, make, reason, monkeypatch):
    if make is group and os.geteuid():
        monkeypatch.setattr(disk, "_is_alone", lambda group: False)
    make(place)
    with said() as messages:
        for _ in range(2):
            with disk.caches():
                used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    (message,) = messages
    assert reason in message and str(place) in message and "a temporary folder" in message
    assert place not in used.parents and stat.S_IMODE(used.stat().st_mode) == 0o700
    assert variables() == dict.fromkeys(disk.NAMES)


def test_a_folder_of_another_user_is_not_used(place, monkeypatch):
    disk.made(place)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="and this process runs as 12345"):
        disk.made(place)


def test_where_it_may_lie(place):
    place.parent.chmod(0o1777)  # as /tmp
    assert disk.made(place).parent == place
    (place.parent / "by link").symlink_to(place)  # the user's own
    assert disk.made(place.parent / "by link") == disk.made(place)


def test_a_cache_that_cannot_be_made(place):
    place.write_text("a file")
    with said() as messages, disk.caches():
        assert Path(os.environ["TRITON_CACHE_DIR"]).parent.is_dir()
    assert len(messages) == 1 and "is not used" in messages[0]


def test_a_user_without_a_home(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("QINDUCTOR_CACHE", "XDG_CACHE_HOME", *disk.NAMES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tables.pathlib.Path, "home", home)
    disk._opened.cache_clear()
    with said() as messages, disk.caches():
        assert Path(os.environ["TRITON_CACHE_DIR"]).parent.is_dir()
    assert len(messages) == 1 and "no home folder" in messages[0]


def test_questions_to_the_compiler_are_asked_once(tmp_path, monkeypatch):
    asked = []

    def check_build(self, code):
        asked.append(code)
        return code == "works"

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    for path in (tmp_path / "isa.json", tmp_path / "isa.json", tmp_path / "broken.json"):
        if path.name == "broken.json":
            path.write_text('{"a": tr')
        with isa.known(path):
            assert cpu_vec_isa.VecAVX2().check_build("works")
            assert not cpu_vec_isa.VecAVX2().check_build("fails")
    assert asked == ["works", "fails", "fails", "works", "fails"]
    assert cpu_vec_isa.VecISA.check_build is check_build


# Packed weights.

N, K, GROUP = 64, 64, 32
X = torch.randn(4, K, generator=torch.Generator().manual_seed(1))


class Linear(torch.nn.Module):
    """x . W^T with W = (codes - 8) * scale in groups."""

    def __init__(self, seed=0, high=16):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, high, (N, K), generator=g, dtype=torch.int8)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", torch.rand(N, K // GROUP, generator=g) * 0.02 + 0.01)

    def forward(self, x):
        w = (self.codes.view(N, -1, GROUP).to(x.dtype) - 8) * self.scale[:, :, None]
        return torch.nn.functional.linear(x, w.view(N, K))


@pytest.fixture
def packs(monkeypatch):
    """One entry for every weight that is packed."""
    found, pack = [], Plan.pack

    def counted(self, *arguments):
        found.append(self)
        return pack(self, *arguments)

    monkeypatch.setattr(Plan, "pack", counted)
    return found


def call(model, **options):
    """What the model gives, compiled as in a process that knows nothing."""
    torch._dynamo.reset()
    store.ENTRIES.clear()
    options = {"packed": "disk", "inductor": EAGER_REST, **options}
    with torch.no_grad():
        y = torch.compile(model, backend="qinductor", options=options)(X)
    assert qinductor.last_report().sites[0].lowered
    return y


def packed_files(root):
    """{path: when it was written}."""
    return {path: path.stat().st_mtime_ns for path in (version(root) / "packed").iterdir()}


def test_a_packed_weight_is_packed_once(root, packs):
    first = call(Linear())
    (path,) = packed_files(root)
    assert len(packs) == 1 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert torch.equal(call(Linear()), first) and len(packs) == 1
    assert torch.equal(call(Linear(), packed="memory"), first) and len(packs) == 2
    torch.testing.assert_close(first, Linear()(X))


@pytest.mark.parametrize("change", ["codes", "scale", "kept"])
def test_other_weights_are_others(root, packs, change):
    """`kept`: of a model that is compiled, a weight is written to."""
    first = call(model := Linear())
    if change == "kept":
        compiled = torch.compile(model, backend="qinductor", options={"packed": "disk"})
        with torch.no_grad():
            compiled(X)
            model.codes[3, 5] ^= 1
            y = compiled(X)
    else:
        other = Linear()
        if change == "codes":
            other.codes[3, 5] ^= 1
        else:
            other.scale[3, 1] *= 1.5
        y, model = call(other), other
    assert not torch.equal(y, first) and len(packs) == len(packed_files(root)) == 2
    torch.testing.assert_close(y, model(X))


def test_a_weight_written_back_is_found(root, packs):
    """At run time, too, where it is proved before it is packed."""
    model = Linear()
    options = {"packed": "disk", "inductor": EAGER_REST}
    compiled = torch.compile(model, backend="qinductor", options=options)
    with torch.no_grad():
        first = compiled(X)
        model.codes[3, 5] ^= 1
        compiled(X)
        model.codes[3, 5] ^= 1
        assert torch.equal(compiled(X), first) and len(packs) == 2
        model.codes[3, 5] = 100  # no longer four bits
        torch.testing.assert_close(compiled(X), model(X))


FAULTS = {
    "empty": lambda data: b"",
    "short": lambda data: data[:-1],
    "long": lambda data: data + b"\0",
    "first": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "header": lambda data: data.replace(b'"shape": [', b'"shape": [ ', 1),
    "body": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "length": lambda data: data.replace(b" 1 ", b" 1 9", 1),
    "binary": lambda data: b"\xff" * len(data),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_packed_weight_is_packed_again(root, packs, fault):
    first = call(Linear())
    (path,) = packed_files(root)
    data = path.read_bytes()
    path.write_bytes(FAULTS[fault](data))
    assert path.read_bytes() != data
    with said() as messages:
        assert torch.equal(call(Linear()), first)
    assert len(packs) == 2 and path.read_bytes() == data
    assert len(messages) == 1 and "is no packed weight" in messages[0]


def test_every_byte_of_a_packed_weight_counts(root, packs):
    from qinductor.caches import packed

    leaves = [torch.arange(6, dtype=torch.int8).view(2, 3).t()]
    made = {"a": torch.randn(3, 2).to(torch.bfloat16).t(), "b": torch.tensor(1.5)}
    path = root.parent / "x" / "packed"
    packed._write(path, made, leaves)
    data = path.read_bytes()
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :])
        with open(path, "rb") as file, contextlib.suppress(Exception):
            packed._read(file, leaves)
            pytest.fail(f"byte {i} does not matter")


def test_tensors_come_back_as_they_were(tmp_path):
    from qinductor.caches import packed

    leaf = torch.arange(24, dtype=torch.int8).view(4, 6)
    tensors = {
        "rows": torch.randn(3, 5).to(torch.bfloat16),
        "columns": torch.randn(5, 3).t(),
        "shifted": torch.arange(10)[4:],
        "bytes": torch.randn(8).to(torch.float8_e4m3fn),
        "exponents": torch.ones(4, dtype=torch.float8_e8m0fnu),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "leaf": leaf,
        "part": leaf[1:, ::2],
        "other dtype": leaf.view(torch.uint8)[2:],
    }
    packed._write(tmp_path / "p" / "x", tensors, [leaf])
    with open(tmp_path / "p" / "x", "rb") as file:
        found = packed._read(file, [leaf])
    assert found.keys() == tensors.keys() and found["leaf"] is leaf
    for name, tensor in tensors.items():
        one = found[name]
        assert (one.dtype, one.shape, one.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(one.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    for name in ("part", "other dtype"):
        assert found[name].untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()


def test_what_has_no_bytes_of_its_own_is_packed_every_time(tmp_path):
    from qinductor.caches import packed

    packed._write(tmp_path / "x", {"a": torch.ones(1).expand(4)}, [])
    packed._write(tmp_path / "x", {"a": torch.eye(2).to_sparse()}, [])
    assert not (tmp_path / "x").exists()
    assert packed.key_of("", [torch.eye(2).to_sparse()]) is None


def test_keys_of_leaves():
    from qinductor.caches.packed import key_of

    leaf = torch.arange(12, dtype=torch.int8).view(3, 4)
    keys = [
        key_of(text, [given])
        for text, given in (
            ("a", leaf), ("b", leaf), ("a", leaf.view(4, 3)), ("a", leaf.view(torch.uint8)),
            ("a", leaf.t()), ("a", leaf + 1),
        )
    ]  # fmt: skip
    assert len(set(keys)) == 6 and key_of("a", [leaf.clone()]) == keys[0]


def test_freed_weights_come_from_their_packed_form(root, packs):
    first = call(Linear(), weights="replace")
    model = Linear()
    y = call(model, weights="replace")
    assert torch.equal(first, y) and len(packs) == 1
    assert qinductor.last_report().freed_bytes > 0
    with torch.no_grad():  # another M, for which the originals are gone
        compiled = torch.compile(
            model, backend="qinductor", options={"weights": "replace", "packed": "disk"}
        )
        torch.testing.assert_close(compiled(X[:2]), Linear()(X[:2]))


def test_a_full_disk_is_said_and_nothing_fails(root, monkeypatch):
    def full(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with said() as messages:
        torch.testing.assert_close(call(Linear()), Linear()(X))
    assert any("a packed weight is not kept" in message for message in messages)
    assert not (version(root) / "packed").exists() or not packed_files(root)
