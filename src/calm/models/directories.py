"""Where models lie, and of which kind they are."""

from importlib.resources import files
from pathlib import Path

from calm.errors import UserError
from calm.models.state_files import field_of, read_object

BUNDLED = "bundled"


def located(name: Path) -> Path:
    """A model's directory; the word `bundled` is the one that comes with the package."""
    return Path(str(files("calm") / BUNDLED)) if str(name) == BUNDLED and not name.exists() else name


def model_type(directory: Path) -> str:
    """What kind of model a directory holds."""
    path = directory / "config.json"
    if not path.is_file():
        hint = f"; its model is in {directory / 'model'}" if (directory / "model" / "config.json").exists() else ""
        raise UserError(f"{directory} is not a model directory (no config.json in it){hint}")
    return str(field_of(read_object(path, f"the model in {directory} cannot be read: "), "model_type", path))
