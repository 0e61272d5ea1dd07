"""What `calm serve` does: load, listen, say where."""

from contextlib import nullcontext
from pathlib import Path

from calm import console
from calm.errors import UserError

try:
    from calm.serve import run
except ModuleNotFoundError as error:
    raise UserError(f"calm serve needs {error.name}: pip install 'calm-lm[serve]'") from error

from calm.serve.limits import Limits


def serve(
    model: Path, baseline: Path | None, host: str, port: int, keys: list[str], open_to_all: bool, limits: Limits
) -> None:
    if any(not key.strip() for key in keys):
        raise UserError("an API key is empty; leave --api-key out to serve without keys")
    listening = run.bind(host, port, bool(keys), open_to_all)  # before the model is read, which takes seconds
    with console.stderr.status("loading") if console.stderr.is_terminal else nullcontext():
        writers = run.load_writers(model, baseline)
    run.allow_connections()
    server = run.make_server(writers, limits, keys)
    listening.listen(server.config.backlog)  # from here on connections wait for an answer: nobody is refused
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listening.getsockname()[1]}"
    console.stderr.print(f"Serving {', '.join(writers)} at {url} (a page to play with), {url}/v1 (OpenAI's clients)")
    console.stderr.print("Ctrl-C finishes what is under way and ends; twice ends at once.")
    server.run(sockets=[listening])
