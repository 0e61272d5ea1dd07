"""The layout is the architecture: imports go one way, light parts stay light, and the CPU backend is optional."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import calm

PACKAGE = Path(calm.__file__).parent

# Each part may import those before it.
ORDER = [
    {"errors", "screen", "pages", "seeds", "noise", "_auto"},
    {"files", "distributed"},
    {"data", "scores"},
    {"autoencoder"},
    {"heads"},
    {"kv_cache"},
    {"llama"},
    {"model", "transformer"},
    {"checkpoint"},
    {"cpu"},
    {"generate"},
    {"hf", "official"},
    {"config", "evaluate"},
    {"train"},
    {"serve", "paper"},
    {"bench", "quickstart"},
    {"console"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
EXCEPTIONS = {
    ("checkpoint.py", "hf"),  # backbones of transformers, imported when one is loaded
    ("energy.py", "autoencoder"),  # the Posterior in a type annotation
}
CPU_IMPORTERS = {"generate/engine.py", "train/loop.py"}


def imports_of(path: Path) -> set[str]:
    """The parts of calm that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "calm" else [f"calm.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
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
            if LEVEL[other] >= LEVEL[part] and (path.name, other) not in EXCEPTIONS:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {other}")
    assert not wrong


def test_only_the_engine_and_the_training_loop_import_the_cpu_backend():
    importers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "cpu" in imports_of(path) and path.parent.name != "cpu"
    }
    assert importers == CPU_IMPORTERS


def test_nobody_outside_of_heads_asks_which_head_a_model_has():
    questions = ("is_chain", "ChainHead", "isinstance(head", "isinstance(self.head", "isinstance(model.head")
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "heads":
            assert not [question for question in questions if question in path.read_text()], path


def test_no_module_changes_its_class():
    assert not [path for path in PACKAGE.rglob("*.py") if "__class__ = " in path.read_text()]


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
        "from transformers import AutoConfig;",
        "import transformers, calm; from transformers import AutoModel;",
        "import calm.hf;",
        "import calm.checkpoint;",
        "import calm.evaluate.plots;",
    ):
        done = subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True)
        assert done.stdout.strip() == "ChunkAutoencoder CalmForCausalLM", first + done.stderr


def test_generation_imports_no_transformers():
    command = ["generate", "bundled", "And God said", "--max-new-tokens", "8", "--temperature", "0.5"]
    found = loaded_by(f"from calm.cli import app; app({command}, standalone_mode=False)")
    assert "torch" in found
    assert not {"transformers", "torch._dynamo", "sympy"} & found  # each takes a second or more


def test_help_and_workers_import_neither_torch_nor_transformers():
    heavy = {"torch", "transformers"}
    assert not heavy & loaded_by("from calm.cli import app; app(['--help'], standalone_mode=False)")
    assert not heavy & loaded_by("import calm.data.workers, calm.data.loader, calm.data.prepare")


def test_everything_works_without_the_cpu_backend(tmp_path):
    """A copy of the package without cpu/ prepares, trains, evaluates, and generates."""
    shutil.copytree(PACKAGE, tmp_path / "calm", ignore=shutil.ignore_patterns("cpu", "__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def calm(*arguments: str) -> str:
        command = [sys.executable, "-m", "calm", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert not (tmp_path / "calm" / "cpu").exists()
    calm("prepare", "embedded", "--tokenizer", "bpe:512", "--validation-share", "0.05", "--output", "data/embedded")
    steps = ["--set", "train.steps=3", "--set", "train.evaluation_batches=1"]
    calm("train", "toy-autoencoder", "--output", "runs/toy-autoencoder", *steps)
    calm("train", "toy-calm", "--output", "runs/toy-calm", *steps)
    text = tmp_path / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth.\n" * 20)
    assert "brier_lm" in calm("evaluate", "runs/toy-calm/model", "--data", str(text), "--json")
    with_backend = subprocess.run(
        [sys.executable, "-m", "calm", "generate", "bundled", "And God", "--max-new-tokens", "12"],
        capture_output=True,
        text=True,
    )
    assert calm("generate", "bundled", "And God", "--max-new-tokens", "12") == with_backend.stdout
