"""The library of kernels: built once, kept where nobody else can write, verified, loaded as it was verified."""

import getpass
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from posbench import files, machine
from posbench.kernels import fused, library
from posbench.kernels.native import takes
from posbench.model.attention import dispatch
from posbench.run_folder.folder import load_record

HERE = (sys.platform, os.uname().machine) == ("linux", "x86_64") and shutil.which("g++") is not None
needs_it = pytest.mark.skipif(library.binary() is None, reason=f"attention here: {library.described()}")
needs_compiler = pytest.mark.skipif(not HERE, reason="needs Linux on x86-64 and g++")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
STRANGER = 12_345  # a user's number

# As many functions as the kernels have, and nothing in them.
NAMES = ["can_run", "backward", "cross_entropy"]
NAMES += [f"scratch_of_{name}" for name in ("forward", "backward")]
STUB = "\n".join(f'extern "C" int {name}() {{ return 1; }}' for name in NAMES)
FOREIGN = 'extern "C" int another() { return 1; }'


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of libraries in an empty cache. What is built is a stub, so that it takes a tenth of a second."""
    source = tmp_path / "stub.cpp"
    source.write_text(STUB, encoding="utf-8")
    monkeypatch.setattr(library, "SOURCES", [source])
    monkeypatch.setattr(library, "_FLAGS", ["-fPIC", "-O0"])
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(library.SWITCH, raising=False)
    library._found.cache_clear()
    yield tmp_path / "cache" / "posbench" / "kernels"
    monkeypatch.undo()
    library._found.cache_clear()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    caplog.set_level(logging.INFO, "posbench")
    return lambda level: [record.getMessage() for record in caplog.records if record.levelno >= level]


def again() -> object:
    """What a new process would find."""
    library._found.cache_clear()
    return library.binary()


def compiler(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def linked(folder: Path, source: str) -> bytes:
    """A library of another source."""
    (folder / "other.cpp").write_text(source, encoding="utf-8")
    subprocess.run(["g++", "-shared", "-fPIC", folder / "other.cpp", "-o", folder / "other.so"], check=True)
    return (folder / "other.so").read_bytes()


def with_digest(data: bytes) -> bytes:
    return library.hashlib.sha256(data).digest() + data


# -- kept --------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_it_is_built_once_into_a_folder_of_the_users_own(kernels: Path, said: Callable[[int], list[str]]) -> None:
    assert library.binary() is not None
    (kept,) = kernels.glob("*.lib")
    assert kernels.stat().st_mode & 0o077 == 0 and kept.stat().st_mode & 0o077 == 0
    made = kept.stat().st_mtime_ns
    assert again() is not None and kept.stat().st_mtime_ns == made
    assert said(logging.INFO) == ["building kernels (once for this machine, about 7 s)"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        assert again() is not None  # what was built needs no compiler


DAMAGE: dict[str, Callable[[bytes, Path], bytes]] = {
    "cut to half": lambda data, folder: data[: len(data) // 2],
    "cut to nothing": lambda data, folder: b"",
    "one bit": lambda data, folder: data[:4000] + bytes([data[4000] ^ 1]) + data[4001:],
    "text": lambda data, folder: b"damaged",
    "another library": lambda data, folder: with_digest(linked(folder, FOREIGN)),
    "no digest": lambda data, folder: data[32:],
}


@pytest.mark.sample(3)
@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_built_again_with_one_line(
    kernels: Path, tmp_path: Path, said: Callable[[int], list[str]], damage: str
) -> None:
    assert library.binary() is not None
    (kept,) = kernels.glob("*.lib")
    whole = kept.read_bytes()
    kept.write_bytes(DAMAGE[damage](whole, tmp_path))
    assert again() is not None
    assert with_digest(kept.read_bytes()[32:]) == kept.read_bytes()
    assert sum("are built again" in line for line in said(logging.INFO)) == 1 and not said(logging.WARNING)


@needs_compiler
@pytest.mark.parametrize("swap", ["a link", "others may write to it", pytest.param("a stranger's", marks=needs_root)])
def test_a_file_that_others_could_have_made_is_not_loaded(kernels: Path, tmp_path: Path, swap: str) -> None:
    assert library.binary() is not None
    (kept,) = kernels.glob("*.lib")
    planted = with_digest(linked(tmp_path, STUB + FOREIGN))
    if swap == "a link":
        (tmp_path / "planted").write_bytes(planted)
        kept.unlink()
        kept.symlink_to(tmp_path / "planted")
    else:
        kept.write_bytes(planted)
        if swap == "a stranger's":
            os.chown(kept, STRANGER, STRANGER)
        else:
            kept.chmod(0o666)
    found = again()
    assert found is not None and not hasattr(found, "another")
    assert not kept.is_symlink() and kept.stat().st_uid == os.geteuid()


@needs_compiler
def test_what_was_verified_is_what_is_loaded(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is exchanged between the check and the load changes nothing."""
    assert library.binary() is not None
    (kept,) = kernels.glob("*.lib")
    planted, opened = with_digest(linked(tmp_path, STUB + FOREIGN)), library._opened

    def exchanged(data: bytes) -> object:
        os.replace(kept, tmp_path / "aside")
        kept.write_bytes(planted)
        return opened(data)

    monkeypatch.setattr(library, "_opened", exchanged)
    found = again()
    assert found is not None and not hasattr(found, "another")


def owned(folder: Path, mode: int, owner: int | None = None) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    if owner is not None:
        os.chown(folder, owner, owner)


@pytest.mark.parametrize(
    ("where", "mode", "owner", "is_used"),
    [
        ("cache", 0o755, None, True),
        ("cache", 0o1777, None, True),
        ("cache", 0o777, None, False),
        ("cache/posbench", 0o777, None, False),
        ("cache/posbench/kernels", 0o777, None, False),
        pytest.param("cache", 0o755, STRANGER, False, marks=needs_root),
        pytest.param("cache", 0o1777, STRANGER, False, marks=needs_root),
        pytest.param("cache/posbench", 0o700, STRANGER, False, marks=needs_root),
        pytest.param("cache/posbench/kernels", 0o700, STRANGER, False, marks=needs_root),
    ],
)
def test_a_folder_that_a_stranger_could_exchange_is_not_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[int], list[str]],
    where: str,
    mode: int,
    owner: int | None,
    is_used: bool,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    owned(tmp_path / where, mode, owner)
    folder = files.private_cache("kernels")
    assert (folder == tmp_path.resolve() / "cache/posbench/kernels") is is_used
    assert folder.is_dir() and folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o077
    assert len(said(logging.WARNING)) == (not is_used)


# -- built -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@needs_it
def test_the_real_one_is_built_by_a_compiler_that_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: Callable[[int], list[str]]
) -> None:
    monkeypatch.setattr(library, "_FLAGS", [*library._FLAGS, "-O0"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false -v")
    assert again() is not None and not said(logging.WARNING)
    monkeypatch.undo()
    library._found.cache_clear()


WRONG = {
    "fails": "echo 'stub.cpp:1: error: missing'; echo 'stub.cpp:1: error: missing' >&2; exit 1",
    "makes nothing": "exit 0",
    "makes another library": "for last; do :; done; {gxx} -shared -fPIC {other} -o $last",
    "hangs": "sleep 4321",
}


@needs_compiler
@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_compiler_is_said_once_and_torch_serves(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[int], list[str]], how: str
) -> None:
    (tmp_path / "other.cpp").write_text(FOREIGN, encoding="utf-8")
    lines = WRONG[how].format(gxx=shutil.which("g++"), other=tmp_path / "other.cpp")
    monkeypatch.setenv("CXX", compiler(tmp_path / "wrong", lines))
    monkeypatch.setattr(library.shutil, "which", lambda name: None if name == "g++" else name)
    monkeypatch.setattr(library, "_BUILD_SECONDS", 0.5)
    q = torch.zeros(2, 2, 8, 32, dtype=torch.bfloat16)
    assert not takes(q, q, q, None) and not takes(q, q, q, None)
    (line,) = said(logging.WARNING)
    assert "cannot be used, slower operations of torch serve" in line and "\n" not in line
    assert {"fails": "missing", "hangs": "has not ended within"}.get(how, "") in line
    until(lambda: not processes("sleep 4321"))  # the system takes a moment to take away what was killed
    assert not list(kernels.glob("*.lib")) and not list(kernels.glob(".tmp-*"))
    assert dispatch.kernel(q, q, q, 0.2, None, None).shape == q.shape


def processes(command: str) -> list[str]:
    """The processes of a command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip().endswith(command):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def asking(kernels: Path) -> list[str]:
    """A process that asks for the library as this one would."""
    code = (
        "import logging; from pathlib import Path; from posbench import machine; from posbench.kernels import library;"
        "logging.basicConfig(level='INFO', format='%(message)s'); machine.cpu_flags = lambda: {'avx512_bf16'};"
        f"library._FLAGS = ['-fPIC']; library.SOURCES = [Path({str(library.SOURCES[0])!r})];"
        "assert library.binary() is not None"
    )
    return [sys.executable, "-c", code]


@pytest.mark.full
@needs_compiler
def test_a_build_that_is_killed_leaves_no_process_and_its_files_go(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path / "hangs", "sleep 9876"))
    builder = subprocess.Popen(asking(kernels))
    until(lambda: processes("sleep 9876"))
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    until(lambda: not processes("sleep 9876"))
    assert list(kernels.glob(".tmp-*"))
    monkeypatch.delenv("CXX")
    assert again() is not None and not list(kernels.glob(".tmp-*"))


@pytest.mark.full
@needs_compiler
def test_of_several_processes_one_builds(kernels: Path) -> None:
    several = [subprocess.Popen(asking(kernels), stderr=subprocess.PIPE, text=True) for _ in range(3)]
    told = [process.communicate(timeout=120)[1] for process in several]
    assert [process.returncode for process in several] == [0, 0, 0], told
    assert "".join(told).count("building kernels") == 1


@pytest.mark.parametrize("why", ["switched off", "no compiler", "another CPU"])
def test_without_it_nothing_is_said_but_to_who_asks(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[int], list[str]], why: str
) -> None:
    known = {"switched off": "POSBENCH_NATIVE=0", "no compiler": "needs a compiler", "another CPU": "is for Linux on"}
    if why == "switched off":
        monkeypatch.setenv(library.SWITCH, "0")
    elif why == "no compiler":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx2"}))
    assert library.binary() is None
    if (sys.platform, os.uname().machine) == ("linux", "x86_64"):
        assert known[why] in library.described()
    assert not said(logging.WARNING) and not list(kernels.glob("*.lib"))


@pytest.mark.full
@pytest.mark.parametrize("switch", [pytest.param("", marks=needs_it), "0", "a CPU without AVX-512"])
def test_a_run_records_whether_it_was_used(tmp_path: Path, switch: str) -> None:
    support.write_text(tmp_path)
    small = support.each_once(
        [*support.TINY, "model.d_model=64", "training.precision=bf16", "training.tokens=640", "runtime.cache=cache"]
    )
    command = [sys.executable, "-m", "posbench"]
    if switch.startswith("a CPU"):
        code = "import sys; from posbench import machine; machine.cpu_flags = lambda: frozenset({'avx2'});"
        command = [sys.executable, "-c", f"{code} from posbench.cli.app import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "train", *small, "data.path=text.txt", "study=one"],
        cwd=tmp_path,
        env=os.environ | {library.SWITCH: "0" if switch == "0" else ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (attempt,) = load_record(next(tmp_path.glob("outputs/one/*")))["attempts"]
    assert attempt["native"] is (switch == "")


# -- what torch compiles -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_torch_compiles_is_kept_privately_unless_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch itself sets it
    monkeypatch.setenv("TRITON_CACHE_DIR", "/where/the/user/says")
    fused.compiled(lambda x: x)
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert kept.parent == tmp_path.resolve() / "posbench" / "compiled" and not kept.parent.stat().st_mode & 0o077
    assert os.environ["TRITON_CACHE_DIR"] == "/where/the/user/says"


@pytest.mark.slow
@needs_root
@needs_compiler
def test_a_folder_that_somebody_else_made_for_torch_is_not_used(tmp_path: Path) -> None:
    planted = tmp_path / f"torchinductor_{getpass.getuser()}"
    owned(planted, 0o777, STRANGER)
    code = "import torch; from posbench.kernels.fused import compiled; compiled(lambda x: x.sin() + 1)(torch.ones(3))"
    given = {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"} | given
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=200)
    assert list((tmp_path / "cache" / "posbench" / "compiled").rglob("*.so")) and not list(planted.iterdir())
