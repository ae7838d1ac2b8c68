"""Targets trained together with their own drafter: LayerSkip's early exits from scratch, and Medusa-2's heads.

Such a target is another model than the plain one, so each is compared with target-only decoding of itself. Its
held-out bits per byte stand beside those of the plain target, with the steps that each was trained for: LayerSkip's
takes as many as the plain one, Medusa-2's goes on from the plain one.
"""

import functools
import pathlib
from typing import Any

from ml_collections import ConfigDict

from experiments import decoding_speed as speed
from experiments.decoding_speed import Setting
from experiments.trained_pair import held_out_loss, prepare_text, train_target
from experiments.training_stage import Text, TrainingStage, check_training, plain
from specjax.drafters import EarlyExit, Medusa
from specjax.models import LanguageModel, TransformerConfig
from specjax.peak_flops import measure_peak_flops
from specjax.protocol import Drafter
from specjax.report import plots
from specjax.report.environment import environment
from specjax.report.results import check_at_most
from specjax.report.stages import Stages
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.sampling import Sampling
from specjax.topology import Topology
from specjax.training.early_exit_objective import LayerSkip
from specjax.training.head_objectives import HeadDistillation, JointHeads
from specjax.training.objectives import NextToken
from specjax.training.rollouts import HeldOutDecoding
from specjax.training.saved_drafter import load_drafter, save_drafter
from specjax.training.saved_model import load_model, save_model


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Trains what `config.methods` names, decodes each with its own target, and reports."""
    known = {"layerskip": layerskip, "medusa2": medusa2}
    unknown = [name for name in config.methods if name not in known]
    if unknown or not config.methods:
        raise ValueError(f"methods must be some of {', '.join(known)}; got {', '.join(unknown) or 'none'}")
    for name in ("target_training", "heads_training", "joint_training"):
        check_training(name, config[name])
    stages = Stages(workdir, borrow=[config.reuse] if config.reuse else [])
    text = prepare_text(config, stages)
    target, record = train_target(config, stages, text)
    models = [{"model": "plain target", **_quality(record)}]
    peak, rows = measure_peak_flops(), []
    for name in config.methods:
        joint, drafter, params, record = known[name](config, stages, text, target)
        models.append({"model": name, **_quality(record)})
        rows += measure(config, text, name, joint, drafter, params)
    worst = max(row["bits_per_byte"] for row in models[1:]) - models[0]["bits_per_byte"]
    checks = [check_at_most("bits per byte that joint training costs", worst, config.allowed_loss)]
    report = write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(peak),
        results={"rows": rows, "models": models, "checks": checks, "stages": stages.records},
        plots={
            "speedup": plots.bars(
                {f"{r['drafter']}, {r['verifier']}, T = {r['temperature']:g}": r["speedup"] for r in rows},
                quantity="speed-up", title="Speed-up over the same target alone", reference=1.0,
            )
        },
    )  # fmt: skip
    shown = ("drafter", "verifier", "temperature", "draft_length", "tokens_per_second", "speedup", "predicted_speedup",
             "block_efficiency", "acceptance_rate", "cost_ratio")  # fmt: skip
    print("\n" + text_table(models) + "\n\n" + text_table(rows, shown) + "\n\n" + text_table(checks))
    return report


def layerskip(config: ConfigDict, stages: Stages, text: Text, target: LanguageModel):
    """Stage "layerskip": a target from scratch with layer dropout and a loss at every exit; it drafts for itself."""
    settings, model = config.layerskip, target.config
    drafter = EarlyExit(model, settings.exit_layer, settings.draft_length)
    objective = LayerSkip(
        model, settings.exit_layer, max_drop=settings.max_drop, exit_scale=settings.exit_scale
    )
    evaluators = [
        held_out_loss(text, NextToken(model), config.target_training),
        _decoding(config, text, model, drafter, lambda params: (params, None)),
    ]

    def save(folder: pathlib.Path, params):
        save_model(folder / "model", LanguageModel(model, params))

    stage = TrainingStage(
        config, text, objective, lambda key: LanguageModel.init(model, key).params, save, config.target_training,
        evaluators,
    )  # fmt: skip
    inputs = {"objective": repr(objective), "training": config.target_training, "seed": config.seed,
              "text": stages.hash_of("text"), "draft_length": settings.draft_length, **_evaluation(config)}  # fmt: skip
    load = lambda folder, record: (load_model(folder / "model"), record)  # noqa: E731
    joint, record = stages.run("layerskip", plain(inputs), stage, load)
    return joint, drafter, None, record


def medusa2(config: ConfigDict, stages: Stages, text: Text, target: LanguageModel):
    """Stages "medusa1" (heads on the frozen target) and "medusa2" (both go on together)."""
    settings, model = config.medusa2, target.config
    drafter = Medusa(model, Topology.chain(settings.draft_length))
    prompts = text.prompts(config.heads_training.eval_prompts, config.prompt_length, config.seed + 1)
    first = TrainingStage(
        config, text, HeadDistillation(drafter), functools.partial(drafter.init_params, target_params=target.params),
        lambda folder, params: save_drafter(folder / "drafter", drafter, params), config.heads_training,
        [HeldOutDecoding(target, drafter, prompts, config.heads_training.eval_new_tokens, Sampling.of(1.0))],
        frozen=target.params,
    )  # fmt: skip
    inputs = {"training": config.heads_training, "settings": settings, "seed": config.seed,
              "prompt_length": config.prompt_length, "target": stages.hash_of("target")}  # fmt: skip
    heads = stages.run("medusa1", plain(inputs), first, lambda folder, _: load_drafter(folder / "drafter")[1])

    def save(folder: pathlib.Path, params):
        save_model(folder / "model", LanguageModel(model, params["target"]))
        save_drafter(folder / "drafter", drafter, params["heads"])

    def load(folder: pathlib.Path, record: dict):
        return load_model(folder / "model"), load_drafter(folder / "drafter", model)[1], record

    plain_loss = held_out_loss(text, NextToken(model), config.joint_training)
    evaluators = [
        lambda params: plain_loss(params["target"]),
        _decoding(config, text, model, drafter, lambda params: (params["target"], params["heads"])),
    ]
    second = TrainingStage(
        config, text, JointHeads(drafter, heads_weight=settings.heads_weight),
        lambda key: {"target": target.params, "heads": heads}, save,
        config.joint_training, evaluators,
    )  # fmt: skip
    inputs = {"training": config.joint_training, "settings": settings, "seed": config.seed,
              "heads": stages.hash_of("medusa1"), **_evaluation(config)}  # fmt: skip
    joint, params, record = stages.run("medusa2", plain(inputs), second, load)
    return joint, drafter, params, record


def _evaluation(config: ConfigDict) -> dict:
    """What `_decoding` depends on."""
    training = config.heads_training
    return {"eval_prompts": training.eval_prompts, "eval_new_tokens": training.eval_new_tokens,
            "prompt_length": config.prompt_length}  # fmt: skip


def _decoding(config: ConfigDict, text: Text, model: TransformerConfig, drafter: Drafter, split):
    """Evaluator: α per depth and τ of the target in training with its own drafter."""
    prompts = text.prompts(config.heads_training.eval_prompts, config.prompt_length, config.seed + 1)

    def evaluate(params):
        target_params, drafter_params = split(params)
        target = LanguageModel(model, target_params)
        new_tokens = config.heads_training.eval_new_tokens
        yield from HeldOutDecoding(target, drafter, prompts, new_tokens, Sampling.of(1.0))(drafter_params)

    return evaluate


def measure(config: ConfigDict, text: Text, name: str, joint: LanguageModel, drafter: Drafter, params: Any):
    """Rows of one joint model: target-only and speculative, at both temperatures."""
    prompts = text.prompts(config.timed_prompts, config.prompt_length, config.seed + 3)
    settings = [Setting.target_only("greedy", 0.0), Setting.target_only("token", 1.0)]
    rules = (("greedy", 0.0), ("token", 1.0), ("block", 1.0))
    settings += [Setting(name, drafter, params, rule, t) for rule, t in rules]
    timed = speed.time_settings(joint, settings, prompts, config.new_tokens, config.repeats)
    rows = []
    for record in timed.values():
        baseline = next(r for r in timed.values() if r.setting.drafter is None
                        and r.setting.temperature == record.setting.temperature)  # fmt: skip
        rows.append(speed.row(record, baseline, name if record.setting.drafter is not None else None))
    return rows


def _quality(record: dict) -> dict:
    held_out = {key.removeprefix("held_out/"): value for key, value in record["held_out"].items()}
    kept = {key: held_out.get(key) for key in ("bits_per_byte", "block_efficiency", "acceptance_rate")}
    return {"steps": record["steps"], **kept}
