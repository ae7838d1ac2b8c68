"""A drafter and a target trained on the same texts: decoding compared, draft lengths swept, easy against hard.

"Calls saved" counts target calls, as introductions do: 1 - calls / tokens. It is what a speed-up would be if drafts and
a wider verify cost nothing; the measured wall clock stands beside it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cyclic_texts import cyclic_texts, epochs_of_batches
from specjax import theory
from specjax.decoding.generate import Run, generate
from specjax.drafters import Independent
from specjax.events import EventWriter, Progress
from specjax.keys import row_keys
from specjax.models import LanguageModel, TransformerConfig
from specjax.report import plots
from specjax.report.costs import probes
from specjax.report.environment import environment
from specjax.report.metrics import CountTable, survival_per_depth
from specjax.report.results import check, check_between, comparison_row
from specjax.report.stages import Stages
from specjax.report.tables import text_table
from specjax.report.timing import interleave, matmul_flops_per_second, timing
from specjax.report.writer import write_report
from specjax.sampling import Sampling
from specjax.training.fit import Schedule, fit
from specjax.training.objectives import NextToken
from specjax.training.saved_model import load_model, save_model
from specjax.training.state import OptimizerConfig

STANDARD_ERRORS = 4.5  # two-sided false alarm 7e-6 for each measured rate
PROBE_TURNS = 50

MEASURED = (
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


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to continue one prompt; `model` drafts at `draft_temperature`, or nothing drafts."""

    prompt: tuple[int, ...]
    draft_length: int = 0
    model: LanguageModel | None = None
    objective: str | None = None
    draft_temperature: float | None = None

    def start(self, target, config) -> Run:
        """The call, prefilled."""
        hot = config.temperature if self.draft_temperature is None else self.draft_temperature
        return Run.start(
            target,
            [self.prompt],
            max_new_tokens=config.max_new_tokens,
            drafter=Independent(self.model.config, self.draft_length) if self.draft_length else None,
            drafter_params=self.model.params if self.draft_length else None,
            sampling=Sampling.of(config.temperature),
            draft_sampling=Sampling.of(hot),
            seed=config.seed,
        )


def run(config, workdir):
    """Returns the report; `results.rows` has one record per measured setting, `section` saying what it belongs to."""
    _check(config)
    stages = Stages(workdir)
    models, training = {}, []
    for role in ("drafter", "target"):
        models[role], records = train(stages, role, config)
        training += records
    target, drafter = models["target"], models["drafter"]
    sizes = [
        {"model": role, "parameters": model.num_params, "closed_form": _parameters(model.config)}
        for role, model in models.items()
    ]
    print(text_table(sizes), end="\n\n")
    print(text_table([record for record in training if record["epoch"] in (1, 10, 20, config.epochs)]), end="\n\n")

    untrained = LanguageModel.init(drafter.config, jax.random.key(config.seed + 1))
    trained = {"model": drafter, "objective": "next_token"}
    easy, hard = config.easy_prompt, config.hard_prompt
    gamma = config.scenario_draft_length
    sections = {
        "comparison": {
            "target-only": Setting(config.comparison_prompt),
            "speculative": Setting(config.comparison_prompt, config.comparison_draft_length, **trained),
        },
        "sweep": {
            "target-only": Setting(config.sweep_prompt),
            **{f"K = {k}": Setting(config.sweep_prompt, k, **trained) for k in config.sweep_draft_lengths},
        },
        "scenarios": {
            "easy: target-only": Setting(easy),
            "easy: trained drafter": Setting(easy, gamma, **trained),
            "drafter too hot": Setting(easy, gamma, **trained, draft_temperature=config.hot_temperature),
            "untrained drafter": Setting(easy, gamma, untrained, "none"),
            "unseen tokens: target-only": Setting(hard),
            "unseen tokens: trained drafter": Setting(hard, gamma, **trained),
        },
    }
    measured = {name: measure(stages, name, config, target, settings) for name, settings in sections.items()}
    draft_lengths = sorted({s.draft_length for section in sections.values() for s in section.values() if s.model})
    seconds = costs(stages, config, target, sections["comparison"]["speculative"], draft_lengths)
    for section in measured.values():
        section["rows"] = [predict(row, seconds) for row in section["rows"]]
    rows = [{**row, "section": name} for name, section in measured.items() for row in section["rows"]]
    drafted = [row for row in rows if row["draft_length"]]
    expected = [_expected(row) for row in drafted]
    differing = greedy_differences(stages, config, target, {"trained drafter": drafter, "untrained drafter": untrained})

    _print(measured, expected)
    checks = [
        *(check(f"{s['model']} parameters", s["parameters"] == s["closed_form"], s["parameters"]) for s in sizes),
        *(
            check(f"temperature 0 equals target-only, {name}", rows_off == 0, rows_off, "0 rows differ")
            for name, rows_off in differing.items()
        ),
        *(_acceptance_is_overlap(row) for row in drafted),
        *(
            check(
                f"{row['section']}, {row['setting']}: emits exactly what was asked for",
                row["emitted_tokens"] == config.num_seeds * config.max_new_tokens,
                row["emitted_tokens"],
                config.num_seeds * config.max_new_tokens,
            )
            for row in rows
        ),
    ]
    for failed in (c for c in checks if not c["passed"]):
        print(f"FAILED: {failed['name']}: {failed['value']}, must be {failed['limit']}")
    return write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(seconds.pop("matmul_flops_per_second")),
        results={
            "rows": rows,
            "checks": checks,
            "first_runs": [{"section": name} | run for name, s in measured.items() for run in s["first_runs"]],
            "expected_tokens": expected,
            "models": sizes,
            "costs": [{"part": part, "seconds": value} for part, value in seconds.items()],
            "training": training,
            "stages": stages.records,
        },
        plots=_plots(training, rows),
    )


def train(stages, role, config):
    """(trained model, one record per epoch), from the stage of this name."""
    settings = config[role]
    model_config = TransformerConfig(
        vocab_size=config.vocab_size,
        d_model=settings.d_model,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
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
    data = {name: config[name] for name in ("num_sequences", "sequence_length", "pattern_length")}
    steps_per_epoch = math.ceil(config.num_sequences / config.batch_size)
    schedule = Schedule(steps=config.epochs * steps_per_epoch, log_every=steps_per_epoch, seed=config.seed)
    optimizer = OptimizerConfig(  # Adam, as PyTorch has it
        learning_rate=settings.learning_rate,
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
        names = ("loss", "accuracy", "gradient_norm")
        return [
            {"model": role, "epoch": r["step"] // steps_per_epoch, **{n: r[n] for n in names}} for r in result.history
        ]

    inputs = {"model": model_config, "optimizer": optimizer, "schedule": schedule, "data": data}
    inputs["batch_size"] = config.batch_size
    return stages.run(role, inputs, function, lambda folder, records: (load_model(folder / "model"), records))


def measure(stages, name, config, target, settings):
    """Every setting decoded with `num_seeds` seeds, one text per call, the settings taking turns.

    Returns:
        "rows" over all seeds, and "first_runs" of the first seed alone.
    """

    def function(folder):
        del folder
        starts = {label: setting.start(target, config) for label, setting in settings.items()}
        calls = {label: [] for label in settings}
        for start in starts.values():  # compiles
            _with_seed(start, config.seed).advance()
        with Progress(config.num_seeds * len(settings), name, unit="text") as progress:
            for seed in range(config.seed, config.seed + config.num_seeds):
                for label, start in starts.items():
                    calls[label].append(_with_seed(start, seed))
                    calls[label][-1].advance()
                    progress.update()
        generations = {label: [call.result() for call in runs] for label, runs in calls.items()}
        timings = {label: timing([g.decode_seconds for g in runs]) for label, runs in generations.items()}
        plain = {s.prompt: timings[label].median for label, s in settings.items() if not s.draft_length}
        rows = [
            _row(label, setting, config, generations[label], timings[label], plain[setting.prompt])
            for label, setting in settings.items()
        ]
        return {"rows": rows, "first_runs": [_first_run(label, settings[label], g[0]) for label, g in generations.items()]}

    inputs = {
        "settings": {label: dataclasses.replace(s, model=None) for label, s in settings.items()},
        "models": [stages.hash_of("drafter"), stages.hash_of("target")],
        **{key: config[key] for key in ("seed", "num_seeds", "max_new_tokens", "temperature")},
    }
    return stages.run(name, inputs, function)


def _with_seed(start, seed):
    """A prefilled call of one row, to be run with another seed; nothing before decoding depends on it."""
    state = jax.tree.map(jnp.copy, start.state).replace(row_keys=row_keys(seed, 1))
    return Run(start.decoder, start.inputs, jax.block_until_ready(state), start.prompt_lengths, start.prefill_seconds)


def costs(stages, config, target, setting, draft_lengths):
    """Seconds of one draft step ("draft") and of a target forward with its verdict, by width ("verify 5")."""

    def function(folder):
        del folder
        widths = tuple(sorted({1, *(gamma + 1 for gamma in draft_lengths)}))
        thunks = probes(setting.start(target, config), widths, PROBE_TURNS)
        del thunks["ideal"]
        seconds = {label: timing(s).median / PROBE_TURNS for label, s in interleave(thunks).items()}
        seconds["draft"] /= setting.draft_length
        return {**seconds, "matmul_flops_per_second": matmul_flops_per_second()}

    inputs = {"models": [stages.hash_of("drafter"), stages.hash_of("target")], "draft_lengths": draft_lengths}
    inputs |= {"setting": dataclasses.replace(setting, model=None), "temperature": config.temperature}
    return stages.run("costs", inputs, function)


def predict(row, seconds):
    """Adds what a round costs, in target-only steps of the same run, and the speed-up that follows.

    A round is γ draft steps and a target-only step that is wider: the loop around them costs both the same.
    """
    gamma = row["draft_length"]
    if not gamma:
        return row
    step = 1 / row["baseline_tokens_per_second"]
    cost_ratio = seconds["draft"] / step
    verify_ratio = 1 + (seconds[f"verify {gamma + 1}"] - seconds["verify 1"]) / step
    predicted = theory.predicted_speedup(_survival(row), cost_ratio, verify_ratio)
    return row | {"cost_ratio": cost_ratio, "verify_ratio": verify_ratio, "predicted_speedup": predicted}


def _survival(row):
    """A depth that was never reached adds nothing."""
    return [s or 0.0 for s in row["survival_per_depth"]]


def greedy_differences(stages, config, target, drafters):
    """By drafter, how many of the pattern's texts differ from target-only decoding at temperature 0."""

    def function(folder):
        del folder
        prompts = cyclic_texts(config.pattern_length, len(config.easy_prompt), config.pattern_length)
        common = {"prompts": prompts, "max_new_tokens": config.max_new_tokens, "sampling": Sampling.of(0)}
        plain = generate(target, **common).tokens
        differing = {}
        for label, model in drafters.items():
            drafter = Independent(model.config, config.scenario_draft_length)
            drafted = generate(target, **common, drafter=drafter, drafter_params=model.params).tokens
            differing[label] = sum(not np.array_equal(a, b) for a, b in zip(plain, drafted, strict=True))
        return differing

    keys = ("seed", "max_new_tokens", "pattern_length", "easy_prompt", "scenario_draft_length")
    inputs = {"models": [stages.hash_of("drafter"), stages.hash_of("target")], **{key: config[key] for key in keys}}
    return stages.run("temperature_0", inputs, function)


def _row(label, setting, config, generations, timed, plain_seconds):
    counts = CountTable.concatenate(g.counts for g in generations)
    return comparison_row(
        drafter="independent" if setting.draft_length else "none",
        objective=setting.objective,
        verifier="token",
        lossless=True,
        temperature=config.temperature,
        batch=1,
        draft_length=setting.draft_length,
        counts=counts,
        tokens_per_second=config.max_new_tokens / timed.median,
        baseline_tokens_per_second=config.max_new_tokens / plain_seconds,
        setting=label,
        prompt=setting.prompt,
        draft_temperature=setting.draft_temperature,
        calls_saved=1 - int(counts.rounds.sum()) / int(counts.emitted.sum()),
        attempts=int(counts.attempts.sum()),
        survival_per_depth=survival_per_depth(counts),
        seconds=timed.median,
        seconds_iqr=timed.iqr,
    )


def _first_run(label, setting, generation):
    """One run by itself, as the notebook prints it."""
    counts = CountTable.of(generation.counts)
    emitted, calls = int(counts.emitted.sum()), int(counts.rounds.sum())
    return {
        "setting": label,
        "target_calls": calls,
        "drafted_tokens": int(counts.drafted.sum()),
        "accepted_tokens": int(counts.accepted.sum()),
        "emitted_tokens": emitted,
        "calls_saved": 1 - calls / emitted,
        "text": " ".join(map(str, [*setting.prompt, *generation.tokens[0].tolist()])),
    }


def _expected(row):
    """Tokens per target call: measured, and what three formulas make of the measured acceptance."""
    alpha, gamma = row["acceptance_rate"], row["draft_length"]
    return {
        "section": row["section"],
        "setting": row["setting"],
        "draft_length": gamma,
        "acceptance_rate": alpha,
        "block_efficiency": row["block_efficiency"],
        "from_survival": theory.expected_tokens_from_survival(_survival(row)),
        "constant_alpha_with_bonus": float(theory.expected_tokens(alpha, gamma)),
        "constant_alpha_without_bonus": float(theory.expected_tokens_without_bonus(alpha, gamma)),
    }


def _acceptance_is_overlap(row):
    """The token rule accepts with probability Σ min(p, q), position by position."""
    overlap = row["overlap"]
    tolerance = STANDARD_ERRORS * math.sqrt(max(overlap * (1 - overlap), 0) / row["attempts"]) + 1e-5
    name = f"{row['section']}, {row['setting']}: acceptance rate equals overlap"
    return check_between(name, row["acceptance_rate"], overlap - tolerance, overlap + tolerance)


def _parameters(c):
    """What the notebook's architecture holds: embedding, blocks, last norm, head with its bias."""
    block = 12 * c.d_model**2 + 13 * c.d_model
    return c.vocab_size * c.d_model + c.num_layers * block + 2 * c.d_model + (c.d_model + 1) * c.vocab_size


def _print(measured, expected):
    for name, section in measured.items():
        print(f"\n{name}, first seed\n{text_table(section['first_runs'])}")
        count = section["rows"][0]["emitted_tokens"]
        print(f"\n{name}, {count:,} tokens per setting\n{text_table(section['rows'], MEASURED)}")
    print(f"\ntokens per target call\n{text_table(expected)}\n")


def _plots(training, rows):
    roles = list(dict.fromkeys(record["model"] for record in training))
    losses = {role: [r for r in training if r["model"] == role] for role in roles}
    curves = {role: ([r["epoch"] for r in rs], [r["loss"] for r in rs]) for role, rs in losses.items()}
    sweep = [row for row in rows if row["section"] == "sweep" and row["draft_length"]]
    scenarios = [row for row in rows if row["section"] == "scenarios" and row["draft_length"]]
    alphas = np.linspace(0.1, 0.99, 50)
    forms = {
        "with the bonus token: (1 − α^(γ+1)) / (1 − α)": theory.expected_tokens,
        "without it: (1 − α^γ) / (1 − α)": theory.expected_tokens_without_bonus,
    }
    panels = {name: {gamma: form(alphas, gamma) for gamma in (2, 4, 6, 8)} for name, form in forms.items()}
    return {
        "training_loss": plots.training_curves(curves, quantity="loss (nats per token)", title="Training", log=True),
        "speedup": plots.speedup_by_draft_length(
            [row["draft_length"] for row in sweep],
            {
                "target calls saved": [row["block_efficiency"] for row in sweep],
                "wall clock": [row["speedup"] for row in sweep],
            },
            {"wall clock": [row["predicted_speedup"] for row in sweep]},
        ),
        "expected_tokens": plots.expected_tokens_curves(alphas, panels, [*sweep, *scenarios]),
        "survival": plots.per_depth(
            {row["setting"]: row["survival_per_depth"] for row in scenarios},
            quantity="survival",
            title="Drafts accepted up to a depth",
        ),
    }


def _check(config):
    for name in ("num_seeds", "epochs", "max_new_tokens", "num_sequences", "batch_size", "pattern_length"):
        if config[name] < 1:
            raise ValueError(f"{name} must be at least 1; got {config[name]}")
    if config.sequence_length < 2:
        raise ValueError(f"sequence_length must be at least 2; got {config.sequence_length}")
    if config.sequence_length > config.context_length:
        raise ValueError(
            f"sequence_length {config.sequence_length} exceeds context_length {config.context_length}; lower it"
        )
    if config.pattern_length >= config.vocab_size:
        raise ValueError(
            f"pattern_length {config.pattern_length} must be under vocab_size {config.vocab_size}: its ids start at 1"
        )
