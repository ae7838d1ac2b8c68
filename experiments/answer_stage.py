"""A pretrained target answers prompts itself: the stages that turn prompts into training data for its drafters."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.training_stage import Text, plain
from specjax.data.answers import Answer, AnswerSource, AnswerWriter, answer_batches, answer_windows, answers_fingerprint
from specjax.data.pipeline import Batch, PipelineConfig, TokenizedText
from specjax.data.prompts import Prompt, PromptFiles, refused_prompt, split_prompts
from specjax.data.standard_library_prompts import function_prompts
from specjax.data.text import StandardLibrary, load_corpus
from specjax.decoding import generate
from specjax.drafters import NGram
from specjax.events import Progress
from specjax.report import metrics
from specjax.report.metrics import CountTable
from specjax.report.stages import Stages
from specjax.sampling import Sampling
from specjax.training.manifest import checksum

PROMPT_SOURCES = ("standard_library", "files")


@dataclasses.dataclass(frozen=True)
class TokenPrompt:
    """A prompt as the target reads it, chat template included."""

    name: str
    kind: str
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class AnswerData:
    """Answers as training data.

    Attributes:
        train, held_out: answers to training prompts and to some of the held-out ones.
        context: tokens of context in windows that are cut out of longer records.
    """

    train: AnswerSource
    held_out: AnswerSource
    context: int

    def pipeline(self, config: PipelineConfig) -> tuple[Iterator[Batch], str]:
        return answer_batches(self.train, config, self.context), answers_fingerprint(self.train, config, self.context)

    def held_out_windows(self, window: int) -> list[Batch]:
        """Every held-out answer, one window a batch."""
        windows = answer_windows(self.held_out, window, self.context)
        return [{name: x[None] for name, x in windows[i].items()} for i in range(len(windows))]

    def text(self, tokenizer) -> Text:
        """The answers without their prompts, as families take text: for frequencies, indices and rank rates."""
        sides = (self.train, self.held_out)
        return Text(tokenizer, *(TokenizedText(side.tokens(), 0) for side in sides))


def prepare_prompts(config: ConfigDict, stages: Stages, target) -> tuple[list[TokenPrompt], list[TokenPrompt]]:
    """Stage "prompts": (training, held-out) prompts, in the order in which they are answered.

    Args:
        config: of the experiment; `prompts` and `seed` are used.
        stages: of this run.
        target: a `specjax.pretrained.Pretrained`.

    Raises:
        ValueError: what `gather_prompts` raises, too few prompts, or one that the target's template refuses while
            `prompts.on_broken` is "stop".
    """
    settings = config.prompts

    def run(folder: pathlib.Path) -> dict:
        sides, left_out = gather_prompts(settings, config.seed)
        record: dict[str, Any] = {"broken_lines": len(left_out)}
        _say_left_out(left_out)
        found = {}
        for name, prompts, count in zip(
            ("train", "held_out"), sides, (settings.count, settings.held_out_count), strict=True
        ):
            fitting, too_long, refused = _tokenize(target, prompts, settings.max_tokens, count, settings.on_broken)
            _say_left_out(refused)
            if len(fitting) < count:
                beside = f" ({len(refused)} were refused, the first: {refused[0]})" if refused else ""
                raise ValueError(
                    f"{count} {name} prompts of at most {settings.max_tokens} tokens are asked for, and there are "
                    f"{len(fitting)}{beside}; lower prompts.{'count' if name == 'train' else 'held_out_count'}, raise "
                    "prompts.max_tokens, or add prompts"
                )
            found[name] = [dataclasses.asdict(prompt) for prompt in fitting]
            lengths = [len(prompt.ids) for prompt in fitting]
            record[name] = {
                "prompts": count,
                "too_long": too_long,
                "refused": len(refused),
                "mean_tokens": float(np.mean(lengths)),
            }
        (folder / "prompts.json").write_text(json.dumps(found), encoding="utf-8")
        return record

    def load(folder: pathlib.Path, _):
        found = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
        return tuple([TokenPrompt(**prompt) for prompt in found[name]] for name in ("train", "held_out"))

    inputs = {
        "prompts": settings,
        "seed": config.seed,
        "tokenizer": target.tokenizer.fingerprint,
        "template": _template_inputs(target),
    }
    return stages.run("prompts", plain(inputs), run, load)


def gather_prompts(settings: ConfigDict, seed: int) -> tuple[tuple[list[Prompt], list[Prompt]], list[str]]:
    """((training, held out), broken lines left out): of all sources, each shuffled by the seed.

    Raises:
        ValueError: an unknown source, or what a source raises.
    """
    unknown = [name for name in settings.sources if name not in PROMPT_SOURCES]
    if unknown or not settings.sources:
        given = ", ".join(unknown) or "none"
        known, given = ", ".join(PROMPT_SOURCES), ", ".join(unknown) or "none"
        raise ValueError(f"prompts.sources must be some of {known}; got {given}")
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    left_out: list[str] = []
    if "files" in settings.sources:
        if not settings.path:
            raise ValueError("prompts.sources has 'files', which reads prompts.path, and that is empty; set it")
        prompts, left_out = PromptFiles(settings.path, settings.pattern, settings.on_broken).read()
        for side, part in zip(sides, split_prompts(prompts, settings.held_out), strict=True):
            side += part
    if "standard_library" in settings.sources:
        corpus = load_corpus(StandardLibrary(), settings.held_out)
        for side, documents in zip(sides, (corpus.train, corpus.held_out), strict=True):
            side += function_prompts(documents, seed, kinds=tuple(settings.kinds), max_chars=settings.max_chars)
    order = [np.random.default_rng(seed).permutation(len(side)) for side in sides]
    shuffled = tuple([side[i] for i in places] for side, places in zip(sides, order, strict=True))
    return shuffled, left_out


def answer_prompts(
    config: ConfigDict, stages: Stages, target, prompts: tuple[list[TokenPrompt], list[TokenPrompt]]
) -> tuple[AnswerData, dict]:
    """Stage "answers": the target's answers to all training prompts and the first held-out ones, and how it went."""
    settings = config.answers

    def run(folder: pathlib.Path) -> dict:
        chosen = {"train": prompts[0], "held_out": prompts[1][: settings.held_out_count]}
        about = f"{stages.hash_of('prompts')} {inputs['target']} {json.dumps(inputs['answers'])}"
        room = max(len(prompt.ids) for some in chosen.values() for prompt in some) + settings.max_new_tokens
        return {
            name: write_answers(folder / name, target, some, settings, config.seed, about, room)
            for name, some in chosen.items()
        }

    inputs = plain({
        "answers": settings, "seed": config.seed, "stop_ids": [int(i) for i in target.stop_ids],
        "target": checksum(target.model.params), "prompts": stages.hash_of("prompts"),
    })  # fmt: skip
    folder, record = stages.run("answers", inputs, run, lambda folder, record: (folder, record))
    train, held_out = (AnswerSource(folder / name) for name in ("train", "held_out"))
    return AnswerData(train, held_out, config.training.context), record


def write_answers(
    folder: pathlib.Path,
    target,
    prompts: Sequence[TokenPrompt],
    settings: ConfigDict,
    seed: int,
    about: str,
    room: int,
) -> dict[str, Any]:
    """Answers all prompts, a shard at a time, going on where an earlier attempt was stopped.

    A prompt's answer depends on its number, the seed and the settings alone, so a resumed attempt writes the very
    shards that an uninterrupted one would have. All batches have one size and one `room`, the tokens of the longest
    prompt and its answer, so that nothing is compiled twice.
    """
    writer = AnswerWriter(folder, about)
    numbers = range(len(prompts))
    shards = [numbers[at : at + settings.per_shard] for at in range(0, len(prompts), settings.per_shard)]
    missing = writer.missing(len(shards))
    if 0 < len(missing) < len(shards):
        print(f"{len(shards) - len(missing)} of {len(shards)} shards are finished, going on")
    counts, seconds = [], 0.0
    with Progress(sum(len(shards[i]) for i in missing), f"answers, {folder.name}", unit="answer") as progress:
        for index in missing:
            answers = []
            for at in range(0, len(shards[index]), settings.batch):
                batch = shards[index][at : at + settings.batch]
                result = answer_batch(target, prompts, batch, settings, seed, room)
                answers += _records(result, prompts, batch, settings)
                counts.append(CountTable.of(result.counts))
                seconds += result.decode_seconds + result.prefill_seconds
                progress.update(len(batch))
            writer.write(index, answers)
    writer.finish(len(shards))
    source = AnswerSource(folder)
    ended = sum(answer.tokens[-1] in target.stop_ids for answer in source)
    record = {
        "answers": len(source),
        "answer_tokens": len(source.tokens()),
        "ended_by_stop": ended / len(source),
        "tokens_per_second": None,
        "block_efficiency": None,
    }
    if counts:
        table = CountTable.concatenate(counts)
        record |= {
            "tokens_per_second": float(table.emitted.sum() / seconds),
            "block_efficiency": metrics.block_efficiency(table),
        }
    return record


def answer_batch(
    target, prompts: Sequence[TokenPrompt], numbers: Sequence[int], settings: ConfigDict, seed: int, room: int
):
    """The Generation of one batch; a batch with too few prompts is filled up with its first one."""
    filled = [*numbers, *[numbers[0]] * (settings.batch - len(numbers))]
    drafting = {"drafter": NGram(settings.draft_length, settings.max_match)} if settings.drafter == "ngram" else {}
    return generate(
        target.model,
        [prompts[i].ids for i in filled],
        max_new_tokens=settings.max_new_tokens,
        verifier="token",
        sampling=Sampling.of([_temperature(settings, i) for i in filled]),
        stop_ids=target.stop_ids,
        seed=[(1_000_003 * seed + i) % 2**31 for i in filled],
        buffer_length=room,
        **drafting,
    )


def _records(result, prompts, numbers, settings) -> list[Answer]:
    records = []
    for number, written in zip(numbers, result.tokens, strict=False):
        ids = np.concatenate([prompts[number].ids, written]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompts[number].ids)
        records.append(Answer(prompts[number].name, ids, mask, _temperature(settings, number)))
    return records


def _temperature(settings, number: int) -> float:
    """By turns, so that every batch has the same mixture."""
    return float(settings.temperatures[number % len(settings.temperatures)])


def _tokenize(
    target, prompts: Sequence[Prompt], longest: int, count: int, on_broken: str
) -> tuple[list[TokenPrompt], int, list[str]]:
    """The first `count` prompts of at most `longest` tokens, how many were too long, and what the target refused."""
    fitting, too_long, refused = [], 0, []
    for prompt in prompts:
        try:
            ids = [int(i) for i in _ids(target, prompt)]
        except ValueError as error:
            refused.append(refused_prompt(prompt.name, error, on_broken))
            continue
        if len(ids) > longest:
            too_long += 1
        else:
            fitting.append(TokenPrompt(prompt.name, prompt.kind, ids))
            if len(fitting) == count:
                break
    return fitting, too_long, refused


def _say_left_out(lines: Sequence[str], most: int = 5) -> None:
    for line in lines[:most]:
        print(f"left out: {line}")
    if len(lines) > most:
        print(f"left out: {len(lines) - most} more")


def _template_inputs(target) -> Any:
    """What tells one chat template from another: the ids of a short message, or why it refuses that."""
    try:
        return [int(i) for i in _ids(target, Prompt("", (("user", "a"),), ""))]
    except ValueError as error:
        return str(error)


def _ids(target, prompt: Prompt):
    """Through the chat template; a model without one reads the last message as plain text."""
    return target.prompt_ids(prompt.messages[-1][1] if target.chat_template is None else prompt.chat)
