"""Import a module of ours right after one of another package, whenever that happens.

transformers takes two seconds to import and torch two more. Our model files register themselves with the Auto classes;
this sees to it that they are imported as soon as the Auto classes are, and not before.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast


def register_when_imported(ours_after_theirs: dict[str, str]) -> None:
    for theirs, ours in ours_after_theirs.items():
        if theirs in sys.modules:
            importlib.import_module(ours)
    sys.meta_path.insert(0, cast(Any, _Finder(ours_after_theirs)))


class _Finder:
    def __init__(self, ours_after_theirs: dict[str, str]):
        self.waiting = dict(ours_after_theirs)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        ours = self.waiting.pop(fullname)  # so that the next line asks the other finders
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = cast(Any, _Loader(spec.loader, ours))
        return spec


class _Loader:
    def __init__(self, loader: Any, ours: str):
        self.loader, self.ours = loader, ours

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        importlib.import_module(self.ours)
