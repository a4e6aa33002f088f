"""The library of kernels in C++: built once for a machine, kept in a private folder, verified, then loaded.

All `*.cpp` beside this file become one library, in a few seconds, by the compiler that `CXX` names or by `g++`, for
Linux on processors with AVX-512 BF16 or AMX. Its flags name each instruction set and go into the file's name, so
machines that share a home folder share a library only if both can run it.

Two dangers, two guards. A stranger who can write to the folder could plant code: the folder and its parents are
checked, and so is the file that was opened. A disk or a kill can damage a file: it begins with the sha256 of the rest.
The bytes that were verified are the bytes that are loaded; nothing is opened by name a second time.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

from posbench import files, machine

logger = logging.getLogger(__name__)

SWITCH = "POSBENCH_NATIVE"  # environment variable: 0 = do without it
# Compiled side by side, the longest first
SOURCES = sorted(Path(__file__).parent.glob("*.cpp"), key=lambda path: (-path.stat().st_size, path.name))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-mprefer-vector-width=512"]
_FLAGS += ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16"]
_FLAGS_AMX = ["-mamx-tile", "-mamx-bf16"]
_BUILD_SECONDS = 120  # at most
_LARGEST = 2**26  # bytes of a library
_DIGEST_BYTES = hashlib.sha256().digest_size
# Runs a command in a process group of its own, and kills the group when standard input closes: at our timeout, or when
# this process has died, even by SIGKILL. A compiler starts processes of its own, which would outlive it.
_GUARD = """
import os, signal, subprocess, sys, threading
command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def kill():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
os._exit(command.wait() & 255)
"""


def built() -> ctypes.CDLL:
    """The library that `binary` has loaded."""
    found = binary()
    assert found is not None
    return found


def binary() -> ctypes.CDLL | None:
    """Return the library, built if need be; None if it cannot be built (warns once, unless the reason is obvious)."""
    return _found()[0]


def described() -> str:
    """What computes attention in bf16 on this machine's CPU, and why."""
    return _found()[1]


@functools.cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    """The library, and what `described` says of it."""
    flags = machine.cpu_flags()
    if os.environ.get(SWITCH) == "0":
        return None, f"operations of torch: {SWITCH}=0"
    if (sys.platform, platform.machine()) != ("linux", "x86_64") or "avx512_bf16" not in flags:
        return None, "operations of torch: the kernel in C++ is for Linux on CPUs with AVX-512 BF16 or AMX"
    options = [*_FLAGS, *(_FLAGS_AMX if "amx_bf16" in flags else [])]
    read = [path.read_bytes() for path in (*SOURCES, *_HEADERS)]
    named = hashlib.sha256(b"".join([repr(options).encode(), *read])).hexdigest()[:16]
    kept = files.private_cache("kernels") / f"attention-{named}.lib"
    found = None
    try:
        found = _kept(kept)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.info("%s cannot be used (%s): kernels are built again", kept, error.strerror or error)
    try:
        if found is None:
            compilers = [os.environ.get("CXX", "").split(), ["g++"]]
            there = [command for command in compilers if command and shutil.which(command[0])]
            if not there:
                return None, "operations of torch: the kernel in C++ needs a compiler, g++ or what CXX names"
            found = _build(kept, there, options)
    except (OSError, subprocess.SubprocessError) as error:
        said = _first_line(error)
    else:
        if found.can_run():
            return found, "kernel in C++"
        said = "the system does not let this process use AMX"
    logger.warning("the kernels in C++ cannot be used, slower operations of torch serve: %s", said)
    return None, f"operations of torch: {said}"


# -- kept --------------------------------------------------------------------------------------------------------------


def _kept(path: Path) -> ctypes.CDLL:
    """Load the library that is kept there.

    Raises OSError if there is none, it is a link, another user's or too large, or it is not as it was written.
    """
    with files.open_itself(path) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or not files.is_private(facts) or facts.st_size > _LARGEST:
            raise OSError("others can write to it, or it is no library")
        data = file.read(_LARGEST)
    if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
        raise OSError("its checksum differs")
    return _loaded(data[_DIGEST_BYTES:])


def _loaded(data: bytes) -> ctypes.CDLL:
    """Load a library from memory and declare its functions as they are in the source; OSError if that fails."""
    library = _opened(data)
    try:
        library.can_run.restype = ctypes.c_bool
        library.backward.argtypes = [*[ctypes.c_void_p] * 12, ctypes.c_int64]
        for call in ("forward", "backward"):
            getattr(library, f"scratch_of_{call}").restype = ctypes.c_int64
        library.cross_entropy.restype = ctypes.c_int64
    except AttributeError as error:
        raise OSError(f"another library than the kernels: {error}") from None
    return library


def _opened(data: bytes) -> ctypes.CDLL:
    """Raises OSError if it is no library."""
    try:
        memory = os.memfd_create("posbench-kernels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(memory, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:  # a sandbox without files in memory: a folder that only this process knows
        path = files.until_exit() / "kernels.so"
        files.write_new(path, data)
        return ctypes.CDLL(str(path))
    try:
        # The descriptor stays open: the loader goes by names, and would take this library for the next of that number.
        return ctypes.CDLL(f"/proc/self/fd/{memory}")
    except OSError:
        os.close(memory)
        raise


# -- built -------------------------------------------------------------------------------------------------------------


def _build(kept: Path, compilers: list[list[str]], options: list[str]) -> ctypes.CDLL:
    """Build the library by the first compiler whose result can be loaded, and keep it. One process at a time builds.

    Raises what the first compiler raised, OSError or subprocess.SubprocessError, if none serves.
    """
    failed: OSError | subprocess.SubprocessError | None = None
    held = files.lock(kept.parent / ".lock", wait=True)
    try:
        files.remove_stale(kept.parent)  # what killed builds left behind
        with contextlib.suppress(OSError):  # unless another process has built it meanwhile
            return _kept(kept)
        logger.info("building kernels (once for this machine, about 7 s)")
        for compiler in compilers:
            try:
                data = _compiled(kept, compiler, options)
                found = _loaded(data)
                files.write(kept, hashlib.sha256(data).digest() + data)
                kept.chmod(0o600)  # whatever the umask: a file that others may write to is not loaded
                return found
            except (OSError, subprocess.SubprocessError) as error:
                failed = failed or error
    finally:
        os.close(held)
    assert failed is not None  # there is a compiler
    raise failed


def _compiled(kept: Path, compiler: list[str], options: list[str]) -> bytes:
    """Return the library's bytes. Raises OSError or subprocess.SubprocessError."""
    aside = files.temporary(kept)
    aside.mkdir(mode=0o700)
    try:
        linked = aside / "attention.so"
        objects = {str(source): str(aside / f"{source.stem}.o") for source in SOURCES}
        _run([[*compiler, *options, "-c", source, "-o", to] for source, to in objects.items()])
        # Linked without OpenMP's library: torch has loaded one, and two would each start threads.
        _run([[compiler[0], "-shared", *objects.values(), "-o", str(linked)]])
        return files.read(linked, _LARGEST)
    finally:
        files.delete(aside)


def _run(commands: list[list[str]]) -> None:
    """Run commands side by side. None of their processes is left when this returns, or when this process dies.

    Raises OSError or subprocess.SubprocessError if one of them fails or takes too long.
    """
    deadline = time.monotonic() + _BUILD_SECONDS
    watched, ours = os.pipe()  # closes when this process ends
    guard = [sys.executable, "-I", "-S", "-c", _GUARD]
    with contextlib.ExitStack() as running:
        running.callback(os.close, watched)
        started = []
        for command in commands:
            process = subprocess.Popen(
                [*guard, *command], stdin=watched, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
            started.append(running.enter_context(process))  # waits at the end, when all are killed or have ended
        running.callback(os.close, ours)
        for command, process in zip(commands, started, strict=True):
            try:
                _, said = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise OSError(f"{command[0]} has not ended within {_BUILD_SECONDS} s") from None
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def _first_line(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    lines = (said.decode(errors="replace") if isinstance(said, bytes) else said).splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else str(error))
