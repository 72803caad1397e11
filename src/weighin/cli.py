"""Arguments -> a plan; the only place that prints errors or exits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from weighin import __version__
from weighin.errors import BadInput, WeighinError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _Group(click.Group):
    """Turns what weighin knows how to explain into a message and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except WeighinError as error:
            if "--debug" in sys.argv:
                raise
            from weighin.report.table import visible  # a message may quote what a model's files say

            click.echo(f"weighin: {visible(str(error))}", err=True)
            sys.exit(error.exit_code)
        except (KeyboardInterrupt, click.Abort):
            click.echo("weighin: interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Group, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="weighin")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """How should I run this language model? Every way, side by side, measured on this machine."""


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that reads a model."""
    for option in (
        click.option(
            "--remote-code",
            type=click.Choice(["refuse", "ignore", "trust"]),
            default="refuse",
            show_default=True,
            help="If the model's files name code: refuse the model, use transformers' own class, or run it.",
        ),
        click.option("--allow-pickle", is_flag=True, help="Read pickled weights (.bin) too, by torch's weights_only."),
        click.option("--threads", type=int, help="Threads of every engine.  [default: the cores allowed here]"),
    ):
        command = option(command)
    return command


FAIL_ON = click.option(
    "--fail-on",
    multiple=True,
    metavar="RULE",
    help="Exit with 3 if this is so: 'decode_tokens_per_second<20', 'regression>5%'; repeat it.",
)


@main.command()
@click.argument("model", required=False)
@click.option(
    "-c",
    "--contender",
    "contenders",
    multiple=True,
    metavar="CONTENDER",
    help="engine:precision@device, as in transformers:nf4@cuda; repeat it.",
)
@click.option(
    "--prompts", metavar="FILE", help="A prompt a line, or JSONL with 'prompt' or 'messages', and 'expected'."
)
@click.option(
    "--template", default="auto", metavar="chat|raw|FILE", help="[default: the model's chat template, if it has one]"
)
@click.option("--system", metavar="TEXT", help="A system message before every prompt.")
@click.option("--max-new-tokens", type=int, default=50, show_default=True, help="New tokens of a timed answer.")
@click.option("--response-tokens", type=int, default=512, show_default=True, help="Cap of the answers that are shown.")
@click.option("--prompt-tokens", default="512", show_default=True, metavar="N,N", help="Prompt lengths for prefill.")
@click.option("--rounds", type=int, help="Exactly this many rounds.  [default: until precise, or the budget ends]")
@click.option("--budget", default="10m", show_default=True, help="Time for everything after preparing: 90s, 10m, 1h.")
@click.option("--reference", metavar="CONTENDER", help="What quality is judged against.  [default: fp32, if it fits]")
@click.option(
    "--text", metavar="FILE", help="What quality is measured on: documents with blank lines between, or JSONL."
)
@click.option(
    "--quality/--no-quality", default=True, help="Measure what is lost against the reference.  [default: yes]"
)
@click.option("--quality-tokens", type=int, default=4000, show_default=True, help="Tokens that are scored at most.")
@click.option("--reference-disk", default="8GB", show_default=True, help="Most that the reference's rows may take.")
@click.option(
    "--bos",
    type=click.Choice(["auto", "add", "none"]),
    default="auto",
    show_default=True,
    help="The begin token: as the tokenizer does, put in front, or left out.",
)
@click.option(
    "--sampling",
    type=click.Choice(["greedy", "model"]),
    default="greedy",
    show_default=True,
    help="How answers are made: the likeliest token, or drawn by the model's own settings with three seeds.",
)
@click.option("--tasks", metavar="NAME,DIR", help="Tasks of lm-evaluation-harness, or folders of them (offline).")
@click.option("--task-limit", type=int, metavar="N", help="Documents of each task at most.")
@click.option("--limit", "limits", multiple=True, metavar="PHASE=TIME", help="Time limit of a phase, as in load=20m.")
@click.option("--force", is_flag=True, help="Start contenders that are not expected to fit into memory.")
@click.option("--out", metavar="DIR", help="The result folder.  [default: weighin-results/MODEL-TIME]")
@click.option("--resume", "resumed", metavar="DIR", help="Finish the comparison in this folder.")
@click.option("--against", metavar="DIR", help="An older comparison, for --fail-on 'regression>5%'.")
@FAIL_ON
@model_options
def compare(
    model: str | None,
    resumed: str | None,
    out: str | None,
    against: str | None,
    fail_on: tuple[str, ...],
    **options: Any,
) -> None:
    """Compare ways of running MODEL: a folder, a GGUF file, a Hub id, or demo-base."""
    from rich.console import Console

    from weighin import intake, rules
    from weighin.compare import exit_code, rebuild, resume, start
    from weighin.diff import check_same_workload
    from weighin.folder import RESULTS, check_new_folder, default_folder
    from weighin.report import terminal

    parsed = [rules.parse(text) for text in fail_on]
    older = rebuild(Path(against)) if against else None
    rules.check_possible(parsed, older)
    console = Console(stderr=False)
    show = terminal.Progress(console)
    if resumed is not None:
        _check_resume_alone()
        folder = Path(resumed)
        comparison = resume(folder, show)
    else:
        if model is None:
            raise BadInput("Which model? Give a folder, a GGUF file, a Hub id, or demo-base.")
        check_new_folder(Path(out) if out else Path(RESULTS) / "new")
        plan = intake.make_plan(_request(model, options), say=lambda text: click.echo(text, err=True))
        if older is not None:
            check_same_workload(older, plan)
        folder = Path(out) if out else default_folder(plan)
        comparison = start(plan, folder, show)
    console.print(terminal.result(comparison, console.width))
    console.print(f"The report: {folder / 'report.md'}", markup=False, soft_wrap=True)
    if broken := rules.check(parsed, comparison, older):
        raise rules.RuleFailed(broken)
    sys.exit(exit_code(comparison))


def _check_resume_alone() -> None:
    """An argument beside --resume would change nothing, so it is refused."""
    context = click.get_current_context()
    given = [
        name
        for name in context.params
        if name not in ("resumed", "fail_on", "against")
        and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise BadInput(f"--resume takes its model and all else from the folder; leave out: {', '.join(given)}.")


def _request(model: str, options: dict[str, Any]) -> Any:
    from weighin import intake
    from weighin.plan import parse_duration, parse_size
    from weighin.runner import DEFAULT_LIMITS

    options = dict(options)
    limits = {}
    for text in options.pop("limits"):
        phase, equals, time = text.partition("=")
        if not equals or not phase:
            raise BadInput(f"--limit {text}: write it as PHASE=TIME, as in load=20m.")
        if phase not in DEFAULT_LIMITS:
            raise BadInput(f"--limit {text}: there is no phase '{phase}' (there are {', '.join(DEFAULT_LIMITS)}).")
        limits[phase] = parse_duration(time)
    return intake.Request(
        model=model,
        limits=limits,
        reference_disk_bytes=parse_size(options.pop("reference_disk")),
        tasks=tuple(part.strip() for part in (options.pop("tasks") or "").split(",") if part.strip()),
        budget_seconds=parse_duration(options.pop("budget")),
        prompt_tokens=_lengths(options.pop("prompt_tokens")),
        contenders=tuple(options.pop("contenders")),
        **options,
    )


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise BadInput(f"--prompt-tokens {text}: it takes whole numbers, as in 512,4096.") from None


@main.command()
@click.argument("model")
@click.argument("prompt")
@click.option("-c", "--contender", required=True, metavar="CONTENDER", help="engine:precision@device")
@click.option(
    "--template", default="auto", metavar="chat|raw|FILE", help="[default: the model's chat template, if it has one]"
)
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option("--max-new-tokens", "response_tokens", type=int, default=512, show_default=True)
@model_options
def run(model: str, prompt: str, contender: str, **options: Any) -> None:
    """Answer PROMPT once with one contender, streamed."""
    from weighin import answer, intake

    if not prompt.strip():
        raise BadInput("The prompt is empty; write something to answer.")
    if options["response_tokens"] < 1:
        raise BadInput(f"--max-new-tokens {options['response_tokens']}: it takes a whole number of at least 1.")
    request = intake.Request(model=model, contenders=(contender,), prompts=[prompt], prompt_tokens=(), **options)
    answer.stream(request, say=lambda text: click.echo(text, err=True), write=lambda text: click.echo(text, nl=False))


@main.command()
def machine() -> None:
    """Show what this machine is and which engines are ready."""
    from rich.console import Console

    from weighin import cache, environments, instrument, kits
    from weighin import machine as machine_module
    from weighin.report import terminal

    found = machine_module.look(cache.root())
    ready = []
    for row in environments.table():
        if row.devices:
            versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
            state = f"ready, in {row.where}: {versions}" if row.state == kits.READY else f"not ready: {row.state}"
            offers = f"{row.name}:{{{','.join(row.precisions)}}}@{{{','.join(row.devices)}}}"
            ready.append((row.name, state, f"install it with: {row.remedy}" if row.remedy else offers))
    Console().print(terminal.machine_view(found, ready, instrument.remembered(found.key)))


@main.group(name="engines", invoke_without_command=True)
@click.pass_context
def engines_group(context: click.Context) -> None:
    """Show every engine: whether it is ready, its version, where it runs and what it can do.

    An engine that this Python does not have gets an environment of its own: install, remove, upgrade.
    """
    from rich.console import Console

    from weighin import environments
    from weighin.report import engines_view

    if context.invoked_subcommand is None:
        Console().print(engines_view.view(environments.table()))


@engines_group.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def install(names: tuple[str, ...]) -> None:
    """Make the environments of these engines, or repair them; what is sound stays as it is."""
    from rich.console import Console

    from weighin import environments
    from weighin.report.engines_view import Watch

    with Watch(Console(stderr=True)) as watch:
        environments.install(names, watch.say, watch.tell)


@engines_group.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
def upgrade(names: tuple[str, ...]) -> None:
    """Make those environments anew that this weighin wants in other versions.  [default: all there are]"""
    from rich.console import Console

    from weighin import environments
    from weighin.report.engines_view import Watch

    with Watch(Console(stderr=True)) as watch:
        environments.upgrade(names, watch.say, watch.tell)


@engines_group.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def remove(names: tuple[str, ...]) -> None:
    """Remove the environments of these engines."""
    from weighin import environments

    environments.remove(names, lambda text: click.echo(text, err=True))


@main.command()
@click.argument("folder", metavar="DIR")
@click.option(
    "--format", "format_", type=click.Choice(["md", "csv", "json"]), help="Print this one instead of writing all."
)
def report(folder: str, format_: str | None) -> None:
    """Rebuild the reports of a result folder from its journal alone."""
    from weighin import report as reports
    from weighin.compare import rebuild

    comparison = rebuild(Path(folder))
    if format_:
        click.echo(reports.render(comparison, format_), nl=False)
        return
    reports.write(comparison, Path(folder))
    click.echo(f"Wrote comparison.json, report.md and report.csv in {folder}")


@main.command()
@click.argument("old")
@click.argument("new")
@click.option("--format", "format_", type=click.Choice(["md", "json"]), help="Print this instead of a table.")
@FAIL_ON
def diff(old: str, new: str, format_: str | None, fail_on: tuple[str, ...]) -> None:
    """Show what got better or worse from the folder OLD to NEW, and whether it is more than noise."""
    import msgspec
    from rich.console import Console

    from weighin import rules
    from weighin.compare import rebuild
    from weighin.diff import diff as difference
    from weighin.report import changes

    parsed = [rules.parse(text) for text in fail_on]
    before, after = rebuild(Path(old)), rebuild(Path(new))
    found = difference(before, after)
    if format_ == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    elif format_ == "md":
        click.echo(changes.render(found), nl=False)
    else:
        Console().print(changes.view(found))
    if broken := rules.check(parsed, after, before):
        raise rules.RuleFailed(broken)


if __name__ == "__main__":
    main()
