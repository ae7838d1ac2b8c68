"""The main job: train a target on real text, distil a drafter from it, decode speculatively, measure.

    python launch.py --config configs/quickstart.py --workdir runs/quickstart

Cost: 6.5 to 7 minutes on 2 CPU cores (190 to 200 GFLOP/s): target 2.6, drafters 1.6, measuring 2.4; one more with the
installation.

Expect, from two runs of this config and the earlier ones it grew from: a target of 2.27 to 2.31 bits per byte; α at
temperature 1 of 0.65 to 0.69 for the drafter trained on the corpus and 0.84 to 0.86 for the distilled one (rejections
48 to 59 % fewer); a best speed-up of 1.9 to 2.9 at temperature 1 and of 1.2 to 2.1 at temperature 0, where the text of
so small a target repeats itself and is followed well in some runs and less in others. The draft length is picked anew
in each run, from costs that drift.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.experiment = "distillation"
    config.seed = 0

    # Text: "standard_library" needs no download; "files" and "jsonl" read what matches `pattern` in `path`.
    config.corpus = ConfigDict(dict(kind="standard_library", path="", pattern="", field="", held_out=0.05))
    config.tokenizer = ConfigDict(dict(kind="bpe", vocab_size=1024))

    # About 10M parameters, so that a one-token step reads more memory than the caches of a small CPU hold.
    config.target = ConfigDict(dict(num_layers=3, d_model=512, num_heads=8, num_kv_heads=2, d_ff=2304, **_model()))
    config.target_training = _training(steps=1300, learning_rate=1e-3)
    config.target_training.eval_batches = 64

    config.drafters = ("corpus", "distilled")
    config.drafter = ConfigDict(dict(num_layers=1, d_model=192, num_heads=3, num_kv_heads=1, d_ff=768, **_model()))
    config.drafter_training = _training(steps=1100, learning_rate=2e-3)
    config.drafter_training.eval_prompts = 8
    config.drafter_training.eval_new_tokens = 64
    # Shares of the steps trained on texts that the target or the drafter itself wrote, the rest on the corpus.
    config.distillation = ConfigDict(
        dict(divergence="forward_kl", beta=0.5, target_samples=0.16, drafter_samples=0.0, prompt_length=32)
    )
    config.distillation.target_texts = 384  # written by the target before the drafter's training begins

    # Greedy text of a small target is unlike the corpus; without having seen some, a drafter follows it badly.
    config.distillation.target_sample_temperature = 0.0

    config.decoding = ConfigDict(dict(prompt_length=32, new_tokens=96, common_draft_length=7))
    config.decoding.draft_lengths = (3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)  # the best one is picked by prediction
    config.decoding.widths = (1, 5, 9, 17)
    config.decoding.survey_prompts = 32
    config.decoding.survey_new_tokens = 64
    config.decoding.timed_prompts = 5
    config.decoding.coupled_prompts = 100
    config.decoding.repeats = 5
    config.decoding.verifiers = (("greedy",), ("token", "block"))  # at temperature 0, and at temperature 1
    config.expected = ConfigDict(
        dict(bits_per_byte=2.4, speedup_greedy=1.3, speedup_sampled=1.6, rejection_reduction=0.25)
    )
    return config


def _model() -> dict:
    """What both models share; every field of TransformerConfig may stand here."""
    return dict(mlp="relu", context_length=256, dropout=0.0, dtype="float32", remat=False)


def _training(steps: int, learning_rate: float) -> ConfigDict:
    """Small batches: at this size a second step is worth more than a second row."""
    training = ConfigDict(dict(steps=steps, batch_size=2, window=128, log_every=20))
    training.compute_dtype = config_dict.placeholder(str)
    training.compute_dtype = "bfloat16"  # of the training step alone; parameters and decoding stay float32
    training.eval_every, training.save_every = steps // 4, steps // 2
    training.optimizer = ConfigDict(
        dict(
            optimizer="adamw",
            learning_rate=learning_rate,
            schedule="linear",
            warmup_steps=50,
            final_fraction=0.02,
            b2=0.98,
            weight_decay=0.1,
            clip_norm=1.0,
            accumulation=1,
            ema_decay=config_dict.placeholder(float),
        )
    )
    return training
