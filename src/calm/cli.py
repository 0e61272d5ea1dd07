"""The command line: one function a command, no logic. Heavy imports stay inside the commands."""

import gc
import os
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from calm import __version__
from calm.allocator import keep_memory
from calm.errors import INTERRUPTED, CalmWarning, UserError

app = typer.Typer(
    name="calm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # what draws frames takes longer to import than everything else here
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Continuous Autoregressive Language Models: predict one vector for every K tokens.",
    epilog="Errors are one sentence; 'calm --debug COMMAND ...' shows where they come from.",
)

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one field of the recipe; may be repeated."),
]


Int8 = Annotated[bool, typer.Option("--int8", help="Matrices in eight bits: faster on CPUs, nearly the same model.")]


class OnBadDocument(StrEnum):
    fail = "fail"
    skip = "skip"


class Method(StrEnum):
    token = "token"
    batch = "batch"
    exact = "exact"
    mixture = "mixture"
    noise = "noise"


class Positions(StrEnum):
    shared = "shared"
    own = "own"
    every = "every"


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


@app.command(
    epilog="Example: calm quickstart --minutes 5 --data 'novels/*.txt' --output quickstart-novels",
    short_help="The whole idea in a quarter of an hour.",
)
def quickstart(
    minutes: Annotated[float, typer.Option(help="About how long it takes on two cores; scales every stage.")] = 15.0,
    data: Annotated[
        list[str] | None, typer.Option(help="Your own text instead of the embedded one; may be repeated.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The directory to make, or to continue in.")] = Path("quickstart"),
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="The same seed, the same models.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """The whole idea in a quarter of an hour: text, autoencoder, language model, baseline, scores, samples, a report.

    Interrupted, it continues when it is called again. It needs no network.
    """
    from calm.quickstart.plan import Plan

    plan = Plan(minutes, tuple(data or ["embedded"]), seed)  # before torch is imported: a mistake is told at once
    from calm.commands import quickstart as command

    command.quickstart(plan, output, as_json)


@app.command(
    epilog="Example: calm prepare 'texts/*.jsonl.gz' --tokenizer bpe:8192 --output data/mine",
    short_help="Turn text into a tokenizer and shards of token ids.",
)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Files or globs of .txt, .jsonl, .json, .parquet (also .gz, .zst), hf:NAME[:config][:split], "
            "or the word embedded."
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(help="bpe:SIZE to train one, a tokenizer directory or hub name, or a tiktoken file."),
    ],
    output: Annotated[Path, typer.Option(help="The directory to make.")],
    text_field: Annotated[str, typer.Option(help="The field or column that holds the text.")] = "text",
    validation_share: Annotated[float, typer.Option(help="Share of documents for validation.")] = 0.01,
    test_share: Annotated[float, typer.Option(help="Share of documents for testing.")] = 0.0,
    document_size: Annotated[
        int, typer.Option(help="Bytes after which plain text is cut into documents, at a paragraph.")
    ] = 32_768,
    shard_tokens: Annotated[int, typer.Option(help="Tokens in a shard.")] = 2**26,
    workers: Annotated[int | None, typer.Option(help="Worker processes; by default one a core.")] = None,
    on_bad_document: Annotated[OnBadDocument, typer.Option(help="What to do with one.")] = OnBadDocument.fail,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted preparation.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier preparation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Turn text into a tokenizer and shards of token ids, ready to train on.

    Interrupted at any moment, it continues with --resume and ends in the same bytes.
    """
    from calm.commands import prepare as command
    from calm.data.workers import PrepareOptions

    if resume and overwrite:
        raise UserError("--resume continues and --overwrite begins anew; give one of them")
    chosen = PrepareOptions(tokenizer, text_field, validation_share, test_share, document_size, shard_tokens)
    how = {"workers": workers, "on_bad_document": on_bad_document.value, "resume": resume, "overwrite": overwrite}
    command.prepare(sources, output, chosen, as_json, **how)


@app.command(epilog="Example: calm train laptop-autoencoder --output runs/laptop-autoencoder --set train.steps=500")
def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe, or a file ('calm config' lists them).")],
    output: Annotated[Path, typer.Option(help="The directory of the run.")],
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in this directory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train what a recipe describes. Many processes: torchrun ... -m calm train RECIPE --output DIR.

    SIGTERM and Ctrl-C save and stop; --resume continues to the same weights, bit for bit.
    """
    from calm.config import load_config

    resolved = load_config(recipe, settings)  # before torch is imported: a mistake is told at once
    from calm import console
    from calm.train.loop import train as run

    first = os.environ.get("RANK", "0") == "0"
    with console.training_progress(resolved.train.steps, enabled=first) as report:
        summary = run(resolved, output, resume=resume, report=report, warn=console.warn)
    if first and as_json:
        console.print_json(summary)
    elif first:
        console.stdout.print(console.values_table(f"{resolved.stage} in {output}", summary))
        console.stdout.print(f"The model is in {output / 'model'}, the curve in {output / 'loss.png'}", soft_wrap=True)


@app.command(
    epilog="Example: calm evaluate runs/laptop-calm/model runs/laptop-transformer/model --data data/embedded",
    short_help="Measure models: BrierLM, or reconstruction.",
)
def evaluate(
    models: Annotated[list[Path], typer.Argument(help="Directories of trained models; several are compared.")],
    data: Annotated[
        Path | None, typer.Option(help="Data made by calm prepare with the models' tokenizer, or a file of text.")
    ] = None,
    split: Annotated[str, typer.Option(help="Of prepared data: train, validation or test.")] = "validation",
    samples: Annotated[int, typer.Option(min=2, help="Draws at each position; more give smaller errors.")] = 2,
    positions: Annotated[
        Positions, typer.Option(help="Where scores begin: where all models can, at a model's own borders, everywhere.")
    ] = Positions.shared,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens that are read at once; by default 512.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows computed at once, at most.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of the draws and of the bootstrap.")] = 0,
    likelihood_bound: Annotated[
        int, typer.Option(min=0, metavar="N", help="Also bound a CALM model's likelihood, with N latents a chunk.")
    ] = 0,
    int8: Int8 = False,
    harness: Annotated[
        list[str] | None, typer.Option(metavar="TASK", help="Run a task of lm_eval instead; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Of a task, only so many examples.")] = None,
    output: Annotated[Path | None, typer.Option(help="Directory for the JSON and the plot.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measures as JSON.")] = False,
) -> None:
    """Measure models: BrierLM of language models with error bars, reconstruction of an autoencoder.

    Many processes: torchrun ... -m calm evaluate MODEL --data DIR.
    """
    from calm.commands import evaluate as command
    from calm.models.configuration import ChunkAutoencoderConfig
    from calm.models.directories import located, model_type

    models = [located(model) for model in models]
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output should name a directory, and {output} is a file")
    if limit is not None and not harness:
        raise UserError("--limit is for a task of lm_eval (--harness)")
    if harness:
        command.run_harness(models, harness, limit, batch_size, seed, likelihood_bound, output, as_json)
    elif data is None:
        raise UserError("--data is missing: a directory made by calm prepare, or a file of text")
    elif len(models) == 1 and model_type(models[0]) == ChunkAutoencoderConfig.model_type:
        command.evaluate_autoencoder(models[0], data, split, batch_size, output, as_json)
    else:
        from calm.evaluate.language_models import Options

        options = Options(samples, positions.value, context, batch_size, seed, likelihood_bound, int8=int8)
        command.evaluate_language_models(models, data, split, options, output, as_json)


@app.command(epilog="Example: calm generate bundled 'And God said' --temperature 0.5 --num-samples 3")
def generate(
    model: Annotated[
        Path, typer.Argument(help="The directory of a CALM language model; the word bundled names the shipped one.")
    ],
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from stdin, none begins a text.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the continuation, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="Above 0; lower is less surprising, 1 the model as it is.")] = 1.0,
    num_candidates: Annotated[
        int | None,
        typer.Option(min=1, help="Draws for each chunk below temperature 1: 200, of mixture 64; of exact the most."),
    ] = None,
    method: Annotated[
        Method | None,
        typer.Option(help="How candidates become a chunk; by default token, mixture for a chain head."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Of batch: draw fewer candidates where the outcome is settled to this.")
    ] = 0.0,
    refill: Annotated[bool, typer.Option("--refill", help="Of token: draw anew where few candidates agree.")] = False,
    top_k: Annotated[int | None, typer.Option(help="Of mixture: the most probable tokens, so many.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Of mixture: the tokens with this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Of mixture: tokens with this share of the largest.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Continuations of the prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="The same seed, the same text.")] = 0,
    int8: Int8 = False,
    show_chunks: Annotated[
        bool, typer.Option("--show-chunks", help="Colour chunks and tell how many candidates agreed on each.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print texts and what they cost as JSON.")] = False,
) -> None:
    """Continue a text, chunk by chunk, as it comes. The continuation goes to stdout, everything else to stderr."""
    gc.disable()  # importing torch makes many objects and leaves nothing behind: a tenth of its time
    from calm.sampling.next_chunk import Sampling

    gc.enable()
    if show_chunks and as_json:
        raise UserError("--show-chunks is for people and --json for programs; give one of them")
    named = None if method is None else method.value
    sampling = Sampling(temperature, num_candidates, named, tolerance, refill, top_k, top_p, min_p)
    from calm.commands import generate as command

    wanted = command.Wanted(prompt, max_new_tokens, stop or [], num_samples, seed)
    command.generate(model, wanted, sampling, int8, show_chunks, as_json)


@app.command(
    epilog="Example: calm serve runs/laptop-calm/model --baseline runs/laptop-transformer/model --port 8080",
    short_help="Serve a model, with a page to play with.",
)
def serve(
    model: Annotated[Path, typer.Argument(help="A model's directory, or the word bundled.")],
    baseline: Annotated[Path | None, typer.Option(help="A Transformer to serve beside it, to compare.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="CALM_API_KEY", help="Who has one may ask; may be repeated. Other users see arguments."),
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Listen on other addresses than this machine's without a key.")
    ] = False,
    max_batch: Annotated[int, typer.Option(min=1, help="Texts that grow at once.")] = 32,
    max_queue: Annotated[int, typer.Option(min=0, help="Texts that may wait; further ones get a 429.")] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a prompt.")] = 4096,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a text.")] = 2048,
    max_candidates: Annotated[int, typer.Option(min=1, help="Of a chunk.")] = 1000,
    max_seconds: Annotated[float, typer.Option(min=0.1, help="Of a request, waiting included.")] = 300.0,
) -> None:
    """Serve a model: OpenAI's completions, streams with an event for each chunk, and a page to play with."""
    from calm.commands import serve as command
    from calm.serve.limits import Limits

    limits = Limits(
        max_batch=max_batch,
        max_queue=max_queue,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_candidates=max_candidates,
        max_seconds=max_seconds,
    )
    command.serve(model, baseline, host, port, api_key or [], open_to_all, limits)


@app.command(epilog="Example: calm config laptop-autoencoder --set data.batch_size=8")
def config(
    recipe: Annotated[str | None, typer.Argument(help="A shipped recipe, or a file; none lists them.")] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Show the configuration that a recipe resolves to."""
    from calm import console
    from calm.config import load_config, recipe_names, to_yaml

    if recipe is None:
        print("\n".join(recipe_names()))
    elif as_json:
        console.print_json(load_config(recipe, settings).model_dump(mode="json"))
    else:
        print(to_yaml(load_config(recipe, settings)), end="")


@app.command(
    epilog="Example: calm cost paper-calm-m paper-transformer-s --samples 200",
    short_help="Count parameters, FLOPs and memory.",
)
def cost(
    recipes: Annotated[list[str] | None, typer.Argument(help="Recipes; none: the six rows of Table 1.")] = None,
    settings: Settings = None,
    context: Annotated[int, typer.Option(min=1, help="Steps that attention looks back on.")] = 2048,
    samples: Annotated[int, typer.Option(min=1, help="Candidates a chunk, at low temperature.")] = 200,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Tokens; by default those of the recipe's data, or 128,257.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="World that share the memory.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with one object a recipe.")] = False,
) -> None:
    """Count parameters, FLOPs and memory of recipes, split by part, beside the numbers that the paper prints."""
    from calm import console
    from calm.config import load_config
    from calm.paper.cost import TABLE_1, cost_of

    names = recipes or list(TABLE_1)
    configs = {name: load_config(name, settings) for name in names}
    costs = [cost_of(name, config, context, samples, vocabulary, processes) for name, config in configs.items()]
    if as_json:
        console.print_json([found.as_json() for found in costs])
    else:
        for table in console.cost_tables(costs, TABLE_1):
            console.stdout.print(table)


@app.command(
    epilog="Example: calm reproduce alpha --scale toy",
    short_help="Repeat the paper's tables and figures.",
)
def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment of the paper, or all; 'list' names them.")],
    scale: Annotated[
        str, typer.Option(help="toy (minutes), laptop (hours), enwik8 (days) or paper (a cluster).")
    ] = "toy",
    chunk_size: Annotated[int, typer.Option(help="K of the experiments that do not vary it.")] = 4,
    output: Annotated[Path | None, typer.Option(help="By default reproduction/SCALE.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text made by calm prepare; by default the embedded one, or the scale's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print the trainings as commands, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers and answers as JSON.")] = False,
) -> None:
    """Repeat the paper's tables and figures: train what is missing, measure, compare with what the paper found.

    What was measured once is never trained again. Many processes: torchrun ... -m calm reproduce NAME.
    """
    from calm.commands import reproduce as command
    from calm.paper.scales import scale_of

    if name == "list":
        command.show_names()
        return
    command.reproduce(name, scale_of(scale, chunk_size), output, data, resume, plan, as_json)


@app.command(
    epilog="Example: calm bench training --size paper --rounds 3 --json",
    short_help="Measure speed against the machine's limits.",
)
def bench(
    what: Annotated[str, typer.Argument(help="training, generation, evaluation, memory, scaling or all.")] = "all",
    size: Annotated[str, typer.Option(help="laptop, or paper: CALM-M, Transformer-S, 20 GB.")] = "laptop",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured, in turns.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure how close to this machine's limits everything runs, and how much faster than a Transformer.

    Models have random weights. Close other programs: medians help against noise, not against company.
    """
    from calm.commands import bench as command

    command.bench(what, size, rounds, as_json)


@app.command(
    "import-official",
    epilog="Example: calm import-official CALM-M --autoencoder CALM-Autoencoder --output models/calm-m",
)
def import_official(
    model: Annotated[Path, typer.Argument(help="The directory of a published language model or autoencoder.")],
    output: Annotated[Path, typer.Option(help="The directory to make.")],
    autoencoder: Annotated[
        Path | None, typer.Option(help="The published autoencoder that a language model was made with.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was imported as JSON.")] = False,
) -> None:
    """Turn a checkpoint in the authors' format into ours. Every weight is accounted for."""
    from calm import console
    from calm.models.official import import_official as run

    imported = run(model, output, autoencoder)
    summary = {
        "model": str(output),
        "type": imported.config.model_type,
        "parameters": imported.num_parameters(),
        "tokenizer": (output / "tokenizer.json").exists(),
    }
    if not summary["tokenizer"]:
        console.warn(f"{model} has no tokenizer.json, so {output} has none: training and evaluating need it")
    if as_json:
        console.print_json(summary)
    else:
        console.stdout.print(console.values_table(f"imported from {model}", summary))


def _show_warning(message, category, *where) -> None:
    """Our own warnings in one line; those of libraries as they come."""
    from calm import console

    if issubclass(category, CalmWarning):
        console.warn(str(message))
    else:
        print(warnings.formatwarning(message, category, *where[:2]), file=sys.stderr, end="")


def main() -> None:
    """Run a command; a user's mistake becomes one sentence and exit code 2."""
    warnings.showwarning = _show_warning
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # those of transformers; ours tell more
    keep_memory()
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(arguments, prog_name="calm", standalone_mode=False)
        if code == INTERRUPTED:
            _fail("interrupted; commands that take --resume continue with it", code, debug)
        sys.exit(code)
    except UserError as error:
        _fail(str(error), getattr(error, "exit_code", 2), debug)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except TyperException as error:  # an option or argument that the parser cannot take
        message = getattr(error, "format_message", error.__str__)()
        _fail(f"{message} ('calm --help' and 'calm COMMAND --help' tell more)", 2, debug)
    except Exception as error:
        _fail(f"unexpected {type(error).__name__}: {error} ('calm --debug' shows where)", 1, debug)


def _fail(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"calm: {message}", file=sys.stderr)
    sys.exit(code)
