"""Guards around every test: what a test leaves behind fails it, and is cleared away before the next one.

A guard is a function that looks at the process before the test and returns a check; the check says, one line each,
what the test left, and puts back what can be put back. Torch is looked at only where something has imported it.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tests.helpers import processes

Check = Callable[[], list[str]]
GRACE_S = 20.0
"""Ending takes a moment: a thread or process that is about to be gone isn't a leak."""

_ENVIRONMENT_OF_OTHERS = {
    # pytest changes this one within a test.
    "PYTEST_CURRENT_TEST",
    processes.MARK,
    # scikit-learn sets both when it is imported.
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    # torch sets this one at the first optimizer step.
    "TORCHINDUCTOR_CACHE_DIR",
}
# These modules draw from Python's generator.
_DRAWS_WHEN_IMPORTED = {"sklearn.datasets", "rich.console"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


class LeakError(AssertionError):
    """A test left something behind."""


@contextmanager
def no_leaks(*, owns_state: bool = False) -> Iterator[None]:
    """Raise LeakError, naming everything, if the block leaves something behind.

    owns_state: settings of the process (generators, torch's switches, environment variables, handlers of signals and
    of the root logger) may change; they are put back in silence.
    """
    outer = os.environ.get(processes.MARK)
    os.environ[processes.MARK] = mark = processes.new_mark()
    leaks = [_processes(mark), _threads(), _files(), _process_group(), _hydra()]
    settings = [_environment(), _settings(), _logging(), _generators()]
    yield
    left_behind = list(chain.from_iterable(check() for check in leaks))
    changed = list(chain.from_iterable(check() for check in settings))
    if outer is None:
        del os.environ[processes.MARK]
    else:
        os.environ[processes.MARK] = outer
    if not owns_state:
        left_behind += changed
    if left_behind:
        raise LeakError("the test left behind:\n" + "\n".join(f"- {line}" for line in left_behind))


def _processes(mark: str) -> Check:
    before = {process.pid for process in processes.children()}
    started = processes.num_started()

    def find() -> list[Any]:
        # Reap children that have ended.
        multiprocessing.active_children()
        known = before | _multiprocessing_helpers() | processes.LONG_LIVED
        # To look at every process of the machine takes 10 ms: only after a test that has started some.
        orphans = processes.marked(mark) if processes.num_started() > started else ()
        found = {process.pid: process for process in (*processes.children(), *orphans)}
        return [process for pid, process in found.items() if pid not in known]

    def check() -> list[str]:
        left = processes.settle(find, within_s=GRACE_S)
        lines = [f"process {processes.describe(process)}" for process in left]
        processes.kill_all(left)
        return lines

    return check


def _multiprocessing_helpers() -> set[int]:
    """Python's own resource tracker and fork server, which live as long as this process by design."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return {pid for pid in (getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)) if pid}


def _threads() -> Check:
    before = set(threading.enumerate())

    def find() -> list[threading.Thread]:
        # For the rest of the process: tqdm's, begun with the first bar that a library shows, and those of fsspec's
        # event loop.
        lasting = ("tqdm_monitor", "fsspecIO", "asyncio_")
        return [each for each in threading.enumerate() if each not in before and not each.name.startswith(lasting)]

    return lambda: [f"thread {thread.name!r}" for thread in processes.settle(find, within_s=GRACE_S)]


def _files() -> Check:
    before = _open_files()

    def check() -> list[str]:
        left = _open_files() - before
        if left:
            # What only a cycle keeps open is about to be closed; Python warns about it itself.
            gc.collect()
            left = _open_files() - before
        return [f"open file {path}" for path in left]

    return check


def _open_files() -> Counter[str]:
    """Regular files this process has open and that still have a name; none where there is no /proc."""
    paths: Counter[str] = Counter()
    folder = Path("/proc/self/fd")
    for link in folder.iterdir() if folder.is_dir() else ():
        try:
            path = link.readlink()
            # matplotlib keeps its fonts open.
            is_cached_font = "/mpl-data/fonts/" in str(path)
            if path.is_absolute() and stat.S_ISREG(path.stat().st_mode) and not is_cached_font:
                paths[str(path)] += 1
        except OSError:
            # The file was closed meanwhile, such as the one that lists the folder, or deleted.
            continue
    return paths


def _process_group() -> Check:
    def check() -> list[str]:
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return []
        distributed.destroy_process_group()
        return ["torch.distributed's default process group"]

    return check


def _hydra() -> Check:
    def check() -> list[str]:
        module = sys.modules.get("hydra.core.global_hydra")
        if module is None or not module.GlobalHydra.instance().is_initialized():
            return []
        module.GlobalHydra.instance().clear()
        return ["Hydra's global state: use hydra.initialize_config_dir as a context manager"]

    return check


def _logging() -> Check:
    before = _root_handlers()

    def check() -> list[str]:
        left = [handler for handler in _root_handlers() if handler not in before]
        for handler in left:
            logging.root.removeHandler(handler)
            handler.close()
        return [f"a handler of the root logger: {handler}" for handler in left]

    return check


def _root_handlers() -> list[logging.Handler]:
    """Pytest's own aren't counted: it has others in each phase of a test."""
    return [handler for handler in logging.root.handlers if not type(handler).__module__.startswith("_pytest.")]


def _environment() -> Check:
    before = dict(os.environ)

    def check() -> list[str]:
        after = dict(os.environ)
        names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        lines = []
        for name in sorted(names - _ENVIRONMENT_OF_OTHERS):
            lines.append(f"environment variable {name}: was {before.get(name)!r}, is {after.get(name)!r}")
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        return lines

    return check


def _cwd_or_root() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        # The file was deleted.
        return Path("/")


def _generators() -> Check:
    """Python's and NumPy's global generators may not be touched: nothing here draws from them but by mistake.

    Torch's is drawn from by every layer that is made, so that is no fault: each test finds it in the same state,
    whatever ran before, and it is put back.
    """
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    torch = sys.modules.get("torch")
    not_imported = _DRAWS_WHEN_IMPORTED - sys.modules.keys()
    numpy_state = numpy.random.get_state(legacy=False) if numpy else None
    torch_state = torch.get_rng_state() if torch else None
    if torch:
        torch.default_generator.manual_seed(0)

    def check() -> list[str]:
        lines = []
        if random.getstate() != python:
            random.setstate(python)
            if not not_imported & sys.modules.keys():
                lines.append("a changed state of Python's global generator (random)")
        if numpy and not _same(numpy.random.get_state(legacy=False), numpy_state):
            lines.append("a changed state of NumPy's global generator")
            numpy.random.set_state(numpy_state)
        if torch:
            torch.set_rng_state(torch_state)
        if lines:
            lines.append("(a test that seeds on purpose takes the fixture `own_state`)")
        return lines

    return check


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def _settings() -> Check:
    settings = _of_this_process()
    before = {name: read() for name, (read, _) in settings.items()}

    def check() -> list[str]:
        lines = []
        for name, (read, write) in settings.items():
            if (after := read()) != before[name]:
                lines.append(f"{name}: was {before[name]}, is {after}")
                write(before[name])
        return lines

    return check


def _of_this_process() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Setting → how it is read, and put back."""
    settings: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "the working directory": (_cwd_or_root, os.chdir),
        "sys.path": (lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
        "sys.argv": (lambda: list(sys.argv), lambda value: setattr(sys, "argv", value)),
    }
    for number in _SIGNALS:
        settings[f"the handler for {number.name}"] = partial(signal.getsignal, number), partial(signal.signal, number)
    if torch := sys.modules.get("torch"):
        cudnn = torch.backends.cudnn
        settings |= {
            "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
            "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
            "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
            "torch's matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
            "torch's deterministic mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
            "cudnn.deterministic": (lambda: cudnn.deterministic, lambda value: setattr(cudnn, "deterministic", value)),
            "cudnn.benchmark": (lambda: cudnn.benchmark, lambda value: setattr(cudnn, "benchmark", value)),
        }
    return settings
