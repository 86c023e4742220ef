"""Run a program inside a memory budget, in the process that `port-agent exec` becomes.

The program must not notice: `__main__`, `sys.argv`, `sys.path[0]`, the environment, exit codes and tracebacks are those
of `python train.py`. The budget starts when the program imports torch, so after earlier actions such as setting
OMP_NUM_THREADS, and ends with the process. Torch is not imported here.
"""

import atexit
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path

from port_agent.intercept.exec.exec_budget import ExecBudget, ExecOptions
from port_agent.intercept.exec.tracebacks import clean_exception
from port_agent.system.torch_loading import load_torch_library, uncollected
from port_planner.base.source_roots import SOURCE_ROOTS
from port_planner.script_loading import put_first

BOOTSTRAP = (
    "import os, sys; sys.path[: not sys.flags.safe_path] = sys.argv[1].split(os.pathsep); "
    "from port_agent.intercept.exec.launch import main; main()"
)
"""Code that the interpreter runs (`python -c`).

Its arguments are the directories of our packages, `LaunchOptions` as JSON, and the program with its own arguments.
These directories replace the working directory, from which nothing of ours is imported.
"""

ACCOUNTING = BOOTSTRAP.replace("import main; main()", "import account; account()")
"""Code that the interpreter runs after a program that was replaced by another one has ended;
the arguments are the same.
"""

_ROOTS = os.pathsep.join(map(str, SOURCE_ROOTS))


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to run the program. `budget` is an `ExecOptions` in the form of a mapping."""

    budget: Mapping[str, object]
    module: bool
    """Whether the program is a module (`-m`) or a path."""
    restore_environment: Mapping[str, str | None]
    """Variables that were set for this process alone, and the values that the program and its
    children must see instead.
    """
    ours: bool = False
    """Whether the module is one of ours, so that the working directory is ignored."""


def launch_words(options: LaunchOptions, program: Sequence[str]) -> list[str]:
    """Return the command line that runs a program, a script or a module with its arguments, inside a budget."""
    return [sys.executable, "-c", BOOTSTRAP, _ROOTS, json.dumps(asdict(options)), *program]


def accounting_words(options: LaunchOptions, program: Sequence[str]) -> list[str]:
    """Return the command line that reports the figures of a program after another one replaced it."""
    return [sys.executable, "-c", ACCOUNTING, _ROOTS, json.dumps(asdict(options)), *program]


def account() -> None:
    """Report the figures of the program in `sys.argv`."""
    _, described, *words = sys.argv[1:]
    ExecBudget(ExecOptions(**json.loads(described)["budget"]), words).finish_replaced()


def main() -> None:
    """Run the program in `sys.argv`; returns or raises as the program does."""
    roots, described, *words = sys.argv[1:]
    options = LaunchOptions(**json.loads(described))
    _restore(options.restore_environment)
    if not options.ours:
        for root in roots.split(os.pathsep):
            sys.path.remove(root)
    sys.orig_argv = [sys.executable, *(["-m"] if options.module else []), *words]
    sys.argv = ["-m", *words[1:]] if options.module else words
    sys.modules["__main__"] = _fresh_main()
    budget = ExecBudget(ExecOptions(**options.budget), words)  # type: ignore[arg-type]  # asdict in the command line
    run = _module_runner(words[0], ours=options.ours) if options.module else _path_runner(words[0])
    sys.meta_path.insert(0, _WhenTorchLoads(budget))
    atexit.register(_finish, budget, os.getpid())  # registered first, so that it runs last
    try:
        run()
    except BaseException as error:
        budget.fail(error)
        _show_only_theirs()
        raise


def _restore(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _finish(budget: ExecBudget, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child that ends by itself
        budget.finish()


# -- the program


def _fresh_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__.update({"__annotations__": {}, "__builtins__": sys.modules["builtins"]})
    return module


def _path_runner(path: str) -> Callable[[], None]:
    """Return a function that runs a script, or a directory or archive with a `__main__.py`, as `python PATH` does."""
    absolute = path if os.path.isabs(path) else f"{Path.cwd()}/{path}"  # noqa: PTH117  as the interpreter: ./ stays
    if pkgutil.get_importer(path) is not None:
        put_first(absolute)
        return lambda: runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    if not sys.flags.safe_path:
        put_first(str(Path(path).resolve().parent))
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    space = sys.modules["__main__"].__dict__
    space.update({"__file__": absolute, "__cached__": None, "__loader__": loader})
    return lambda: exec(compile(loader.get_data(absolute), absolute, "exec", dont_inherit=True), space)


def _module_runner(name: str, *, ours: bool) -> Callable[[], None]:
    """Return a function that runs a module as `python -m NAME` does."""
    if not sys.flags.safe_path and not ours:
        put_first(str(Path.cwd()))
    return lambda: runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # the interpreter's own way


def _show_only_theirs() -> None:
    """Make the exception hook show only the program's frames."""
    show = sys.excepthook

    def show_theirs(kind: type[BaseException], error: BaseException, _: types.TracebackType | None) -> None:
        clean_exception(error)
        show(kind, error, error.__traceback__)

    sys.excepthook = show_theirs


# -- torch, when the program imports it


class _WhenTorchLoads(MetaPathFinder):
    """Loads torch with less memory at the program's own import of it, and starts the budget
    before that import returns.
    """

    def __init__(self, budget: ExecBudget) -> None:
        self._budget, self._pid = budget, os.getpid()
        self._asks_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return torch's own spec with a loader that also starts the budget; a mere check for torch loads nothing."""
        child = os.getpid() != self._pid  # a program that imports torch in another way has no budget of ours
        if fullname != "torch" or self._asks_others or child:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader, self._begin, self._budget.start)
        return spec

    def _begin(self) -> None:
        sys.meta_path.remove(self)
        self._budget.expect_torch()
        load_torch_library()


class _TorchLoader(Loader):
    def __init__(self, loader: Loader, begin: Callable[[], None], start: Callable[[], None]) -> None:
        self._loader, self._begin, self._start = loader, begin, start

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        self._begin()
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with uncollected():
            self._loader.exec_module(module)
        self._start()
