"""Registers our models with transformers' Auto classes as soon as those are imported, and not before.

Importing transformers takes seconds, so `import calm` only installs an import hook.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast


def call_when_imported(functions: dict[str, str]) -> None:
    """Call a function right after a module is imported. `functions` maps module names to "module:function"."""
    sys.meta_path.insert(0, cast(Any, _Finder(functions)))
    for module, function in functions.items():
        if module in sys.modules:
            _call(function)


def _call(name: str) -> None:
    module, function = name.split(":")
    call = getattr(importlib.import_module(module), function, None)
    if call is not None:  # otherwise the module is being imported, and calls the function at its end
        call()


class _Finder:
    def __init__(self, functions: dict[str, str]):
        self.waiting = dict(functions)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        function = self.waiting.pop(fullname)  # first, so that the next line asks the other finders
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_call(module: ModuleType) -> None:
                exec_module(module)
                _call(function)

            cast(Any, spec.loader).exec_module = exec_and_call
        return spec
