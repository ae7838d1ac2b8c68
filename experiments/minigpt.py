"""A drafter and a target trained on the same texts: decoding compared, draft lengths swept, easy against hard.

"Calls saved" counts target calls, as introductions do: 1 − calls / tokens. The wall clock stands beside it. The
predicted speed-up counts drafts and the verify only; for models this small and texts this short, starting a call and
the rest of a round (acceptance, bookkeeping) cost as much again, so the measured one is lower.
"""

import math

import jax
import numpy as np

from experiments.cyclic_texts import cyclic_texts, epochs_of_batches
from experiments.seeded_decoding import (
    Setting,
    decode_in_turns,
    first_run,
    part_seconds,
    rows,
    rows_that_differ,
    survival,
    with_prediction,
)
from specjax import theory
from specjax.decoding.checks import as_prompts
from specjax.decoding.generate import generate
from specjax.drafters import Independent
from specjax.events import EventWriter, Progress
from specjax.models import LanguageModel, TransformerConfig
from specjax.peak_flops import measure_peak_flops
from specjax.report import plots
from specjax.report.environment import environment
from specjax.report.results import check, check_between
from specjax.report.stages import Stages
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.sampling import Sampling
from specjax.training.fit import Schedule, fit
from specjax.training.objectives import NextToken
from specjax.training.saved_model import load_model, save_model
from specjax.training.state import OptimizerConfig

STANDARD_ERRORS = 4.5  # two-sided false alarm 7e-6 for each measured rate
COLUMNS = (
    "setting",
    "draft_length",
    "acceptance_rate",
    "overlap",
    "block_efficiency",
    "calls_saved",
    "tokens_per_second",
    "speedup",
    "predicted_speedup",
    "cost_ratio",
    "verify_ratio",
)


def run(config, workdir):
    """Returns the report; `results.rows` has one record per measured setting, `section` saying what it belongs to."""
    _check(config)
    configs = {role: architecture(config, role) for role in ("drafter", "target")}
    stages = Stages(workdir)
    models, training = {}, []
    for role, model_config in configs.items():
        models[role], records = _train(stages, role, model_config, config)
        training += records
    sizes = [
        {"model": role, "parameters": m.num_params, "closed_form": parameters(m.config)} for role, m in models.items()
    ]
    print("\n" + text_table(sizes))
    print("\n" + text_table([r for r in training if r["epoch"] % 10 == 0 or r["epoch"] == config.epochs]), end="\n\n")

    untrained = LanguageModel.init(configs["drafter"], jax.random.key(config.seed + 1))
    sections = _sections(config, models["drafter"], untrained)
    decoded = {name: _decode(stages, name, config, models["target"], s) for name, s in sections.items()}
    costs = _costs(stages, config, models["target"], sections)
    differing = _greedy(stages, config, models["target"], {"trained": models["drafter"], "untrained": untrained})
    all_rows = [
        {**with_prediction(row, costs["seconds"]), "section": name} for name in decoded for row in decoded[name]["rows"]
    ]
    first_runs = [{"section": name, **record} for name in decoded for record in decoded[name]["first_runs"]]
    expected = [_expected(row) for row in all_rows if row["draft_length"]]

    for name in decoded:
        here = [row for row in all_rows if row["section"] == name]
        print(f"\n{name}, one text\n{text_table(decoded[name]['first_runs'])}")
        print(f"\n{name}, {config.num_seeds} texts per setting\n{text_table(here, COLUMNS)}")
    print(f"\ntokens per target call\n{text_table(expected)}\n")
    checks = _checks(config, sizes, all_rows, differing)
    for failed in (c for c in checks if not c["passed"]):
        print(f"FAILED: {failed['name']}: {failed['value']}, must be {failed['limit']}")
    return write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(costs["matmul_flops_per_second"]),
        results={
            "rows": all_rows,
            "checks": checks,
            "first_runs": first_runs,
            "expected_tokens": expected,
            "costs": [{"part": part, "seconds": seconds} for part, seconds in costs["seconds"].items()],
            "models": sizes,
            "training": training,
            "stages": stages.records,
        },
        plots=_plots(training, all_rows),
    )


def architecture(config, role):
    """A MiniGPT. Dropout sits on the embedding and on what each sublayer adds."""
    return TransformerConfig(
        vocab_size=config.vocab_size,
        d_model=config[role].d_model,
        num_layers=config[role].num_layers,
        num_heads=config[role].num_heads,
        context_length=config.context_length,
        norm="layernorm",
        norm_eps=1e-5,
        norm_position="post",
        positions="sinusoidal",
        mlp="relu",
        qkv_bias=True,
        attention_bias=True,
        mlp_bias=True,
        head_bias=True,
        tied_head=False,
        dropout=config.dropout,
    )


def parameters(c: TransformerConfig) -> int:
    """Embedding, blocks, last norm, and the head with its bias, in closed form."""
    block = 12 * c.d_model**2 + 13 * c.d_model
    return c.vocab_size * c.d_model + c.num_layers * block + 2 * c.d_model + (c.d_model + 1) * c.vocab_size


def _train(stages, role, model_config, config):
    """(trained model, one record per epoch), from the stage of this name."""
    data = {name: config[name] for name in ("num_sequences", "sequence_length", "pattern_length")}
    steps_per_epoch = math.ceil(config.num_sequences / config.batch_size)
    schedule = Schedule(steps=config.epochs * steps_per_epoch, log_every=steps_per_epoch, seed=config.seed)
    optimizer = OptimizerConfig(  # PyTorch's Adam
        learning_rate=config[role].learning_rate,
        total_steps=schedule.steps,
        schedule="constant",
        b2=0.999,
        weight_decay=0.0,
        clip_norm=None,
    )

    def function(folder):
        model = LanguageModel.init(model_config, jax.random.key(config.seed))
        batches = epochs_of_batches(cyclic_texts(**data), config.batch_size, config.epochs)
        with EventWriter(folder / "events") as writer, Progress(schedule.steps, f"training the {role}") as progress:
            objective = NextToken(model_config)
            result = fit(objective, model.params, batches, optimizer, schedule, writer=writer, progress=progress)
        save_model(folder / "model", LanguageModel(model_config, result.state.eval_params))
        names = ("step", "loss", "accuracy", "gradient_norm")
        return [
            {"model": role, "epoch": r["step"] // steps_per_epoch, **{n: r[n] for n in names}} for r in result.history
        ]

    inputs = {"model": model_config, "optimizer": optimizer, "schedule": schedule, "data": data}
    inputs["batch_size"] = config.batch_size
    return stages.run(role, inputs, function, lambda folder, records: (load_model(folder / "model"), records))


def _sections(config, drafter, untrained):
    """By section, the settings that are compared, each drafter with target-only decoding of its own task."""
    trained = {"model": drafter, "objective": "next_token"}
    gamma, normal, high = config.scenario_draft_length, config.temperature, config.high_temperature
    compared, swept, easy, unseen = (config[f"{name}_prompt"] for name in ("comparison", "sweep", "easy", "unseen"))
    return {
        "comparison": {
            "target-only": Setting(compared, normal),
            "speculative": Setting(compared, normal, config.comparison_draft_length, **trained),
        },
        "sweep": {
            "target-only": Setting(swept, normal),
            **{f"K = {k}": Setting(swept, normal, k, **trained) for k in config.sweep_draft_lengths},
        },
        "scenarios": {
            "easy, target-only": Setting(easy, normal),
            "easy": Setting(easy, normal, gamma, **trained),
            "unseen tokens, target-only": Setting(unseen, normal),
            "unseen tokens": Setting(unseen, normal, gamma, **trained),
            "both hot, target-only": Setting(easy, high),
            "both hot": Setting(easy, high, gamma, **trained),
            "only the drafter hot": Setting(easy, normal, gamma, **trained, draft_temperature=high),
            "untrained drafter": Setting(easy, normal, gamma, untrained, "none"),
        },
    }


def _inputs(stages, config, *names):
    """What a stage that decodes depends on."""
    decoding = {name: config[name] for name in ("seed", "max_new_tokens", *names)}
    return {"drafter": stages.hash_of("drafter"), "target": stages.hash_of("target"), **decoding}


def _decode(stages, name, config, target, settings):
    """Rows over all seeds, and the text of the first."""

    def function(folder):
        del folder
        seeds = range(config.seed, config.seed + config.num_seeds)
        generations = decode_in_turns(target, settings, config.max_new_tokens, seeds, f"decoding, {name}")
        first = [first_run(label, settings[label], runs[0]) for label, runs in generations.items()]
        return {"rows": rows(settings, generations), "first_runs": first}

    inputs = _inputs(stages, config, "num_seeds")
    inputs["settings"] = {label: _named(setting) for label, setting in settings.items()}
    return stages.run(name, inputs, function)


def _named(setting):
    """The numbers of a setting; its objective says which drafter it is."""
    return {name: value for name, value in vars(setting).items() if name != "model"}


def _costs(stages, config, target, sections):
    draft_lengths = sorted({s.draft_length for settings in sections.values() for s in settings.values() if s.model})
    setting = sections["comparison"]["speculative"]

    def function(folder):
        del folder
        seconds = part_seconds(target, setting, config.max_new_tokens, draft_lengths)
        return {"seconds": seconds, "matmul_flops_per_second": measure_peak_flops()}

    inputs = _inputs(stages, config) | {"setting": _named(setting), "draft_lengths": draft_lengths}
    return stages.run("costs", inputs, function)


def _greedy(stages, config, target, drafters):
    """By drafter, how many of the pattern's texts differ from target-only decoding at temperature 0."""

    def function(folder):
        del folder
        prompts = cyclic_texts(config.pattern_length, len(config.easy_prompt), config.pattern_length).tolist()
        common = {"prompts": prompts, "max_new_tokens": config.max_new_tokens, "sampling": Sampling.of(0)}
        plain, differing = generate(target, **common).tokens, {}
        for label, model in drafters.items():
            drafter = Independent(model.config, config.scenario_draft_length)
            drafted = generate(target, **common, drafter=drafter, drafter_params=model.params).tokens
            differing[label] = rows_that_differ(plain, drafted)
        return differing

    inputs = _inputs(stages, config, "pattern_length", "easy_prompt", "scenario_draft_length")
    return stages.run("temperature_0", inputs, function)


def _expected(row):
    """Tokens per target call: measured, and what three formulas make of the measured acceptance.

    The measured value is lower where the last round is cut short by the limit of tokens.
    """
    alpha, gamma = row["acceptance_rate"], row["draft_length"]
    return {
        **{name: row[name] for name in ("section", "setting", "draft_length", "acceptance_rate", "block_efficiency")},
        "from_survival": theory.expected_tokens_from_survival(survival(row)),
        "constant_alpha_with_bonus": float(theory.expected_tokens(alpha, gamma)),
        "constant_alpha_without_bonus": float(theory.expected_tokens_without_bonus(alpha, gamma)),
    }


def _checks(config, sizes, all_rows, differing):
    checks = [check(f"{s['model']} parameters", s["parameters"] == s["closed_form"], s["parameters"]) for s in sizes]
    for drafter, count in differing.items():
        name = f"temperature 0 equals target-only, {drafter} drafter"
        checks.append(check(name, count == 0, count, "no text differs"))
    asked = config.num_seeds * config.max_new_tokens
    for row in all_rows:
        name, emitted = f"{row['section']}, {row['setting']}", row["emitted_tokens"]
        checks.append(check(f"{name}: emits exactly what was asked for", emitted == asked, emitted, asked))
        if row["attempts"]:
            # The token rule accepts with probability Σ min(p, q), position by position.
            overlap = row["overlap"]
            error = math.sqrt(max(overlap * (1 - overlap), 0) / row["attempts"])
            low, high = overlap - STANDARD_ERRORS * error - 1e-4, overlap + STANDARD_ERRORS * error + 1e-4
            checks.append(check_between(f"{name}: acceptance rate is the overlap", row["acceptance_rate"], low, high))
    return checks


def _plots(training, all_rows):
    by_role = {role: [r for r in training if r["model"] == role] for role in ("drafter", "target")}
    losses = {role: ([r["step"] for r in rs], [r["loss"] for r in rs]) for role, rs in by_role.items()}
    sweep, scenarios = (
        [row for row in all_rows if row["section"] == name and row["draft_length"]] for name in ("sweep", "scenarios")
    )
    alphas = np.linspace(0.1, 0.99, 50)
    forms = {
        "with the bonus token: (1 − α^(γ+1)) / (1 − α)": theory.expected_tokens,
        "without it: (1 − α^γ) / (1 − α)": theory.expected_tokens_without_bonus,
    }
    panels = {name: {gamma: form(alphas, gamma) for gamma in (2, 4, 6, 8)} for name, form in forms.items()}
    speedups = {
        "if only target calls counted": [row["block_efficiency"] for row in sweep],
        "wall clock": [row["speedup"] for row in sweep],
    }
    return {
        "training_loss": plots.training_curves(losses, quantity="loss (nats per token)", title="Training", log=True),
        "speedup": plots.speedup_by_draft_length([row["draft_length"] for row in sweep], speedups),
        "expected_tokens": plots.expected_tokens_curves(alphas, panels, [*sweep, *scenarios]),
        "survival": plots.per_depth(
            {row["setting"]: row["survival_per_depth"] for row in scenarios},
            quantity="survival",
            title="Drafts accepted up to a depth, γ = " + str(scenarios[0]["draft_length"]),
        ),
    }


def _check(config):
    """What would otherwise be found only after training."""
    for name in ("num_seeds", "epochs", "max_new_tokens", "num_sequences", "batch_size", "pattern_length"):
        if config[name] < 1:
            raise ValueError(f"{name} must be at least 1; got {config[name]}")
    if not 2 <= config.sequence_length <= config.context_length:
        raise ValueError(
            f"sequence_length must be in 2..context_length {config.context_length}; got {config.sequence_length}"
        )
    if config.pattern_length >= config.vocab_size:
        raise ValueError(
            f"pattern_length {config.pattern_length} must be under vocab_size {config.vocab_size}: its ids start at 1"
        )
    lengths = (*config.sweep_draft_lengths, config.comparison_draft_length, config.scenario_draft_length)
    if not config.sweep_draft_lengths or min(lengths) < 1:
        raise ValueError(f"draft lengths must be at least 1, and those of the sweep not empty; got {lengths}")
    prompts = [config[f"{name}_prompt"] for name in ("comparison", "sweep", "easy", "unseen")]
    longest = max(map(len, as_prompts(prompts, config.vocab_size))) + config.max_new_tokens
    if longest > config.context_length:
        raise ValueError(
            f"the longest prompt with max_new_tokens {config.max_new_tokens} takes {longest} tokens, more than "
            f"context_length {config.context_length}; lower max_new_tokens"
        )
    for name in ("temperature", "high_temperature"):
        Sampling.of(config[name])
