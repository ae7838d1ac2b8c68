"""Every drafter family for one target, trained under one budget and decoded on the same prompts.

    python launch.py --config configs/variants.py --workdir runs/variants

The target is that of configs/quickstart.py; a finished runs/quickstart lends it, otherwise it is trained here. Every
family is a stage of training and one of decoding, so an interrupted run goes on with the next.

Cost on 2 CPU cores (190 to 208 GFLOP/s) with a lent target: training 11 minutes, decoding 25. Acceptance alone:
`--config.measure_speed=False`.

Expect speed-ups at temperature 1 of 2.0 (independent), 1.33 (early exit), 1.31 (Hydra), 1.26 (EAGLE), 1.08 (EAGLE-3),
1.06 (Medusa); at temperature 0 of 1.13 (n-gram) and 1.06 (independent); all others below 1, and hardly a tree above
its chain. Overlap along held-out text 0.84 to 0.85 for the independent drafter, early exit and EAGLE at all depths,
0.82 for Hydra, 0.81 falling to 0.79 for EAGLE-3, 0.48 falling to 0.39 for Medusa. The check that EAGLE-3's overlap
falls less than EAGLE-1's is not met: on a target of three layers EAGLE-1's features hardly drift. (EAGLE-3 was
measured before its features were scaled and its attention began at the own position.)
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
