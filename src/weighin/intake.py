"""What the user asked for becomes a Plan: find the model, look at the machine, choose contenders, make the ids.

Everything that can be wrong with the input is found here, before a folder is made or a worker starts.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weighin import (
    __version__,
    cache,
    demo,
    documents,
    engines,
    environments,
    expected,
    harness,
    hub,
    instrument,
    kits,
    machine,
    model,
    prompts,
    quality,
    reference_rows,
    unpack,
)
from weighin.engines import Settings, SnippetPrompt
from weighin.errors import BadInput
from weighin.machine import Machine
from weighin.model import Model
from weighin.plan import Contender, Document, Entry, Plan, Prompt, Quality, Rendered, Workload
from weighin.probes.speed import LENGTH_TOKENS
from weighin.quality import TOKENS
from weighin.runner import DEFAULT_LIMITS, worker_environment

Say = Callable[[str], None]
DEMOS = ("demo", "demo-base")
SAY_EVERY = 5.0
MEMORY_MARGIN = 0.95  # of what is free: a process needs a little more than its weights
HEADROOM_BYTES = 400e6  # interpreter and libraries
ROWS_CAP = 8e9  # bytes on disk for the reference's rows
ROWS_SHARE = 0.5  # of the free disk
SEEDS = 3  # answers a prompt, where they are drawn


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The words of `weighin compare`, not yet looked at."""

    model: str
    contenders: tuple[str, ...] = ()
    prompts: str | os.PathLike[str] | Sequence[str | dict[str, Any]] | None = None
    template: str = "auto"
    system: str | None = None
    max_new_tokens: int = 50
    response_tokens: int = 512
    prompt_tokens: tuple[int, ...] = (512,)
    rounds: int | None = None
    budget_seconds: float = 600.0
    reference: str | None = None
    text: str | os.PathLike[str] | None = None
    bos: str = "auto"
    sampling: str = "greedy"
    quality: bool = True
    quality_tokens: int = TOKENS
    reference_disk_bytes: float = ROWS_CAP
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None
    limits: dict[str, float] = {}
    threads: int | None = None
    remote_code: str = "refuse"
    allow_pickle: bool = False
    force: bool = False


def make_plan(request: Request, say: Say) -> Plan:
    """Check everything, in the order of what it costs."""
    _check_numbers(request)
    named = list(dict.fromkeys(map(Contender.parse, request.contenders)))
    reference = Contender.parse(request.reference) if request.reference else None
    asked = _prompts(request)
    for number, prompt in enumerate(asked, start=1):
        expected.parse(prompt.get("expected"), f"prompt {number}")
    texts = _texts(request, asked)
    tasks = _tasks(request, say)
    say("looking at the machine and the model")
    here = machine.look(cache.root())
    if request.threads:
        here = msgspec.structs.replace(here, threads=request.threads)
    it = find_model(request.model, request.remote_code, request.allow_pickle, say)
    say("making the tokens")
    tokenizer_path = _tokenizer_path(it, say)
    workload, facts = _workload(request, it, tokenizer_path, asked, texts)
    it = msgspec.structs.replace(it, **facts)
    contenders = named or _default_contenders(here, it)
    if reference and reference not in contenders:
        contenders = [*contenders, reference]
    entries = [_entry(c, c in named or c == reference, here, it, workload, request) for c in contenders]
    entries, it = _without_missing_engines(entries, it)
    chosen, note = _reference(entries, reference, it)
    entries = [msgspec.structs.replace(e, from_disk=e.from_disk and e.name == chosen) for e in entries]
    return Plan(
        weighin_version=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model=it,
        tokenizer_path=tokenizer_path,
        machine=here,
        instrument=instrument.remembered(here.key),
        entries=entries,
        workload=workload,
        reference=chosen,
        reference_note=note,
        quality=_quality(request, workload, here, tasks, it.shape.max_positions) if request.quality else None,
        threads_asked=request.threads,
        rounds=request.rounds,
        budget_seconds=request.budget_seconds,
        limits={**DEFAULT_LIMITS, **request.limits},
        remote_code=request.remote_code == "trust",
        allow_pickle=request.allow_pickle,
    )


def find_model(source: str, remote_code: str, allow_pickle: bool, say: Say) -> Model:
    """A folder, a GGUF file, a Hub id or the demo, as a Model with its files here."""
    if source in DEMOS and not Path(source).exists():
        return _demo(source, say)
    path = Path(source).expanduser()
    if path.exists() or not hub.is_hub_id(source):
        return model.inspect(source, path, remote_code=remote_code, allow_pickle=allow_pickle)
    folder = hub.resolve(
        source, allow_pickle=allow_pickle, before=lambda d: say(_download_size(d)), on_progress=_progress(say)
    )
    return model.inspect(source, folder, remote_code=remote_code, allow_pickle=allow_pickle)


def _download_size(download: hub.Download) -> str:
    return f"downloading {download.repo}: {download.bytes / 1e9:.2f} GB in {len(download.files)} files"


def _progress(say: Say) -> Callable[[int, int], None]:
    """Says every few seconds how far a download is and how long it will take."""
    began = said = time.monotonic()

    def on_progress(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if done and now - said >= SAY_EVERY:
            said = now
            left = (now - began) * (total - done) / done
            say(f"  {done / 1e9:.2f} of {total / 1e9:.2f} GB, about {left:.0f} s left")

    return on_progress


def _tokenizer_path(it: Model, say: Say) -> str:
    """The folder of the model's tokenizer; that of a GGUF is unpacked once, since reading it there takes long."""
    if it.kind != "gguf":
        return it.path
    folder = cache.prepared(it.fingerprint, unpack.TOKENIZER_RECIPE)
    _unpack("tokenizer", it.path, folder, lambda: say("unpacking the tokenizer of the GGUF file (half a minute, once)"))
    return str(folder)


def _unpack(what: str, file: str, folder: Path, announce: Callable[[], None]) -> None:
    """Unpack a part of a GGUF file into the cache, in a child."""

    def build(out: Path) -> None:
        announce()
        command = [sys.executable, "-m", "weighin.unpack", what, file, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=worker_environment(1))
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise BadInput(f"The {what} of {file} could not be unpacked: {last[:500]}")

    cache.make(folder, build)


def _demo(source: str, say: Say) -> Model:
    file = demo.gguf_file(cache.root(), say)
    raw = model.inspect(source, file)
    folder = cache.prepared(raw.fingerprint, unpack.RECIPE)
    _unpack("model", str(file), folder, lambda: say("unpacking the demo model into safetensors (half a minute, once)"))
    found = model.inspect(source, folder, notes=(demo.NOTE,))
    return msgspec.structs.replace(found, name=demo.NAME)


def _check_numbers(request: Request) -> None:
    for words, value in (
        ("--max-new-tokens", request.max_new_tokens),
        ("--response-tokens", request.response_tokens),
        ("--rounds", request.rounds),
        ("--threads", request.threads),
        ("--quality-tokens", request.quality_tokens),
        ("--task-limit", request.task_limit),
        *(("--prompt-tokens", length) for length in request.prompt_tokens),
    ):
        if value is not None and value < 1:
            raise BadInput(f"{words} {value}: it takes a whole number of at least 1.")
    if request.max_new_tokens < 2:
        raise BadInput("--max-new-tokens 1: a decode speed needs at least 2 new tokens.")
    for words, chosen, choices in (
        ("--bos", request.bos, ("auto", "add", "none")),
        ("--sampling", request.sampling, ("greedy", "model")),
    ):
        if chosen not in choices:
            raise BadInput(f"{words} takes {', '.join(choices)}, not '{chosen}'.")
    if request.tasks and not request.quality:
        raise BadInput("--tasks belongs to quality; leave out --no-quality.")
    if request.remote_code not in ("refuse", "ignore", "trust"):
        raise BadInput(f"--remote-code takes refuse, ignore or trust, not '{request.remote_code}'.")


def _prompts(request: Request) -> list[dict[str, Any]]:
    given = request.prompts
    if given is None:
        return [{"text": text} for text in prompts.BUILT_IN]
    if isinstance(given, str | os.PathLike):
        return prompts.read_prompts(Path(given))
    listed = [
        prompts.check({"prompt": p} if isinstance(p, str) else p, f"prompts[{number}]")
        for number, p in enumerate(given)
    ]
    if not listed:
        raise BadInput("prompts is empty; give at least one.")
    return listed


def _texts(request: Request, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The texts that quality is measured on: the user's own, else expected answers and what weighin brings."""
    if not request.quality:
        return []
    if request.text is not None:
        return documents.read(Path(request.text))
    return [*documents.of_expected(asked), *documents.shipped()]


def _tasks(request: Request, say: Say) -> list[str]:
    """The tasks of lm-evaluation-harness, looked for before anything costly is done."""
    if not request.tasks:
        return []
    tasks = harness.parse(request.tasks)
    environment = environments.of_kit(kits.find(harness.NAME))
    if isinstance(environment, environments.Missing):
        raise BadInput(f"--tasks needs lm-evaluation-harness: {environment.reason}. {environment.remedy}")
    say("looking for the tasks")
    known = harness.check(environment.python, tasks, cache.root() / "lm-eval-check.log")
    for task in known:
        say(f"  {task.name}: {task.documents} documents")
    return tasks


def _quality(request: Request, workload: Workload, here: Machine, tasks: list[str], limit: int | None) -> Quality:
    """How much is scored, and how much of the reference's rows is kept under the cap on disk."""
    longest = max(len(r.ids) for r in workload.rendered)
    room = limit - longest if limit is not None else quality.SAMPLE_TOKENS
    samples = 0 if request.text is not None or room < quality.FEWEST_SAMPLE_TOKENS else quality.SAMPLES
    tokens = min(quality.SAMPLE_TOKENS, room)
    positions = sum(d.positions for d in quality.choose(workload.documents, request.quality_tokens)) + samples * tokens
    cap = int(min(request.reference_disk_bytes, (here.disk_free_bytes or ROWS_CAP) * ROWS_SHARE))
    kept = reference_rows.how_many_to_keep(positions, workload.vocabulary, cap)
    return Quality(
        samples=samples,
        sample_tokens=tokens,
        tokens=request.quality_tokens,
        rows_kept=kept,
        rows_bytes=positions * reference_rows.bytes_per_row(workload.vocabulary, kept),
        tasks=tasks,
        task_limit=request.task_limit,
    )


def _sampling(request: Request, it: Model, tokenizer_path: str) -> dict[str, Any] | None:
    """The model's own generation settings, where answers are to be drawn by them."""
    if request.sampling == "greedy":
        return None
    file = Path(tokenizer_path) / "generation_config.json"
    said = msgspec.json.decode(file.read_bytes()) if file.is_file() else {}
    if not said.get("do_sample"):
        raise BadInput(
            f"--sampling model: {it.name} names no sampling in its generation_config.json (do_sample is not true); "
            f"its answers are greedy. Leave --sampling out."
        )
    known = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}  # transformers' own defaults
    drawn = {key: said.get(key) if said.get(key) is not None else usual for key, usual in known.items()}
    if not all(isinstance(value, int | float) and 0 <= value < 1e9 for value in drawn.values()):
        raise BadInput(f"--sampling model: the generation settings of {it.name} are no usable numbers: {drawn}.")
    return drawn


def _workload(
    request: Request, it: Model, tokenizer_path: str, asked: list[dict[str, Any]], texts: list[dict[str, Any]]
) -> tuple[Workload, dict[str, Any]]:
    """The workload, and what the tokenizer's side knows of the model."""
    limit = it.shape.max_positions
    default = request.prompt_tokens == Request.__struct_defaults__[_default_index("prompt_tokens")]
    fits = [n for n in request.prompt_tokens if limit is None or n + LENGTH_TOKENS <= limit]
    if len(fits) < len(request.prompt_tokens) and not default:
        raise BadInput(f"--prompt-tokens {max(request.prompt_tokens)}: the model reads at most {limit} tokens.")
    answer = prompts.render(
        tokenizer_path,
        asked,
        template=request.template,
        system=request.system,
        lengths=list(fits),
        vocabulary=it.shape.vocabulary,
        remote_code=request.remote_code == "trust",
        documents=texts,
        bos=request.bos,
        longest_document=min(quality.LONGEST_DOCUMENT, limit or quality.LONGEST_DOCUMENT),
    )
    longest = max(len(r["ids"]) for r in answer["rendered"])
    if limit is not None and longest + request.max_new_tokens > limit:
        raise BadInput(
            f"The longest prompt has {longest} tokens; with {request.max_new_tokens} new ones that is more than the "
            f"{limit} the model reads. Shorten it, or lower --max-new-tokens."
        )
    cap = request.response_tokens if limit is None else min(request.response_tokens, limit - longest)
    workload = Workload(
        prompts=[Prompt(**{k: p.get(k) for k in ("text", "messages", "expected")}) for p in asked],
        rendered=[Rendered(**r) for r in answer["rendered"]],
        lengths=answer["lengths"],
        template=answer["template"],
        template_note=answer["template_note"],
        system=request.system,
        stop_ids=list(dict.fromkeys([*it.eos_ids, *answer["eos_ids"]])),
        thinking=answer["thinking"],
        max_new_tokens=request.max_new_tokens,
        response_cap=cap,
        vocabulary=min(answer["tokenizer_size"], it.shape.vocabulary),
        documents=[Document(**d) for d in answer["documents"]],
        bos_other=[Document(**d) for d in answer["bos_check"]["documents"]],
        bos=request.bos,
        starts_with_bos=answer["bos_check"]["now"] if answer["bos_check"]["id"] is not None else None,
        sampling=_sampling(request, it, tokenizer_path),
        seeds=SEEDS if request.sampling == "model" else 1,
    )
    return workload, {
        "auto_class": answer["auto_class"],
        "auto_class_reason": answer["auto_class_reason"],
        "notes": (*it.notes, *answer["notes"]),
    }


def _default_index(name: str) -> int:
    fields = Request.__struct_fields__
    return fields.index(name) - (len(fields) - len(Request.__struct_defaults__))


def _default_contenders(here: Machine, it: Model) -> list[Contender]:
    names = [name for engine in engines.everything().values() for name in engine.contenders(here, it)]
    return [Contender.parse(name) for name in names]


def _without_missing_engines(entries: list[Entry], it: Model) -> tuple[list[Entry], Model]:
    """The default set is of the engines that are ready; one sentence names the others and how to get them."""
    kept = [e for e in entries if e.named or e.status != "not_installed"]
    missing = sorted({e.contender.engine for e in entries if e not in kept})
    if not missing or not kept:
        return entries, it
    note = f"Not compared, because not installed: {', '.join(missing)}. weighin engines install {' '.join(missing)}"
    return kept, msgspec.structs.replace(it, notes=(*it.notes, note))


def _entry(contender: Contender, named: bool, here: Machine, it: Model, workload: Workload, request: Request) -> Entry:
    engine = engines.everything()[contender.engine]
    settings = engine.settings(contender, here, it)
    recipe = engine.recipe(contender, it)
    weight_bytes = engine.weight_bytes(contender, settings, it)
    entry = Entry(
        contender=contender,
        named=named,
        settings=dataclasses.asdict(settings),
        weight_bytes=weight_bytes,
        recipe=recipe,
        snippet=_snippet(engine, contender, settings, it, recipe, workload, request.remote_code == "trust"),
        versions=environments.versions(engine),
        log_probabilities=engine.probabilities_of(contender),
        samples=engine.samples,
    )
    if reason := engine.cannot_run(contender, here, it):
        return msgspec.structs.replace(entry, status="cannot_run", reason=reason)
    environment = environments.for_contender(engine, contender, it)
    if isinstance(environment, environments.Missing):
        return msgspec.structs.replace(
            entry, status="not_installed", reason=environment.reason, remedy=environment.remedy
        )
    if not request.force and (reason := _does_not_fit(contender, weight_bytes, here)):
        remedy = "choose a smaller precision, free memory, or try it all the same with --force"
        able = engine.scores_from_disk and contender.device == "cpu"
        return msgspec.structs.replace(
            entry, status="cannot_run", reason=reason, remedy=remedy, from_disk=able, python=environment.python
        )
    needed = engine.prepared_bytes(contender, it)
    made = recipe is not None and cache.is_complete(cache.prepared(it.fingerprint, recipe))
    if not made and here.disk_free_bytes is not None and needed > here.disk_free_bytes:
        reason = f"preparing it writes {needed / 1e9:.1f} GB, the disk has {here.disk_free_bytes / 1e9:.1f} GB free"
        remedy = "make room, or put the cache elsewhere with $WEIGHIN_CACHE"
        return msgspec.structs.replace(entry, status="cannot_run", reason=reason, remedy=remedy)
    return msgspec.structs.replace(entry, python=environment.python)


def _does_not_fit(contender: Contender, weight_bytes: int, here: Machine) -> str | None:
    """Weights against what is free now. (A full prediction, with speed, is another matter.)"""
    if contender.device in ("cuda", "mps", "auto"):
        if contender.device != "cuda" or not here.gpus:
            return None
        free, where = here.gpus[0].memory_free_bytes, "free on the GPU"
        holders = here.gpus[0].processes
        if holders:
            where += (
                f" (held by {', '.join(f'{p.name} pid {p.pid}' for p in holders)}; stop it or restart the notebook)"
            )
    else:
        free, where = here.memory_available_bytes, "of memory free"
    needed = weight_bytes + HEADROOM_BYTES
    if needed <= free * MEMORY_MARGIN:
        return None
    return f"its weights need {weight_bytes / 1e9:.1f} GB, there are {free / 1e9:.1f} GB {where}"


def _snippet(
    engine: type[engines.Engine],
    contender: Contender,
    settings: Settings,
    it: Model,
    recipe: str | None,
    workload: Workload,
    remote_code: bool,
) -> str:
    path = str(cache.prepared(it.fingerprint, recipe)) if recipe else it.path
    first = workload.prompts[0]
    as_chat = workload.template == "chat"
    prompt = SnippetPrompt(
        messages=prompts.conversation(msgspec.to_builtins(first), workload.system) if as_chat else None,
        text=workload.rendered[0].text,
        template_file=workload.template == "file",
        remote_code=remote_code,
    )
    return engine.snippet(contender, settings, path, prompt, workload.response_cap, workload.stop_ids)


def _reference(entries: list[Entry], named: Contender | None, it: Model) -> tuple[str | None, str]:
    """The contender that quality is measured against: the named one, else fp32, else the checkpoint's own dtype."""
    runnable = [e for e in entries if e.status == "ok"]
    if named is not None:
        return str(named), "as asked"
    if it.quantization and it.kind != "gguf":
        return (runnable[0].name if runnable else None), f"the checkpoint as it is ({it.quantization})"
    full = "full precision in 32 bits" + (f", dequantized {it.dtype}" if it.quantization else "")
    for precision, note in (("fp32", full), (it.dtype, f"the checkpoint's own precision, {it.dtype}")):
        for entry in runnable:
            if entry.contender.precision == precision:
                return entry.name, note
    for entry in entries:
        if entry.from_disk and entry.contender.precision == it.dtype:
            return entry.name, (
                f"the checkpoint's own precision, {it.dtype}; it does not fit into memory, so it is only scored, "
                f"layer by layer from disk, and has no answers of its own"
            )
    return None, "no contender here runs in full precision"
