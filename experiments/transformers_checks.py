"""What a comparison with transformers must show: each check with the least that is asked for, and the aim."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments import interleaved_texts as texts
from experiments.equal_texts import widest_gap
from experiments.interleaved_texts import OURS, THEIRS, is_plain
from specjax.report.metrics import block_efficiency
from specjax.report.results import check, check_at_most


def all_checks(config: ConfigDict, agreement: Mapping[str, Any], loading: Mapping[str, Any], speed: Mapping[str, Any]):
    """Records of `results.checks`."""
    return [
        *agreement_checks(config, agreement),
        *speed_checks(config, speed["records"]),
        *text_checks(config, speed["parted"]),
        *loading_checks(config, loading),
    ]


def agreement_checks(config: ConfigDict, agreement: Mapping[str, Any]) -> list[dict]:
    logits, limit = agreement["logits"], config.expected.logit_difference
    name = f"float32 logits, {logits['positions']} positions"
    result = [
        check_at_most(f"{name}: largest difference", logits["max_difference"], limit),
        check_at_most(
            f"{name}: widest gap of the {logits['argmax_differs']} where the best token differs",
            logits["widest_gap"],
            limit,
        ),
    ]
    for one in agreement["perplexity"]:
        result.append(
            check_at_most(
                f"perplexity of {one['text']}, {one['tokens']} tokens ({one[OURS]:.4f} against {one[THEIRS]:.4f}): "
                "relative difference",
                one["difference"],
                config.expected.perplexity_difference,
            )
        )
    greedy = agreement["greedy"]
    name = (
        f"greedy float32 texts, {greedy['prompts']} prompts × {greedy['new_tokens']} tokens, {len(greedy['parted'])} "
        "part: widest logit gap there"
    )
    return [*result, check_at_most(name, widest_gap(greedy["parted"]), config.near_tie.float32)]


def speed_checks(config: ConfigDict, records: Mapping[str, Mapping]) -> list[dict]:
    """Ratios of the best of each kind; both settings are named."""
    everything = list(records.values())
    of = lambda library, **about: [  # noqa: E731
        one for one in everything if one["library"] == library and about.items() <= one.items()
    ]
    our_plain = texts.fastest([one for one in of(OURS) if is_plain(one)])
    their_plain = texts.fastest([one for one in of(THEIRS) if is_plain(one)])
    speculative = [one for one in of(OURS) if not is_plain(one)]
    best = texts.fastest(speculative)
    pairs = [
        ("plain_float32", _plain(of(OURS, dtype="float32")), _plain(of(THEIRS, dtype="float32"))),
        ("plain_fastest", our_plain, their_plain),
    ]
    if best is not None:
        gains = [(one, _plain(of(OURS, dtype=one["dtype"]))) for one in speculative]
        pairs += [
            ("speculative_same_dtype", *max(gains, key=lambda pair: texts.over(*pair))),
            ("speculative_fastest_plain", best, our_plain),
            ("speculative_over_transformers", best, texts.fastest(of(THEIRS))),
        ]
    result = []
    for key, one, other in pairs:
        name = f"{key.replace('_', ' ')}: {_named(one)} over {_named(other)}"
        result.append(at_least(name, texts.over(one, other), config.expected[key]))
    for one in speculative:
        if one["drafter"] in config.trained:
            tau = block_efficiency(texts.count_table(one))
            result.append(at_least(f"τ of {_named(one)}", tau, config.expected.trained_block_efficiency))
    return result


def text_checks(config: ConfigDict, parted: Sequence[Mapping]) -> list[dict]:
    """Per dtype: speculative texts are the plain ones, but where two tokens are as good as tied."""
    result = []
    for dtype in config.dtypes:
        mine = [one for one in parted if one["dtype"] == dtype]
        name = f"{dtype} speculative texts equal the plain ones, {len(mine)} part: widest logit gap there"
        result.append(check_at_most(name, widest_gap(mine), config.near_tie[dtype]))
    return result


def loading_checks(config: ConfigDict, loading: Mapping[str, Any]) -> list[dict]:
    seconds = float(np.median([run["first_token_seconds"] for run in loading["first_token"]]))
    result = [at_most("seconds from process start to first token, cache warm", seconds,
                      config.expected.first_token_seconds)]  # fmt: skip
    for one in loading["memory"]:
        name = f"peak memory while loading {one['format']}, over the weights"
        result.append(check_at_most(name, one["peak_over_weights"], config.expected.peak_over_weights))
    return result


def at_least(name: str, value: float | None, limits: Sequence[float]) -> dict[str, Any]:
    """A check that value >= the first of the limits; whether it reaches the second, the aim, is said with the limit."""
    least, aim = limits
    passed, reached = (value is not None and value >= limit for limit in (least, aim))
    return check(name, passed, value, f">= {least:g} (aim {aim:g}, {'reached' if reached else 'not reached'})")


def at_most(name: str, value: float, limits: Sequence[float]) -> dict[str, Any]:
    """The same with value <= the limits."""
    most, aim = limits
    reached = "reached" if value <= aim else "not reached"
    return check(name, value <= most, value, f"<= {most:g} (aim {aim:g}, {reached})")


def _plain(records: Sequence[Mapping]) -> Mapping:
    return next(one for one in records if is_plain(one))


def _named(record: Mapping) -> str:
    return f"{record['library']} {record['dtype']} {record['drafter']}"
