"""The stages that the experiments share: text, a target trained on it, and drafters for that target.

Configs become the library's dataclasses here; their field names are the dataclasses' own.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.training_stage import Text, TrainingStage, plain
from specjax.data.pipeline import (
    TokenizedText,
    bits_per_byte,
    cut_prompts,
    encode_documents,
    evaluation_batches,
)
from specjax.data.text import JsonLines, StandardLibrary, TextFiles, load_corpus
from specjax.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer
from specjax.drafters import Independent
from specjax.models import LanguageModel, TransformerConfig
from specjax.report.stages import Stages
from specjax.sampling import Sampling
from specjax.training.mixture import Mixture
from specjax.training.objectives import Distillation, NextToken
from specjax.training.rollouts import HeldOutDecoding, HeldOutLoss, Sampled, TextSample
from specjax.training.saved_model import load_model, save_model
from specjax.training.written_texts import Written, write_texts

TEXT_SOURCES = {"standard_library": StandardLibrary, "files": TextFiles, "jsonl": JsonLines}


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
    if corpus.kind not in TEXT_SOURCES:
        raise ValueError(f"corpus.kind must be one of {', '.join(TEXT_SOURCES)}; got {corpus.kind!r}")
    fields = {field.name for field in dataclasses.fields(TEXT_SOURCES[corpus.kind])} & {"path", "pattern", "field"}
    if "path" in fields and not corpus.path:
        raise ValueError(
            f"corpus.kind {corpus.kind!r} reads from corpus.path, which is empty; set --config.corpus.path"
        )
    return TEXT_SOURCES[corpus.kind](**{name: corpus[name] for name in fields if corpus[name]})


def load_text(folder: pathlib.Path, result: Mapping[str, Any]) -> Text:
    """What the finished stage "text" left in its folder; `result` is what it returned."""
    arrays = np.load(folder / "tokens.npz")
    return Text(
        load_tokenizer(folder / "tokenizer.json"),
        TokenizedText(arrays["train"], result["train_bytes"]),
        TokenizedText(arrays["held_out"], result["held_out_bytes"]),
    )


def finished_stages(workdir: str, names: Sequence[str]) -> tuple[pathlib.Path, dict[str, dict]]:
    """The folder of another run's stages, and what each of the named ones left in its result.json.

    Raises:
        ValueError: a stage that is not finished there.
    """
    folder, results = pathlib.Path(workdir) / "stages", {}
    for name in names:
        if not (folder / name / "result.json").exists():
            raise ValueError(
                f"{workdir} holds no finished stage {name!r}; train first: python launch.py "
                f"--config configs/quickstart.py --workdir {workdir}"
            )
        results[name] = json.loads((folder / name / "result.json").read_text())
    return folder, results


TRAININGS = ("corpus", "distilled")


def check_objectives(config: ConfigDict) -> None:
    """Raises ValueError for models, drafters or a distillation that cannot be, before there is a text or a target."""
    models = [TransformerConfig(vocab_size=257, **config[role].to_dict()) for role in ("drafter", "target")]
    distillation = config.distillation
    try:
        Distillation(*models, distillation.divergence, distillation.beta)
    except ValueError as error:
        raise ValueError(f"distillation: {error}") from None
    if distillation.target_texts < 1:
        raise ValueError(f"distillation.target_texts must be at least 1; got {distillation.target_texts}")
    if not 1 <= distillation.prompt_length <= config.drafter_training.window:
        raise ValueError(
            f"distillation.prompt_length must be from 1 to the drafter's training window "
            f"{config.drafter_training.window}; got {distillation.prompt_length}"
        )
    shares = distillation.target_samples, distillation.drafter_samples
    if min(shares) < 0 or sum(shares) > 1:
        raise ValueError(
            "distillation.target_samples and distillation.drafter_samples are shares of the steps, at least 0 and "
            f"together at most 1; got {shares[0]} and {shares[1]}"
        )
    for name in config.drafters:
        if name not in TRAININGS:
            raise ValueError(f"drafters must be some of {', '.join(TRAININGS)}; got {name!r}")


def train_target(config: ConfigDict, stages: Stages, text: Text) -> tuple[LanguageModel, dict]:
    """Stage "target": next-token training on the corpus."""
    model = TransformerConfig(vocab_size=text.tokenizer.vocab_size, **config.target.to_dict())
    training = config.target_training
    evaluators = [
        held_out_loss(text, NextToken(model), training),
        TextSample(model, text.prompts(1, 16, config.seed)[0], min(64, training.window - 16), text.tokenizer.decode),
    ]
    inputs = {"model": config.target, "training": training, "seed": config.seed, "text": stages.hash_of("text")}
    run = TrainingStage(config, text, NextToken(model), *_whole_model(model), training, evaluators)
    return stages.run("target", plain(inputs), run, _load_trained)


def train_drafter(
    config: ConfigDict, stages: Stages, text: Text, target: LanguageModel, name: str
) -> tuple[LanguageModel, dict]:
    """Stage "drafter_<name>": "corpus" trains it like a target, "distilled" on the target's laws."""
    model = TransformerConfig(vocab_size=text.tokenizer.vocab_size, **config.drafter.to_dict())
    training, distillation = config.drafter_training, config.distillation
    distilled, objective = name == "distilled", NextToken(model)
    if distilled:
        objective = Distillation(model, target.config, distillation.divergence, distillation.beta)
    drafter = Independent(model, config.decoding.common_draft_length)
    prompts = text.prompts(training.eval_prompts, config.decoding.prompt_length, config.seed + 1)
    evaluators = [HeldOutDecoding(target, drafter, prompts, training.eval_new_tokens, Sampling.of(1.0))]
    mixture = None
    if distilled and (distillation.target_samples or distillation.drafter_samples):
        sources = [(distillation.drafter_samples, Sampled(model, None, distillation.prompt_length))]
        if distillation.target_samples:
            texts = Written(write_target_texts(config, stages, text, target), distillation.prompt_length)
            sources.append((distillation.target_samples, texts))
        mixture = Mixture(tuple(sources))
    inputs = {
        "model": config.drafter,
        "training": training,
        "seed": config.seed,
        "target": stages.hash_of("target"),
        "decoding": [config.decoding.prompt_length, config.decoding.common_draft_length],
        "distillation": distillation if distilled else None,
    }
    run = TrainingStage(
        config,
        text,
        objective,
        *_whole_model(model),
        training,
        evaluators,
        best="held_out/block_efficiency",
        frozen=target.params if distilled else None,
        prepare=mixture,
    )
    return stages.run(f"drafter_{name}", plain(inputs), run, _load_trained)


def write_target_texts(config: ConfigDict, stages: Stages, text: Text, target: LanguageModel) -> np.ndarray:
    """Stage "target_texts": prompts from the training text, continued by the target, as wide as a training batch."""
    distillation = config.distillation
    length, width = distillation.prompt_length, config.drafter_training.window + 1
    temperature, number = distillation.target_sample_temperature, distillation.target_texts

    def run(folder: pathlib.Path):
        tokens, end = text.train.tokens, text.tokenizer.end_of_text
        prompts = cut_prompts(tokens, number, length, length, config.seed + 8, end_of_text=end)
        np.save(folder / "tokens.npy", write_texts(target, prompts, width - length, temperature, config.seed + 9))
        return {"texts": number, "tokens": number * (width - length)}

    inputs = {"target": stages.hash_of("target"), "prompt_length": length, "width": width, "texts": number,
              "temperature": temperature, "seed": config.seed}  # fmt: skip
    return stages.run("target_texts", inputs, run, lambda folder, result: np.load(folder / "tokens.npy"))


def held_out_loss(text: Text, objective: NextToken, training: ConfigDict) -> HeldOutLoss:
    """Evaluator: cross entropy, perplexity and bits per byte on held-out windows."""
    batches = list(
        evaluation_batches(text.held_out.tokens, training.window, training.batch_size, training.eval_batches)
    )
    bits_per_nat = bits_per_byte(1.0, len(text.held_out.tokens), text.held_out.num_bytes)
    return HeldOutLoss(objective, batches, bits_per_nat=bits_per_nat)


def _load_trained(folder: pathlib.Path, result: dict) -> tuple[LanguageModel, dict]:
    return load_model(folder / "model"), result


def _whole_model(model: TransformerConfig):
    """How a language model of its own begins, and how it is saved."""

    def initial(key):
        return LanguageModel.init(model, key).params

    def save(folder: pathlib.Path, params):
        save_model(folder / "model", LanguageModel(model, params))

    return initial, save
