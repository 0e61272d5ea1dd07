"""Call a function of ours right after a module of another package was imported, whenever that happens.

Importing transformers takes seconds. Our models are registered with its Auto classes as soon as those are imported, and
not before.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast


def call_when_imported(functions: dict[str, str]) -> None:
    """`functions` maps names of modules to our functions, as "module:function"."""
    sys.meta_path.insert(0, cast(Any, _Finder(functions)))
    for module, function in functions.items():
        if module in sys.modules:
            _call(function)


def _call(name: str) -> None:
    module, function = name.split(":")
    call = getattr(importlib.import_module(module), function, None)
    if call is not None:  # else our module is being imported, and calls it at its end
        call()


class _Finder:
    def __init__(self, functions: dict[str, str]):
        self.waiting = dict(functions)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        function = self.waiting.pop(fullname)  # so that the next line asks the other finders
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = cast(Any, _Loader(spec.loader, function))
        return spec


class _Loader:
    def __init__(self, loader: Any, function: str):
        self.loader, self.function = loader, function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _call(self.function)
