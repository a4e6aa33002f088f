"""The command line. Heavy modules are imported only by commands that need them: help
and completion are fast.
"""

import atexit
import functools
import gc
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import posbench
from posbench import files
from posbench.config.overrides import OF_A_FINISHED_RUN, OF_A_SWEEP, WORDS, by_key
from posbench.config.shipped import GROUPS
from posbench.encodings import EXTENSIONS
from posbench.errors import UserError
from posbench.terminal import exits
from posbench.typed import Typed, rewritten

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
app = typer.Typer(
    rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=_HELP
)


def main() -> int:
    """Run the command line and return the exit code."""
    exits.tolerant_output()
    atexit.register(gc.freeze)  # a search of all that is alive took .7 s with torch
    if main.__doc__ is None:
        print("PYTHONOPTIMIZE=2 takes away what help says of commands", file=sys.stderr)
    # as python -P, for all child processes, also those of compilers
    os.environ["PYTHONSAFEPATH"] = "1"
    # it may stand anywhere
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if len(arguments) < len(sys.argv) - 1:
        os.environ[exits.DEBUG] = "1"

    def command() -> None:
        if "" in arguments:  # as a path it would be the current folder
            raise UserError(
                "an argument is empty, perhaps an unset shell variable: give it a value"
                " or leave it out"
            )
        words = arguments or ["--help"]
        try:
            code = app(words, prog_name="posbench", standalone_mode=False)
        except typer.Abort:
            raise KeyboardInterrupt from None
        except Exception as error:
            # only Typer's own have it: an unknown command or option
            if not hasattr(error, "format_message"):
                raise
            # what an unknown option may mean: `--seed 3` is `seed=3`
            name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
            if name == "config_name":
                hint = (
                    "(experiment=NAME chooses a file, --config-dir=DIR has further"
                    " ones)"
                )
            elif name in ("seed", "study", *GROUPS, *WORDS) or "." in name:
                hint = f"Settings are key=value, without dashes: {name}=..."
            else:
                hint = "('posbench --help' shows all)"
            raise UserError(f"{error.format_message()} {hint}") from None
        raise SystemExit(code)

    return exits.run(command)


_SETTINGS = """\b
Settings that people change, with their defaults:
  encoding=rope                 'posbench list encodings' shows all
  experiment=demo               size, budget, text: demo, reader, small, gpt124m ...
  model=gpt                     the block: gpt, llama or qwen3
  data=builtin                  the text: wikitext-2, pg19, task/copy ...
  data.path=                    your own text: a file, folder or glob
  data.tokenizer=bpe            bpe, bytes, a tokenizer.json, or gpt2 on the hub
  study=demo                    folder below outputs for all runs of a comparison
  seed=0                        for weights, order of the text, random positions
  start=                        begin from the weights of a finished run
  model.n_layers=4              transformer blocks
  model.d_model=128             channels of the residual stream
  training.tokens=2e6           of the whole training; 2M is the same
  training.train_length=64      tokens per sequence
  training.batch_size=32        sequences per forward pass
  training.learning_rate=0.012  the peak
  ratio=0.0625,...,16           lengths, in training lengths; length= in tokens
  extension=                    also evaluate RoPE stretched: yarn, ntk, pi ...;
                                beside start= it is trained so
  tracking=wandb                Weights & Biases, tensorboard or none
  device=auto                   cpu, cuda, cuda:1 or mps
  outputs=outputs               folder of the studies
'posbench train --cfg' prints every key with its meaning."""
_WORDS = "key=value, e.g. encoding=alibi training.tokens=2000000"
_KEYS = (
    "'posbench train --help' has the settings that people change, 'posbench train"
    " --cfg' all."
)
_RUNS = (
    "Runs (folders, or ids of those in outputs), study folders (outputs/STUDY) or globs"
)
_MODELS = (
    "or HuggingFace models (a folder, a name on the hub); then settings: length=128,256"
    " extension=yarn:factor=4"
)
_A_MODEL_IS = (
    "; a model is a folder, or OWNER/NAME on the hub, such as openai-community/gpt2"
)
_ROPES = (
    "A config.json, a model, a run, or yarn factor=4 head_dim=128; then length=16384."
)
_SECTIONS = (
    "encodings, patterns, extensions, probes, tasks, data, experiments, models, sweeps"
    " or claims; default: all."
)
Words = Annotated[
    list[str] | None,
    typer.Argument(parser=Typed, metavar="KEY=VALUE", help=_WORDS, show_default=False),
]
Runs = Annotated[list[Path], typer.Argument(help=f"{_RUNS}.")]
AnyRuns = Annotated[
    list[Path] | None, typer.Argument(help=f"{_RUNS}; default: outputs.")
]
Delete = Annotated[
    bool, typer.Option("--delete", help="Delete these runs, after a question.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Delete without the question.")]
DeleteTokens = Annotated[
    bool,
    typer.Option(
        "--delete-tokens",
        help="Delete tokens in the cache, of texts that no run has, after a question.",
    ),
]
Pack = Annotated[
    Path | None,
    typer.Option(
        "--pack", metavar="FILE", help="Write these runs into one new file, a zip."
    ),
]
Unpack = Annotated[
    bool, typer.Option("--unpack", help="Take the runs of such a file into outputs/.")
]
WithText = Annotated[
    bool, typer.Option("--with-text", help="Pack the files of their text, too.")
]
WithOptimizer = Annotated[
    bool,
    typer.Option(
        "--with-optimizer", help="Pack what an unfinished training goes on from, too."
    ),
]
SyncedRuns = Annotated[list[Path], typer.Argument(metavar="RUN", help=f"{_RUNS}.")]
Run = Annotated[
    Path, typer.Argument(help="A run: its folder (outputs/STUDY/RUN) or id.")
]
ExportedRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run: its folder or id.")
]
NewFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A new folder, or an empty one.")
]
OwnClass = Annotated[
    str, typer.Argument(metavar="code=true", help="Export posbench's own class.")
]
Claims = Annotated[
    list[str] | None,
    typer.Argument(parser=Typed, metavar="CLAIM|all|key=value", help=f"Then {_WORDS}"),
]
Evaluated = Annotated[
    list[str],
    typer.Argument(metavar="RUN|MODEL|key=value", help=f"{_RUNS}, {_MODELS}."),
]
Prompt = Annotated[str, typer.Argument(help="The text to go on from.")]
Tokens = Annotated[int, typer.Option(min=1, help="How many tokens to draw.")]
Sections = Annotated[list[str] | None, typer.Argument(help=_SECTIONS)]
Ropes = Annotated[
    list[str], typer.Argument(metavar="CONFIG|MODEL|RUN|ENCODING", help=_ROPES)
]
Drawing = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw it, as a PNG file.")
]
AnySchemes = Annotated[
    list[str] | None,
    typer.Argument(
        parser=Typed,
        metavar="names",
        help="Encodings, each with its options; default: all.",
    ),
]
Benched = Annotated[
    list[str] | None,
    typer.Argument(
        parser=Typed,
        metavar="words",
        help="Encodings (all); also training.precision=fp32, threads=1.",
    ),
]
Shape = Annotated[
    str, typer.Option(help="Size of model and batch: demo, 3m, 12m or 124m.")
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Number of rounds; medians are over these.")
]
Schemes = Annotated[
    list[str],
    typer.Argument(
        parser=Typed,
        metavar="names",
        help="Encodings, each with its options (rope base=100); run folders.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", exists=True, help="A folder of further YAML files."),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="List the commands, with runs and tokens; run nothing."
    ),
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Runs at a time (1 per core, 1-4 per GPU).")
]


def _be_quiet(flag: bool) -> None:
    if flag:  # also for the processes that share a run
        os.environ[exits.QUIET] = "1"


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        callback=_be_quiet,
        help="Print only warnings, errors and where the results are.",
    ),
]
Cfg = Annotated[
    bool,
    typer.Option(
        "--cfg", help="Print every key with its value and meaning; train nothing."
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Move an existing run aside and start again.")
]
Slurm = Annotated[
    str | None,
    typer.Option(
        metavar="OPTIONS", help="Submit as a Slurm array ('--time=60'), and end."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Output folder; default: STUDY/report."),
]
Least = Annotated[
    float | None,
    typer.Option(min=0.0, help="Nats that a verdict needs; default: 0.02."),
]
Reference = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What others are compared with, also an extension; default: rope.",
    ),
]
Figure = Annotated[
    Literal["panels", "curve"],
    typer.Option(help="Panels, or the loss alone."),
]
Text = Annotated[
    bool, typer.Option("--text", help="Print text instead: formula, paper, options.")
]
Png = Annotated[Path, typer.Option(metavar="FILE", help="The PNG file.")]
Phrase = Annotated[
    str | None, typer.Option(help="Move this phrase along a sentence; with --words.")
]
Pair = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Two words of the phrase, whose logit is drawn."),
]


Checked = Annotated[
    list[str] | None,
    typer.Argument(
        parser=Typed,
        metavar="FILE.py:CLASS|NAME",
        help="An encoding, then options and settings, such as ratio=1,32.",
    ),
]
New = Annotated[
    Path | None,
    typer.Option("--new", metavar="FILE.py", help="Write an encoding to begin with."),
]


def _version(flag: bool) -> None:
    """Print what a bug report needs: versions and devices. torch is asked only where
    there may be a device.
    """
    if not flag:
        return
    import importlib.metadata
    import platform

    device = "cpu"
    drivers = [Path("/dev/nvidiactl"), Path("/dev/kfd")]  # NVIDIA's, AMD's
    if sys.platform == "darwin" or any(driver.exists() for driver in drivers):
        import torch.cuda

        from posbench import machine

        found = machine.resolve("auto")
        device = str(found)
        if found.type == "cuda":
            device = f"{found}, {torch.cuda.get_device_name(found)}"
    version = importlib.metadata.version("torch")
    print(f"posbench {posbench.__version__}")
    print(f"Python {platform.python_version()}, torch {version}")
    print(f"device {device}, {platform.machine()}, {os.cpu_count()} cores")
    raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_version, is_eager=True, help="Print versions."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]


@app.callback()
def _options(version: Version = False, debug: Debug = False) -> None:
    """Which positional encoding should my transformer use, and how far beyond its
    training length will it hold?
    """


@app.command(epilog=_SETTINGS)
def train(
    words: Words = None,
    cfg: Cfg = False,
    config_dir: ConfigDir = None,
    restart: Restart = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a model and evaluate how far it holds. Repeat the command to continue or
    complete the run.

    Writes one run folder, outputs/STUDY/RUN, mirrors it to W&B and draws the curve.
    """
    from posbench.launch import plans

    if cfg and as_json:
        raise UserError("--cfg prints YAML: leave out --json")
    plan = plans.resolve_one(words or [], config_dir)
    if cfg:
        from posbench import listing

        print(listing.explained_yaml(plan.config), end="")
        return
    from posbench.launch import execute
    from posbench.reports import one_run

    split = plan.config.evaluation.split
    show = functools.partial(one_run.print_results, plan.folder, split)
    if as_json:
        show = functools.partial(one_run.print_json, [plan.folder])
    execute.run(plan, restart, show)


@app.command(epilog=_KEYS)
def prepare(words: Words = None, config_dir: ConfigDir = None) -> None:
    """Turn a run's text into tokens, without training.

    Use it on a machine without a GPU, before one is paid for. Takes the words of
    'posbench train', which then finds the tokens in the cache. Comma lists prepare each
    text: data=wikitext-2,pg19.
    """
    from posbench.data.tokens import prepare_all
    from posbench.launch import compose
    from posbench.terminal import console, signals

    configs = [config for _, config in compose.configs(words or [], config_dir)]
    console.log_to_terminal()
    with signals.signals_as_errors():
        prepared = prepare_all(configs)
    for tokens in prepared:
        counts = tokens.meta["tokens"].items()
        splits = ", ".join(f"{split} {count:,}" for split, count in counts)
        print(f"{tokens.meta['name']}: {splits} tokens in {tokens.folder}")
        documents = tokens.meta["documents"].items()
        counts = ", ".join(f"{split} {count:,}" for split, count in documents)
        what = "documents"
        if tokens.meta["split"] == "stretches":
            what = "pieces of documents, which are too few to hold whole ones out"
        copies = tokens.meta["copies"]
        if tokens.meta["split"] == "document":
            shared = (
                "left out of training, as they share passages with held-out ones:"
                f" {copies['dropped_documents']:,}"
            )
        else:
            shared = f"of held-out passages, training has {copies['shared']:.2%}"
        print(f"  {what}: {counts}; {shared}")
    if not prepared:
        print("Nothing to prepare: the problems of a task are made in training.")


@app.command(epilog=f"Only for sweeps: {', '.join(OF_A_SWEEP)}. {_KEYS}")
def sweep(
    words: Words = None,
    n_jobs: Jobs = None,
    config_dir: ConfigDir = None,
    dry_run: DryRun = False,
    slurm: Slurm = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare: run every combination of values, then report.

    encoding=rope,alibi seed=0,1,2 makes six runs. sweep=NAME takes the list from
    configs/sweep. tune=true first chooses each encoding's learning rate, of
    tune_grid=[0.5,1,2] times its own. A failed run does not stop the others; repeat the
    command to do missing and failed runs.
    """
    from posbench.launch import sweep as comparison

    if as_json and (dry_run or slurm is not None):
        raise UserError("--json prints the report: leave out --dry-run and --slurm")
    then = functools.partial(report, as_json=as_json)
    comparison.sweep(words or [], n_jobs, config_dir, dry_run, slurm, report=then)


@app.command(epilog="'posbench list claims' shows all.")
def reproduce(
    words: Claims = None,
    n_jobs: Jobs = None,
    config_dir: ConfigDir = None,
    dry_run: DryRun = False,
) -> None:
    """Test what the literature claims, on fresh seeds.

    Runs what claims need in one study, with seeds that no prediction was made from,
    and says of each claim: supported, contradicted, open, not learned, or not run; of
    published numbers: reproduced or not. See configs/claim.
    """
    from posbench.claims import reproduce as claims

    claims.reproduce(words or [], n_jobs, config_dir, dry_run)


@app.command(
    epilog=(
        f"Settings: {', '.join(OF_A_FINISHED_RUN)}. Extensions:"
        f" {', '.join(EXTENSIONS)}."
    )
)
def evaluate(words: Evaluated, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Evaluate runs or HuggingFace models beyond training length.

    Existing rows are not computed again. Of several runs each prints a line per curve,
    one alone a table. A model also takes data=NAME data.path=...
    train_length=N bos=window; its results go to outputs/models/MODEL.
    """
    from posbench.run import find

    models = list[str]()
    paths = list[Path]()
    settings = list[str]()
    for word in words:
        if "=" in word:
            settings.append(word)
        elif find.is_model(word):
            models.append(word)
        else:
            paths.append(Path(word))

    folders = list[Path]()
    if models and paths:
        raise UserError(f"{paths[0]} is no model: expected runs or models, not both")
    if not models:
        folders = find.run_folders(paths, _A_MODEL_IS)

    if by_key(settings).get(WORDS["extension"]) == "search":
        from posbench.huggingface import search

        if as_json:
            raise UserError("extension=search prints a table: leave out --json")
        for subject in models or folders:
            search.search(subject, settings)
    elif models:
        from posbench.huggingface import evaluate as huggingface

        huggingface.evaluate_models(models, settings, as_json)
    else:
        from posbench.run.folder import evaluated_config

        configs = {folder: evaluated_config(folder, settings) for folder in folders}

        from posbench.launch import execute  # only now: it takes torch
        from posbench.reports import one_run

        show, show_all = one_run.printers(folders, as_json)
        execute.evaluate_runs(configs, show, show_all)


@app.command()
def sample(
    run: Run,
    prompt: Prompt,
    tokens: Tokens = 200,
    seed: int = 0,
) -> None:
    """Print how a run's model continues a prompt."""
    from posbench.run import find

    folder = find.run_folder(run)

    from posbench.run import model  # only now: it takes torch

    print(model.sample(folder, prompt, tokens, seed))


@app.command()
def sync(paths: SyncedRuns) -> None:
    """Send W&B the rows of run folders that it lacks.

    WANDB_PROJECT and WANDB_ENTITY send them elsewhere than before.
    """
    from posbench.run import find
    from posbench.tracking import sync

    sync.sync(find.run_folders(paths))


@app.command()
def report(
    paths: Runs,
    out: Out = None,
    least: Least = None,
    reference: Reference = None,
    figure: Figure = "panels",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare finished runs in words, tables, figures and a page.

    Writes the answer in words, a table, CSV, LaTeX, curves with intervals, and one HTML
    page.
    """
    gc.disable()  # it took an eighth of the time, and a report soon ends
    from posbench import reports

    reports.main(paths, out, least, reference, figure, as_json)


@app.command()
def runs(
    paths: AnyRuns = None,
    delete: Delete = False,
    delete_tokens: DeleteTokens = False,
    yes: Yes = False,
    pack: Pack = None,
    unpack: Unpack = False,
    with_text: WithText = False,
    with_optimizer: WithOptimizer = False,
) -> None:
    """List runs: what tells them apart, status, loss at the training length, size.

    --delete deletes them, after a question; --delete-tokens what 'posbench prepare' and
    deleted runs leave in the cache. --pack FILE writes them into one file for another
    machine, where 'posbench runs FILE --unpack' takes them into outputs/.
    """
    actions = {
        "--delete": delete,
        "--delete-tokens": delete_tokens,
        "--pack": pack is not None,
        "--unpack": unpack,
    }
    given = [option for option, is_given in actions.items() if is_given]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: expected one of them at a time")
    if pack is None and (with_text or with_optimizer):
        raise UserError("--with-text and --with-optimizer need --pack FILE")
    if unpack and not paths:
        raise UserError("--unpack: expected the files of --pack before it")

    from posbench.run.find import run_folders

    if paths and not (unpack or delete_tokens):
        run_folders(paths)  # which refuses unknown ones before torch is imported

    from posbench.reports import runs as listed
    from posbench.run import delete as deleted
    from posbench.run import pack as packed
    from posbench.terminal import console

    if delete_tokens:
        folders = deleted.unused_tokens(paths or [])
        texts = console.plural(len(folders), "prepared text")
        n_bytes = sum(map(files.size, folders))
        what = f"{texts}, {n_bytes:,} bytes"
        _ask(what, yes)
        deleted.delete_tokens(folders)
    elif delete:
        folders = deleted.deletable(paths or [])
        listed.main(folders)
        what = console.plural(len(folders), "run")
        _ask(what, yes)
        deleted.delete(folders)
    elif unpack:
        for path in paths or []:
            listed.main(packed.unpack(path, Path("outputs")))
        return
    elif pack:
        folders = run_folders(paths or [])
        packed.pack(folders, pack, with_optimizer, with_text)
        what = console.plural(len(folders), "run")
        print(f"{what} in {pack}, {pack.stat().st_size:,} bytes")
        return
    else:
        listed.main(paths or [Path("outputs")])
        return
    print(f"Deleted {what}.")


def _refuse_unknown(words: list[str] | None) -> None:
    """Raise UserError for the name of no encoding, file or run: before torch is
    imported.
    """
    from posbench.config.shipped import chosen_files, configs_dir
    from posbench.run.find import of_id

    for word in words or []:
        name = word.removeprefix("encoding=")
        # a path to a run or a file of code is in no folder of ours: it is read later
        may_be_ours = Path(f"{configs_dir()}/encoding/{name}").parent.is_dir()
        if "=" not in name and may_be_ours and not of_id(Path(name)).exists():
            chosen_files({"encoding": rewritten(word, name)}, ())


def _ask(what: str, yes: bool) -> None:
    """Ask whether to delete, unless `yes`. Raises UserError if nobody can answer."""
    if yes:
        return
    try:
        is_wanted = typer.confirm(f"Delete {what}?")
    except typer.Abort:  # also at the end of an input that is no terminal
        if sys.stdin.isatty():
            raise
        raise UserError(
            f"no terminal to ask at, nothing was deleted: give --yes to delete {what}"
        ) from None
    if not is_wanted:
        raise typer.Abort


@app.command()
def export(run: ExportedRun, folder: NewFolder, code: OwnClass = "code=false") -> None:
    """Write a run's model as a folder that transformers loads.

    It becomes a Llama if it has that block (model=llama) and the encoding is rotary or
    none; an error says why if not. With code=true it is posbench's own class, for all
    of its encodings; who loads it needs posbench. The folder is kept only if its logits
    equal those of the run. It has tokenizer and model card. Needs transformers.
    """
    from posbench.run import find

    if "=" in folder.name:
        raise UserError(f"'{folder}' stands where the new folder is expected")
    if code not in ("code=true", "code=false"):
        raise UserError(
            f"after RUN and DIR comes '{code}': expected code=true or nothing"
        )
    path = find.run_folder(run)

    from posbench.huggingface import export  # only now: it takes torch

    print(export.export(path, folder, code == "code=true"))


@app.command("list")
def list_(sections: Sections = None, as_json: AsJson = False) -> None:
    """List encodings, tasks, data sets and all other choices.

    --json has everything. 'posbench show NAME --text' describes an encoding.
    """
    from posbench import listing

    listing.print_rows(sections or [], as_json)


@app.command()
def check(words: Checked = None, new: New = None) -> None:
    """Try whether an encoding of yours keeps the contract, in seconds, without data.

    Says all that is wrong, a line each: the hook, the file's line, what to do. --new
    writes a commented file to begin with.
    """
    _refuse_unknown(words)
    from posbench import check as contract

    if new:
        name = contract.write_new(new)
        print(f"{new}: try it with 'posbench check {new}:{name}'")
    if words or not new:
        contract.main(words or [])


@app.command()
def properties(names: AnySchemes = None, as_json: AsJson = False) -> None:
    """Measure the properties that tutorials want from an encoding.

    These are: order, uniqueness, relative, continuous, invariant, purpose, mean, spread
    and the share of key pairs whose order flips with distance.
    """
    _refuse_unknown(names)
    from posbench.show import properties
    from posbench.terminal import console

    console.log_to_terminal()
    properties.main(names, as_json)


@app.command()
def show(
    names: Schemes,
    text: Text = False,
    png: Png = Path("show.png"),
    phrase: Phrase = None,
    words: Pair = None,
) -> None:
    """Draw an encoding, or what a run's encoding has learned.

    As a PNG file; --text describes it in words. A run is drawn with its learned
    weights, and with the attention of its model on its own test text. Of an encoding it
    prints the share of key pairs whose order flips with distance.
    """
    if not text:
        _refuse_unknown(names)
        from posbench.show import command

        command.main(names, png, phrase, words)
        command.print_flips(names)
        return
    from posbench import listing

    for word in names:
        if "=" in word:
            raise UserError(f"'{word}': --text describes all options: leave it out")
    print("\n\n\n".join(map(listing.page_text, names)))


@app.command(context_settings={"ignore_unknown_options": True})
def rope(words: Ropes, png: Drawing = None) -> None:
    """Say what a RoPE configuration means.

    Give two to compare them. No weights are read. A config.json needs transformers.
    """
    gc.disable()  # as in a report
    from posbench.rope.words import schemes_of

    schemes, lengths = schemes_of(words)
    from posbench.rope import command  # it imports torch and transformers

    ropes = command.main(schemes, lengths)
    if png:
        from posbench.show import rope_picture

        rope_picture.write(png, ropes, lengths)


@app.command()
def bench(
    words: Benched = None,
    shape: Shape = "demo",
    rounds: Rounds = 5,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of encodings in training side by side.

    On a GPU their peak memory and the share of the GPU's peak, too.
    """
    _refuse_unknown(words)
    from posbench import bench as speed
    from posbench.terminal import console

    console.log_to_terminal()
    frame = speed.bench(words or [], speed.sizes_of(shape), rounds)
    if as_json:
        print(frame.to_json(orient="records", indent=2))
    else:
        speed.table(frame).print(console.stdout())
