"""Command line interface: one function per command. Heavy imports stay inside the commands.

The commands that need more than a few lines continue in `commands/`.
"""

import gc
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from typer.exceptions import TyperException

from calm import __version__
from calm.errors import INTERRUPTED, CalmWarning, UserError

app = typer.Typer(
    name="calm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich help panels take longer to import than the rest of this module
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Continuous Autoregressive Language Models (CALM): one step of the backbone for every K tokens.",
    epilog="Use 'calm COMMAND --help' for the options of a command.",
)

# Options of several commands
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one recipe field; may be repeated."),
]
Model = Annotated[Path, typer.Argument(help="Model directory, or 'bundled' for the model that ships with the package.")]
Int8 = Annotated[
    bool, typer.Option("--int8", help="Quantize the linear layers to int8. Faster; changes outputs slightly. CPU only.")
]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, or cuda:N.")]
Dtype = Annotated[
    Literal["auto", "fp32", "bf16"], typer.Option(help="Precision of the weights. auto: bf16 on a GPU, fp32 elsewhere.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**62, help="Random seed.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace prepared data in the output directory.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in the output directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]

Method = Literal["token", "batch", "exact", "mixture", "noise"]  # those of calm.generate.sampler, which imports torch


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback on errors.")] = False,
) -> None:
    pass


@app.command(
    epilog="Example: calm quickstart --minutes 5 --data 'novels/*.txt' --output quickstart-novels",
    short_help="Train CALM and a baseline end to end, and write a report.",
)
def quickstart(
    minutes: Annotated[
        float, typer.Option(help="Approximate total time in minutes on two CPU cores; scales every stage.")
    ] = 15.0,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to train on, any source that 'calm prepare' reads; may be repeated. Default: the embedded text."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Output directory; an interrupted run in it is continued.")] = Path(
        "quickstart"
    ),
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train an autoencoder, a CALM language model and a Transformer baseline, evaluate them, and write a report.

    Needs no network. Run the same command again to continue after an interruption.
    """
    from calm.quickstart.plan import Plan

    plan = Plan(minutes, tuple(data or ["embedded"]), seed)  # validate before the slow import of torch
    from calm import console
    from calm.quickstart.report import next_commands
    from calm.quickstart.run import REPORT
    from calm.quickstart.run import quickstart as run

    results = run(plan, output, console.StageScreen())
    console.print_results(results, console.scores_tables(results["scores"]), as_json)
    if not as_json:
        console.show_samples(results["samples"])
        console.stdout.print(f"Report: {output / REPORT}. Next steps:", soft_wrap=True)
        print(next_commands(output), end="")


@app.command(
    epilog="Example: calm prepare 'texts/*.jsonl.gz' --tokenizer bpe:8192 --output data/mine",
    short_help="Tokenize text into shards of token ids.",
)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Files or globs (.txt, .jsonl, .json, .parquet; optionally .gz or .zst), hf:NAME[:config][:split] for "
            "a Hugging Face dataset, or 'embedded' for the text that ships with the package."
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bpe:SIZE to train a byte-level BPE tokenizer, a tokenizer directory, a Hugging Face Hub name, or a "
            "tiktoken file."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Output directory.")],
    text_field: Annotated[str, typer.Option(help="Name of the field or column that contains the text.")] = "text",
    validation_share: Annotated[float, typer.Option(help="Fraction of documents in the validation split.")] = 0.01,
    test_share: Annotated[float, typer.Option(help="Fraction of documents in the test split.")] = 0.0,
    document_size: Annotated[
        int, typer.Option(help="Split long .txt files at the first blank line after this many bytes.")
    ] = 32_768,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard.")] = 2**26,
    max_document_bytes: Annotated[
        int,
        typer.Option(help="Largest document: a line, JSON value, or table cell. See --on-bad-document."),
    ] = 2**24,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Prepare only part I of N, for example on one of N machines; combine the parts with 'calm merge'.",
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Number of worker processes. Default: one per CPU core.")] = None,
    on_bad_document: Annotated[
        Literal["fail", "skip"], typer.Option(help="How to handle a document that cannot be decoded or is too large.")
    ] = "fail",
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Tokenize text into shards of token ids for training.

    An interrupted run can be continued with --resume and produces identical files.
    """
    from calm import console
    from calm.data.prepare import prepare as run
    from calm.data.workers import PrepareOptions

    if resume and overwrite:
        raise UserError("--resume and --overwrite are mutually exclusive; give one of them")
    options = PrepareOptions(
        tokenizer, text_field, validation_share, test_share, document_size, shard_tokens, max_document_bytes
    )
    with console.preparation_progress() as report:
        manifest = run(
            sources,
            output,
            options,
            shard=shard,
            workers=workers,
            on_bad_document=on_bad_document,
            resume=resume,
            overwrite=overwrite,
            report=report,
            warn=console.warn,
        )
    if as_json:
        console.print_json(manifest)
    else:
        console.show_prepared(output, manifest)


@app.command(
    epilog="Example: calm merge parts/1 parts/2 parts/3 --output data/mine",
    short_help="Combine the parts of a corpus prepared on several machines.",
)
def merge(
    parts: Annotated[
        list[Path], typer.Argument(help="Directories made by 'calm prepare --shard I/N', in any order. Not changed.")
    ],
    output: Annotated[Path, typer.Option(help="Output directory.")],
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Combine the parts of a corpus into the same files that one 'calm prepare' of the whole corpus writes."""
    from calm import console
    from calm.data.merge import merge as run

    if resume and overwrite:
        raise UserError("--resume and --overwrite are mutually exclusive; give one of them")
    with console.preparation_progress() as report:
        manifest = run(parts, output, resume=resume, overwrite=overwrite, report=report)
    if as_json:
        console.print_json(manifest)
    else:
        console.show_prepared(output, manifest)


@app.command(
    epilog="Example: calm train laptop-autoencoder --output runs/laptop-autoencoder --set train.steps=500",
    short_help="Train a model from a recipe.",
)
def train(
    recipe: Annotated[
        str, typer.Argument(help="Name of a built-in recipe ('calm config' lists them), or a YAML file.")
    ],
    output: Annotated[Path, typer.Option(help="Run directory, for checkpoints, metrics and the trained model.")],
    settings: Settings = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Train an autoencoder, a CALM language model or a Transformer from a recipe.

    SIGTERM and Ctrl-C save a checkpoint and stop; --resume continues and produces bitwise-identical weights.

    Distributed training: torchrun --nproc-per-node=N -m calm train RECIPE --output DIR
    """
    from calm.config import load_config

    resolved = load_config(recipe, settings)  # validate before the slow import of torch
    from calm import console
    from calm.train.loop import train as run

    with console.training_progress(resolved.train.steps) as report:
        summary = run(resolved, output, resume=resume, report=report, warn=console.warn)
    console.print_results(summary, [console.values_table(f"{resolved.stage} in {output}", summary)], as_json)
    if not as_json:
        console.stdout.print(f"Model: {output / 'model'}. Loss curve: {output / 'loss.png'}.", soft_wrap=True)


@app.command(
    epilog="Example: calm evaluate runs/laptop-calm/model runs/laptop-transformer/model --data data/embedded",
    short_help="Evaluate models: BrierLM, reconstruction, or lm_eval tasks.",
)
def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(
            help="Model directories. Several language models are scored on the same positions and compared."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Directory made by 'calm prepare' with the models' tokenizer, or a text file. Required without "
            "--harness."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the prepared data: train, validation or test.")] = "validation",
    samples: Annotated[
        int, typer.Option(min=2, help="Samples per position; more samples reduce the standard error.")
    ] = 2,
    positions: Annotated[
        Literal["shared", "own", "every"],
        typer.Option(
            help="Start positions to score: the chunk boundaries that all models share (shared), those of each model "
            "(own), or every token (every)."
        ),
    ] = "shared",
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Window length in tokens. Default: 512, or less if a model supports fewer positions."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Maximum number of windows per batch.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Random seed for sampling and for the bootstrap.")] = 0,
    likelihood_bound: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Also report an upper bound on the cross-entropy of CALM models, from N latents per chunk. 0 disables "
            "it; --harness then uses 64.",
        ),
    ] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    int8: Int8 = False,
    harness: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK", help="Run this task of lm_eval (lm-evaluation-harness) instead; may be repeated."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of examples per --harness task. Default: all.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory to save results and plots in. Default: not saved.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate models: BrierLM with standard errors for language models, reconstruction for an autoencoder.

    Distributed evaluation of language models: torchrun --nproc-per-node=N -m calm evaluate MODEL --data DIR
    """
    from calm.autoencoder import AutoencoderConfig
    from calm.checkpoint import model_type, resolve_model_dir
    from calm.commands import evaluate as command

    models = [resolve_model_dir(model) for model in models]
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output should name a directory, but {output} is a file")
    if limit is not None and not harness:
        raise UserError("--limit is for a task of lm_eval; give --harness too, or leave --limit out")
    if harness:
        options = {"limit": limit, "batch_size": batch_size, "seed": seed, "num_latents": likelihood_bound}
        options |= {"device": device, "dtype": dtype}
        command.run_harness(models, harness, output, as_json, **options)
    elif data is None:
        raise UserError("--data is missing; give a directory made by 'calm prepare', or a text file")
    elif len(models) == 1 and model_type(models[0]) == AutoencoderConfig.model_type:
        command.evaluate_autoencoder(models[0], data, split, batch_size, output, as_json, device, dtype)
    else:
        from calm.evaluate.language_models import Options

        options = Options(samples, positions, context, batch_size, seed, likelihood_bound, int8=int8, dtype=dtype)
        command.evaluate_language_models(models, data, split, options, output, as_json, device)


@app.command(epilog="Example: calm generate bundled 'And God said' --temperature 0.5 --num-samples 3")
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Prompt, or - for stdin. Default: empty.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy. Values above 1 require --method mixture.")
    ] = 1.0,
    num_candidates: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Candidates per chunk. Default: 200, or 64 for mixture (1 with a chain head). For exact: the maximum "
            "number of draws, 100,000 by default. Not used by noise, and at temperature 1 only by mixture.",
        ),
    ] = None,
    method: Annotated[
        Method | None,
        typer.Option(
            help="How to sample a chunk (see docs/sampling.md). Default: token for vector heads, noise for probit "
            "heads, mixture for chain heads, Transformers, and with --top-k, --top-p or --min-p."
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            help="For batch: stop drawing candidates at this expected total variation distance from the limit "
            "distribution. 0 draws all candidates."
        ),
    ] = 0.0,
    refill: Annotated[
        bool,
        typer.Option(
            "--refill", help="For token: draw more candidates when fewer than 1/temperature match the tokens so far."
        ),
    ] = False,
    top_k: Annotated[
        int | None, typer.Option(help="For mixture: keep only the k most probable tokens. Default: all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="For mixture: sample from the smallest set of tokens with this total probability, in (0, 1]. Default: "
            "all."
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="For mixture: minimum probability relative to the most probable token, in (0, 1]. Default: no minimum."
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this string; may be repeated.")
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of continuations to generate.")] = 1,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    int8: Int8 = False,
    show_chunks: Annotated[
        bool,
        typer.Option(
            "--show-chunks",
            help="Color chunks and show the fraction of candidates equal to each (mixture: the chunk's probability).",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Generate text from a prompt and stream it to stdout. Everything else goes to stderr."""
    gc.disable()  # garbage collection takes a tenth of the time to import torch, and frees nothing
    from calm.generate.sampler import SamplingParams

    gc.enable()
    if show_chunks and as_json:
        raise UserError("--show-chunks and --json are mutually exclusive; give one of them")
    params = SamplingParams(temperature, num_candidates, method, tolerance, refill, top_k, top_p, min_p)
    from calm import console
    from calm.checkpoint import resolve_model_dir
    from calm.generate.text import TextGenerator

    with console.stderr.status("loading"):
        generator = TextGenerator(resolve_model_dir(model), device, dtype, int8=int8)
    params = params.resolve(generator.model.head)
    prompt = _read_prompt(prompt)
    deltas = generator.stream(
        [generator.tokenizer.encode(prompt)] * num_samples,
        params,
        max_new_tokens=max_new_tokens,
        stops=[stop or []] * num_samples,
        seed=seed,
    )
    try:
        if as_json:
            texts = console.collected_texts(deltas, num_samples)  # runs the generation, which fills generator.stats
            settings = {"prompt": prompt, "seed": seed, "temperature": params.temperature, "method": params.method}
            console.print_json({**settings, "texts": texts, "cost": asdict(generator.stats)})
        else:
            console.show_texts(deltas, num_samples, show_chunks)
    except KeyboardInterrupt:
        console.stdout.print()
        sys.exit(INTERRUPTED)
    if warning := generator.stats.warning(params):
        console.warn(warning)


def _read_prompt(prompt: str) -> str:
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise UserError(f"the prompt is not valid UTF-8: {error}; convert it to UTF-8 first") from error
    return text


@app.command(
    epilog="Example: calm serve runs/laptop-calm/model --baseline runs/laptop-transformer/model --port 8080",
    short_help="Serve a model over HTTP with an OpenAI-compatible API.",
)
def serve(
    model: Model,
    baseline: Annotated[
        Path | None, typer.Option(help="Directory of a Transformer to serve as well, for comparison.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free port.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="CALM_API_KEY",
            help="API key that clients must send; may be repeated. Prefer the environment variable: other users of the "
            "machine can see command line arguments.",
        ),
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Allow listening on a non-loopback address without an API key.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name that requests may use besides localhost, e.g. calm.example; may be repeated. A server on a "
            "loopback address without an API key refuses other names. By default all other servers accept any name.",
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of sequences per decoding step.")] = 32,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Maximum number of queued sequences; requests beyond it get HTTP 429.")
    ] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Maximum prompt length in tokens.")] = 4096,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens to generate per sequence.")
    ] = 2048,
    max_candidates: Annotated[int, typer.Option(min=1, help="Maximum number of candidates per chunk.")] = 1000,
    max_seconds: Annotated[
        float, typer.Option(min=0.1, help="Maximum time per request in seconds, including time in the queue.")
    ] = 300.0,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible completions API and a web playground."""
    from calm import console

    try:
        from calm.serve import run
    except ModuleNotFoundError as error:
        raise UserError(f"calm serve needs {error.name}: pip install 'calm-lm[serve]'") from error
    from calm.serve.limits import Limits

    keys = api_key or []
    if any(not key.strip() for key in keys):
        raise UserError("an API key is empty; omit --api-key to serve without authentication")
    names = allowed_host or []
    if wrong := [name for name in names if not name.strip() or "/" in name]:
        raise UserError(f"--allowed-host {wrong[0]!r} is not a host name; pass a name such as calm.example")
    limits = Limits(
        max_batch=max_batch,
        max_queue=max_queue,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_candidates=max_candidates,
        max_seconds=max_seconds,
    )
    listener = run.bind(host, port, bool(keys), open_to_all)  # fails early: loading the model takes seconds
    with console.stderr.status("loading"):
        generators = run.load_generators(model, baseline, device, dtype)
    run.raise_file_limit()
    gc.freeze()  # a garbage collection between two requests would scan all objects of torch and the model: 0.2 s
    server = run.make_server(generators, limits, keys, run.allowed_hosts(listener, host, names, bool(keys)))
    listener.listen(server.config.backlog)  # before the URL is printed, so that no client is refused a connection
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    console.stderr.print(f"Serving {', '.join(generators)} at {url} (playground), {url}/v1 (OpenAI-compatible API)")
    console.stderr.print("Press Ctrl-C to finish all requests and exit, twice to exit immediately.")
    server.run(sockets=[listener])


@app.command(
    epilog="Example: calm config laptop-autoencoder --set data.batch_size=8",
    short_help="Print a resolved recipe, or list the recipes.",
)
def config(
    recipe: Annotated[
        str | None,
        typer.Argument(help="Name of a built-in recipe, or a YAML file. Default: list the built-in recipes."),
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Print the resolved configuration of a recipe, or list the built-in recipes."""
    from calm import console
    from calm.config import load_config, recipe_names, recipe_summary, to_yaml

    if recipe is None:
        names = recipe_names()
        width = max(map(len, names))
        print("\n".join(f"{name:{width}}  {recipe_summary(name)}" for name in names))
    elif as_json:
        console.print_json(load_config(recipe, settings).model_dump(mode="json"))
    else:
        print(to_yaml(load_config(recipe, settings)), end="")


@app.command(
    epilog="Example: calm cost paper-calm-m paper-transformer-s --samples 200",
    short_help="Estimate parameters, FLOPs and memory of recipes.",
)
def cost(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Built-in recipes or YAML files. Default: the six models of Table 1.")
    ] = None,
    settings: Settings = None,
    context: Annotated[
        int, typer.Option(min=1, help="Context length in backbone steps: chunks for CALM, tokens for a Transformer.")
    ] = 2048,
    samples: Annotated[
        int, typer.Option(min=1, help="Candidates per chunk for the inference cost at low temperature.")
    ] = 200,
    vocabulary: Annotated[
        int | None,
        typer.Option(min=1, help="Vocabulary size. Default: that of the recipe's data, or 128,257 without data."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes that shard the training state (FSDP).")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Estimate parameters, FLOPs and memory of recipes by component, next to the numbers in the paper."""
    from calm import console
    from calm.config import load_config
    from calm.paper.cost import TABLE_1, cost_of

    names = recipes or list(TABLE_1)
    configs = {name: load_config(name, settings) for name in names}
    costs = [cost_of(name, config, context, samples, vocabulary, processes) for name, config in configs.items()]
    console.print_results([cost.as_json() for cost in costs], console.cost_tables(costs, TABLE_1), as_json)


@app.command(
    epilog="Example: calm reproduce alpha --scale toy",
    short_help="Reproduce the tables and figures of the paper.",
)
def reproduce(
    name: Annotated[str, typer.Argument(help="Name of an experiment, 'all', or 'list' to list them.")],
    scale: Annotated[
        str, typer.Option(help="Scale: toy (minutes), laptop (hours), enwik8 (days) or paper (a cluster).")
    ] = "toy",
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk (K), in experiments that do not vary it.")] = 4,
    output: Annotated[
        Path | None,
        typer.Option(help="Output directory. Default: reproduction/SCALE, or reproduction/SCALE-kK if K is not 4."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Directory made by 'calm prepare'. Default: the embedded text for toy and laptop, data/enwik8 for "
            "enwik8, data/pile for paper."
        ),
    ] = None,
    resume: Resume = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print the training commands and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce tables and figures of the paper: train the models, evaluate them, compare with the paper's claims.

    Saved results are reused: a model that has been evaluated is not trained again.

    Distributed: torchrun --nproc-per-node=N -m calm reproduce NAME
    """
    from calm.commands import reproduce as command
    from calm.paper.scales import scale_of

    if name == "list":
        command.show_names()
        return
    command.reproduce(name, scale_of(scale, chunk_size), output, data, resume, plan, as_json)


@app.command(
    epilog="Example: calm bench training --size paper --rounds 3 --json",
    short_help="Benchmark speed and memory.",
)
def bench(
    what: Annotated[
        str, typer.Argument(help="Benchmark to run: training, generation, evaluation, memory, scaling or all.")
    ] = "all",
    size: Annotated[
        str, typer.Option(help="Model size: laptop, or paper (CALM-M and Transformer-S; needs 20 GB of memory).")
    ] = "laptop",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per variant; variants are interleaved.")] = 5,
    as_json: Json = False,
) -> None:
    """Benchmark speed and memory on the CPU, relative to hardware limits and to a Transformer baseline.

    Models have random weights. Close other programs first: medians reduce noise, but cannot correct for a busy machine.
    """
    from calm.commands import bench as command

    command.bench(what, size, rounds, as_json)


@app.command(
    "import-official",
    epilog="Example: calm import-official CALM-M --autoencoder CALM-Autoencoder --output models/calm-m",
    short_help="Convert a checkpoint of the paper's authors.",
)
def import_official(
    model: Annotated[Path, typer.Argument(help="Directory of a language model or autoencoder in the authors' format.")],
    output: Annotated[Path, typer.Option(help="Output directory.")],
    autoencoder: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the autoencoder that the language model was trained with. Required for a language model."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint from the format of the paper's authors. Missing or unexpected weights are an error."""
    from calm import console
    from calm.official import import_official as run

    imported = run(model, output, autoencoder)
    summary = {
        "model": str(output),
        "type": imported.config.model_type,
        "parameters": sum(p.numel() for p in imported.parameters()),
        "tokenizer": (output / "tokenizer.json").exists(),
    }
    if not summary["tokenizer"]:
        console.warn(f"{model} has no tokenizer.json; copy one to {output} before you train or evaluate")
    console.print_results(summary, [console.values_table(f"Imported from {model}", summary)], as_json)


def _show_warning(message, category, *where) -> None:
    """Print warnings of this package on one line, and those of libraries in the default format."""
    from calm import console

    if issubclass(category, CalmWarning):
        console.warn(str(message))
    else:
        print(warnings.formatwarning(message, category, *where[:2]), file=sys.stderr, end="")


def main() -> None:
    """Run a command. A user error is printed as one line and exits with code 2."""
    warnings.showwarning = _show_warning
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # console.py has its own progress bars
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(arguments, prog_name="calm", standalone_mode=False)
        if code == INTERRUPTED:
            _fail("interrupted; commands with a --resume option can continue from here", code, debug)
        sys.exit(code)
    except UserError as error:
        _fail(str(error), getattr(error, "exit_code", 2), debug)
    except BrokenPipeError:  # the reader of stdout has exited, e.g. `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except TyperException as error:  # invalid option or argument
        message = getattr(error, "format_message", error.__str__)()
        _fail(f"{message} (see 'calm --help' and 'calm COMMAND --help')", 2, debug)
    except Exception as error:
        _fail(f"unexpected {type(error).__name__}: {error} (run with --debug for the traceback)", 1, debug)


def _fail(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"calm: {message}", file=sys.stderr)
    sys.exit(code)
