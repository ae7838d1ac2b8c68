"""Every drafter family for one target, trained under one budget and decoded on the same prompts.

    python launch.py --config configs/variants.py --workdir runs/variants

The target is that of configs/quickstart.py; a finished runs/quickstart lends it, otherwise it is trained here. Every
family is a stage of training and one of decoding, so an interrupted run goes on with the next.

Cost on 2 CPU cores (190 to 217 GFLOP/s) with a lent target: training 9 minutes, decoding 30. Acceptance alone:
`--config.measure_speed=False`.

Expect speed-ups at temperature 1 of 2.0 (independent), 1.36 (EAGLE-3), 1.24 (Hydra), 1.23 (EAGLE), 1.19 (early exit),
1.01 (Medusa); at temperature 0 of 1.15 (n-gram), 1.09 (Hydra's tree) and 1.01 (suffix); all others below 1. Overlap
along held-out text 0.86 for EAGLE-3 at all depths (its fall from depth 1 to 4 is 0.003), 0.83 to 0.82 for EAGLE
(0.012), Hydra, early exit and the independent drafter, 0.56 falling to 0.40 for the block drafter, 0.48 to 0.39 for
Medusa.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    for name in ("drafters", "drafter", "distillation", "expected"):
        del config[name]
    config.experiment = "variants"
    config.reuse = "runs/quickstart"  # a workdir whose finished stages may be used; "" for none

    training = config.drafter_training  # one budget for all; the learning rate is each family's own
    training.steps = 800
    training.eval_every, training.save_every = 200, 400

    config.families = (
        "independent", "early_exit", "medusa", "hydra", "eagle", "eagle3", "block", "ngram", "suffix", "lookahead",
    )  # fmt: skip
    config.family_settings = ConfigDict(_families())
    config.quality = ConfigDict(dict(prefixes=384, prefix_length=64, depths=4, texts=64, text_length=128))
    config.measure_speed = True  # False: train and compare acceptance only
    config.decoding = ConfigDict(
        dict(prompt_length=32, new_tokens=64, timed_prompts=8, batches=(1, 8), repeats=5, turns=8)
    )
    return config


def _families() -> dict:
    heads = dict(
        draft_length=4, num_blocks=1, learning_rate=1e-3, tree=(2, 2, 1), num_nodes=12, num_ranks=6,
        rate_texts=64, rate_length=64, seed=11,
    )  # fmt: skip
    eagle = dict(draft_length=5, d_ff=1024, learning_rate=1e-3, tree=(2, 2, 1, 1), num_nodes=12, max_depth=4, beam=4)
    model = dict(
        num_layers=1, d_model=192, num_heads=3, num_kv_heads=1, d_ff=768, mlp="relu", context_length=256
    )
    return {
        "independent": dict(
            model=model, draft_length=6, learning_rate=2e-3, tree=(2, 2, 1, 1), longest=10, stop_below=0.4
        ),
        "early_exit": dict(exit_layer=1, draft_length=3, learning_rate=1e-3),
        "medusa": heads,
        "hydra": heads,
        "eagle": eagle | dict(law_weight=1.0),
        "eagle3": eagle | dict(feature_layers=(1, 2, 3), steps_ahead=5),
        "block": dict(num_layers=1, feature_layers=(1, 2, 3), draft_length=6, anchors=24, learning_rate=1e-3),
        "ngram": dict(draft_length=5, max_match=3),
        "suffix": dict(draft_length=6, max_match=8, corpus_tokens=400_000),
        "lookahead": dict(window=5, ngram=4, candidates=4),
    }
