"""Two warm processes from which ranks for tests are forked: torch and DeepSpeed are imported twice, not once per rank.

``of(rank).fork(env, answers, log)`` returns a ``Child``, which looks like ``subprocess.Popen``. ``command(...)`` runs
the relaymeter command as a child of such a process, and its ranks as children of the command: launcher, network
namespaces, signals, exit codes and logs are the real ones, the imports alone are shared. Run as a script this file is
one of the warm processes: it imports until it is first asked for a rank. Forking is safe as it has no thread but the
first: where an import starts one, it begins anew and leaves that import out. It ends, and its ranks with it, with the
process that started it.

Ranks of one nursery share a hash seed, so what depends on the order of a set would look the same on all of them: ranks
of even and of odd number come from two nurseries (``of(rank)``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

__all__ = ["Child", "Nursery", "command", "die_with_parent", "of"]

#: What ranks import sooner or later, in this order: (module, names taken from it, as they are imported at first use).
_IMPORTS = (
    ("numpy", ()),
    ("torch", ()),
    ("torch.distributed", ()),
    ("relaymeter.relayout", ()),
    ("deepspeed", ()),
    ("torch._dynamo", ()),
    ("pandas", ()),
    ("sklearn", ()),
    ("transformers", ("LlamaForCausalLM", "Qwen3MoeForCausalLM")),
)
_NEEDED = 3  #: imports without which no rank is forked
_LIMIT_S = 120.0


class Child:
    """A forked rank: process id, standard input and how it ended, like ``subprocess.Popen``."""

    def __init__(self, nursery: Nursery, pid: int, stdin: IO[bytes] | None = None) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(["rank"], timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """One warm process, started at once and warming up beside whatever else goes on."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_at_import = {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        no_threads = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        env = os.environ | no_threads | read_at_import
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(len(_IMPORTS))],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._socket = ours
        self._socket.settimeout(_LIMIT_S)

    def ask(self, request: Mapping[str, Any], fds: tuple[int, ...] = ()) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        answer = self._socket.recv(1 << 16)
        if not answer:
            raise RuntimeError("the process from which ranks are forked has ended")
        return json.loads(answer)

    def fork(self, env: Mapping[str, str], answers: int, log: int) -> Child:
        """A rank that runs ``pool.rank_main`` with this ``env``, writing to the descriptors ``answers`` and ``log``."""
        reading, writing = os.pipe()
        try:
            pid = self.ask({"env": dict(env)}, (reading, answers, log))
        finally:
            os.close(reading)
        return Child(self, pid, os.fdopen(writing, "wb", buffering=0))

    def start(self, module: str, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], fds: list[int]) -> Child:
        """``python -m MODULE ARGUMENTS`` in the folder ``cwd``, writing to two descriptors."""
        with open(os.devnull, "rb") as empty:
            request = {"module": module, "arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}
            return Child(self, self.ask(request, (empty.fileno(), *fds)))

    def close(self) -> None:
        """End the warm process and all of its ranks."""
        self._socket.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_NURSERIES: list[Nursery] = []


def of(rank: int) -> Nursery:
    """The nursery of a rank: one for even, another for odd ones. Both start at the first call."""
    while len(_NURSERIES) < 2:
        _NURSERIES.append(Nursery())
        atexit.register(_NURSERIES[-1].close)
    return _NURSERIES[rank % 2]


def command(
    arguments: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    limit_s: float,
    *,
    module: str = "relaymeter",
    stdout: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run`` of ``python -m MODULE ARGUMENTS``, whose ranks, started by ``launch``, are warm too.

    At the time limit the command and its ranks are ended. What it prints is returned, or goes to ``stdout``.
    """
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        fds = [out.fileno() if stdout is None else stdout, err.fileno()]
        child = of(0).start(module, arguments, cwd, env, fds)
        try:
            code = child.wait(limit_s)
        finally:
            child.kill()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([module, *arguments], code, *texts)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    parent_death = 1
    ctypes.CDLL(None, use_errno=True).prctl(parent_death, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _warm(asked: Callable[[], bool], most: int) -> None:
    for number, (name, members) in enumerate(_IMPORTS[:most]):
        if number >= _NEEDED and asked():
            break
        with contextlib.suppress(ImportError):  # an extra that is not installed here
            module = importlib.import_module(name)
            for member in members:
                getattr(module, member)
        if len(os.listdir("/proc/self/task")) > 1:
            os.execv(sys.executable, [sys.executable, __file__, sys.argv[1], str(number)])
    gc.collect()
    gc.freeze()  # pages of long-lived objects stay shared


def _take_over(env: Mapping[str, str], stdin: int, stdout: int, stderr: int) -> None:
    """In a forked process: environment, import path and standard streams of its own."""
    for number, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, number)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # found again, in this environment
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, 1, closefd=False)  # noqa: SIM115
        for fd, mode in enumerate("rww")
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _end(code: object) -> NoReturn:
    """What the interpreter does at its end, without joining threads of a broken process group."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class _Rank:
    """Stands for ``subprocess.Popen`` in the launcher: forks the command instead of starting an interpreter."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: Any, stderr: Any,
        start_new_session: bool,
    ) -> None:  # fmt: skip
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            out, err = (fd if isinstance(fd, int) else fd.fileno() for fd in (stdout, stderr))
            _take_over(env, os.open(os.devnull, os.O_RDONLY), os.dup(out), os.dup(err))
            self._run(list(command[3:]))
        except SystemExit as ended:
            _end(ended.code)
        except BaseException:
            traceback.print_exc()
            _end(1)

    @staticmethod
    def _run(command: list[str]) -> None:
        """``enter`` with its own arguments, then, where it would become the command, the command's module."""
        from relaymeter.harness import enter

        def become(_: str, arguments: Sequence[str]) -> NoReturn:
            sys.argv = list(arguments[2:])
            runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
            _end(0)

        enter.os = SimpleNamespace(**{**vars(os), "execvp": become})  # type: ignore[attr-defined]
        _end(enter.main(command))

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _become_rank(env: dict[str, str], fds: list[int]) -> None:
    """In a forked process: serve the pool. Does not return."""
    stdin, answers, log = fds
    _take_over(env, stdin, log, log)
    os.close(stdin)
    os.close(log)
    import pool

    pool.rank_main(answers)


def _become_command(module: str, arguments: list[str], cwd: str, env: dict[str, str], fds: list[int]) -> None:
    """In a forked process: run a module as ``python -m`` does. Does not return."""
    _take_over(env, *fds)
    for fd in fds:
        os.close(fd)
    os.chdir(cwd)
    from relaymeter.harness import launch

    launch.subprocess = SimpleNamespace(Popen=_Rank, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        _end(ended.code)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(os.getppid())
    _warm(lambda: bool(select.select([connection], [], [], 0)[0]), int(sys.argv[2]))
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        here = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(here)
            connection.close()
            if "module" in request:
                _become_command(**request, fds=fds)
            _become_rank(**request, fds=fds)
            os._exit(0)
        for fd in fds:
            os.close(fd)
        connection.send(json.dumps(pid).encode())


if __name__ == "__main__":
    _main()
