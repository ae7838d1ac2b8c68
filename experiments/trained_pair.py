"""The stages that the experiments share: text, a target trained on it, and drafters for that target.

Configs become the library's dataclasses here; their field names are the dataclasses' own.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from specjax.data.pipeline import (
    PipelineConfig,
    TokenizedText,
    bits_per_byte,
    encode_documents,
    evaluation_batches,
    held_out_prompts,
    pipeline_fingerprint,
    training_batches,
)
from specjax.data.text import JsonLines, StandardLibrary, TextFiles, load_corpus
from specjax.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from specjax.drafters import Independent
from specjax.events import EventWriter, Progress
from specjax.models import LanguageModel, TransformerConfig
from specjax.report.stages import Stages
from specjax.sampling import Sampling
from specjax.training.checkpoints import Checkpoints
from specjax.training.fit import FitResult, Schedule, fit
from specjax.training.mixture import Mixture
from specjax.training.objectives import Distillation, NextToken
from specjax.training.rollouts import HeldOutDecoding, HeldOutLoss, Sampled, TextSample
from specjax.training.saved_model import load_model, save_model
from specjax.training.state import OptimizerConfig

SOURCES = {"standard_library": StandardLibrary, "files": TextFiles, "jsonl": JsonLines}


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokenized text, split into training and held-out documents."""

    tokenizer: Tokenizer
    train: TokenizedText
    held_out: TokenizedText

    def prompts(self, num: int, length: int, seed: int) -> list[np.ndarray]:
        """Held-out prompts of one length, none across the edge of a document."""
        end = self.tokenizer.end_of_text
        return held_out_prompts(self.held_out.tokens, num, length, length, seed, end_of_text=end)


def prepare_text(config: ConfigDict, stages: Stages) -> Text:
    """Stage "text": corpus, tokenizer, token arrays."""
    settings = {"corpus": config.corpus.to_dict(), "tokenizer": config.tokenizer.to_dict()}
    corpus = load_corpus(_source(config.corpus), config.corpus.held_out)

    def run(folder: pathlib.Path):
        tokenizer = ByteTokenizer()
        if config.tokenizer.kind == "bpe":
            tokenizer = BPETokenizer.train(corpus.train, config.tokenizer.vocab_size)
        elif config.tokenizer.kind != "byte":
            raise ValueError(f"tokenizer.kind must be bpe or byte; got {config.tokenizer.kind!r}")
        train, held_out = (encode_documents(tokenizer, part) for part in (corpus.train, corpus.held_out))
        tokenizer.save(folder / "tokenizer.json")
        np.savez(folder / "tokens.npz", train=train.tokens, held_out=held_out.tokens)
        return {
            "corpus_hash": corpus.hash,
            "tokenizer": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "train_bytes": train.num_bytes,
            "train_tokens": len(train.tokens),
            "held_out_bytes": held_out.num_bytes,
            "held_out_tokens": len(held_out.tokens),
            "bytes_per_token": train.bytes_per_token,
        }

    return stages.run("text", settings | {"corpus_hash": corpus.hash}, run, load_text)


def _source(corpus: ConfigDict):
    """The text source that a config names, with those of its settings that are set."""
    if corpus.kind not in SOURCES:
        raise ValueError(f"corpus.kind must be one of {', '.join(SOURCES)}; got {corpus.kind!r}")
    fields = {field.name for field in dataclasses.fields(SOURCES[corpus.kind])} & {"path", "pattern", "field"}
    if "path" in fields and not corpus.path:
        raise ValueError(
            f"corpus.kind {corpus.kind!r} reads from corpus.path, which is empty; set --config.corpus.path"
        )
    return SOURCES[corpus.kind](**{name: corpus[name] for name in fields if corpus[name]})


def load_text(folder: pathlib.Path, result: Mapping[str, Any]) -> Text:
    """What the finished stage "text" left in its folder; `result` is what it returned."""
    arrays = np.load(folder / "tokens.npz")
    return Text(
        load_tokenizer(folder / "tokenizer.json"),
        TokenizedText(arrays["train"], result["train_bytes"]),
        TokenizedText(arrays["held_out"], result["held_out_bytes"]),
    )


def train_target(config: ConfigDict, stages: Stages, text: Text) -> tuple[LanguageModel, dict]:
    """Stage "target": next-token training on the corpus."""
    model = TransformerConfig(vocab_size=text.tokenizer.vocab_size, **config.target.to_dict())
    training = config.target_training
    evaluators = [
        _held_out_loss(text, NextToken(model), training),
        TextSample(model, text.prompts(1, 16, config.seed)[0], min(64, training.window - 16), text.tokenizer.decode),
    ]
    inputs = {"model": config.target, "training": training, "seed": config.seed, "text": stages.hash_of("text")}
    run = _Training(config, text, NextToken(model), model, training, evaluators, best=None)
    return stages.run("target", _plain(inputs), run, _load_trained)


def train_drafter(
    config: ConfigDict, stages: Stages, text: Text, target: LanguageModel, name: str
) -> tuple[LanguageModel, dict]:
    """Stage "drafter_<name>": "corpus" trains it like a target, "distilled" on the target's laws."""
    model = TransformerConfig(vocab_size=text.tokenizer.vocab_size, **config.drafter.to_dict())
    training, distillation = config.drafter_training, config.distillation
    objectives = {
        "corpus": lambda: NextToken(model),
        "distilled": lambda: Distillation(model, target.config, distillation.divergence, distillation.beta),
    }
    if name not in objectives:
        raise ValueError(f"drafters must be some of {', '.join(objectives)}; got {name!r}")
    distilled = name == "distilled"
    drafter = Independent(model, config.decoding.common_draft_length)
    prompts = text.prompts(training.eval_prompts, config.decoding.prompt_length, config.seed + 1)
    evaluators = [HeldOutDecoding(target, drafter, prompts, training.eval_new_tokens, Sampling.of(1.0))]
    mixture = None
    if distilled and (distillation.target_samples or distillation.drafter_samples):
        length = distillation.prompt_length
        mixture = Mixture(
            (
                (
                    distillation.target_samples,
                    Sampled(target.config, target.params, length, distillation.target_sample_temperature),
                ),
                (distillation.drafter_samples, Sampled(model, None, length)),
            )
        )
    inputs = {
        "model": config.drafter,
        "training": training,
        "seed": config.seed,
        "target": stages.hash_of("target"),
        "decoding": [config.decoding.prompt_length, config.decoding.common_draft_length],
        "distillation": distillation if distilled else None,
    }
    run = _Training(
        config,
        text,
        objectives[name](),
        model,
        training,
        evaluators,
        best="held_out/block_efficiency",
        frozen=target.params if distilled else None,
        prepare=mixture,
    )
    return stages.run(f"drafter_{name}", _plain(inputs), run, _load_trained)


@dataclasses.dataclass(frozen=True)
class _Training:
    """Runs `fit` in a stage's folder, with checkpoints, events and a progress bar, and saves the model."""

    config: ConfigDict
    text: Text
    objective: Any
    model: TransformerConfig
    training: ConfigDict
    evaluators: list
    best: str | None
    frozen: Any = None
    prepare: Any = None

    def __call__(self, folder: pathlib.Path) -> dict:
        training = self.training
        pipeline = PipelineConfig(training.window, training.batch_size, self.config.seed)
        checkpoints = Checkpoints(
            folder / "checkpoints",
            pipeline=pipeline_fingerprint(self.text.train.tokens, pipeline),
            best=self.best,
            keep=1,
        )
        start = checkpoints.latest_step() or 0
        initial = LanguageModel.init(self.model, jax.random.key(self.config.seed))
        label = folder.name.replace("_", " ")
        with (
            EventWriter(folder / "events", resume_step=start + 1 if start else None) as writer,
            Progress(training.steps, f"training {label}") as progress,
        ):
            writer.table("config/all", self.config.to_dict())
            result = fit(
                self.objective,
                initial.params,
                training_batches(self.text.train.tokens, pipeline),
                OptimizerConfig(total_steps=training.steps, **training.optimizer.to_dict()),
                Schedule(
                    training.steps, training.log_every, training.eval_every, training.save_every, self.config.seed
                ),
                frozen=self.frozen,
                prepare=self.prepare,
                evaluators=self.evaluators,
                checkpoints=checkpoints,
                writer=writer,
                progress=progress,
            )
        params = self._best_params(checkpoints, result)
        save_model(folder / "model", LanguageModel(self.model, params))
        best_step = checkpoints.best_step()
        checkpoints.close()
        chosen = [record for record in result.evaluations if record["step"] == best_step] or result.evaluations[-1:]
        return {
            "parameters": initial.num_params,
            "steps": training.steps,
            "tokens": training.steps * training.batch_size * training.window,
            "tokens_per_second": result.tokens_per_second,
            "flop_utilisation": result.flop_utilisation,
            "matmul_flops_per_second": result.peak_flops,
            "best_step": best_step,
            "held_out": {name: value for name, value in chosen[0].items() if name != "step"},
            "history": [{"step": r["step"], "loss": r["loss"]} for r in result.history],
            "evaluations": result.evaluations,
        }

    def _best_params(self, checkpoints: Checkpoints, result: FitResult):
        step = checkpoints.best_step()
        if step is None or step == int(result.state.step):
            return result.state.eval_params
        return checkpoints.restore(result.state, step=step).eval_params


def _held_out_loss(text: Text, objective: NextToken, training: ConfigDict) -> HeldOutLoss:
    batches = list(
        evaluation_batches(text.held_out.tokens, training.window, training.batch_size, training.eval_batches)
    )
    bits_per_nat = bits_per_byte(1.0, len(text.held_out.tokens), text.held_out.num_bytes)
    return HeldOutLoss(objective, batches, bits_per_nat=bits_per_nat)


def _load_trained(folder: pathlib.Path, result: dict) -> tuple[LanguageModel, dict]:
    return load_model(folder / "model"), result


def _plain(inputs: Mapping[str, Any]) -> dict:
    return {name: value.to_dict() if isinstance(value, ConfigDict) else value for name, value in inputs.items()}
