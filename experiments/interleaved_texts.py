"""Greedy texts of two libraries on the same weights and prompts, timed in turns, and the ratios that come of it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.equal_texts import where_parted
from experiments.pretrained_setting import BASELINE, Setting
from specjax.decoding import generate
from specjax.events import Progress
from specjax.pretrained import Pretrained
from specjax.report.metrics import PER_DEPTH, PER_ROW, CountTable
from specjax.report.writer import jsonable

OURS, THEIRS = "specjax", "transformers"

# One text: ids in; {"tokens", "seconds", "timed_tokens", "prefill_seconds", "target_calls", "counts" or nothing} out.
Writer = Callable[[Sequence[int]], dict[str, Any]]


def interleaving(names: Sequence[str], prompts: int, repeats: int) -> Iterator[tuple[int, int, str]]:
    """(turn, prompt, name) in order; turn 0 is the warm-up.

    All names take a prompt one after the other, and their order is rotated from prompt to prompt and turn to turn, so
    that what drifts meets all of them and none always follows the same other.
    """
    for turn in range(repeats + 1):
        for prompt in range(prompts):
            shift = (turn + prompt) % len(names)
            for name in [*names[shift:], *names[:shift]]:
                yield turn, prompt, name


def time_texts(
    writers: Mapping[str, Writer], prompts: Sequence[Sequence[int]], repeats: int, settle_seconds: float
) -> dict[str, list[dict]]:
    """Per name and prompt: the text, and the seconds of every turn.

    Args:
        writers: by name.
        prompts: token ids.
        repeats: timed turns; before them, everything is compiled and run once.
        settle_seconds: pause before each timed text, until no thread of another library is left spinning.
    """
    answers: dict[str, list[dict]] = {name: [{} for _ in prompts] for name in writers}
    plan = list(interleaving(list(writers), len(prompts), repeats))
    with Progress(len(plan), "texts", unit="text") as progress:
        for turn, number, name in plan:
            if turn:
                time.sleep(settle_seconds)
            text = writers[name](prompts[number])
            progress.update()
            if turn:
                answer = answers[name][number]
                seconds = answer.get("seconds", []) + [text["seconds"]]
                prefill = answer.get("prefill_seconds", []) + [text["prefill_seconds"]]
                answer.update(text, seconds=seconds, prefill_seconds=prefill)
    return answers


def our_writer(target: Pretrained, setting: Setting, max_new_tokens: int, stop_ids: Sequence[int]) -> Writer:
    """Texts by specjax. Its seconds begin behind the prefill, so they hold all tokens."""

    def write(ids: Sequence[int]) -> dict[str, Any]:
        result = generate(
            target.model, [ids], max_new_tokens=max_new_tokens, stop_ids=stop_ids, **setting.arguments(0.0)
        )
        counts = {name: getattr(result.counts, name)[0] for name in PER_ROW + PER_DEPTH}
        return jsonable(
            {
                "tokens": result.tokens[0],
                "seconds": result.decode_seconds,
                "timed_tokens": len(result.tokens[0]),
                "prefill_seconds": result.prefill_seconds,
                "target_calls": counts["rounds"],
                "counts": counts,
            }
        )

    return write


def parted_texts(records: Mapping[str, dict], models: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> list:
    """Where a speculative text of specjax leaves the plain one of the same dtype.

    Args:
        records: by name, with "library", "dtype", "drafter" and "answers".
        models: LanguageModel by dtype.
        prompts: token ids.
    """
    plain = {one["dtype"]: one["answers"] for one in records.values() if is_plain(one) and one["library"] == OURS}
    found = []
    for name, one in records.items():
        if one["library"] != OURS or is_plain(one) or one["dtype"] not in plain:
            continue
        for number, ids in enumerate(prompts):
            texts = [np.array(answers[number]["tokens"]) for answers in (plain[one["dtype"]], one["answers"])]
            parted = where_parted(models[one["dtype"]], ids, *texts)
            if parted is not None:
                found.append({"setting": name, "dtype": one["dtype"], "prompt": number, **parted})
    return found


def is_plain(record: Mapping[str, Any]) -> bool:
    """Target-only decoding."""
    return record["drafter"] == BASELINE


def rates(record: Mapping[str, Any]) -> np.ndarray:
    """[turns] tokens per second over all prompts."""
    tokens = sum(answer["timed_tokens"] for answer in record["answers"])
    return tokens / np.sum([answer["seconds"] for answer in record["answers"]], 0)


def over(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """How many times as fast: the median of the ratios within a turn."""
    return float(np.median(rates(one) / rates(other)))


def tokens_per_second(record: Mapping[str, Any]) -> float:
    return float(np.median(rates(record)))


def fastest(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """By tokens per second; None of none."""
    return max(records, key=tokens_per_second, default=None)


def count_table(record: Mapping[str, Any]) -> CountTable:
    """Counts, one row per prompt; of the other library only target calls and tokens are known."""
    tables = []
    for answer in record["answers"]:
        rows = answer.get("counts") or {
            "rounds": answer["target_calls"], "drafted": 0, "accepted": 0, "emitted": len(answer["tokens"]),
            **dict.fromkeys(PER_DEPTH, []),
        }  # fmt: skip
        shaped = {name: np.array([rows[name]]) for name in PER_ROW}
        tables.append(shaped | {name: np.array(rows[name], float).reshape(1, -1) for name in PER_DEPTH})
    return CountTable.concatenate(tables)
