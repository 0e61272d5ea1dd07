"""The layout is the architecture: imports go one way, and light parts stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import calm

PACKAGE = Path(calm.__file__).parent

# Each part may import those before it. `errors`, `files`, `noise` and `distributed` belong to everybody.
ORDER = [
    {"allocator", "errors", "native", "noise", "screen", "pages", "seeds", "_auto"},
    {"files", "distributed", "products"},
    {"linear"},
    {"data", "scores"},
    {"models", "heads"},
    {"sampling"},
    {"evaluate"},
    {"config", "train"},
    {"serve", "paper"},
    {"bench", "quickstart"},
    {"console"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}


def imports_of(path: Path) -> set[str]:
    """The parts of calm that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "calm" else [f"calm.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        names = [name for name in names if name not in ("calm.models.posterior", "calm.models.layer")]  # for everybody
        found |= {name.split(".")[1] for name in names if name.startswith("calm.")}
    return found - {"__version__"}


def test_imports_go_one_way():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        assert part in LEVEL, f"{part} has no place in the order of imports"
        for other in imports_of(path) - {part}:
            allowed = (
                LEVEL[other] < LEVEL[part]
                or (part, other)
                in {
                    ("models", "heads"),
                    ("train", "config"),
                }
                or (path.name, other) == ("calm.py", "sampling")
            )  # model.generate

            if not allowed:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {other}")
    assert not wrong


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_import_calm_is_light_and_still_registers_the_auto_classes():
    assert not {"torch", "transformers", "numpy"} & loaded_by("import calm")
    code = (
        "import calm; from transformers import AutoConfig, AutoModel, AutoModelForCausalLM;"
        "small = dict(vocab_size=16, hidden_size=8, intermediate_size=8);"
        "inner = AutoConfig.for_model('calm-autoencoder', **small);"
        "layers = dict(num_hidden_layers=1, num_attention_heads=1, **small);"
        "config = AutoConfig.for_model('calm', backbone_config=layers, autoencoder_config=inner);"
        "made = AutoModel.from_config(inner), AutoModelForCausalLM.from_config(config);"
        "print(*(type(model).__name__ for model in made))"
    )
    for first in (
        "",
        "from transformers import AutoModel;",
        "import calm.models.autoencoder;",
        "import calm.models.calm;",
        "import calm.evaluate.report;",
    ):
        done = subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True)
        assert done.stdout.strip() == "ChunkAutoencoder CalmForCausalLM", first + done.stderr


def test_writing_with_a_model_imports_no_transformers():
    command = ["generate", "bundled", "And God said", "--max-new-tokens", "8", "--temperature", "0.5"]
    found = loaded_by(f"from calm.cli import app; app({command}, standalone_mode=False)")
    assert "torch" in found
    assert not {"transformers", "torch._dynamo", "sympy"} & found  # each takes a second or more


def test_help_and_workers_import_neither_torch_nor_transformers():
    heavy = {"torch", "transformers"}
    assert not heavy & loaded_by("from calm.cli import app; app(['--help'], standalone_mode=False)")
    assert not heavy & loaded_by("import calm.data.workers, calm.data.loader, calm.data.prepare")
