"""The `calm serve` command."""

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
        raise UserError("an API key is empty; omit --api-key to serve without authentication")
    listener = run.bind(host, port, bool(keys), open_to_all)  # fails early: loading the model takes seconds
    with console.stderr.status("loading") if console.stderr.is_terminal else nullcontext():
        generators = run.load_generators(model, baseline)
    run.raise_file_limit()
    server = run.make_server(generators, limits, keys)
    listener.listen(server.config.backlog)  # before the URL is printed, so that no client is refused a connection
    url_host = f"[{host}]" if ":" in host else host
    url = f"http://{url_host}:{listener.getsockname()[1]}"
    console.stderr.print(f"Serving {', '.join(generators)} at {url} (playground), {url}/v1 (OpenAI-compatible API)")
    console.stderr.print("Press Ctrl-C to finish all requests and exit, twice to exit immediately.")
    server.run(sockets=[listener])
