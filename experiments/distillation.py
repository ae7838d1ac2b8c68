"""Train a target and its drafters, decode with them, and report speed, acceptance and exactness."""

import pathlib
import time

from ml_collections import ConfigDict

from experiments import decoding_speed as speed
from experiments.decoding_speed import Setting
from experiments.equal_texts import check_equal_texts, compare_texts
from experiments.trained_pair import check_objectives, prepare_text, train_drafter, train_target
from experiments.training_stage import Text, check_training
from specjax.decoding import generate
from specjax.drafters import Independent
from specjax.keys import row_keys
from specjax.models import LanguageModel
from specjax.peak_flops import measure_peak_flops
from specjax.report import colour, metrics, plots
from specjax.report.environment import environment
from specjax.report.results import check, check_at_least, check_between
from specjax.report.stages import Stages
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.sampling import Sampling
from specjax.theory import best_draft_length, survival_from_acceptance

COLUMNS = (
    "drafter",
    "verifier",
    "temperature",
    "draft_length",
    "tokens_per_second",
    "speedup",
    "predicted_speedup",
    "block_efficiency",
    "acceptance_rate",
    "overlap",
    "cost_ratio",
    "verify_ratio",
)


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Runs all stages and writes the report into `workdir`."""
    begin = time.perf_counter()
    _check(config)
    stages = Stages(workdir)
    text = prepare_text(config, stages)
    target, target_record = train_target(config, stages, text)
    drafters, records = {}, {"target": target_record}
    for name in config.drafters:
        drafters[name], records[name] = train_drafter(config, stages, text, target, name)

    peak = measure_peak_flops()
    surveys = survey_drafters(config, text, target, drafters)
    timed, rows, costs = measure(config, text, target, drafters, surveys)
    exact = exactness(config, text, target, drafters[config.drafters[-1]], timed)
    checks = exact + expectations(config, records, rows, surveys)
    results = {
        "rows": rows,
        "checks": checks,
        "training": [{"model": name, **_flat(record)} for name, record in records.items()],
        "rejection": rejection(surveys),
        "width_seconds": [{"width": w, "seconds": s} for w, s in sorted(costs.verify.items())],
        "stages": stages.records,
        "seconds": time.perf_counter() - begin,
    }
    report = write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(peak),
        results=results,
        plots=figures(records, surveys, rows, costs),
    )
    show(config, workdir, text, target, drafters, report)
    return report


def _check(config: ConfigDict) -> None:
    """What would otherwise be found only after minutes of training."""
    decoding, contexts = (
        config.decoding,
        {"target": config.target.context_length, "drafter": config.drafter.context_length},
    )
    for role, context in contexts.items():
        if decoding.prompt_length + decoding.new_tokens > context:
            raise ValueError(
                f"decoding.prompt_length {decoding.prompt_length} + decoding.new_tokens {decoding.new_tokens} exceed "
                f"{role}.context_length {context}; lower one or raise the context"
            )
        window = config.target_training.window if role == "target" else config.drafter_training.window
        if window >= context:
            raise ValueError(f"the {role}'s training window {window} must be below its context_length {context}")
    for field, least in (("prompt_length", 1), ("survey_prompts", 1), ("timed_prompts", 1), ("coupled_prompts", 0)):
        if decoding[field] < least:
            raise ValueError(f"decoding.{field} must be at least {least}; got {decoding[field]}")
    check_training("target_training", config.target_training)
    check_training("drafter_training", config.drafter_training)
    check_objectives(config)
    if 1 not in decoding.widths:
        raise ValueError(f"decoding.widths must hold 1, the step that others are compared with; got {decoding.widths}")
    if decoding.repeats < 5:
        raise ValueError(f"decoding.repeats must be at least 5; got {decoding.repeats}")
    if not config.drafters or min(decoding.draft_lengths, default=0) < 1 or decoding.common_draft_length < 1:
        raise ValueError("drafters must name one at least, and every draft length must be at least 1")
    if min(decoding.new_tokens, decoding.survey_new_tokens) < 2:
        raise ValueError("decoding.new_tokens and decoding.survey_new_tokens must be at least 2, or nothing is drafted")


def survey_drafters(config: ConfigDict, text: Text, target: LanguageModel, drafters: dict) -> dict:
    """Counts per (drafter, temperature) on held-out prompts that the target continues, at the largest draft length."""
    decoding = config.decoding
    prompts = text.prompts(decoding.survey_prompts, decoding.prompt_length, config.seed + 2)
    surveys = {}
    for name, model in drafters.items():
        for temperature, verifiers in zip((0.0, 1.0), decoding.verifiers, strict=True):
            setting = Setting.independent(name, model, max(decoding.draft_lengths), verifiers[0], temperature)
            surveys[name, temperature] = speed.survey(target, setting, prompts, decoding.survey_new_tokens)
    return surveys


def measure(config: ConfigDict, text: Text, target: LanguageModel, drafters: dict, surveys: dict):
    """Pick each drafter's draft length by prediction, then time every setting in turns."""
    decoding = config.decoding
    prompts = text.prompts(decoding.timed_prompts, decoding.prompt_length, config.seed + 3)
    first = Setting.independent("", next(iter(drafters.values())), decoding.common_draft_length, "token", 1.0)
    arguments = (prompts[0], decoding.new_tokens)
    costs = speed.measure_costs(target, first, *arguments, decoding.widths, decoding.repeats)

    settings = []
    for temperature, verifiers in zip((0.0, 1.0), decoding.verifiers, strict=True):
        settings += [Setting.target_only(verifiers[0], temperature)]
        for name, model in drafters.items():
            survival = metrics.survival_per_depth(surveys[name, temperature], unreached=0.0)
            length = best_draft_length(
                survival, costs.cost_ratio, costs.verify_ratio, decoding.draft_lengths
            )
            settings += [Setting.independent(name, model, length, verifier, temperature) for verifier in verifiers]
    timed = speed.time_settings(target, settings, prompts, decoding.new_tokens, decoding.repeats)
    rows = []
    for record in timed.values():
        peers = [r for r in timed.values() if r.setting.drafter is None]
        baseline = speed.fastest([r for r in peers if r.setting.temperature == record.setting.temperature])
        objective = {"none": None, "corpus": "next_token", "distilled": config.distillation.divergence}
        rows.append(speed.row(record, baseline, objective[record.setting.label]))
    return timed, rows, costs


def exactness(config: ConfigDict, text: Text, target: LanguageModel, model: LanguageModel, timed: dict) -> list[dict]:
    """Texts compared token for token with target-only decoding; where one parts, a near-tie must explain it."""
    decoding = config.decoding
    prompts = text.prompts(decoding.timed_prompts, decoding.prompt_length, config.seed + 3)
    plain = next(r for r in timed.values() if r.setting.drafter is None and r.setting.temperature == 0)
    checks = []
    for record in timed.values():
        if record.setting.drafter is not None and record.setting.temperature == 0:
            compared = compare_texts(target, prompts, plain.tokens, record.tokens)
            name = f"temperature 0: {record.setting.label} drafter gives target-only text"
            checks.append(check_equal_texts(name, compared))

    prompts = text.prompts(decoding.coupled_prompts, decoding.prompt_length, config.seed + 5)
    drafter = Independent(model.config, decoding.common_draft_length)
    options = dict(max_new_tokens=decoding.survey_new_tokens, sampling=Sampling.of(1.0), verifier="coupled")
    plain = generate(target, prompts, seed=config.seed, **options).tokens
    drafted = generate(
        target, prompts, seed=config.seed, drafter=drafter, drafter_params=model.params, **options
    ).tokens
    compared = compare_texts(target, prompts, plain, drafted, row_keys(config.seed, len(prompts)))
    return [*checks, check_equal_texts("temperature 1: coupled verifier gives target-only text", compared)]


def rejection(surveys: dict) -> dict | None:
    """How much rarer the distilled drafter's rejections are than the corpus-trained one's, at temperature 1."""
    if not {("corpus", 1.0), ("distilled", 1.0)} <= surveys.keys():
        return None
    reduction = metrics.compare_rejection(surveys["distilled", 1.0], surveys["corpus", 1.0])["reduction"]
    return {
        "corpus_acceptance_rate": metrics.acceptance_rate(surveys["corpus", 1.0]),
        "distilled_acceptance_rate": metrics.acceptance_rate(surveys["distilled", 1.0]),
        "rejection_reduction": reduction.estimate,
        "rejection_reduction_low": reduction.low,
        "rejection_reduction_high": reduction.high,
    }


def expectations(config: ConfigDict, records: dict, rows: list[dict], surveys: dict) -> list[dict]:
    """What the config says that a run should reach."""
    expected = config.expected
    bits = records["target"]["held_out"]["held_out/bits_per_byte"]
    checks = [
        check("target: held-out bits per byte", bits <= expected.bits_per_byte, bits, f"<= {expected.bits_per_byte}")
    ]
    for temperature, limit in ((0.0, expected.speedup_greedy), (1.0, expected.speedup_sampled)):
        best = max(r["speedup"] for r in rows if r["drafter"] != "none" and r["temperature"] == temperature)
        checks.append(check_at_least(f"temperature {temperature:g}: best speed-up", best, limit))
    for row in rows:
        if row["predicted_speedup"]:
            setting = f"{row['drafter']}, {row['verifier']}, temperature {row['temperature']:g}"
            name = f"{setting}: measured / predicted speed-up"
            checks.append(check_between(name, row["speedup"] / row["predicted_speedup"], 0.9, 1.1))
    reduction = rejection(surveys)
    if reduction:
        name = "distilled: rejections fewer than corpus-trained by"
        checks.append(check_at_least(name, reduction["rejection_reduction"], expected.rejection_reduction))
    return checks


def figures(records: dict, surveys: dict, rows: list[dict], costs: speed.Costs) -> dict:
    """The plots of the report."""
    curves = {
        name: ([r["step"] for r in rec["history"]], [r["loss"] for r in rec["history"]])
        for name, rec in records.items()
    }
    tau = {
        name: ([e["step"] for e in rec["evaluations"]], [e["held_out/block_efficiency"] for e in rec["evaluations"]])
        for name, rec in records.items()
        if name != "target"
    }
    survival = {f"{n}, temperature {t:g}": metrics.survival_per_depth(c) for (n, t), c in surveys.items()}
    alpha = {f"{n}, temperature {t:g}": metrics.acceptance_per_depth(c) for (n, t), c in surveys.items()}
    constant = {
        f"{n}, temperature {t:g}": list(survival_from_acceptance([metrics.acceptance_rate(c)] * c.attempts.shape[1]))
        for (n, t), c in surveys.items()
        if metrics.acceptance_rate(c) is not None
    }
    speeds = {f"{r['drafter']}, {r['verifier']}, temperature {r['temperature']:g}": r["speedup"] for r in rows}
    widths = sorted(costs.verify)
    return {
        "loss": plots.training_curves(curves, quantity="training loss (nats per token)", title="Training"),
        "block_efficiency": plots.training_curves(tau, quantity="τ, held out", title="Block efficiency while training"),
        "survival": plots.per_depth(survival, constant, quantity="survival", title="Drafts that survive to each depth"),
        "acceptance": plots.per_depth(alpha, quantity="acceptance rate", title="Acceptance rate at each depth"),
        "speedup": plots.bars(speeds, quantity="speed-up", title="Speed-up over target-only decoding", reference=1.0),
        "width": plots.width_curve({1: (widths, [costs.verify[w] for w in widths])}),
    }


def show(config: ConfigDict, workdir: pathlib.Path, text: Text, target: LanguageModel, drafters: dict, report: dict):
    """The terminal's summary."""
    results = report["results"]
    print("\n" + text_table(results["training"]))
    print("\n" + text_table(results["rows"], COLUMNS))
    best = max(
        (r for r in results["rows"] if r["temperature"] == 1.0 and r["drafter"] != "none"), key=lambda r: r["speedup"]
    )
    model = drafters[best["drafter"]]
    prompt = text.prompts(1, config.decoding.prompt_length, config.seed + 4)[0]
    sample = generate(
        target,
        [prompt],
        max_new_tokens=config.decoding.new_tokens,
        drafter=Independent(model.config, best["draft_length"]),
        drafter_params=model.params,
        verifier=best["verifier"],
        sampling=Sampling.of(1.0),
    )
    print(f"\nA sample at temperature 1, drafter {best['drafter']}, γ = {best['draft_length']}:\n")
    pieces = _pieces(text, [*prompt, *sample.tokens[0]], [0] * len(prompt) + sample.origins[0].tolist())
    print(colour.trace(pieces) + "\n\n" + colour.legend(pieces))
    print("\n" + text_table(results["checks"]))
    gigaflops = report["environment"]["matmul_flops_per_second"] / 1e9
    print(
        f"\nThis machine multiplied float32 matrices at {gigaflops:.0f} GFLOP/s. "
        f"This run took {results['seconds']:.0f} s."
    )
    print(f"Tables: {workdir}/report.md   plots: {workdir}/plots   curves: tensorboard --logdir {workdir}")


def _pieces(text: Text, tokens: list, origins: list) -> list[tuple[str, int]]:
    """(text, origin) of each token; bytes of a character that is split over tokens go to the last of them."""
    pieces, pending = [], b""
    for token, origin in zip(tokens, origins, strict=True):
        pending += text.tokenizer.decode_bytes([token])
        try:
            pieces.append((pending.decode("utf-8"), origin))
            pending = b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                pieces.append((pending.decode("utf-8", "replace"), origin))
                pending = b""
    return pieces


def _flat(record: dict) -> dict:
    """The numbers of a training stage's record that make a row of a table."""
    names = ("parameters", "steps", "tokens", "tokens_per_second", "flop_utilisation")
    held_out = ("bits_per_byte", "block_efficiency", "acceptance_rate")
    row = {name: record[name] for name in names}
    return row | {name: record["held_out"].get(f"held_out/{name}") for name in held_out}
